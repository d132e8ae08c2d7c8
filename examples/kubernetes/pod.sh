#!/bin/sh
# The first process of a pod: starts torchrun with these arguments, and passes SIGTERM to its ranks.
#
# Ends as torchrun does, or with 1 if this pod was told to stop: with 0, Kubernetes would take its part for complete.
set -eu

torchrun "$@" &
launcher=$!
ranks="/proc/$launcher/task/$launcher/children"
is_told=false

# Not to torchrun: it kills its ranks 30 s later, and passes nothing on once they have ended.
trap 'is_told=true; kill -TERM $(cat "$ranks") 2>/dev/null || true' TERM

status=0
wait "$launcher" || status=$?
if $is_told; then
    while [ -n "$(cat "$ranks" 2>/dev/null)" ]; do sleep 0.1; done
    kill -KILL "$launcher" 2>/dev/null || true
    exit 1
fi
exit "$status"
