#!/usr/bin/env bash
# Runs the tests of RaggedShard with veScale's own classes in place of stand-ins:
#
#   scripts/vescale.sh PATH           PATH: a checkout of volcengine/veScale's main, which no package index carries
#   scripts/vescale.sh PATH ARGUMENT...
#
# They run in the environment of scripts/oldest.sh, whose PyTorch is the one that veScale works with. No gate runs this.
set -euo pipefail

path=$(realpath -- "${1:?"expected the path of a checkout: scripts/vescale.sh PATH"}")
shift
if [[ ! -f "$path/vescale/dtensor/placement_types.py" ]]; then
    printf 'vescale: expected a checkout of volcengine/veScale, found no vescale/dtensor in %s\n' "$path" >&2
    exit 2
fi
export PYTHONPATH=$path
exec "$(dirname "${BASH_SOURCE[0]}")/oldest.sh" tests/python/test_ragged.py "$@"
