#!/usr/bin/env bash
# Runs the tests with two clients of NFS, tests/nfs. Each client is a small guest of qemu, since the kernel here may
# have no NFS client; the server is nfs-ganesha. Debian's packages are unpacked in target/guests and not installed. Taps
# and a bridge take root. Arguments are pytest's; `scripts/guests.sh gate` runs the short tests of `make test`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source scripts/environment.sh

at=$PWD/target/guests

# What a guest loads, in this order.
readonly modules="virtio_ring virtio virtio_pci_modern_dev virtio_pci_legacy_dev virtio_pci failover net_failover
    virtio_net sunrpc auth_rpcgss dns_resolver netfs fscache grace lockd nfs_acl nfs nfsv4"

# Skips the tests on a machine that lacks what they need.
missing() {
    echo "guests: SKIPPED: tests with clients of NFS need $*" >&2
    exit 0
}

# The name of Debian's present kernel, which changes with each of its updates.
kernel() {
    apt-cache depends linux-image-cloud-amd64 | sed -n 's/^ *Depends: \(linux-image-6\.1\..*\)$/\1/p'
}

unpack() {
    local kernel
    kernel=$(kernel)
    if [[ -z $kernel ]]; then
        echo "guests: apt-cache knows no linux-image-cloud-amd64 of 6.1: run apt-get update" >&2
        return 1
    fi
    unpack_packages "$at" "$kernel=6.1" busybox-static=1%3a1.35 qemu-system-x86=1%3a7.2 qemu-system-common=1%3a7.2 \
        qemu-system-data=1%3a7.2 seabios=1.16 nfs-ganesha=4.3 nfs-ganesha-vfs=4.3 libntirpc4.3=4.3 libaio1=0.3 \
        libcapstone4=4.0 libdaxctl1=76 libfdt1=1.6 libfuse3-3=3.14 libibverbs1=44 libndctl6=76 libnfsidmap1=1%3a2.6 \
        libnl-3-200=3.7 libnl-route-3-200=3.7 libpmem1=1.12 librdmacm1=44 libslirp0=4.7 liburcu8=0.13 liburing2=2.3 \
        libvdeplug2=4.0 libwbclient0=2%3a4.17
}

# The guest's first file system: busybox, the modules and tests/nfs/init.
make_initramfs() {
    local made=$at/initramfs stamp module
    stamp=$(cat tests/nfs/init "$at/packages.stamp" scripts/guests.sh | digest)
    if is_stamped "$at" initramfs "$stamp"; then
        return
    fi
    rm -rf "$made"
    mkdir -p "$made"/{bin,dev,host,modules,proc,root,sys}
    cp "$at/bin/busybox" "$made/bin/"
    install -m 755 tests/nfs/init "$made/init"
    for module in $modules; do
        cp "$(find "$at/lib/modules" -name "$module.ko")" "$made/modules/"
        echo "$module" >>"$made/modules/order"
    done
    (cd "$made" && find . | "$at/bin/busybox" cpio -o -H newc | gzip -1 >"$at/initramfs.gz") 2>/dev/null
    echo "$stamp" >"$at/initramfs.stamp"
}

[[ $(uname -m) == x86_64 ]] || missing "a processor of x86-64, found $(uname -m)"
[[ $EUID == 0 ]] || missing "root, for taps and mounts"
[[ -c /dev/net/tun ]] || missing "/dev/net/tun"
for tool in apt-get dpkg-deb ip unshare nsenter mkfs.ext4; do
    command -v "$tool" >/dev/null || missing "$tool"
done
unshare --net --mount true || missing "a network namespace"
unpack || { apt-get update --quiet=2 && unpack; } || missing "Debian's packages of bookworm"
make_initramfs

if [[ ${1-} == gate ]]; then
    set -- -m smoke tests/nfs
fi
exec env SHARDFAST_TEST_GUESTS="$at" .venv/bin/pytest --quiet "${@:-tests/nfs}"
