//! The shardfast command.
