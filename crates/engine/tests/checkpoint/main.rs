//! Checkpoints as their callers have them: saved and loaded under any layout, damaged, cut off by crashes, refused.

mod bad_input;
mod block;
mod capture;
mod crash;
mod damage;
mod job;
mod kill;
mod large;
mod layout;
mod meddling;
mod notes;
mod overtaken;
mod phases;
mod planning;
mod replicas;
mod reshard;
mod retention;
mod runs;
mod share;
mod sweep;
mod sweeps;
mod transient;

/// Returns the number of cases: `usual`, or the value of the environment variable in a campaign.
pub(crate) fn count(variable: &str, usual: usize) -> usize {
    std::env::var(variable).map_or(usual, |count| count.parse().expect("a number"))
}
