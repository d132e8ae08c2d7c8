#!/usr/bin/env bash
# Runs the tests with what receives metrics, traces and pictures, tests/receivers: Debian's Prometheus, Alertmanager and
# the terminal tmux, whose packages are unpacked in target/receivers and not installed, and a collector of
# OpenTelemetry's that Go builds there from tests/receivers/collector. Arguments are pytest's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source scripts/environment.sh

readonly at=$PWD/target/receivers
readonly packages=(prometheus prometheus-alertmanager tmux libevent-core-2.1-7 libutempter0)
readonly versions=(2.42 0.25 3.3 2.1 1.2)

if ! is_stamped "$at" packages "${packages[*]} ${versions[*]}"; then
    rm -rf "$at"
    mkdir -p "$at"
    for i in "${!packages[@]}"; do
        echo "receivers: unpacking ${packages[i]} ${versions[i]}"
        (cd "$at" && apt-get download --quiet=2 "${packages[i]}")
        [[ -n $(compgen -G "$at/${packages[i]}_${versions[i]}*.deb") ]] || {
            echo "receivers: expected ${packages[i]} ${versions[i]}, found $(cd "$at" && ls ./*.deb)" >&2
            exit 1
        }
        dpkg-deb --extract "$at/${packages[i]}"_*.deb "$at"
        rm "$at/${packages[i]}"_*.deb
    done
    echo "${packages[*]} ${versions[*]}" >"$at/packages.stamp"
fi

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
exec env SHARDFAST_TEST_RECEIVERS=1 .venv/bin/pytest --quiet "${@:-tests/receivers}"
