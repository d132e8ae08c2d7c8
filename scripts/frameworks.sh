#!/usr/bin/env bash
# Runs the tests with other libraries' packages, tests/frameworks:
#
#   scripts/frameworks.sh                 all of them
#   scripts/frameworks.sh gate            for every change: those marked `smoke`, at least one with each package
#   scripts/frameworks.sh ARGUMENT...     pytest with these arguments
#
# Their environment, target/frameworks, holds these packages and the shardfast of .venv. The first time this installs a
# PyTorch, which takes minutes and 5 GB on x86_64, unless uv has it in its cache.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source scripts/environment.sh

make_environment frameworks
install_what_is_tested frameworks
if [[ $* == gate ]]; then
    set -- -m smoke tests/frameworks
elif (($# == 0)); then
    set -- tests/frameworks
fi
exec target/frameworks/bin/python -m pytest --quiet "$@"
