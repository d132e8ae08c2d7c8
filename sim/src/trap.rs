//! What goes wrong at which system call of a rank.

use std::path::Path;
use std::time::Duration;

use shardfast_store::disk::Errno;

/// What happens at a system call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Fate {
    /// The process dies, before the call or after it.
    Die { after: bool },
    /// The call fails and does nothing.
    Fail(Errno),
    /// It has its effect, and fails.
    Lost(Errno),
    /// It takes that long.
    Slow(Duration),
    /// Records what a loss of power would leave at this point; the run goes on.
    Blackout { seed: u64 },
    /// Before the call another program removes data files of what has no `COMMIT` yet: in a decision, when every rank
    /// has written, all of the checkpoint; else the file that the call is for, or all of the calling rank. What others
    /// write at the same time has no order.
    Sweep,
}

/// At which system call something happens, once.
#[derive(Clone, Debug)]
pub(crate) struct Trap {
    pub(crate) site: Site,
    pub(crate) fate: Fate,
}

/// A system call of one rank. Several threads of it write at a time, so only the calls of one name on one kind of file
/// have an order, and those of a decision.
#[derive(Clone, Debug)]
pub(crate) enum Site {
    /// The call of that name on a data file of that key (on the key's directory where the call is for directories),
    /// after so many others.
    Data { name: &'static str, key: &'static str, left: u32 },
    /// The `at`-th call, from 1, of the decision of that stage, after so many decisions.
    Deciding { stage: &'static str, at: u32, left: u32 },
}

impl Trap {
    /// Whether this call springs it. `deciding` is the decision under way, and the number of this call in it.
    pub(crate) fn is_sprung(&mut self, name: &str, path: &Path, deciding: Option<(&str, u32)>) -> bool {
        match (&mut self.site, deciding) {
            (Site::Deciding { stage, at, left }, Some((found, number))) if found == *stage && number == *at => {
                *left = left.wrapping_sub(1);
                *left == u32::MAX
            }
            (Site::Data { name: wanted, key, left }, None) => {
                let dir = if is_data(path) { path.parent() } else { Some(path) };
                if name != *wanted || !dir.is_some_and(|dir| dir.ends_with(&**key)) {
                    return false;
                }
                *left = left.wrapping_sub(1);
                *left == u32::MAX
            }
            _ => false,
        }
    }
}

/// Whether it is the path of a data file.
pub(crate) fn is_data(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "safetensors")
}
