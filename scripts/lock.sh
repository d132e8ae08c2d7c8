#!/usr/bin/env bash
# Makes requirements/dev.txt from requirements/dev.in: every package pinned, for every platform. Run it after an edit
# of dev.in; `scripts/lock.sh --upgrade` takes newer versions of what dev.in does not name.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
UV_CUSTOM_COMPILE_COMMAND=scripts/lock.sh .venv/bin/uv pip compile requirements/dev.in "$@" --quiet --universal \
    --python-version 3.11 --no-emit-index-url --no-emit-find-links --no-annotate --output-file requirements/dev.txt
