//! Ranks that are threads of one process; one rank is the smallest such world.

use std::sync::Arc;
use std::time::Duration;

use crate::hub::{Hub, LEFT};
use crate::{Coord, Decide, Error, Meeting};

struct Local {
    rank: u32,
    meeting: Meeting,
    hub: Arc<Hub>,
}

/// The one rank of a world of one. It waits for nobody.
///
/// # Panics
/// When the system has no random numbers.
pub fn solo() -> Arc<dyn Coord> {
    local(1).remove(0)
}

/// The ranks of a world within this process, in their order; each is meant for threads of its own.
///
/// # Panics
/// When the system has no random numbers.
pub fn local(world: u32) -> Vec<Arc<dyn Coord>> {
    let meeting = Meeting::draw().expect("random numbers");
    let hub = Arc::new(Hub::new(world));
    (0..world).map(|rank| Arc::new(Local { rank, meeting, hub: Arc::clone(&hub) }) as Arc<dyn Coord>).collect()
}

impl Coord for Local {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn world(&self) -> u32 {
        self.hub.world()
    }

    fn meeting(&self) -> Meeting {
        self.meeting
    }

    fn host(&self) -> &str {
        "127.0.0.1"
    }

    fn agree(
        &self,
        topic: &str,
        contribution: Result<Vec<u8>, String>,
        decide: Decide<'_>,
        deadline: Duration,
    ) -> Result<Vec<u8>, Error> {
        self.hub.agree(self.rank, topic, contribution, decide, deadline)
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        self.hub.lose(self.rank, LEFT);
    }
}
