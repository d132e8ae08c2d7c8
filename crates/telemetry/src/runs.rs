//! Finds the run that a checkpoint belongs to, where its records are kept.

use std::sync::Arc;

use shardfast_engine::Result;
use shardfast_engine::listen::Verb;
use shardfast_format::{TELEMETRY, parse_step_dir};
use shardfast_store::{Shared, Store, open_on, split};

/// Words that the names of trainers' directories have before the number of a step: `checkpoint-500`, `global_step500`,
/// `iter_0000500`, `epoch=0-step=500.ckpt`.
const STEP_WORDS: [&str; 4] = ["step", "iter", "checkpoint", "ckpt"];

/// Run of a checkpoint.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Run {
    /// Place of the run.
    url: String,
    /// Training step of the checkpoint.
    pub(crate) step: u64,
    /// Whether records are kept there only if some are there already.
    is_guess: bool,
}

impl Run {
    /// Returns the run of the checkpoint at `url`: the directory of its step, or of the trainer's directory that is
    /// named by its step and holds it. `None` for a checkpoint that is no step of a run.
    pub(crate) fn of(verb: Verb, url: &str, step: Option<u64>) -> Option<Run> {
        let (dir, name) = split(url)?;
        if let Some(step) = parse_step_dir(&name) {
            return Some(Run { url: dir, step, is_guess: false });
        }
        let found = |url, name: &str| {
            let named = step_in(name).filter(|&named| step.is_none_or(|step| step == named))?;
            // A load does not know the step before the checkpoint is open.
            Some(Run { url, step: named, is_guess: verb == Verb::Load || step.is_none() })
        };
        let above = split(&dir);
        found(dir, &name).or_else(|| above.and_then(|(dir, name)| found(dir, &name)))
    }

    /// Returns the store of the run. `has_found`: the operation saves a checkpoint, or has found the one that it loads.
    ///
    /// # Errors
    /// Those of the store; `NotFound` where records are kept only beside others, and there are none.
    pub(crate) fn store(&self, storage: &Arc<Shared>, has_found: bool) -> Result<Arc<dyn Store>> {
        let store = open_on(&self.url, storage)?;
        if self.is_guess || !has_found {
            store.list(TELEMETRY)?;
        }
        Ok(store)
    }
}

/// Returns the last number in a trainer's name that follows one of the words.
fn step_in(name: &str) -> Option<u64> {
    let end = name.rfind(|c: char| c.is_ascii_digit())? + 1;
    let begin = name[..end].rfind(|c: char| !c.is_ascii_digit()).map_or(0, |at| at + 1);
    let word = name[..begin].trim_end_matches(['-', '_', '=']);
    STEP_WORDS.iter().any(|known| word.ends_with(known)).then(|| name[begin..end].parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(verb: Verb, url: &str, step: Option<u64>) -> Option<(String, u64, bool)> {
        Run::of(verb, url, step).map(|run| (run.url, run.step, run.is_guess))
    }

    #[test]
    fn a_run_is_the_directory_of_steps() {
        for verb in [Verb::Save, Verb::Load] {
            assert_eq!(of(verb, "/runs/a/step-00000010", None), Some(("/runs/a".to_owned(), 10, false)));
            assert_eq!(of(verb, "s3://b/runs/step-00000010", None), Some(("s3://b/runs".to_owned(), 10, false)));
            assert_eq!(of(verb, "/runs/a/last", Some(10)), None);
        }
    }

    #[test]
    fn a_trainers_directory_that_names_the_step_is_in_a_run() {
        for place in [
            "checkpoint-500/shardfast",
            "checkpoint_500",
            "step-500/.shardfast.saving",
            "global_step500",
            "iter_0000500",
            "epoch=0-step=500.ckpt/shardfast",
        ] {
            let url = format!("/out/{place}");
            assert_eq!(of(Verb::Save, &url, Some(500)), Some(("/out".to_owned(), 500, false)), "{place}");
            assert_eq!(of(Verb::Load, &url, None), Some(("/out".to_owned(), 500, true)), "{place}");
            assert_eq!(of(Verb::Save, &url, None), Some(("/out".to_owned(), 500, true)), "{place}");
            assert_eq!(of(Verb::Save, &url, Some(50)), None, "{place}");
        }
        for place in ["/runs/gpt2/best", "/data/v500", "/step/500x/a", "/step", "/epoch=500"] {
            assert_eq!(of(Verb::Save, place, Some(500)), None, "{place}");
        }
        assert_eq!(of(Verb::Load, "/out/step-99999999999999999999", None), None);
    }
}
