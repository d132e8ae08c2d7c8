"""A GlusterFS of its own and machines that mount it, in namespaces that end with the process that made them.

Its programs come from unpacked packages, which lie over ``/usr`` in a mount namespace. All processes are in one process
namespace: its first process ends when this one does, and takes the others, the mounts and the networks with it.
"""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

VOLUMES = {"one": 1, "replicated": 2}
"""Number of bricks that hold each byte of a volume."""

SHARED = Path("/run/shared")
"""Place where each machine has the volumes."""

CLIENTS = Path("/run/clients")
"""Place where all machines' mounts are visible to the one that serves."""

READY_S = 30.0

SERVING = """
set -euo pipefail
read -r pid _ </proc/self/stat # of the namespace outside
mount -t proc none /proc
mount -t overlay none -o "lowerdir=$UNPACKED/usr:/usr" /usr
mount -t tmpfs none /run
mount -t tmpfs none /var/lib
mount -t tmpfs none /var/log
mkdir -p /run/gluster /var/lib/glusterd /var/log/glusterfs
ip link set lo up
ip link add bridge type bridge # bricks refuse addresses of the loopback
ip address add 10.77.0.1/24 dev bridge
ip link set bridge up
echo "$pid"
read -r _ || true # until the other end is closed
"""

CONNECTED = """
set -euo pipefail
ip link set lo up
echo $$
read -r _ # until the cable is there
ip address add "$ADDRESS/24" dev eth0
ip link set eth0 up
echo connected
read -r _ # until the clients have mounted
exec unshare --mount --uts bash -c "$ALONE"
"""

ALONE = """
set -euo pipefail
hostname "machine$NUMBER"
for volume in $VOLUMES; do
    mkdir -p "$SHARED/$volume"
    mount --bind "$CLIENTS/$volume" "$SHARED/$volume"
done
echo ready
read -r _ || true
"""


def wait_until(happened: Callable[[], object], what: str, within_s: float = READY_S) -> None:
    until = time.monotonic() + within_s
    while not happened():
        assert time.monotonic() < until, f"{what}: not within {within_s:g} s"
        time.sleep(0.05)


def said_by(process: subprocess.Popen[str]) -> str:
    """The next line that a process says."""
    line = process.stdout.readline().strip()
    assert line, f"{process.args} has ended"
    return line


class Machine:
    """A machine with a network, a name and mounts of its own."""

    def __init__(self, cluster: "Cluster", number: int) -> None:
        self.address, self.clients = f"10.77.0.{10 + number}", CLIENTS / str(number)
        environment = {
            **os.environ,
            "NUMBER": str(number),
            "ADDRESS": self.address,
            "CLIENTS": str(self.clients),
            "SHARED": str(SHARED),
            "VOLUMES": " ".join(VOLUMES),
            "ALONE": ALONE,
        }
        self.process = subprocess.Popen(
            [*cluster.enter, "unshare", "--net", "bash", "-c", CONNECTED],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        pid = said_by(self.process)
        plug = f"ip link add machine{number} master bridge type veth peer name eth0 netns {pid}"
        cluster.run(*plug.split())
        cluster.run("ip", "link", "set", f"machine{number}", "up")
        assert self.goes_on() == "connected"
        for volume in VOLUMES:
            place = self.clients / volume
            cluster.run("mkdir", "-p", place)
            mount = ["glusterfs", "--volfile-server=10.77.0.1", f"--volfile-id={volume}", place]
            cluster.run("nsenter", "--target", pid, "--net", "--", *mount)
            cluster.run("mountpoint", "--quiet", place)
        # The mount namespace is copied here: until then clients share that of the servers, where both can be seen.
        assert self.goes_on() == "ready"
        self.enter = [*cluster.enter, "nsenter", "--target", pid, "--net", "--mount", "--uts", "--"]

    def goes_on(self) -> str:
        """Lets its first process go on, and returns what that says then."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return said_by(self.process)


class Cluster:
    """Servers of GlusterFS with the volumes, and the machines that have mounted them."""

    def __init__(self, unpacked: Path, bricks: Path) -> None:
        self.bricks = bricks
        libraries = ":".join(str(unpacked / path) for path in ("lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu"))
        self.environment = {**os.environ, "LD_LIBRARY_PATH": libraries}
        flags = ["--net", "--mount", "--pid", "--fork", "--kill-child"]
        self.process = subprocess.Popen(
            ["unshare", *flags, "bash", "-c", SERVING],
            env={**os.environ, "UNPACKED": str(unpacked)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.machines: list[Machine] = []
        try:
            self.enter = ["nsenter", "--target", said_by(self.process), "--net", "--mount", "--pid", "--"]
            self._serve(unpacked)
            for number in range(2):
                self.machines.append(Machine(self, number))
        except BaseException:
            self.close()
            raise

    def run(self, *command: object) -> str:
        """What a command prints that runs beside the servers."""
        done = subprocess.run(
            [*self.enter, *map(str, command)], env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def gluster(self, *words: str) -> str:
        return self.run("gluster", "--mode=script", *words)

    def pids(self, volume: str) -> list[int]:
        """The processes of a volume's bricks, 0 for one that is dead."""
        status = ElementTree.fromstring(self.gluster("volume", "status", volume, "--xml"))
        bricks = [node for node in status.iter("node") if "/" in node.findtext("path", "")]
        assert len(bricks) == VOLUMES[volume], status
        return [int(brick.findtext("pid")) if brick.findtext("status") == "1" else 0 for brick in bricks]

    def restart(self, volume: str) -> None:
        """Starts the dead bricks of a volume, and waits until they and the clients have each other."""
        self.gluster("volume", "start", volume, "force")
        wait_until(lambda: all(self.pids(volume)), f"the bricks of {volume} are up")

    def close(self) -> None:
        """Ends the first process of the namespace, and so all others and what is mounted."""
        self.process.stdin.close()
        self.process.wait(READY_S)
        for machine in self.machines:
            machine.process.stdin.close()
            machine.process.stdout.close()
            machine.process.wait(READY_S)
        self.process.stdout.close()

    def _serve(self, unpacked: Path) -> None:
        self.run("glusterd", "--volfile", unpacked / "etc/glusterfs/glusterd.vol", "--pid-file", "/run/glusterd.pid")
        for volume, copies in VOLUMES.items():
            places = [f"10.77.0.1:{self.bricks}/{volume}{number}" for number in range(copies)]
            kind = ["replica", str(copies)] if copies > 1 else []
            self.gluster("volume", "create", volume, *kind, *places, "force")
            self.gluster("volume", "start", volume)


@contextmanager
def running(unpacked: Path, bricks: Path) -> Iterator[Cluster]:
    """A cluster that is up, and is gone afterwards."""
    cluster = Cluster(unpacked, bricks)
    try:
        yield cluster
    finally:
        cluster.close()
