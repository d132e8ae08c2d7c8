#!/usr/bin/env bash
# Runs the tests that walk through Python's objects with the extension built under AddressSanitizer: a use of an object
# after Python has freed it, or of memory behind its end, ends the run with a report.
#
# Needs gcc, which brings the sanitizer's runtime (libasan). Python takes every object from malloc, so that the
# sanitizer knows each of them. It does not see a use of a freed list, dict, tuple or float while Python keeps it for
# the next one, nor what Python's own functions read; mistakes show where their items are followed.
#
# A step of `make campaigns`: it builds the extension once more, and takes three to six minutes on two cores.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly host=x86_64-unknown-linux-gnu
readonly built=target/memcheck/$host/debug/lib_native.so
readonly package=target/memcheck/python

fail() {
    printf 'memcheck: %s\n' "$*" >&2
    exit 1
}

# library NAME: the path of a library of gcc's; gcc prints a bare name when it has none.
library() {
    local path
    path=$(gcc -print-file-name="$1")
    [[ $path == /* ]] || fail "gcc has no $1: install it (on Debian and Ubuntu: apt install g++)"
    echo "$path"
}

[[ $(uname -m) == x86_64 ]] || fail "expected an x86_64 machine, found $(uname -m)"
[[ -x .venv/bin/pytest ]] || fail "no environment: run \`make setup\` first"
command -v gcc >/dev/null || fail "gcc is missing: install it (on Debian and Ubuntu: apt install g++)"
# The runtime comes first. It looks for the C++ library when it starts, before torch loads that.
runtime=$(library libasan.so)
runtime+=" $(library libstdc++.so)"

# The sanitizer is an unstable option of the compiler; RUSTC_BOOTSTRAP lets the pinned one take it.
RUSTC_BOOTSTRAP=1 RUSTFLAGS=-Zsanitizer=address PYO3_PYTHON=$PWD/.venv/bin/python \
    cargo build --package shardfast-native --locked --target "$host" --target-dir target/memcheck
rm -rf "$package"
mkdir -p "$package"
cp -r python/shardfast "$package"
cp "$built" "$package/shardfast/_native.abi3.so"

# check COMMAND...: runs a command with the sanitizer. Leaks are no finding: Python does not free everything when it
# ends. An allocation that is too large fails instead of ending the run, as the tests expect.
check() {
    env LD_PRELOAD="$runtime" PYTHONPATH="$package" PYTHONMALLOC=malloc \
        ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:abort_on_error=1 "$@"
}

check .venv/bin/python -c "
import pathlib
from shardfast import _native
found = pathlib.Path(_native.__file__).resolve()
assert found.is_relative_to('$PWD/$package'), f'expected the extension in $package, found {found}'"

# The sanitizer's report goes to standard error, which pytest must not hold back (--capture=sys). The test that is left
# out needs a new object where one was freed.
check .venv/bin/pytest --quiet --capture=sys -p no:cacheprovider \
    tests/python/test_values.py tests/python/test_values_hostile.py tests/python/test_outline.py \
    tests/python/test_capture.py tests/python/test_description.py tests/python/test_state.py \
    --deselect tests/python/test_values.py::test_a_key_is_not_taken_for_another_that_stood_at_its_address
echo "memcheck: no error found"
