"""Versions of other programs: below the oldest that works none is taken, and others than the one tried are named."""

from __future__ import annotations

import itertools
import logging

import shardfast as sf

_log = logging.getLogger("shardfast")


def expect_version(name: str, found: str, *, oldest: str, tried: str) -> None:
    """Refuses a version that is too old. Another one than the one that was tried is a warning in the log.

    Args:
        name: The program's name.
        found: The version here.
        oldest: The oldest one whose trainings go on with the same losses.
        tried: The one with which all tests run.

    Raises:
        Unsupported: It is older.
    """
    if _numbers(found) < _numbers(oldest):
        raise sf.Unsupported(
            f"{name} {found}: {oldest} is the oldest version with which a resumed training is the same"
        )
    if found != tried:
        _log.warning("%s %s: shardfast was tried with %s", name, found, tried)


def _numbers(version: str) -> tuple[int, ...]:
    parts = [*version.split("."), "0", "0"][:3]  # "5.10" is 5.10.0
    return tuple(int("".join(itertools.takewhile(str.isdigit, part)) or 0) for part in parts)
