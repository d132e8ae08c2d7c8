#!/usr/bin/env bash
# Rust pages in target/doc, Python pages in target/doc-python.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
RUSTDOCFLAGS='-D warnings' cargo doc --workspace --no-deps --locked
scripts/pydoc.sh
