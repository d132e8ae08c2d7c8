//! Inspects, verifies, compares, exports, copies, sends and sweeps checkpoints that exist.
//!
//! Each tool runs in one process, without other ranks. Two of them read no checkpoint: [`interval`] says how often a
//! save is worth its cost, and [`machine`] what this machine offers to saves and loads.

pub mod copy;
pub mod diff;
pub mod drain;
pub mod export;
pub mod inspect;
pub mod interval;
pub mod machine;
pub mod mapped;
pub mod neighbours;
mod repr;
pub mod sweep;
pub mod verify;

pub use copy::{Copied, Copying, FailedStep, Limit, Synced, copy, copy_between, sync};
pub use diff::{Diff, diff};
pub use drain::{Drain, Sent};
pub use export::{Exported, export, export_to};
pub use inspect::{History, Summary, history, summary};
pub use machine::{Machine, examine};
pub use mapped::{Mapped, View};
pub use sweep::{Swept, sweep};
pub use verify::{VerifyReport, verify, verify_in, verify_stored};
