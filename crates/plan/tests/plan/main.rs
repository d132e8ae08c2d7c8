//! Plans as their callers see them.

// Ranks are said as ranges, and often one is enough.
#![allow(clippy::single_range_in_vec_init)]

mod coverage;
mod load;
mod objects;
mod reshard;
mod save;
mod share;
mod spread;
