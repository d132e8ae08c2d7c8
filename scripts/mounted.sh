#!/usr/bin/env bash
# Runs the tests on file systems that are mounted from elsewhere, tests/mounted: a bucket by Debian's s3fs, whose
# packages are unpacked in target/mounted and not installed. Mounting takes root. Arguments are pytest's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source scripts/environment.sh

at=$PWD/target/mounted
unpack_packages "$at" s3fs=1.90 libfuse2=2.9 fuse=2.9
exec env SHARDFAST_TEST_MOUNTED="$at" .venv/bin/pytest --quiet "${@:-tests/mounted}"
