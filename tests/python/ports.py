"""Ports of this machine that are free."""

import contextlib
import random
import socket

PORTS = range(10_000, 19_900)
"""Below those that the kernel gives to connections, of which one may take a port between its choice and its use."""


def free_ports(count):
    """The first of that many free ports in a row."""
    while True:
        with contextlib.ExitStack() as open_ones, contextlib.suppress(OSError):
            first = random.SystemRandom().choice(PORTS)
            for offset in range(count):
                open_ones.enter_context(socket.socket()).bind(("127.0.0.1", first + offset))
            return first
