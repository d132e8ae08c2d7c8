//! Tests plans from outside, as their callers use them.

// Ranks are said as ranges, and often one is enough.
#![allow(clippy::single_range_in_vec_init)]

mod amend;
mod assembly;
mod balance;
mod coverage;
mod flat;
mod load;
mod local;
mod reshard;
mod save;
mod share;
mod spread;
mod unshared;
