#!/usr/bin/env bash
# Functions for scripts that run many steps, each named and timed. All steps run even when one fails, so that one run
# tells everything. To be sourced from the root of the checkout.
set -euo pipefail

names=()    # steps in order
outcomes=() # "passed", "FAILED" or "not run", by step
seconds=()  # by step
logs=$(mktemp -d) # what each step printed, by its number
aside=""          # what `beside` began and `joined` has not waited for: its name,
aside_pid=""      # its process
aside_started=0   # and when it began
trap '[[ -z $aside ]] || kill "$aside_pid"; rm -rf "$logs"' EXIT

# ended NAME OUTCOME STARTED: remembers how a step ended that began at this second.
ended() {
    local took=$((SECONDS - $3))
    names+=("$1") outcomes+=("$2") seconds+=("$took")
    printf -- '--- %s: %s, %d s\n' "$1" "$2" "$took"
}

# step NAME COMMAND...: runs one command and remembers how it ended, and what it printed.
step() {
    local name=$1 log=$logs/${#names[@]} started=$SECONDS outcome=passed
    shift
    printf '\n=== %s\n' "$name"
    # Not in a pipeline: a step may set variables of this shell.
    exec {copied}> >(tee "$log")
    local tee=$!
    "$@" >&"$copied" 2>&1 {copied}>&- || outcome=FAILED
    exec {copied}>&-
    wait "$tee"
    ended "$name" "$outcome" "$started"
}

# beside NAME COMMAND...: begins a step that runs beside those that follow, until `joined`; one at a time. For a step
# that leaves processors idle.
beside() {
    aside=$1 aside_started=$SECONDS
    shift
    printf '\n=== %s: runs beside the steps below\n' "$aside"
    "$@" >"$logs/aside" 2>&1 &
    aside_pid=$!
}

# joined: waits for the step that `beside` began, and prints what it prints.
joined() {
    local name=$aside outcome=passed
    [[ -n $name ]] || return 0
    printf '\n=== %s\n' "$name"
    tail --pid="$aside_pid" --lines=+1 --follow "$logs/aside"
    wait "$aside_pid" || outcome=FAILED
    aside=""
    mv "$logs/aside" "$logs/${#names[@]}"
    ended "$name" "$outcome" "$aside_started"
}

# left_out NAME: remembers a step that cannot run.
left_out() { names+=("$1") outcomes+=("not run") seconds+=(0); }

# summary: prints how each step ended, what failed once more, and fails unless all steps passed.
summary() {
    local i failed=()
    for i in "${!names[@]}"; do
        [[ ${outcomes[i]} == FAILED ]] || continue
        printf '\n=== once more, of what "%s" printed: tests that failed, and the end\n' "${names[i]}"
        { grep -E -A 5 '^(---- .* stdout|FAILED|ERROR)' "$logs/$i" | tail -n 60 || true; } | cut -c1-500
        tail -n 20 "$logs/$i" | cut -c1-500
    done
    printf '\n=== summary\n'
    for i in "${!names[@]}"; do
        printf '%6d s  %-8s %s\n' "${seconds[i]}" "${outcomes[i]}" "${names[i]}"
        [[ ${outcomes[i]} == passed ]] || failed+=("${names[i]}")
    done
    if ((${#failed[@]})); then
        printf '%6d s  FAILED: %s\n' "$SECONDS" "$(IFS=, && echo "${failed[*]}" | sed 's/,/, /g')"
        return 1
    fi
    printf '%6d s  all %d steps passed\n' "$SECONDS" "${#names[@]}"
}
