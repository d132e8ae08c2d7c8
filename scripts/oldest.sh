#!/usr/bin/env bash
# Runs the tests of tests/python that depend on PyTorch's version with the oldest PyTorch that Shardfast works with; the
# arguments are pytest's (instead of these tests). Their environment, target/oldest, holds that PyTorch and the
# shardfast of .venv.
#
# A step of `make test`. The first time it installs the PyTorch, which takes minutes and 5 GB on x86_64, unless uv has
# it in its cache.
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

# The files that say nothing about PyTorch's version: processes that end or fail, connections, the command, the guide,
# places in a file system.
others=(collection devices exit failures guide import missed_calls package places readme schedule seccomp session
    sharing values_hostile)

python=$(find_python)
make_environment oldest "$python"
install_what_is_tested oldest
if (($# == 0)); then
    set -- tests/python
    for other in "${others[@]}"; do
        set -- "$@" "--ignore=tests/python/test_$other.py"
    done
fi
exec target/oldest/bin/python -m pytest --quiet "$@"
