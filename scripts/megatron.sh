#!/usr/bin/env bash
# Runs the tests with Megatron-Core, tests/megatron, on the CPU:
#
#   scripts/megatron.sh                 all of them
#   scripts/megatron.sh gate            for every change: those not marked `campaign`
#   scripts/megatron.sh with VERSION    those of `gate` with this megatron-core, in target/megatron-VERSION
#   scripts/megatron.sh ARGUMENT...     pytest with these arguments
#
# Their environment, target/megatron, holds it and the shardfast of .venv. The first time this installs a PyTorch, which
# takes minutes and 5 GB on x86_64, unless uv has it in its cache.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source scripts/environment.sh

# find_python MINOR: prints a Python from 3.12 to 3.MINOR, which the newest Megatron-Core needs; .venv's if there is
# none. A pyenv's python3.12 can be a shim that runs nothing, beside the Python itself.
find_python() {
    local candidate
    for candidate in python3.13 python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[23]*/bin/python; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 12) <= sys.version_info[:2] <= (3, '"$1"'))' \
            2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    printf 'megatron: NO PYTHON 3.12 OR 3.13 HERE: the tests run with an old Megatron-Core, 0.16.1\n' >&2
    echo .venv/bin/python
}

# requirements_with VERSION: prints those of megatron.txt with another megatron-core. Up to 0.15 it asks for NumPy 1,
# which has no wheel for Python 3.13.
requirements_with() {
    local numpy='s/^numpy==2.*/numpy==1.26.4/'
    [[ $1 == 0.1[0-5].* ]] || numpy=
    sed -e '/^megatron-core==/d' -e "$numpy" requirements/megatron.txt
    echo "megatron-core==$1"
}

# add_deepspeed: puts DeepSpeed of scripts/frameworks.sh, and what it imports, beside the environment.
add_deepspeed() {
    local at=$PWD/target/megatron-deepspeed version needs='annotated-types|hjson|msgpack|ninja|packaging|py-cpuinfo'
    version=$(sed -n 's/^readonly deepspeed=//p' scripts/frameworks.sh)
    export PYTHONPATH=$at
    ! is_stamped "$at" deepspeed "$version" || return 0
    rm -rf "$at"
    local install=(.venv/bin/uv pip install --quiet --no-deps --python "target/$name/bin/python" --target "$at")
    grep -E "^($needs|pydantic|pydantic-core|tqdm|typing-inspection)==" requirements/frameworks.txt |
        xargs "${install[@]}"
    DS_BUILD_OPS=0 "${install[@]}" --no-build-isolation "deepspeed==$version"
    echo "$version" >"$at/deepspeed.stamp"
}

if (($# == 2)) && [[ $1 == with ]]; then
    name=megatron-$2
    python=$(find_python 12)
    mkdir -p target
    requirements_with "$2" >"target/$name.txt"
    make_environment "$name" "$python" "target/$name.txt"
    set -- gate
else
    name=megatron
    python=$(find_python 13)
    make_environment megatron "$python"
fi
install_what_is_tested "$name"
if [[ $* == gate ]]; then
    set -- -m 'not campaign' tests/megatron
elif (($# == 0)); then
    add_deepspeed
    set -- tests/megatron
fi
exec "target/$name/bin/python" -m pytest --quiet "$@"
