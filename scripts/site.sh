#!/usr/bin/env bash
# The guide with the Python reference in target/site, which opens from disk. A warning, such as a link that leads
# nowhere, is a failure; so are losses that differ where the guide's figure shows them equal. With the word `gate` that
# figure has one panel of four: `tests/python/test_losses.py` compares more layouts. Reports of slow saves are pages of
# real runs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
rm -rf target/site target/doctrees
panels=4
[[ ${1-} != gate ]] || panels=1
.venv/bin/python examples/curves.py docs/guide/losses.svg --panels "$panels"
.venv/bin/sphinx-build --quiet --fail-on-warning --keep-going --doctree-dir target/doctrees docs target/site
.venv/bin/python examples/slow_saves.py target/site/reports >/dev/null
if grep --recursive --line-number --extended-regexp '(src|srcset)="(https?:)?//|@import|url\((https?:)?//' target/site \
    --include='*.html' --include='*.css'; then
    echo "site: the lines above load something from the network" >&2
    exit 1
fi
echo "site: target/site/index.html"
