#!/usr/bin/env bash
# Runs the tests with programs of Kubernetes, tests/kubernetes: etcd, the API server, and the controllers of jobs, of
# JobSet and of Kubeflow Trainer, which Go builds in target/kubernetes from the modules that tests/kubernetes/programs
# names (400 MB; fifteen minutes on two cores the first time). No node and no container runs. Arguments are pytest's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source scripts/environment.sh

for tool in go openssl; do
    command -v "$tool" >/dev/null || {
        echo "kubernetes: SKIPPED, no manifest is checked: $tool is missing" >&2
        exit 0
    }
done

at=$PWD/target/kubernetes
readonly modules=tests/kubernetes/programs
built=$(cat "$modules"/{,jobset/}go.{mod,sum} | digest)
if ! is_stamped "$at" programs "$built"; then
    echo "kubernetes: building what $modules names"
    mkdir -p "$at"
    # One package at a time: some take 2 GB to compile, and a campaign has neighbours.
    for module in "$modules" "$modules/jobset"; do # which needs other versions than Trainer
        nice -n 15 go build -C "$module" -p 1 -trimpath -buildvcs=false -mod=readonly -ldflags='-s -w' -o "$at/" tool
    done
    mv "$at/server" "$at/etcd" # Go calls it by its module
    echo "$built" >"$at/programs.stamp"
fi
exec env SHARDFAST_TEST_KUBERNETES=1 .venv/bin/pytest --quiet "${@:-tests/kubernetes}"
