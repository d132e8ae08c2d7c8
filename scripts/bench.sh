#!/usr/bin/env bash
# Runs the benchmarks; the arguments are those of bench/run.py (--help lists them). Their environment, target/bench,
# holds the rivals and a wheel.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly venv=target/bench

source scripts/environment.sh

make_environment bench
rm -rf target/bench-wheels
.venv/bin/maturin build --quiet --release --locked --interpreter .venv/bin/python \
    --out target/bench-wheels
wheels=(target/bench-wheels/shardfast-*.whl)

wheel=$(digest <"${wheels[0]}")
# As pip leaves it: without, each process would compile the package.
if ! is_stamped "$venv" wheel "$wheel"; then
    .venv/bin/uv pip install --quiet --compile-bytecode --python "$venv/bin/python" --no-deps --reinstall "${wheels[0]}"
    echo "$wheel" >"$venv/wheel.stamp"
fi
# The measures with Megatron-Core, DeepSpeed, trainers and loaders run in the environments that scripts/megatron.sh
# and scripts/frameworks.sh make, if they are there.
for other in target/megatron target/frameworks; do
    if [[ -x $other/bin/python ]]; then
        .venv/bin/uv pip install --quiet --python "$other/bin/python" --no-deps --reinstall "${wheels[0]}"
    fi
done
exec "$venv/bin/python" bench/run.py "$@"
