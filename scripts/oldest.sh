#!/usr/bin/env bash
# Runs tests of tests/python with the oldest PyTorch that Shardfast works with:
#
#   scripts/oldest.sh                 all that can depend on PyTorch's version
#   scripts/oldest.sh gate            a choice of them, for every change: what looks into PyTorch's objects
#   scripts/oldest.sh ARGUMENT...     pytest with these arguments
#
# Their environment, target/oldest, holds that PyTorch and the shardfast of .venv. The first time this installs the
# PyTorch, which takes minutes and 5 GB on x86_64, unless uv has it in its cache.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source scripts/environment.sh

# find_python: prints the first Python for which this PyTorch has wheels; .venv's if it is one.
find_python() {
    local candidate
    for candidate in .venv/bin/python python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
            2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    printf 'oldest: PyTorch %s has wheels up to Python 3.13: expected 3.11, 3.12 or 3.13 with venv, found %s\n' \
        "$(sed -n 's/^torch==//p' requirements/oldest.txt)" "$(.venv/bin/python --version 2>&1)" >&2
    return 1
}

# What `gate` runs: how modules, optimizers and wrappers are understood, described and captured.
chosen=(adapters_torch capture description fsdp kinds load_hooks optimizers wrapped)

# Of these, what takes longest: two ranks show the same of a version as more.
too_long=('test_fsdp.py::test_every_layout_into_every_other[3]' 'test_fsdp.py::test_every_layout_into_every_other[4]')

# The files that say nothing about PyTorch's version: processes that end or fail, connections, the command, the guide,
# places in a file system.
others=(collection devices exit failures guide import missed_calls package places readme schedule seccomp session
    sharing values_hostile)

python=$(find_python)
make_environment oldest "$python"
install_what_is_tested oldest
if [[ $* == gate ]]; then
    set --
    for name in "${chosen[@]}"; do
        set -- "$@" "tests/python/test_$name.py"
    done
    for test in "${too_long[@]}"; do
        set -- "$@" "--deselect=tests/python/$test"
    done
elif (($# == 0)); then
    set -- tests/python
    for name in "${others[@]}"; do
        set -- "$@" "--ignore=tests/python/test_$name.py"
    done
fi
exec target/oldest/bin/python -m pytest --quiet "$@"
