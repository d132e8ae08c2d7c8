#!/usr/bin/env bash
# Makes .venv in the checkout ready: the pinned tools, and the wheel of this machine as it is shipped, built from the
# sources as they stand (target/wheels). Does only what has changed since the last time.
#
#   scripts/setup.sh                all of it
#   scripts/setup.sh environment    the tools only
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

# The first Python that is new enough for the pinned torch.
find_python() {
    local candidate
    for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "needs Python 3.11 or later with the venv module (on Debian and Ubuntu: apt install python3 python3-venv)," \
        "found: $(python3 --version 2>&1 || true)"
}

source scripts/environment.sh

# One number for everything that the wheel is made of, and made with.
sources_digest() {
    find Cargo.toml Cargo.lock rust-toolchain.toml pyproject.toml README.md LICENSE crates python \
        scripts/wheel.sh requirements/dev.txt \
        -type f -not -path '*/__pycache__/*' -not -path '*/.*_cache/*' -print0 | sort -z | xargs -0 sha256sum | digest
}

command -v cargo >/dev/null ||
    fail "cargo is missing: install Rust from https://rustup.rs (rust-toolchain.toml then picks the version)"
if ! .venv/bin/python -c '' 2>/dev/null || ! is_stamped .venv place "$(here)"; then
    python=$(find_python)
    echo "setup: making .venv with $("$python" --version)"
    rm -rf .venv
    "$python" -m venv .venv
    here >.venv/place.stamp
fi

requirements=$(digest <requirements/dev.txt)
if ! is_stamped .venv requirements "$requirements"; then
    echo "setup: installing requirements/dev.txt (torch is large: minutes on a slow line)"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check "$(grep '^uv==' requirements/dev.txt)"
    .venv/bin/uv pip install --python .venv/bin/python --requirement requirements/dev.txt
    echo "$requirements" >.venv/requirements.stamp
fi

[[ ${1-} != environment ]] || exit 0
sources=$(sources_digest)
if ! is_stamped .venv shardfast "$sources" || ! ls target/wheels/*.whl >/dev/null 2>&1; then
    echo "setup: building the wheel (the first time takes minutes)"
    rm -rf target/wheels
    scripts/wheel.sh build "$(uname -m)" target/wheels
    .venv/bin/uv pip install --quiet --python .venv/bin/python --no-deps --reinstall target/wheels/shardfast-*.whl
    echo "$sources" >.venv/shardfast.stamp
fi
echo "setup: .venv is ready"
