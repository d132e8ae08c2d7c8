//! What goes wrong at which operation of a rank on the storage: a system call, or a request.

use std::path::Path;
use std::time::Duration;

use shardfast_store::disk::Errno;
use shardfast_store::testing::sims3::Fault;

/// What happens at an operation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Fate {
    /// The process dies, before it or after it.
    Die { after: bool },
    /// It fails.
    Fails(Failure),
    /// It takes that long.
    Slow(Duration),
    /// Records what a later job would find if all ended at this point, by chance with it or without it; the run goes
    /// on.
    Blackout { seed: u64 },
    /// Before it another program removes data files of what has no `COMMIT` yet: in a decision, when every rank has
    /// written, all of the checkpoint; else the file that it is for, or all of the rank. What others write at the same
    /// time has no order.
    Sweep,
}

/// How the storage fails.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Failure {
    /// Of a disk: with this error, and with its effect or without.
    Call { errno: Errno, has_effect: bool },
    /// Of a service.
    Request(Fault),
}

/// At which operation something happens, once.
#[derive(Clone, Debug)]
pub(crate) struct Trap {
    pub(crate) site: Site,
    pub(crate) fate: Fate,
}

/// An operation of one rank. Several threads of it write at a time, so only the operations of one name on one kind of
/// file have an order, and those of a decision.
#[derive(Clone, Debug)]
pub(crate) enum Site {
    /// The one of that name on a data file of that key (on the key's directory where it is for directories),
    /// after so many others.
    Data { name: &'static str, key: &'static str, left: u32 },
    /// The one of that name on the checkpoint's own directory or an object in it, outside of decisions, after so many
    /// others.
    Place { name: &'static str, left: u32 },
    /// The `at`-th one, from 1, of the decision of that stage, after so many decisions.
    Deciding { stage: &'static str, at: u32, left: u32 },
}

impl Trap {
    /// Whether this operation springs it. `deciding` is the decision under way, and the number of this one in it.
    pub(crate) fn is_sprung(&mut self, name: &str, path: &Path, deciding: Option<(&str, u32)>) -> bool {
        let dir = if is_data(path) { path.parent() } else { Some(path) };
        let is_one = |found: &&Path| found.file_name().is_some_and(|name| name.to_string_lossy().starts_with("step-"));
        let is_in_place = || is_one(&path) || path.parent().is_some_and(|dir| is_one(&dir));
        let (is_it, left) = match (&mut self.site, deciding) {
            (Site::Deciding { stage, at, left }, Some((found, number))) => (found == *stage && number == *at, left),
            (Site::Data { name: wanted, key, left }, None) => {
                (name == *wanted && dir.is_some_and(|dir| dir.ends_with(&**key)), left)
            }
            (Site::Place { name: wanted, left }, None) => (name == *wanted && is_in_place(), left),
            _ => return false,
        };
        if is_it {
            *left = left.wrapping_sub(1);
        }
        is_it && *left == u32::MAX
    }
}

/// Whether it is the path of a data file.
pub(crate) fn is_data(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "safetensors")
}
