#!/usr/bin/env bash
# Everything that CI runs, each step named and timed. All steps run even when one fails, so that one run tells
# everything; steps that need what a failed step makes are reported as not run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly bin=$PWD/.venv/bin
names=()    # steps in order
outcomes=() # "passed", "FAILED" or "not run", by step
seconds=()  # by step
ready=true  # whether .venv and the wheel are there
logs=$(mktemp -d) # what each step printed, by its number
trap 'rm -rf "$logs"' EXIT

# step NAME COMMAND...: runs one command and remembers how it ended, and what it printed.
step() {
    local name=$1 log=$logs/${#names[@]} started=$SECONDS outcome=passed
    shift
    printf '\n=== %s\n' "$name"
    # Not in a pipeline: `setup` sets a variable of this shell.
    exec {copied}> >(tee "$log")
    local tee=$!
    "$@" >&"$copied" 2>&1 {copied}>&- || outcome=FAILED
    exec {copied}>&-
    wait "$tee"
    names+=("$name") outcomes+=("$outcome") seconds+=($((SECONDS - started)))
    printf -- '--- %s: %s, %d s\n' "$name" "$outcome" $((SECONDS - started))
}

# venv_step NAME COMMAND...: a step that needs the environment.
venv_step() {
    if $ready; then
        step "$@"
    else
        names+=("$1") outcomes+=("not run") seconds+=(0)
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
venv_step "pytest" "$bin/pytest" --quiet tests --ignore=tests/structure --ignore=tests/wheel \
    --ignore=tests/frameworks --ignore=tests/python/test_readme.py --ignore=tests/python/test_guide.py
venv_step "pytest, trainers' packages" scripts/frameworks.sh
venv_step "pytest, oldest PyTorch" scripts/oldest.sh
venv_step "README and guide" "$bin/pytest" --quiet tests/python/test_readme.py tests/python/test_guide.py
venv_step "memory that Python owns" scripts/memcheck.sh
venv_step "structure" "$bin/pytest" --quiet tests/structure
venv_step "guide as a site" scripts/site.sh

for i in "${!names[@]}"; do
    [[ ${outcomes[i]} == FAILED ]] || continue
    printf '\n=== once more, of what "%s" printed: tests that failed, and the end\n' "${names[i]}"
    { grep -E -A 5 '^(---- .* stdout|FAILED|ERROR)' "$logs/$i" | tail -n 60 || true; } | cut -c1-500
    tail -n 20 "$logs/$i" | cut -c1-500
done

printf '\n=== summary\n'
failed=()
for i in "${!names[@]}"; do
    printf '%6d s  %-8s %s\n' "${seconds[i]}" "${outcomes[i]}" "${names[i]}"
    [[ ${outcomes[i]} == passed ]] || failed+=("${names[i]}")
done
if ((${#failed[@]})); then
    printf '%6d s  FAILED: %s\n' "$SECONDS" "$(IFS=, && echo "${failed[*]}" | sed 's/,/, /g')"
    exit 1
fi
printf '%6d s  all %d steps passed\n' "$SECONDS" "${#names[@]}"
