#!/usr/bin/env bash
# Runs the tests with what receives metrics, traces and pictures, tests/receivers: Debian's Prometheus, Alertmanager and
# the terminal tmux, whose packages are unpacked in target/receivers and not installed, a collector of OpenTelemetry's
# that Go builds there from tests/receivers/collector, and MinIO. Arguments are pytest's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source scripts/environment.sh

at=$PWD/target/receivers
unpack_packages "$at" prometheus=2.42 prometheus-alertmanager=0.25 tmux=3.3 libevent-core-2.1-7=2.1 libutempter0=1.2

readonly collector=tests/receivers/collector
built=$(cat "$collector"/{main.go,go.mod,go.sum} | digest)
if ! is_stamped "$at" collector "$built"; then
    command -v go >/dev/null || {
        echo "receivers: go is missing: it builds the collector of $collector" >&2
        exit 1
    }
    echo "receivers: building the collector of $collector"
    go build -C "$collector" -trimpath -buildvcs=false -mod=readonly -o "$at/collector" .
    echo "$built" >"$at/collector.stamp"
fi
scripts/servers.sh install minio # takes longer than any test may
exec env SHARDFAST_TEST_RECEIVERS=1 .venv/bin/pytest --quiet "${@:-tests/receivers}"
