#!/usr/bin/env bash
# Runs the benchmarks; the arguments are those of bench/run.py (--help lists them). Their environment, target/bench,
# holds the rivals and a wheel.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly venv=target/bench

fail() {
    printf 'bench: %s\n' "$*" >&2
    exit 1
}

# is_stamped NAME DIGEST: whether that is installed already.
is_stamped() { [[ -f "$venv/$1.stamp" && "$(<"$venv/$1.stamp")" == "$2" ]]; }

digest() { sha256sum | cut -d' ' -f1; }

[[ -x .venv/bin/uv ]] || fail "no environment: run \`make setup\` first"
rm -rf target/bench-wheels
.venv/bin/maturin build --quiet --release --locked --interpreter .venv/bin/python \
    --out target/bench-wheels
wheels=(target/bench-wheels/shardfast-*.whl)

if ! "$venv/bin/python" -c '' 2>/dev/null; then
    rm -rf "$venv"
    .venv/bin/python -m venv "$venv"
fi
requirements=$(digest <requirements/bench.txt)
if ! is_stamped requirements "$requirements"; then
    echo "bench: installing requirements/bench.txt (torch is large: minutes on a slow line)"
    .venv/bin/uv pip install --quiet --python "$venv/bin/python" --requirement requirements/bench.txt
    echo "$requirements" >"$venv/requirements.stamp"
fi
wheel=$(digest <"${wheels[0]}")
if ! is_stamped wheel "$wheel"; then
    .venv/bin/uv pip install --quiet --python "$venv/bin/python" --no-deps --reinstall "${wheels[0]}"
    echo "$wheel" >"$venv/wheel.stamp"
fi
# Processes of a job find the byte code of what they import; without it they would compile all of it each time.
unset PYTHONDONTWRITEBYTECODE
exec "$venv/bin/python" bench/run.py "$@"
