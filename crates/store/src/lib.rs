//! Moves named bytes and publishes one name atomically.
