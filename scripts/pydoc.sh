#!/usr/bin/env bash
# Python pages in target/doc-python. A warning (a page that cannot be made) is a failure.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
rm -rf target/doc-python
.venv/bin/python -W error::UserWarning -m pdoc --output-directory target/doc-python \
    shardfast shardfast.testing shardfast.catalog
echo "Python pages: target/doc-python/shardfast.html"
