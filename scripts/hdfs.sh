#!/usr/bin/env bash
# Functions of scripts/servers.sh, which sources this file, for Hadoop's file system: how its nodes are configured, run
# and asked.
#
# hdfs is a NameNode and three DataNodes, each a process of its own, which a test may kill: the file NODE.pid of `dir`
# has its id (NODE is namenode, datanode0, datanode1 or datanode2). Who started it is the superuser; snapshots are
# allowed on /snapshots; with --space the blocks have so much room. The NameNode takes a DataNode for dead after ten
# minutes, as everywhere.
#
# hdfs-ha has two NameNodes, namenode0 and namenode1, of the name service `pair`, and three JournalNodes. namenode0 is
# active at first. `hadoop DIR org.apache.hadoop.hdfs.tools.DFSHAAdmin -transitionToActive --forceactive namenode1`
# makes the other one active when it is dead. A NameNode that is started again is a standby.
#
# hdfs-kerberos is an hdfs with Kerberos; its KDC is Hadoop's MiniKdc. The superuser is hdfs, whose keys are in the file
# `keytab` of `dir`.
#
# hdfs-kms is an hdfs with a server of keys (KMS), for encryption zones. Hadoop 3.5.0 has none, so it is the last one.
set -euo pipefail

readonly datanodes=(datanode0 datanode1 datanode2)
readonly name_service=pair
readonly realm=EXAMPLE.COM

# Starts fast, is small, and leaves no file elsewhere when it is killed.
readonly java=(java -Xmx160m -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Xshare:auto -XX:-UsePerfData
    --add-opens=java.base/java.lang=ALL-UNNAMED)

# java_of_hadoop DIR CLASS ARG...: becomes that program of Hadoop's, with the configuration in this folder.
java_of_hadoop() {
    local dir=$1 options=(-Djava.io.tmpdir="$1/tmp")
    shift
    if [[ -e $dir/krb5.conf ]]; then
        options+=(-Djava.security.krb5.conf="$dir/krb5.conf")
        export KRB5PRINCIPAL=hdfs@$realm KRB5KEYTAB=$dir/keytab
    fi
    HADOOP_USER_NAME=${HADOOP_USER_NAME-$(id -un)} \
        exec "${java[@]}" "${options[@]}" -cp "$dir/conf:$servers/hdfs/lib/*" "$@"
}

# run_node NODE COMMAND...: runs a node of hdfs in its folder, and again when it has ended and `restart` asks for it.
run_node() {
    local node=$1
    shift
    while :; do
        "$@" &
        echo "$!" >"$node.pid"
        wait "$!" || true
        until [[ -e $node.again ]]; do sleep 0.05; done
        rm "$node.again"
    done
}

# nodes_of DIR KIND: the nodes of this kind that its hdfs has.
nodes_of() {
    local address
    for address in "$1/$2"*.address; do
        [[ ! -e $address ]] || basename "$address" .address
    done
}

# run_kdc: the server of tickets, in its folder; returns when the keys are there.
run_kdc() {
    local dir=$PWD
    printf '%s=%s\n' org.name EXAMPLE org.domain COM kdc.bind.address 127.0.0.1 kdc.port "$(<kdc.port)" transport TCP \
        instance Kdc max.ticket.lifetime 86400000 max.renewable.lifetime 604800000 debug false >kdc.properties
    mkdir -p kdc
    run_node kdc "${java[@]}" -cp "$servers/hdfs-kerberos/lib/*" org.apache.hadoop.minikdc.MiniKdc "$dir/kdc" \
        "$dir/kdc.properties" "$dir/keytab" hdfs hdfs/localhost HTTP/localhost &
    until [[ -s keytab ]]; do sleep 0.1; done
}

# run_kms: the server of keys, in its folder.
run_kms() {
    run_node kms "${java[@]}" -Djava.io.tmpdir="$PWD/tmp" -Dkms.config.dir="$PWD/conf" -Dkms.log.dir="$PWD" \
        -Dlog4j.configuration="file:$PWD/conf/log4j.properties" -cp "$PWD/conf:$servers/hdfs-kms/lib/*" \
        org.apache.hadoop.crypto.key.kms.server.KMSWebServer
}

# format_namenode NODE FIRST: makes a NameNode's directory, the first one's or a copy of it.
format_namenode() {
    local dir=$PWD
    if [[ -e $1 ]]; then
        return
    elif [[ $1 != "$2" ]]; then
        cp -r "$2" "$1"
    else
        (java_of_hadoop "$dir" org.apache.hadoop.hdfs.server.namenode.NameNode -D "dfs.ha.namenode.id=$1" \
            -D "dfs.namenode.name.dir=file://$dir/$1" -format -force -nonInteractive)
    fi
}

# run_hdfs: the server, in its folder.
run_hdfs() {
    local node nodes hdfs=org.apache.hadoop.hdfs dir=$PWD
    unset HADOOP_USER_NAME
    [[ ! -e kdc.port ]] || run_kdc
    [[ ! -e conf/kms-site.xml ]] || run_kms &
    for node in $(nodes_of . journalnode); do
        run_node "$node" java_of_hadoop "$dir" "$hdfs.qjournal.server.JournalNode" \
            -D "dfs.journalnode.edits.dir=$dir/$node" -D "dfs.journalnode.rpc-address=$(<"$node.address")" \
            -D "dfs.journalnode.http-address=$(<"$node.http")" &
    done
    mapfile -t nodes < <(nodes_of . namenode)
    for node in "${nodes[@]}"; do format_namenode "$node" "${nodes[0]}"; done
    for node in "${nodes[@]}"; do
        run_node "$node" java_of_hadoop "$dir" "$hdfs.server.namenode.NameNode" -D "dfs.ha.namenode.id=$node" \
            -D "dfs.namenode.name.dir=file://$dir/$node" &
    done
    for node in "${datanodes[@]}"; do
        run_node "$node" java_of_hadoop "$dir" "$hdfs.server.datanode.DataNode" \
            -D "dfs.datanode.data.dir=file://$dir/data/$node" -D dfs.datanode.ipc.address=127.0.0.1:0 \
            -D "dfs.datanode.address=$(<"$node.address")" -D "dfs.datanode.http.address=$(<"$node.http")" &
    done
    wait
}

property() { printf '<property><name>%s</name><value>%s</value></property>\n' "$1" "$2"; }

url_of_hdfs() { # DIR NAME
    if [[ $2 == hdfs-ha ]]; then echo "hdfs://$name_service"; else echo "hdfs://$(<"$1/namenode.address")"; fi
}

properties_of_ha() { # DIR
    local node journal=() leading
    for node in $(nodes_of "$1" journalnode); do journal+=("$(<"$1/$node.address")"); done
    leading=$(nodes_of "$1" namenode | paste --serial --delimiters=,)
    property dfs.nameservices "$name_service"
    property "dfs.ha.namenodes.$name_service" "$leading"
    for node in ${leading//,/ }; do
        property "dfs.namenode.rpc-address.$name_service.$node" "$(<"$1/$node.address")"
        property "dfs.namenode.http-address.$name_service.$node" "$(<"$1/$node.http")"
    done
    property dfs.namenode.shared.edits.dir "qjournal://$(IFS=';' && echo "${journal[*]}")/$name_service"
    property "dfs.client.failover.proxy.provider.$name_service" \
        org.apache.hadoop.hdfs.server.namenode.ha.ConfiguredFailoverProxyProvider
    property dfs.ha.fencing.methods 'shell(/bin/true)' # JournalNodes refuse a NameNode that was active before
}

properties_of_kerberos() { # DIR
    local kind
    for kind in namenode datanode; do
        property "dfs.$kind.kerberos.principal" "hdfs/localhost@$realm"
        property "dfs.$kind.keytab.file" "$1/keytab"
    done
    property dfs.namenode.http-address "$(<"$1/namenode.http")"
    property dfs.web.authentication.kerberos.principal "HTTP/localhost@$realm"
    property dfs.web.authentication.kerberos.keytab "$1/keytab"
    property dfs.block.access.token.enable true
    property dfs.data.transfer.protection authentication
    property ignore.secure.ports.for.testing true # the pages of DataNodes go over HTTP
}

# configure_kdc DIR PORT: the configuration of Kerberos, for Java and for others.
configure_kdc() {
    echo "$2" >"$1/kdc.port"
    cat >"$1/krb5.conf" <<EOF
[libdefaults]
    default_realm = $realm
    dns_canonicalize_hostname = false
    rdns = false
    udp_preference_limit = 1
[realms]
    $realm = {
        kdc = 127.0.0.1:$2
    }
EOF
}

# configure_kms DIR PORT: the configuration of the server of keys; prints where it answers.
configure_kms() {
    local use
    {
        echo '<configuration>'
        property hadoop.kms.key.provider.uri "jceks://file@$1/keys.jceks"
        property hadoop.kms.http.host 127.0.0.1
        property hadoop.kms.http.port "$2"
        echo '</configuration>'
    } >"$1/conf/kms-site.xml"
    {
        echo '<configuration>'
        for use in MANAGEMENT GENERATE_EEK DECRYPT_EEK READ; do property "default.key.acl.$use" '*'; done
        echo '</configuration>'
    } >"$1/conf/kms-acls.xml"
    echo "kms://http@127.0.0.1:$2/kms"
}

# configure_hdfs DIR INDEX NAME: the configuration, for the nodes and for clients, and the addresses of each node.
configure_hdfs() {
    local dir=$1 index=$2 name=$3 node nodes=(namenode "${datanodes[@]}")
    [[ $name != hdfs-ha ]] || nodes=(namenode0 namenode1 journalnode0 journalnode1 journalnode2 "${datanodes[@]}")
    mkdir "$dir/conf" "$dir/tmp"
    for node in "${nodes[@]}"; do
        echo "127.0.0.1:$(free_port "$index")" >"$dir/$node.address"
        echo "127.0.0.1:$(free_port "$((index + 1))")" >"$dir/$node.http"
        index=$((index + 2))
    done
    [[ $name != hdfs-kerberos ]] || configure_kdc "$dir" "$(free_port "$index")"
    {
        echo '<configuration>'
        property fs.defaultFS "$(url_of_hdfs "$dir" "$name")"
        property hadoop.tmp.dir "$dir/tmp"
        case $name in
            hdfs-kerberos) property hadoop.security.authentication kerberos ;;
            hdfs-kms) property hadoop.security.key.provider.path "$(configure_kms "$dir" "$(free_port "$index")")" ;;
        esac
        echo '</configuration>'
    } >"$dir/conf/core-site.xml"
    {
        echo '<configuration>'
        # A client that is told to reach DataNodes by name reaches a proxy that listens there, if there is one.
        property dfs.datanode.hostname 127.0.0.2
        property dfs.namenode.datanode.registration.ip-hostname-check false
        property dfs.permissions.enabled true
        property dfs.replication "${#datanodes[@]}"
        property dfs.blocksize 1048576
        property dfs.namenode.fs-limits.min-block-size 1024
        # A NameNode that begins again takes writes when its blocks are there, not 30 s later.
        property dfs.namenode.safemode.extension 0
        property dfs.heartbeat.interval 1
        case $name in
            hdfs | hdfs-kms) property dfs.namenode.http-address "$(<"$dir/namenode.http")" ;;
            hdfs-ha) properties_of_ha "$dir" ;;
            hdfs-kerberos) properties_of_kerberos "$dir" ;;
        esac
        echo '</configuration>'
    } >"$dir/conf/hdfs-site.xml"
    cat >"$dir/conf/log4j.properties" <<'EOF'
log4j.rootLogger=WARN, console
log4j.logger.org.apache.hadoop.util.NativeCodeLoader=ERROR
log4j.logger.org.apache.hadoop.jmx.JMXJsonServlet=OFF
log4j.appender.console=org.apache.log4j.ConsoleAppender
log4j.appender.console.target=System.err
log4j.appender.console.layout=org.apache.log4j.PatternLayout
log4j.appender.console.layout.ConversionPattern=%d{ISO8601} %p %c{2}: %m%n
EOF
}

# node_runs DIR NODE: false also when the folder has been removed.
node_runs() {
    local pid group
    { read -r pid <"$1/$2.pid" && read -r group <"$1/pid"; } 2>/dev/null && is_of_group "$pid" "$group"
}

# says DIR NODE QUERY: what a node of hdfs says of itself.
says() { curl --silent --noproxy '*' --max-time 5 "http://$(<"$1/$2.http")/jmx?$3"; }

# hdfs_answers DIR NODE...: whether these nodes run, and know each other if a NameNode is among them.
hdfs_answers() {
    local dir=$1 node said leading=() data=()
    shift
    for node in "$@"; do
        node_runs "$dir" "$node" || return 1
        case $node in
            namenode*) leading+=("$node") ;;
            datanode*) data+=("$node") ;;
        esac
    done
    for node in "${leading[@]}"; do
        said=$(says "$dir" "$node" qry=Hadoop:service=NameNode,name=FSNamesystemState) || return 1
        [[ $said =~ \"NumLiveDataNodes\"\ :\ ([0-9]+) ]] && ((BASH_REMATCH[1] >= ${#data[@]})) || return 1
        # Without DataNodes it waits for their blocks.
        ((${#data[@]} == 0)) || [[ $said == *'"FSState" : "Operational"'* ]] || return 1
    done
    for node in "${data[@]}"; do
        said=$(says "$dir" "$node" get=Hadoop:service=DataNode,name=DataNodeInfo::BPServiceActorInfo) || return 1
        ((${#leading[@]} == 0)) || [[ $said == *'ActorState\":\"RUNNING'* ]] || return 1
    done
}

# Makes the directories when all nodes answer.
create_bucket_hdfs() { # URL KEY SECRET DIR
    local at leading
    mapfile -t leading < <(nodes_of "$4" namenode)
    hdfs_answers "$4" "${leading[@]}" "${datanodes[@]}" || return 1
    if [[ -e $4/krb5.conf ]]; then
        (java_of_hadoop "$4" org.apache.hadoop.fs.FsShell -mkdir -p "/$bucket")
        return
    elif ((${#leading[@]} > 1)); then
        (java_of_hadoop "$4" org.apache.hadoop.hdfs.tools.DFSHAAdmin -transitionToActive "${leading[0]}") || return 1
    fi
    at=http://$(<"$4/${leading[0]}.http")/webhdfs/v1
    request "$at/$bucket?op=MKDIRS&user.name=$2" &&
        request "$at/snapshots?op=MKDIRS&user.name=$2" &&
        request "$at/snapshots?op=ALLOWSNAPSHOT&user.name=$2"
}

# line_of_hdfs DIR: what a started hdfs adds to its line.
line_of_hdfs() {
    local dir=$1 node
    printf 'variable:HADOOP_CONF_DIR=%s' "$dir/conf"
    if [[ -e $dir/krb5.conf ]]; then
        printf ' variable:KRB5_CONFIG=%s variable:KRB5_CLIENT_KTNAME=%s' "$dir/krb5.conf" "$dir/keytab"
        printf ' variable:KRB5CCNAME=%s' "$dir/tickets"
    else
        printf ' variable:HADOOP_USER_NAME=%s' "$(id -un)"
    fi
    [[ ! -e $dir/namenode.http ]] || printf ' http=%s' "$(<"$dir/namenode.http")"
    for node in $(nodes_of "$dir" ''); do
        printf ' %s=%s %s.pid=%s' "$node" "$(<"$dir/$node.address")" "$node" "$(<"$dir/$node.pid")"
    done
}

# restart DIR NODE: what `run_node` waits for is the file NODE.again.
restart() {
    local dir=${1-} node=${2-} other nodes=() known deadline=$((SECONDS + start_seconds_max))
    [[ -f $dir/pid ]] && is_running "$(<"$dir/pid")" || fail "restart: no hdfs runs in '$dir'"
    mapfile -t known < <(nodes_of "$dir" namenode && nodes_of "$dir" datanode)
    [[ " ${known[*]} " == *" $node "* && -s $dir/$node.pid ]] ||
        fail "restart: expected one of ${known[*]}, found '$node'"
    if node_runs "$dir" "$node"; then
        kill -KILL "$(<"$dir/$node.pid")"
        while node_runs "$dir" "$node"; do sleep 0.01; done
    fi
    rm "$dir/$node.pid"
    touch "$dir/$node.again"
    for other in "${known[@]}"; do
        if [[ $other == "$node" ]] || node_runs "$dir" "$other"; then
            nodes+=("$other")
        fi
    done
    until hdfs_answers "$dir" "${nodes[@]}"; do
        ((SECONDS <= deadline)) || fail "restart: $node does not answer: $(reason <"$dir/log")"
        sleep 0.1
    done
}

hadoop() {
    local dir=${1-}
    [[ -d $dir/conf ]] || fail "hadoop: no hdfs runs in '$dir'"
    (($# > 1)) || fail "hadoop: expected a class of Hadoop's, found nothing"
    cd "$OLDPWD"
    java_of_hadoop "$@"
}
