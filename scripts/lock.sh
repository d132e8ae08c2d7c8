#!/usr/bin/env bash
# Makes dev.txt, bench.txt, browser.txt, frameworks.txt, megatron.txt and oldest.txt in requirements/ from the .in
# files beside them: every package pinned, for every platform. Run it after an edit of one of those;
# `scripts/lock.sh --upgrade` takes newer versions of what they do not name.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# lock NAME OPTIONS...
lock() {
    local name=$1
    shift
    UV_CUSTOM_COMPILE_COMMAND=scripts/lock.sh .venv/bin/uv pip compile "requirements/$name.in" "$@" --quiet \
        --universal --python-version 3.11 --no-emit-index-url --no-emit-find-links --no-annotate \
        --output-file "requirements/$name.txt"
}

lock dev "$@"
others=$(mktemp) ours=$(mktemp)
trap 'rm -f "$others" "$ours"' EXIT
# Rivals ask for older ones of these two, and run with those of dev.txt.
grep -E '^(python-dateutil|tzdata)==' requirements/dev.txt >"$ours"
lock bench --constraint requirements/dev.txt --override "$ours" "$@"
lock megatron --constraint requirements/dev.txt "$@"
lock browser --constraint requirements/dev.txt "$@"
lock frameworks --constraint requirements/dev.txt --excludes requirements/frameworks.excludes "$@"
# What comes with torch is of the version that this torch asks for.
grep -vE '^(torch|triton)==' requirements/dev.txt >"$others"
lock oldest --constraint "$others" "$@"
