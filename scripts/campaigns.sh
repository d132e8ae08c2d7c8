#!/usr/bin/env bash
# Runs the campaigns: tests of `make test` with many more seeds and kills, for an hour or two on two cores. Before a
# release, and after a change to what they attack. `fuzz/Cargo.toml` tells how to fuzz the decoders by coverage.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source scripts/steps.sh

simulated() { cargo run --locked --quiet --package shardfast-sim -- "$@"; }
# engine VARIABLE=NUMBER CARGO'S ARGUMENTS...: tests of the engine with so many seeds.
engine() {
    local many=$1
    shift
    env "$many" cargo test --locked --quiet --package shardfast-engine "$@"
}

step "object-storage servers" scripts/servers.sh install
step "jobs on a disk" simulated --seeds 0..10000
step "jobs at a service of objects" simulated --seeds 0..2500 --storage objects
step "faults at any request" engine SHARDFAST_FAR_SEEDS=500 --test far seeded
step "a server that is killed" engine SHARDFAST_TEST_CRASHES=50 --test far outlives
step "sweeps beside savers" engine SHARDFAST_SWEEP_SEEDS=1000 --test checkpoint sweep::
step "changes in windows" engine SHARDFAST_AHEAD_SEEDS=500 --lib ahead::
# Without the stacks that pytest shows of a test that takes five minutes.
step "kills in windows" env SHARDFAST_AHEAD_KILLS=200 .venv/bin/pytest --quiet --override-ini faulthandler_timeout=0 \
    tests/python/test_ahead_kills.py
step "stored values" .venv/bin/python fuzz/values.py --seconds 600 --start 1000000
summary
