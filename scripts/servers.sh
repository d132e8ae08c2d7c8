#!/usr/bin/env bash
# Installs servers for tests, of storage and of jobs, starts them on loopback, stops them.
#
#   scripts/servers.sh install [NAME...]            into target/servers, at the versions below; all without a NAME
#   scripts/servers.sh start [--with PID] [--space MIB] NAME...
#                                                   prints a line of KEY=VALUE pairs for each, and returns
#   scripts/servers.sh stop PID...                  ends these servers; PID is what `start` printed
#   scripts/servers.sh crash DIR SECONDS            kills the server of this folder (`dir` of the line that `start`
#                                                   printed); SECONDS later it begins again with its data and its port
#   scripts/servers.sh restart DIR NODE             starts a node of this folder's hdfs again, with its data and ports;
#                                                   kills it before, unless it is dead; returns when it answers
#   scripts/servers.sh hadoop DIR CLASS [ARG...]    runs a tool of Hadoop's with this folder's hdfs, as in
#                                                   `hadoop DIR org.apache.hadoop.fs.FsShell -ls /`
#
# Names: minio, versitygw, moto, s3rver (S3), azurite (Azure Blob Storage), hdfs, hdfs-ha, hdfs-kerberos and hdfs-kms
# (Hadoop's file system), slurm (a scheduler). Go builds the first two; moto needs Python, the next two need Node, those
# of Hadoop need Java 17 and Maven, slurm needs root and Debian 12; `start` needs curl 7.75 or later.
#
# A started server has one empty bucket (azurite: container, hdfs: directory, slurm: none). Its data and its log are
# below `dir`, a new temporary folder; with --space its data have so many MiB, in a file system of their own, which
# takes root. It ends within a second after process PID of --with has ended (without --with: the process that called
# this script). Its folder is removed when it ends, for whatever reason.
#
# scripts/hdfs.sh explains what is special about Hadoop's, scripts/slurm.sh about slurm.
#
# What these versions do when eight clients write one name with `If-None-Match: *` at the same time (a PUT sends its
# body when all have sent their heads; complete ends a multipart upload):
#
#   minio, versitygw   one write succeeds, PUT or complete; signatures and CRC64NVME are verified
#   moto               one PUT succeeds, but sometimes two completes; neither signatures nor CRC64NVME are verified
#   s3rver             all succeed, and the object can be a mixture of the bodies; nothing is verified
#   azurite            one Put Blob succeeds; Put Block List never does, because staged blocks count as a blob
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source scripts/environment.sh
source scripts/hdfs.sh
source scripts/slurm.sh

readonly checkout=$PWD
readonly servers=$PWD/target/servers
readonly bucket=shardfast-test
readonly region=us-east-1
readonly start_seconds_max=240
readonly stop_seconds_max=60

readonly ports_of_hdfs=16
readonly names=(minio versitygw moto s3rver azurite hdfs hdfs-ha hdfs-kerberos hdfs-kms slurm)
declare -rA versions=(
    [minio]=v0.0.0-20260212201848-7aac2a2c5b7c
    [versitygw]=v1.8.0
    [moto]=5.2.5
    [s3rver]=3.7.1
    [azurite]=3.35.0 # the last one for Node 20
    [hdfs]=3.5.0
    [hdfs-ha]=3.5.0
    [hdfs-kerberos]=3.5.0
    [hdfs-kms]=3.4.2
    [slurm]=22.05
)

fail() {
    printf 'servers: %s\n' "$*" >&2
    exit 1
}

# reason <LOG: the line that tells most.
reason() {
    local log
    log=$(cat)
    grep --ignore-case --max-count=1 error <<<"$log" || tail --lines=1 <<<"$log"
}

check_names() {
    local name
    for name in "$@"; do
        [[ -v versions[$name] ]] || fail "expected one of ${names[*]}, found $name"
    done
}

install_go() { GOBIN=$servers/bin GOFLAGS=-trimpath go install "$1"; }
install_python() {
    python3 -m venv --clear "$servers/$1" &&
        "$servers/$1/bin/python" -m pip install --quiet --disable-pip-version-check "$2"
}
install_node() {
    rm -rf "${servers:?}/$1" && mkdir "$servers/$1" &&
        npm install --prefix "$servers/$1" --loglevel=error --ignore-scripts --no-audit --no-fund "$2"
}
# Maven copies what a project depends on.
install_maven() { # NAME GROUP:ARTIFACT:VERSION
    local group artifact version
    IFS=: read -r group artifact version <<<"$2"
    rm -rf "${servers:?}/$1" && mkdir "$servers/$1" &&
        cat >"$servers/$1/pom.xml" <<EOF &&
<project><modelVersion>4.0.0</modelVersion><groupId>shardfast</groupId><artifactId>$1</artifactId><version>1</version>
<dependencies><dependency>
<groupId>$group</groupId><artifactId>$artifact</artifactId><version>$version</version>
</dependency></dependencies></project>
EOF
        mvn --quiet --batch-mode --file "$servers/$1/pom.xml" \
            org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies \
            -DoutputDirectory="$servers/$1/lib"
}

# A server that runs beside an hdfs.
install_beside_hdfs() { install_maven "$@" && install_one hdfs; }

# install_one NAME: installs this server unless it is there; says on standard error why it cannot. Tests that run beside
# each other ask for the same server: one of them installs it. A subshell, because its end releases the lock.
install_one() (
    local name=$1 version=${versions[$1]} log=$servers/$1.log tool command lock
    mkdir -p "$servers"
    exec {lock}>"$servers/$name.lock"
    flock "$lock"
    if is_stamped "$servers" "$name" "$version"; then
        return
    fi
    case $name in
        minio) tool=go command=(install_go "github.com/minio/minio@$version") ;;
        versitygw) tool=go command=(install_go "github.com/versity/versitygw/cmd/versitygw@$version") ;;
        moto) tool=python3 command=(install_python "$name" "moto[server,s3]==$version") ;;
        s3rver | azurite) tool=npm command=(install_node "$name" "$name@$version") ;;
        hdfs) tool=mvn command=(install_maven "$name" "org.apache.hadoop:hadoop-minicluster:$version") ;;
        hdfs-ha) tool=mvn command=(install_one hdfs) ;;
        hdfs-kerberos) tool=mvn command=(install_beside_hdfs "$name" "org.apache.hadoop:hadoop-minikdc:$version") ;;
        hdfs-kms) tool=mvn command=(install_beside_hdfs "$name" "org.apache.hadoop:hadoop-kms:$version") ;;
        slurm) tool=apt-get command=(install_slurm "$version") ;;
    esac
    if ! command -v "$tool" >/dev/null; then
        printf 'servers: %s is not installed: %s is missing\n' "$name" "$tool" >&2
        return 1
    fi
    echo "servers: installing $name $version"
    rm -f "$servers/$name.stamp"
    if ! "${command[@]}" >"$log" 2>&1; then
        printf 'servers: %s is not installed: %s (%s has the rest)\n' "$name" "$(reason <"$log")" "$log" >&2
        return 1
    fi
    rm "$log"
    echo "$version" >"$servers/$name.stamp"
)

# What was not asked for by name may be missing.
install() {
    local name failed=0
    check_names "$@"
    for name in "${@:-"${names[@]}"}"; do
        install_one "$name" || failed=1
    done
    (($# == 0)) || return "$failed"
}

# is_running PID: false also for a process that has ended and that its parent has not waited for.
is_running() {
    local stat
    { read -r stat <"/proc/$1/stat"; } 2>/dev/null && [[ $stat != *') Z '* ]]
}

# is_of_group PID GROUP: whether a process with this id runs in the group; its id may long be that of another one. The
# first thread of a process that has been killed can be gone before the others are.
is_of_group() {
    local stat state group threads
    { read -r stat <"/proc/$1/stat"; } 2>/dev/null || return 1
    read -r state _ group _ <<<"${stat##*) }"
    threads=("/proc/$1/task/"*)
    [[ $group == "$2" ]] && { [[ $state != Z ]] || ((${#threads[@]} > 1)); }
}

# end_group PID DIR: kills what is left of the process group that this process leads. Returns when none of the nodes
# runs that the folder names.
end_group() {
    local node pid
    kill -KILL -- "-$1" 2>/dev/null || true
    for node in "$2"/*.pid; do
        while { read -r pid <"$node"; } 2>/dev/null && is_of_group "$pid" "$1"; do sleep 0.01; done
    done
}

# watch PID DIR COMMAND...: runs a server until process PID ends, then removes its folder. The server is killed: what it
# stores goes, too. A server that `crash` has killed is started again. It leads a process group, because hdfs has many
# processes.
watch() {
    local with=$1 dir=$2 server guard
    shift 2
    cd "$dir"
    while :; do
        set -m
        "$@" >>log 2>&1 &
        set +m
        server=$!
        (
            while is_running "$with"; do sleep 1; done
            kill -KILL -- "-$server"
        ) &
        guard=$!
        echo "$server" >pid
        wait "$server" || true
        end_group "$server" "$dir"
        kill "$guard" 2>/dev/null || true
        [[ -s crashed ]] && is_running "$with" || break
        sleep "$(<crashed)"
        rm crashed
    done
    cd /
    [[ -z $space ]] || umount --lazy "$dir/data"
    rm -rf "$dir"
}

# free_port INDEX: a port for the server with this index. Two calls of this script have different process ids, hence
# different ports; all are below those that Linux gives to clients.
free_port() {
    local port=$((10000 + ($$ * 8 + $1) % 22000))
    while (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do
        port=$((10000 + RANDOM % 22000))
    done
    echo "$port"
}

# request CURL_ARGUMENTS...: whether the server made the bucket, or has it.
request() {
    local status
    status=$(curl --silent --noproxy '*' --max-time 5 --output /dev/null --write-out '%{http_code}' \
        --request PUT --header 'Content-Length: 0' "$@") && [[ $status == 20? || $status == 409 ]]
}

create_bucket_s3() { # URL KEY SECRET
    request --aws-sigv4 "aws:amz:$region:s3" --user "$2:$3" \
        --header 'x-amz-content-sha256: UNSIGNED-PAYLOAD' "$1/$bucket"
}

# What is signed is a list of eleven standard headers, all empty here, then headers of Azure's own, then the resource.
# Node is there: it runs Azurite.
create_bucket_azure() { # URL KEY SECRET
    local date signature
    date=$(LC_ALL=C date --utc '+%a, %d %b %Y %H:%M:%S GMT')
    signature=$(node -e '
        const [date, account, key, bucket] = process.argv.slice(1);
        const lines = ["PUT", ...Array(11).fill(""), `x-ms-date:${date}`, "x-ms-version:2021-12-02",
            `/${account}/${account}/${bucket}`, "restype:container"];
        const code = require("crypto").createHmac("sha256", Buffer.from(key, "base64"));
        console.log(code.update(lines.join("\n")).digest("base64"));' "$date" "$2" "$3" "$bucket")
    request --header "x-ms-date: $date" --header 'x-ms-version: 2021-12-02' \
        --header "Authorization: SharedKey $2:$signature" "$1/$bucket?restype=container"
}

# start_one PID INDEX NAME: starts one server, waits until it has its bucket, adds its line to what is printed.
start_one() {
    local with=$1 name=$3 port dir url pid key=shardfast secret=shardfast-secret kind=s3 log pids deadline command line
    is_stamped "$servers" "$name" "${versions[$name]}" ||
        fail "$name ${versions[$name]} is not installed: run \`scripts/servers.sh install $name\` first"
    port=$(free_port "$2")
    url=http://127.0.0.1:$port
    dir=$(mktemp --directory --tmpdir "shardfast-$name.XXXXXXXX")
    mkdir "$dir/data" "$dir/iam"
    [[ -z $space ]] || mount -t tmpfs -o "size=${space}m" none "$dir/data"
    touch "$dir/log" "$dir/pid"
    exec {log}<"$dir/log" {pids}<"$dir/pid" # open, because a server that ends at once takes its folder with it
    command=(env HOME="$dir" TMPDIR="$dir")
    case $name in
        minio)
            command+=(MINIO_ROOT_USER="$key" MINIO_ROOT_PASSWORD="$secret" MINIO_BROWSER=off MINIO_UPDATE=off
                MINIO_CALLHOME_ENABLE=off MINIO_PROMETHEUS_AUTH_TYPE=public "$servers/bin/minio" server data --quiet
                --address "127.0.0.1:$port")
            ;;
        versitygw)
            command+=("$servers/bin/versitygw" --quiet --access "$key" --secret "$secret" --region "$region"
                --port "127.0.0.1:$port" --iam-dir "$dir/iam" posix data)
            ;;
        moto)
            command+=("$servers/moto/bin/python" -m moto.server --host 127.0.0.1 --port "$port")
            ;;
        s3rver)
            key=S3RVER secret=S3RVER # it knows no other
            command+=(node "$servers/s3rver/node_modules/s3rver/bin/s3rver.js" --directory data
                --address 127.0.0.1 --port "$port" --no-vhost-buckets --silent)
            ;;
        azurite)
            # The account that every client of Azure's knows as the emulator's.
            kind=azure key=devstoreaccount1 url+=/$key
            secret=Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==
            command+=(node "$servers/azurite/node_modules/azurite/dist/src/blob/main.js" --location data
                --blobHost 127.0.0.1 --blobPort "$port" --skipApiVersionCheck --disableProductStyleUrl
                --disableTelemetry --silent)
            ;;
        hdfs | hdfs-*)
            kind=hdfs key=$(id -un) secret=
            configure_hdfs "$dir" "$2" "$name"
            url=$(url_of_hdfs "$dir" "$name")
            command=(run_hdfs)
            ;;
        slurm)
            kind=slurm
            configure_slurm "$dir" "$2" "$((100000 + $$ % 100000 * 100))"
            url=slurm://127.0.0.1:$(sed -n 's/^SlurmctldPort=//p' "$dir/slurm.conf")
            command=(run_slurm)
            ;;
    esac

    # A process group of its own: what ends the caller's group leaves the watch, which then removes the folder.
    set -m
    watch "$with" "$dir" "${command[@]}" </dev/null >/dev/null 2>&1 &
    set +m
    deadline=$((SECONDS + start_seconds_max))
    until read -r pid <&"$pids"; do
        ((SECONDS <= deadline)) || fail "$name has not been started in $dir"
        sleep 0.05
    done
    started+=("$pid")
    until "create_bucket_$kind" "$url" "$key" "$secret" "$dir"; do
        if ! is_running "$pid" || ((SECONDS > deadline)); then
            fail "$name does not answer at $url: $(reason <&"$log")"
        fi
        sleep 0.1
    done
    exec {log}<&- {pids}<&-
    is_running "$pid" || fail "$name has ended, and another process answers at $url"
    line="name=$name url=$url bucket=$bucket pid=$pid dir=$dir"
    case $kind in
        hdfs) line+=" $(line_of_hdfs "$dir")" ;;
        slurm) line+=$(line_of_slurm "$dir") ;;
        *) line+=" region=$region key=$key secret=$secret" ;;
    esac
    lines+=("$line")
}

# All of them or none.
start() {
    local with=$PPID index=0 name space=
    if [[ ${1-} == --with ]]; then
        (($# > 1)) || fail "--with: expected the id of a process, found nothing"
        with=$2
        shift 2
    fi
    if [[ ${1-} == --space ]]; then
        [[ ${2-} =~ ^[0-9]+$ ]] || fail "--space: expected MiB, found '${2-}'"
        space=$2
        shift 2
    fi
    (($#)) || fail "start: expected names, found none"
    is_running "$with" || fail "--with: expected the id of a process that runs, found '$with'"
    check_names "$@"
    command -v curl >/dev/null || fail "start: curl is missing"
    started=() lines=()
    trap 'stop "${started[@]}"' EXIT
    for name in "$@"; do
        start_one "$with" "$index" "$name"
        index=$((index + ports_of_hdfs))
    done
    trap - EXIT
    printf '%s\n' "${lines[@]}"
}

# stop PID...: the folder of a server is the one that it works in (versitygw: in data below it); the watch removes it.
stop() {
    local pid dir deadline
    for pid in "$@"; do
        [[ $pid =~ ^[0-9]+$ ]] || fail "stop: expected ids of processes, found '$pid'"
        is_running "$pid" || continue
        dir=$(readlink "/proc/$pid/cwd") || continue
        dir=${dir%/data}
        [[ -f $dir/pid && "$(<"$dir/pid")" == "$pid" ]] || fail "stop: process $pid is no server that \`start\` started"
        kill -KILL "$pid" 2>/dev/null || true
        deadline=$((SECONDS + stop_seconds_max))
        while [[ -e $dir ]]; do
            ((SECONDS <= deadline)) || fail "stop: process $pid has been killed, but $dir is still there"
            sleep 0.05
        done
    done
}

# crash DIR SECONDS: returns when the server is dead.
crash() {
    local dir=$1 pid
    [[ -f $dir/pid && ! -e $dir/crashed ]] || fail "crash: no server runs in $dir"
    pid=$(<"$dir/pid")
    is_running "$pid" || fail "crash: the server of $dir does not run"
    echo "$2" >"$dir/crashed"
    end_group "$pid" "$dir"
    while is_running "$pid"; do sleep 0.01; done
}

case ${1-} in
    install | start | stop | crash | restart | hadoop) "$@" ;;
    *)
        fail "expected install, start, stop, crash, restart or hadoop, found '${1-}'; the script's head explains them"
        ;;
esac
