#!/usr/bin/env bash
# Makes the wheels for other machines, in dist/: Linux on x86_64 and aarch64 with glibc 2.28 or later. Then checks them
# (tests/wheel). Their tools are in an environment of their own, target/wheel-tools.
#
#   scripts/wheel.sh         builds both
#   scripts/wheel.sh here    builds that of this machine's processor, and only lints the code for the other one, which
#                            takes less than half of the time: a step of `make test`
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly tools=target/wheel-tools

fail() {
    printf 'wheel: %s\n' "$*" >&2
    exit 1
}

[[ -z $* || $* == here ]] || fail "expected no argument or \`here\`, found: $*"
[[ -x .venv/bin/uv ]] || fail "no environment: run \`make setup\` first"
requirements=$(sha256sum <requirements/wheel.txt)
if [[ ! -f $tools/requirements.stamp || "$(<$tools/requirements.stamp)" != "$requirements" ]]; then
    echo "wheel: installing requirements/wheel.txt (ziglang is large)"
    rm -rf "$tools"
    .venv/bin/python -m venv "$tools"
    .venv/bin/uv pip install --quiet --python "$tools/bin/python" --requirement requirements/wheel.txt
    echo "$requirements" >"$tools/requirements.stamp"
fi

PATH=$PWD/$tools/bin:$PATH
rm -rf dist
not_built=()
for machine in x86_64 aarch64; do
    target=$machine-unknown-linux-gnu
    if command -v rustup >/dev/null; then
        rustup --quiet target add "$target"
    fi
    if [[ ${1:-} == here && $machine != "$(uname -m)" ]]; then
        cargo-zigbuild clippy --workspace --locked --quiet --target "$target" -- -D warnings
        not_built+=(-k "not $machine")
    else
        maturin build --quiet --release --locked --zig --target "$target" --compatibility manylinux_2_28 --out dist
    fi
done
.venv/bin/pytest --quiet tests/wheel "${not_built[@]}"
