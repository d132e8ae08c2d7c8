#!/usr/bin/env bash
# Runs the tests with Megatron-Core, tests/megatron, on the CPU:
#
#   scripts/megatron.sh                 all of them
#   scripts/megatron.sh gate            for every change: those not marked `campaign`
#   scripts/megatron.sh ARGUMENT...     pytest with these arguments
#
# Their environment, target/megatron, holds it and the shardfast of .venv. The first time this installs a PyTorch, which
# takes minutes and 5 GB on x86_64, unless uv has it in its cache.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source scripts/environment.sh

# find_python: prints a Python for which there is the newest Megatron-Core; .venv's if there is none. A pyenv's
# python3.12 can be a shim that runs nothing, beside the Python itself.
find_python() {
    local candidate
    for candidate in python3.13 python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[23]*/bin/python; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    printf 'megatron: NO PYTHON 3.12 OR 3.13 HERE: the tests run with an old Megatron-Core, 0.16.1\n' >&2
    echo .venv/bin/python
}

python=$(find_python)
make_environment megatron "$python"
install_what_is_tested megatron
if [[ $* == gate ]]; then
    set -- -m 'not campaign' tests/megatron
elif (($# == 0)); then
    set -- tests/megatron
fi
exec target/megatron/bin/python -m pytest --quiet "$@"
