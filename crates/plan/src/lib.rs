//! Plans which rank moves which bytes, given what each rank holds or wants. Pure and deterministic.
//!
//! Every function here is a function of its arguments alone: no files, clocks, threads, devices or storage. Ranks that
//! call one with equal arguments get equal answers, so a plan needs no message of its own.
//!
//! - [`save`]: what each rank's catalog holds → which rank writes which part.
//! - [`amend`]: the same around writes that have begun.
//! - [`save_unshared`], [`amend_unshared`], [`local_unshared`]: the same where copies of some leaves may differ, so
//!   that each region of theirs comes from one rank.
//! - [`local`]: what one rank holds and which others hold it → what this rank writes, without a message; [`prove`]:
//!   whether such plans fit together.
//! - [`load`]: a manifest and the regions that one rank wants → the reads that bring them.
//! - [`Assembly`]: what each rank wrote → the tensors of a manifest, each whole.
//! - [`share`](fn@share): the regions that each rank wants → which rank reads what for which others.
//! - [`tiles`]: whether regions cover a tensor exactly once.

mod amend;
mod assembly;
mod balance;
mod coverage;
mod error;
mod group_small;
mod index;
mod levels;
mod load;
mod local;
mod ranks;
mod save;
mod share;
mod units;
mod write;

pub use amend::{amend, amend_unshared};
pub use assembly::Assembly;
pub use coverage::{Flaw, tiles};
pub use error::{Error, Problems};
pub use load::{Limits, Piece, Read, Reads, Want, load};
pub use local::{Claim, Local, Replicas, local, local_unshared, prove};
pub use ranks::{RankSet, ranges};
pub use save::{save, save_unshared};
pub use share::{CHUNK_BLOCKS_MAX, Chunk, Chunks, Common, Matching, Sharing, Wanted, share};
pub use write::{Rows, Write, pieces};
