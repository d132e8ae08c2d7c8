//! The story: what a save and a load are, told by calling the crates that each do one thing.
//!
//! Start with [`save`](mod@save) and [`load`]; what makes a checkpoint exist is in [`commit`].

mod ablation;
mod agree;
mod ahead;
mod background;
mod calls;
pub mod carrier;
pub mod checkpoint;
pub mod commit;
mod copy;
pub mod cuda;
pub mod diff;
pub mod error;
pub mod export;
pub mod inspect;
pub mod load;
pub mod locate;
pub mod mapped;
pub mod pending;
mod planning;
mod proof;
pub mod provider;
pub mod reader;
mod replicas;
mod repr;
pub mod runs;
pub mod save;
mod shared;
mod sharing;
pub mod sink;
pub mod staging;
mod stream;
pub mod verify;
mod writer;

pub use agree::{Engine, staging_bytes_default};
pub use checkpoint::{Checkpoint, Opinion, open};
pub use diff::{Diff, diff};
pub use error::{Error, Kind, Result};
pub use export::{Exported, export, export_to};
pub use inspect::{History, Summary, history, summary};
pub use load::{Forecast, Loaded, ValueRef, Way};
pub use locate::{Located, locate, locate_all};
pub use mapped::{Mapped, View};
pub use pending::{Pending, Report};
pub use provider::{Fence, Fences, Memory, Provider, Strided};
pub use save::{Destination, Pace, State, save, save_deferred, save_to};
pub use shardfast_plan::{RankSet, Replicas};
pub use shared::Traffic;
pub use sink::{Sink, Want, row_major_strides};
pub use verify::{VerifyReport, verify, verify_in};
