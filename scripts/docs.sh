#!/usr/bin/env bash
# The guide with the Python reference in target/site, and the Rust pages in target/doc; with the word `rust` only these.
# A warning is a failure.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ ${1-} == rust ]] || scripts/site.sh
RUSTDOCFLAGS='-D warnings' cargo doc --workspace --no-deps --locked --quiet
