#!/usr/bin/env bash
# Runs the tests with other libraries' packages, tests/frameworks; the arguments are pytest's (instead of all of them).
# Their environment, target/frameworks, holds these packages and the shardfast of .venv.
#
# A step of `make test`. The first time it installs a PyTorch, which takes minutes and 5 GB on x86_64, unless uv has it
# in its cache.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source scripts/environment.sh

make_environment frameworks
install_what_is_tested frameworks
(($#)) || set -- tests/frameworks
exec target/frameworks/bin/python -m pytest --quiet "$@"
