//! The story: save and load.
