"""The ``shardfast`` command, as the wheel installs it."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Sequence

from .native import Error, cli_main, dismiss_keeper, memory_place

LOOKS_EVERY_S = 1.0
"""Seconds after which a keeper knows at the latest that a signal has come."""


def main() -> int:
    """Runs the command with this process's arguments; the result is the exit code."""
    # Ctrl-C ends the process at once: Python's own handler would wait until the command has ended.
    with contextlib.suppress(ValueError):  # not on the main thread
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.argv[1:3] == ["keeper", "run"]:
        return _keep()
    return cli_main(sys.argv, _host)


def _keep() -> int:
    """Is a keeper. SIGTERM, which machines that go down send, has it send what only it has to the run's own place."""
    codes: list[int] = []
    keeping = threading.Thread(target=lambda: codes.append(cli_main(sys.argv, _host)))

    def leave(*_: object) -> None:
        with contextlib.suppress(Error):  # it ends already, or has not begun
            dismiss_keeper(memory_place(sys.argv[-1])[0], all=False)

    signal.signal(signal.SIGTERM, leave)
    keeping.start()
    # The kernel may give the signal to another thread, which does not wake this one.
    while keeping.is_alive():
        keeping.join(LOOKS_EVERY_S)
    return codes[0] if codes else 1


def _host() -> tuple[int | None, Sequence[tuple[str, str, str, str]]]:
    """Python's findings about this machine; called only if the command reports them, since it imports frameworks."""
    from . import machine

    return machine.examine()
