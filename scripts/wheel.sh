#!/usr/bin/env bash
# Makes the wheels that are shipped: Linux on x86_64 and aarch64 with glibc 2.28 or later.
#
#   scripts/wheel.sh                     both, in dist/, and checks them (tests/wheel); `make setup` has made one
#   scripts/wheel.sh build MACHINE OUT   one of them, in the folder OUT
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly machines=(x86_64 aarch64)

fail() {
    printf 'wheel: %s\n' "$*" >&2
    exit 1
}

build() { # MACHINE OUT
    [[ " ${machines[*]} " == *" $1 "* ]] || fail "expected a machine of ${machines[*]}, found $1"
    local target=$1-unknown-linux-gnu
    if command -v rustup >/dev/null; then
        rustup --quiet target add "$target"
    fi
    PATH=$PWD/.venv/bin:$PATH maturin build --quiet --release --locked --zig --target "$target" \
        --compatibility manylinux_2_28 --out "$2"
}

[[ -x .venv/bin/maturin ]] || fail "no environment: run \`make setup\` first"
if [[ ${1-} == build ]]; then
    (($# == 3)) || fail "build: expected MACHINE OUT, found $*"
    build "$2" "$3"
    exit
fi
rm -rf dist
mkdir dist
for machine in "${machines[@]}"; do
    if [[ $machine == "$(uname -m)" ]]; then
        cp target/wheels/*.whl dist
    else
        build "$machine" dist
    fi
done
.venv/bin/pytest --quiet tests/wheel
