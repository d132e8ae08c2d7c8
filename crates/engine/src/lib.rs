//! Save and load, composed of the crates that each do one thing.
//!
//! Start with [`save`](mod@save) and [`load`]; [`commit`] makes a checkpoint exist.

mod assemble;
pub mod background;
mod batch;
mod calls;
pub mod checkpoint;
pub mod commit;
mod concurrently;
pub mod contents;
mod engine;
pub mod files_exist;
mod foreign;
pub mod jobs;
mod layout;
pub mod levels;
pub mod listen;
mod listened;
pub mod load;
pub mod locate;
pub mod newest;
mod operation;
mod peers;
pub mod pending;
pub mod pins;
mod planning;
mod plans;
pub mod reads;
mod receipt;
mod replicas;
pub mod retention;
pub mod rewind;
pub mod runs;
pub mod save;
pub mod state;
pub mod stream;
mod terms;

pub use calls::Waits;
pub use checkpoint::{Checkpoint, MatchSummary, open, open_to_load};
pub use engine::{Engine, SAVE_MAX};
pub use jobs::Job;
pub use listened::wait_collected;
pub use locate::{Located, absolute_url, locate, locate_all};
pub use operation::of_ranks;
pub use peers::{PeerReads, carrier, links_max};
pub use pending::Pending;
pub use pins::{pin, unpin};
pub use reads::{Forecast, Loaded, Traffic, ValueRef};
pub use rewind::{Rewound, rewind};
pub use save::{save, save_deferred, save_to};
pub use state::{Compared, Destination, Maker, Prove, State};
pub use terms::Terms;

// A caller of saves and loads needs these of the crates below.
pub use shardfast_plan::{RankSet, Replicas};
pub use shardfast_transfer::capture::{Capture, Captures};
pub use shardfast_transfer::error::{Error, Kind, Result};
pub use shardfast_transfer::host::row_major_strides;
pub use shardfast_transfer::memory::staging_bytes_default;
pub use shardfast_transfer::provider::{Evidence, Fence, Fences, Memory, Provider, SAMPLE_BYTES, Sample, Strided};
pub use shardfast_transfer::report::{Moved, Report};
pub use shardfast_transfer::sink::{Sink, Want};
pub use shardfast_transfer::timeout::{TIMEOUT, Timeout};
pub use shardfast_transfer::{error, staging};
