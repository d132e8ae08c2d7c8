#!/usr/bin/env bash
# Makes the wheels for other machines, in dist/: Linux on x86_64 and aarch64 with glibc 2.28 or later. Then checks them
# (tests/wheel). Their tools are in an environment of their own, target/wheel-tools.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly tools=target/wheel-tools

fail() {
    printf 'wheel: %s\n' "$*" >&2
    exit 1
}

[[ -x .venv/bin/uv ]] || fail "no environment: run \`make setup\` first"
requirements=$(sha256sum <requirements/wheel.txt)
if [[ ! -f $tools/requirements.stamp || "$(<$tools/requirements.stamp)" != "$requirements" ]]; then
    echo "wheel: installing requirements/wheel.txt (ziglang is large)"
    rm -rf "$tools"
    .venv/bin/python -m venv "$tools"
    .venv/bin/uv pip install --quiet --python "$tools/bin/python" --requirement requirements/wheel.txt
    echo "$requirements" >"$tools/requirements.stamp"
fi

rm -rf dist
for machine in x86_64 aarch64; do
    target=$machine-unknown-linux-gnu
    if command -v rustup >/dev/null; then
        rustup --quiet target add "$target"
    fi
    PATH=$PWD/$tools/bin:$PATH maturin build --quiet --release --locked --zig --target "$target" \
        --compatibility manylinux_2_28 --out dist
done
.venv/bin/pytest --quiet tests/wheel
