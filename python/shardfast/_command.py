"""The ``shardfast`` command, as the wheel installs it."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Sequence

from .native import cli_main


def main() -> int:
    """Runs the command with this process's arguments; the result is the exit code."""
    # Ctrl-C ends the process at once: Python's own handler would wait until the command has ended.
    with contextlib.suppress(ValueError):  # not on the main thread
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return cli_main(sys.argv, _host)


def _host() -> tuple[int | None, Sequence[tuple[str, str, str, str]]]:
    """Python's findings about this machine; called only if the command reports them, since it imports frameworks."""
    from . import machine

    return machine.examine()
