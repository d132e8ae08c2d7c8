#!/usr/bin/env bash
# The guide with the Python reference in target/site, and the Rust pages in target/doc. A warning is a failure.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/site.sh
RUSTDOCFLAGS='-D warnings' cargo doc --workspace --no-deps --locked
