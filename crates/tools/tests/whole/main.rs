//! The verbs that go through whole checkpoints: verify, diff, export, inspect, locate.

mod checkpoints;
mod copy;
mod diff;
mod dying;
mod export;
mod inspect;
mod later;
mod levels;
mod mapped;
mod parts;
mod reading;
mod stores;
mod tending;
mod verify;
