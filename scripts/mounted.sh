#!/usr/bin/env bash
# Runs the tests on file systems that are mounted from elsewhere, tests/mounted: a bucket by Debian's s3fs, and volumes
# of Debian's GlusterFS on two machines, which are namespaces. The packages are unpacked in target/mounted and not
# installed. Mounting takes root. Arguments are pytest's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source scripts/environment.sh

readonly at=$PWD/target/mounted
readonly gluster=10.3
unpack_packages "$at" s3fs=1.90 libfuse2=2.9 fuse=2.9 \
    glusterfs-{server,cli,client,common}=$gluster lib{glusterfs0,gfapi0,gfchangelog0,gfrpc0,gfxdr0,glusterd0}=$gluster \
    liburcu8=0.13 libtirpc3=1.3 libaio1=0.3

# The program of the store's conformance tests. Of the whole workspace: for a part of it cargo compiles dependencies
# anew.
readonly program='import json, sys; print(*filter(None, (json.loads(line).get("executable") for line in sys.stdin)))'
conformance=$(cargo test --workspace --locked --quiet --test conformance --no-run --message-format=json |
    .venv/bin/python -c "$program")
exec env SHARDFAST_TEST_MOUNTED="$at" SHARDFAST_TEST_CONFORMANCE="$conformance" \
    .venv/bin/pytest --quiet "${@:-tests/mounted}"
