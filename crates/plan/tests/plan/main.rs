//! Plans as their callers see them.

mod load;
mod objects;
mod reshard;
mod save;
mod spread;
