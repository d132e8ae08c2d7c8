#!/usr/bin/env bash
# Checks and measures Shardfast on a machine with a CUDA device. Needs the checkout, the wheel in target/wheels (or what
# builds it), and a Python that has torch: `PYTHON=python3.12 bench/gpu/run.sh --where /mnt/nvme`. Installs nothing.
# `--multistep`, as the first argument, measures saves that are captured over several steps instead.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python=${PYTHON:-python3}

skip() {
    printf 'bench/gpu: skipped: %s\n' "$*"
    exit 0
}

"$python" -c 'import torch' 2>/dev/null || skip "$python has no torch (name another Python with PYTHON=...)"
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
    skip "torch of $python sees no CUDA device"

shopt -s nullglob
wheels=(target/wheels/shardfast-*.whl)
if ((${#wheels[@]} == 0)); then
    maturin=$(command -v maturin || command -v .venv/bin/maturin || true)
    [[ -n $maturin ]] || { echo "bench/gpu: no wheel in target/wheels, and no maturin to build one" >&2 && exit 1; }
    "$maturin" build --release --locked --out target/wheels
    wheels=(target/wheels/shardfast-*.whl)
fi

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
"$python" -m zipfile -e "${wheels[-1]}" "$site"
export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}

# Figures of a build that does not keep its promises mean nothing.
if "$python" -c 'import pytest' 2>/dev/null; then
    # A thousand steps of every variant take longer than a loan of a device; run test_device_replay.py by itself.
    "$python" -m pytest -q -c /dev/null --rootdir=tests/gpu -p no:cacheprovider \
        --ignore=tests/gpu/test_device_replay.py tests/gpu
else
    echo "bench/gpu: tests/gpu was not run: $python has no pytest"
fi
if [[ ${1:-} == --multistep ]]; then
    shift
    PYTHONPATH=bench:bench/gpu:$PYTHONPATH "$python" bench/gpu/multistep.py "$@"
else
    "$python" bench/gpu/measure.py "$@"
fi
