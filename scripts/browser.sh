#!/usr/bin/env bash
# Runs the tests of the command's pages in a real browser, tests/browser:
#
#   scripts/browser.sh                all of them
#   scripts/browser.sh ARGUMENT...    pytest with these arguments
#
# Their environment, target/browser, holds what drives the browser; what it is shown is made by the shardfast of .venv.
# The browser is the system's chromium, or the one that SHARDFAST_CHROMIUM names. Pictures of the pages are left in
# target/browser-pictures.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source scripts/environment.sh

if ! command -v "${SHARDFAST_CHROMIUM:-chromium}" >/dev/null; then
    echo "browser: no chromium: install one (on Debian: apt install chromium), or name one in SHARDFAST_CHROMIUM" >&2
    exit 1
fi
make_environment browser
export SHARDFAST_BROWSER_PYTHON=$PWD/.venv/bin/python SHARDFAST_PICTURES=$PWD/target/browser-pictures
(($# > 0)) || set -- tests/browser
exec target/browser/bin/python -m pytest --quiet "$@"
