"""The ``shardfast`` command, as the wheel installs it."""

import sys

from ._native import cli_main


def main() -> int:
    """Runs the command with this process's arguments; the result is the exit code."""
    return cli_main(sys.argv)
