"""The ``shardfast`` command, as the wheel installs it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from .native import cli_main


def main() -> int:
    """Runs the command with this process's arguments; the result is the exit code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Python would note Ctrl-C until the command returns, which watches may never do.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return cli_main(sys.argv, _host)


def _host() -> tuple[int | None, Sequence[tuple[str, str, str, str]]]:
    """Python's findings about this machine; called only if the command reports them, since it imports frameworks."""
    from . import machine

    return machine.examine()
