//! shardfast._native
