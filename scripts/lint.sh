#!/usr/bin/env bash
# Formats what can be formatted and reports the rest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
cargo fmt --all
cargo fmt --manifest-path fuzz/Cargo.toml
.venv/bin/ruff format .
.venv/bin/ruff check --fix .
cargo clippy --workspace --all-targets --locked -- -D warnings
.venv/bin/mypy
.venv/bin/pytest --quiet tests/structure
