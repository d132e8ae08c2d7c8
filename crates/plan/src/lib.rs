//! Who moves which bytes, given what each rank holds or wants. Pure and deterministic.
//!
//! Every function here is a function of its arguments alone: no files, clocks, threads, devices or storage. Ranks that
//! call one with equal arguments get equal answers, so a plan needs no message of its own.
//!
//! - [`save`]: what each rank's catalog holds → which rank writes which part.
//! - [`objects`]: the digests of encoded values → which rank writes which value for whom.
//! - [`load`]: a manifest and the regions that one rank wants → the reads that bring them.
//! - [`share`](fn@share): the regions that each rank wants → which rank reads what for which others.
//! - [`tiles`]: whether regions cover a tensor exactly once.

mod balance;
mod coverage;
mod error;
mod index;
mod load;
mod objects;
mod ranks;
mod save;
mod share;

pub use coverage::{Flaw, tiles};
pub use error::{Error, Problems};
pub use load::{Limits, Piece, Read, Reads, Want, load};
pub use objects::{ObjectWrite, objects};
pub use save::{PartRef, SavePlan, save};
pub use share::{CHUNK_BLOCKS_MAX, Chunk, Chunks, Common, Matching, Sharing, Wanted, share};
