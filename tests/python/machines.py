"""Machines on this one: network namespaces on a bridge, each with a name and a link of its own."""

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

_NUMBERS = itertools.count()


def shell(command: str) -> str:
    """What the command prints."""
    done = subprocess.run(command.split(), capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


class Machines:
    """Machines by their numbers. ``here`` is this one's address on their bridge."""

    def __init__(self, name: str, net: str, count: int) -> None:
        self._name, self._net, self.here, self.count = name, net, f"{net}.1", count

    def add(self, at: int, ends: ExitStack) -> None:
        space = self.space(at)
        shell(f"ip netns add {space}")
        ends.callback(shell, f"ip netns del {space}")
        shell(f"ip link add {space}a type veth peer name eth0 netns {space}")
        shell(f"ip link set {space}a master {self._name} up")
        shell(f"ip -n {space} addr add {self.address(at)}/24 dev eth0")
        shell(f"ip -n {space} link set eth0 up")
        shell(f"ip -n {space} link set lo up")

    def space(self, at: int) -> str:
        """The name of its network namespace."""
        return f"{self._name}m{at}"

    def address(self, at: int) -> str:
        return f"{self._net}.{10 + at}"

    def entering(self, at: int, *, dies_as_one: bool = False) -> list[str]:
        """The command in front of one that runs there. ``dies_as_one``: what it starts ends with its first process."""
        unshare = "unshare --uts --pid --fork --kill-child --mount-proc" if dies_as_one else "unshare --uts"
        named = [*unshare.split(), "sh", "-c", f'hostname node-{at}; exec "$@"', "sh"]
        return ["ip", "netns", "exec", self.space(at), *named]

    def limit(self, at: int, rate: str) -> None:
        """Sets the rate of a machine's link, in both directions."""
        limit = f"root tbf rate {rate} burst 32kb latency 400ms"
        shell(f"ip netns exec {self.space(at)} tc qdisc replace dev eth0 {limit}")
        shell(f"tc qdisc replace dev {self.space(at)}a {limit}")

    def plug(self, at: int, *, is_in: bool) -> None:
        """Pulls a machine's cable, or plugs it in again."""
        shell(f"ip link set {self.space(at)}a {'up' if is_in else 'down'}")


def _free_net(bridge: str) -> str:
    """Gives the bridge the first address of a network that no other one here has; returns the network's first bytes."""
    for number in range(250):
        net = f"10.77.{(os.getpid() + number) % 250}"
        shell(f"ip addr add {net}.1/24 dev {bridge}")
        # Two that add it at once both see two, and both go on.
        if shell(f"ip -o -4 addr show to {net}.1/32").count("\n") == 1:
            return net
        shell(f"ip addr del {net}.1/24 dev {bridge}")
    raise RuntimeError("all networks of the machines of tests are taken")


@contextmanager
def machines(count: int) -> Iterator[Machines]:
    """Machines with the numbers from 0 on; skips the test where they cannot be made."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc", "unshare"))):
        pytest.skip("network namespaces take root, iproute2 and unshare")
    # Links of machines that are gone may stay for a moment.
    name = f"sf{os.getpid() % 10000}{next(_NUMBERS) % 100:02}"
    with ExitStack() as ends:
        shell(f"ip link add {name} type bridge")
        ends.callback(shell, f"ip link del {name}")
        made = Machines(name, _free_net(name), count)
        shell(f"ip link set {name} up")
        for at in range(count):
            made.add(at, ends)
        yield made
