"""Ports of this machine that are free."""

import contextlib
import socket


def free_ports(count):
    """The first of that many free ports in a row."""
    while True:
        with contextlib.ExitStack() as open_ones, contextlib.suppress(OSError, OverflowError):
            first = open_ones.enter_context(socket.socket())
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            for offset in range(1, count):
                open_ones.enter_context(socket.socket()).bind(("127.0.0.1", port + offset))
            return port
