#!/usr/bin/env bash
# Removes what the other scripts made: builds, the environment, outputs. The sources stay.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
rm -rf target dist .venv demo-out bench-out fuzz/target .mypy_cache .pytest_cache .ruff_cache
find python tests examples bench -name __pycache__ -type d -prune -exec rm -rf {} +
