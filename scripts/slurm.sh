#!/usr/bin/env bash
# Functions of scripts/servers.sh, which sources this file, for the scheduler Slurm: how it is unpacked, configured, run
# and asked.
#
# slurm is a slurmctld and six slurmd, node0 to node5, each with 64 processors that this machine need not have, and a
# munged with a key and a socket of its own. Debian builds slurmd so that several can run on a machine. Its packages are
# unpacked and not installed: slurm.conf names the folder of plugins (PluginDir), slurmd is told where slurmstepd is,
# and LD_LIBRARY_PATH has Slurm's libraries, which Debian's programs look for in /usr.
#
# All of them and all jobs run in a namespace of processes: they end together, whatever sessions and process groups they
# are in. In it the host is called `slurm`, and the nodes' names are those of loopback. Only 127.0.0.1 is listened on.
#
# There are two partitions. `low` is the default one; its jobs are requeued when one of `high` needs their nodes, 5 s
# after they were sent SIGTERM. A job that is requeued begins again after 6 s; one that is ended is killed 5 s after
# SIGTERM.
set -euo pipefail

readonly nodes_of_slurm=(node0 node1 node2 node3 node4 node5)
readonly processors_of_slurm=64
readonly grace_of_slurm_seconds=5 # the least that Slurm takes for cred_expire

# libraries_of_slurm DIR: where those of the unpacked packages are.
libraries_of_slurm() { printf '%s' "$1/usr/lib/$(uname -m)-linux-gnu:$1/usr/lib/$(uname -m)-linux-gnu/slurm-wlm"; }

unpack_slurm() {
    unpack_packages "$servers/slurm" slurmctld="$1" slurmd="$1" slurm-client="$1" slurm-wlm-basic-plugins="$1" \
        munge=0.5 libmunge2=0.5 libhwloc15=2.9 libnuma1=2.0
}

# install_slurm VERSION: where apt-get does not know the packages, it asks for them.
install_slurm() {
    local tool
    for tool in dpkg-deb unshare ip; do
        command -v "$tool" >/dev/null || {
            echo "error: $tool is missing"
            return 1
        }
    done
    [[ $EUID == 0 ]] || {
        echo 'error: it takes root: Slurm runs in namespaces of its own'
        return 1
    }
    unshare --pid --mount --uts --fork true || {
        echo 'error: this machine gives no namespaces of processes, mounts and host names'
        return 1
    }
    unpack_slurm "$1" || { apt-get update --quiet=2 && unpack_slurm "$1"; } || {
        echo "error: apt-get has no packages of Slurm $1: Debian 12 has"
        return 1
    }
}

# configure_slurm DIR INDEX FIRST: the configuration, with ports from this index on; FIRST is the number of the first
# job, since the ranks of two jobs with one number would meet at one port.
configure_slurm() {
    local dir=$1 index=$2 node libraries
    libraries=$(libraries_of_slurm "$servers/slurm")
    mkdir "$dir/state"
    cat >"$dir/slurm.conf" <<EOC
ClusterName=shardfast
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=$(free_port "$index")
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge.socket,cred_expire=$grace_of_slurm_seconds
CredType=cred/munge
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
PluginDir=${libraries##*:}
PlugStackConfig=$dir/no-plugins
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool-%n
SlurmctldPidFile=$dir/slurmctld.number
SlurmdPidFile=$dir/slurmd-%n.number
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=$grace_of_slurm_seconds
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1
FirstJobId=$3
EOC
    for node in "${nodes_of_slurm[@]}"; do
        index=$((index + 1))
        printf 'NodeName=%s NodeHostname=slurm NodeAddr=127.0.0.1 Port=%s CPUs=%s RealMemory=1000\n' \
            "$node" "$(free_port "$index")" "$processors_of_slurm"
    done >>"$dir/slurm.conf"
    cat >>"$dir/slurm.conf" <<EOC
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=$grace_of_slurm_seconds State=UP
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF State=UP
EOC
}

# run_slurm: the server, in its folder. The first process of a namespace takes all others of it along.
run_slurm() {
    exec unshare --pid --mount --uts --fork --kill-child \
        bash -euo pipefail -c 'source "$1"; serve_slurm "$2"' slurm "$checkout/scripts/slurm.sh" "$servers/slurm"
}

# serve_slurm TREE: in the namespace. slurm.pid gets the number that its first process has outside.
serve_slurm() {
    local dir=$PWD node number tree=$1
    read -r number _ </proc/self/stat
    echo "$number" >slurm.pid
    mount -t proc proc /proc
    hostname slurm
    { cat /etc/hosts && printf '127.0.0.1 %s\n' slurm "${nodes_of_slurm[@]}"; } >hosts
    mount --bind hosts /etc/hosts
    export SLURM_CONF=$dir/slurm.conf LD_LIBRARY_PATH PATH=$tree/usr/bin:$tree/usr/sbin:$PATH
    LD_LIBRARY_PATH=$(libraries_of_slurm "$tree")
    (umask 077 && head --bytes=32 /dev/urandom >munge.key)
    munged --foreground --force --socket="$dir/munge.socket" --key-file="$dir/munge.key" \
        --pid-file="$dir/munged.number" --log-file="$dir/munged.log" --seed-file="$dir/munged.seed" \
        --group-update-time=-1 &
    until [[ -S munge.socket ]]; do sleep 0.01; done
    slurmctld-wlm -D &
    for node in "${nodes_of_slurm[@]}"; do
        mkdir "spool-$node"
        slurmd-wlm -D -N "$node" -d "$tree/usr/sbin/slurmstepd-wlm" &
    done
    wait -n # without one of them the others are of no use
}

# create_bucket_slurm URL KEY SECRET DIR: whether all nodes wait for jobs.
create_bucket_slurm() {
    local idle
    idle=$(SLURM_CONF=$4/slurm.conf LD_LIBRARY_PATH=$(libraries_of_slurm "$servers/slurm") timeout 5 \
        "$servers/slurm/usr/bin/sinfo" --noheader --partition=low --states=idle --format=%D 2>/dev/null) &&
        [[ $idle == "${#nodes_of_slurm[@]}" ]]
}

# line_of_slurm DIR: what a started slurm adds to its line.
line_of_slurm() {
    printf ' variable:SLURM_CONF=%s' "$1/slurm.conf"
    printf ' variable:LD_LIBRARY_PATH=%s programs=%s' "$(libraries_of_slurm "$servers/slurm")" "$servers/slurm/usr/bin"
}
