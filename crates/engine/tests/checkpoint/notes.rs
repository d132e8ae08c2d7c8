//! Tests notes that rank 0 adds while a save runs: the checkpoint records them, and every rank gets them with the
//! outcome.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use shardfast_coord::{Absent, Coord, Decide, Meeting};
use shardfast_engine::{Engine, Pending, checkpoint, save};

use crate::job::{Job, LONG, Truth, alike, destination, outcomes};
use crate::layout::{Dice, Layout};
use crate::reshard::scratch;

const NAME: &str = "shardfast.interval";

/// A rank that loses rank 0 before the outcome of a commit arrives.
struct Deaf(Arc<dyn Coord>);

impl Coord for Deaf {
    fn rank(&self) -> u32 {
        self.0.rank()
    }

    fn world(&self) -> u32 {
        self.0.world()
    }

    fn meeting(&self) -> Meeting {
        self.0.meeting()
    }

    fn host(&self) -> &str {
        self.0.host()
    }

    fn absent(&self, topic: &str) -> Absent {
        self.0.absent(topic)
    }

    fn agree(
        &self,
        topic: &str,
        contribution: Result<Vec<u8>, String>,
        decide: Decide<'_>,
        deadline: Duration,
    ) -> Result<Vec<u8>, shardfast_coord::Error> {
        let answer = self.0.agree(topic, contribution, decide, deadline)?;
        match topic.ends_with("commit") {
            true => Err(shardfast_coord::Error::Unavailable("rank 0 is out of reach".to_owned())),
            false => Ok(answer),
        }
    }
}

/// Three ranks, the last of which never gets the outcome of a commit.
fn job() -> Job {
    let engine = |coord: Arc<dyn Coord>| {
        let coord: Arc<dyn Coord> = if coord.rank() == 2 { Arc::new(Deaf(coord)) } else { coord };
        Engine::new(coord, shardfast_engine::staging::STAGING_BYTES_MIN).unwrap()
    };
    Job { engines: shardfast_coord::local(3).into_iter().map(engine).collect(), layout: Layout::rows(3) }
}

/// Begins a save on all ranks, each with a note of its own; rank 0 changes its note before the others begin.
fn begin(job: &Job, url: &str) -> Vec<Pending> {
    let begin = |engine: &Arc<Engine>| {
        let mut destination = destination(url);
        destination.user.insert(NAME.to_owned(), format!("at first, of rank {}", engine.rank()));
        let state = Truth::small(1, 50).state(&job.layout, engine.rank(), &mut Dice(1));
        let pending = save(engine, destination, state, LONG);
        pending.note(NAME.to_owned(), format!("later, of rank {}", engine.rank()));
        pending
    };
    job.engines.iter().map(begin).collect()
}

#[test]
fn every_rank_learns_the_notes_of_rank_0_also_one_that_looks_for_the_commit_itself() {
    let (dir, job) = (scratch(), job());
    let url = dir.path().to_str().unwrap();
    let pending = begin(&job, url);
    alike(outcomes(pending.clone())).unwrap();
    let expected = BTreeMap::from([(NAME.to_owned(), "later, of rank 0".to_owned())]);
    for (rank, pending) in pending.iter().enumerate() {
        assert_eq!(pending.committed_notes(), expected, "rank {rank}");
    }
    // The user's own note is recorded beside it, and is no business of the other ranks.
    let saved = checkpoint::open(&Engine::solo(), url, LONG).unwrap();
    let recorded = BTreeMap::from([("note".to_owned(), "test".to_owned())]).into_iter().chain(expected).collect();
    assert_eq!(saved.manifest().info.user, recorded);
}

#[test]
fn a_save_that_fails_has_no_notes() {
    let (dir, job) = (scratch(), job());
    let url = dir.path().to_str().unwrap();
    alike(outcomes(begin(&job, url))).unwrap();
    let pending = begin(&job, url);
    assert!(outcomes(pending.clone()).iter().all(Result::is_err), "a checkpoint is there already");
    assert!(pending.iter().all(|pending| pending.committed_notes().is_empty()));
}
