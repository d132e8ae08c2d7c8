//! A run that is brought up to date, step by step.

use std::sync::Arc;

use serde::Serialize;
use shardfast_engine::Engine;
use shardfast_engine::runs;
use shardfast_transfer::error::{Error, Kind, Result};

use super::{Copied, Copying, copy_between};

/// A run that was brought up to date.
#[derive(Debug, Clone, Serialize)]
pub struct Synced {
    /// Each committed step of the source that is at the target now, ascending.
    pub checkpoints: Vec<Copied>,
    /// Steps of the source without a commit, which are not copied.
    pub incomplete: Vec<u64>,
    /// Steps that left the source while they were copied.
    pub left: Vec<u64>,
    /// Committed steps that could not be copied.
    pub failed: Vec<FailedStep>,
}

/// A step that could not be copied.
#[derive(Debug, Clone, Serialize)]
pub struct FailedStep {
    /// Step of the checkpoint.
    pub step: u64,
    /// The kind of the error.
    #[serde(serialize_with = "by_name")]
    pub kind: Kind,
    /// Error of the copy.
    pub error: String,
}

fn by_name<S: serde::Serializer>(kind: &Kind, serializer: S) -> std::result::Result<S::Ok, S::Error> {
    serializer.serialize_str(kind.name())
}

/// Copies each committed step of the run at `from` that the run at `to` does not have, oldest first. Steps that only
/// the target has stay. A step that is damaged, that the target has from elsewhere or that is removed meanwhile does
/// not stop the later ones.
///
/// # Errors
/// As [`copy`](super::copy) for failures that concern every step: stores that are unreachable, full or refuse. Earlier
/// steps are complete.
pub fn sync(
    engine: &Arc<Engine>,
    from: &str,
    to: &str,
    how: &Copying,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<Synced> {
    let mut synced = Synced { checkpoints: Vec::new(), incomplete: Vec::new(), left: Vec::new(), failed: Vec::new() };
    let steps = runs::list_in(&*engine.store(from, engine.timeout())?, from, engine.timeout())?.0;
    if steps.is_empty() {
        return Err(Error::new(Kind::NotFound, format!("{from}: there is no run with a step to copy")));
    }
    for step in steps {
        let copied = match step.commit {
            Ok(None) => {
                synced.incomplete.push(step.step);
                continue;
            }
            Ok(Some(_)) => {
                let target = runs::step_url(to, step.step);
                let (source, place) =
                    (engine.store(&step.url, engine.timeout())?, engine.store(&target, engine.timeout())?);
                copy_between(engine, (source, &step.url), (place, &target), how, progress)
            }
            Err(error) => Err(error),
        };
        match copied {
            Ok(copied) => synced.checkpoints.push(copied),
            // It was listed as committed.
            Err(error) if error.kind == Kind::NotFound => synced.left.push(step.step),
            Err(error) if matches!(error.kind, Kind::Corrupt | Kind::Unsupported | Kind::Conflict) => {
                synced.failed.push(FailedStep { step: step.step, kind: error.kind, error: error.message });
            }
            Err(error) => return Err(error),
        }
    }
    Ok(synced)
}
