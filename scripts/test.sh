#!/usr/bin/env bash
# Everything that CI runs. Steps that need what a failed step makes are reported as not run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source scripts/steps.sh

readonly bin=$PWD/.venv/bin
ready=true # whether .venv and the wheel are there

# venv_step, venv_beside NAME COMMAND...: as `step` and `beside`, for a step that needs the environment.
venv_step() { when_ready step "$@"; }
venv_beside() { when_ready beside "$@"; }
when_ready() {
    if $ready; then
        "$@"
    else
        left_out "$2"
    fi
}

rust_format() { cargo fmt --all --check && cargo fmt --manifest-path fuzz/Cargo.toml --check; }

setup() { scripts/setup.sh || { ready=false && return 1; }; }

# As a user would: away from the checkout and its configuration, against what is installed.
user_types() {
    local here=$PWD
    (cd / && "$bin/mypy" --strict --config-file= --cache-dir="$here/.mypy_cache/user" \
        "$here/tests/python/typing/user_script.py")
}
stubs() { (cd / && "$bin/stubtest" shardfast._native); }

step "rustfmt" rust_format
step "object-storage servers" scripts/servers.sh install
step "clippy" cargo clippy --workspace --all-targets --locked --quiet -- -D warnings
step "cargo test" cargo test --workspace --no-fail-fast --locked --quiet
step "fuzz seeds" cargo run --manifest-path fuzz/Cargo.toml --target-dir target/fuzz --example seeds --locked --quiet
step "cargo doc" env RUSTDOCFLAGS='-D warnings' cargo doc --workspace --no-deps --locked --quiet
step "environment and wheel" setup
venv_step "ruff check" "$bin/ruff" check .
venv_step "ruff format" "$bin/ruff" format --check .
venv_step "mypy" "$bin/mypy"
venv_step "mypy, a user's script" user_types
venv_step "stubs" stubs
venv_step "wheels for other machines" scripts/wheel.sh
# It leaves much of two processors idle, as the steps below do.
venv_beside "pytest" "$bin/pytest" --quiet tests --ignore=tests/structure --ignore=tests/wheel \
    --ignore=tests/frameworks --ignore=tests/python/test_readme.py --ignore=tests/python/test_guide.py
venv_step "pytest, trainers' packages" scripts/frameworks.sh
venv_step "pytest, oldest PyTorch" scripts/oldest.sh
venv_step "README and guide" "$bin/pytest" --quiet tests/python/test_readme.py tests/python/test_guide.py
venv_step "memory that Python owns" scripts/memcheck.sh
venv_step "structure" "$bin/pytest" --quiet tests/structure
venv_step "guide as a site" scripts/site.sh
joined

summary
