"""Directories of accelerate's: the checkpoint in one, and those that are named by numbers."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Set
from pathlib import Path
from typing import Any, NamedTuple

import shardfast as sf

from . import directories
from .places import absolute, is_far, of_rank_0

_log = logging.getLogger("shardfast")

_REPLACED = ".shardfast.replaced"
"""The checkpoint of a directory while another one is saved there."""


class Found(NamedTuple):
    """Contents of a directory.

    Attributes:
        place: Where its checkpoint is, or is going to be.
        is_ours: Whether Shardfast saved, or began to.
        is_committed: Whether there is a whole checkpoint.
    """

    place: Path
    is_ours: bool
    is_committed: bool

    def expect_committed(self) -> None:
        """Refuses a directory that was not saved to its end.

        Raises:
            NotFound: It is one.
        """
        if not self.is_committed:
            raise sf.NotFound(
                f"{self.place.parent} was not saved to its end: load another directory; with automatic naming "
                "load_state() without one takes the newest that was"
            )


def find(directory: Path) -> Found:
    """Returns the contents of a directory, as this process sees it."""
    place = directories.state_of(directory)
    away = directory / _REPLACED
    if directories.is_committed(directory) or not (away / "COMMIT").is_file():
        return Found(place, directories.is_ours(directory), directories.is_committed(directory))
    return Found(away, True, True)


def named_by(place: Any, call: str) -> Path:
    """The directory that a user means.

    Raises:
        Invalid: It is none.
    """
    if not isinstance(place, (str, os.PathLike)) or not os.fspath(place):
        raise sf.Invalid(f"{call}: expected a directory, found {place!r}: name one, or name them automatically")
    if is_far(str(os.fspath(place))):
        raise sf.Unsupported(f"{call}: {place} is no directory: use a Checkpointer to save to an object store")
    return Path(absolute(str(os.fspath(place))))


def begin(directory: Path) -> None:
    """Makes a directory that does not count yet, on rank 0."""
    try:
        directories.begin(directory)
    except OSError as error:  # the save meets it, too, and says so on all ranks
        _log.warning("%s cannot be made: %s", directory, error)


def expect_new(directory: Path, *, is_running: bool) -> None:
    """Refuses a directory that was saved already. One that was cut off is saved anew.

    Raises:
        ValueError: As accelerate does.
    """
    found = find(directory)
    if directory.exists() and (found.is_committed or not found.is_ours or is_running):
        raise ValueError(
            f"Checkpoint directory {directory} already exists. Please manually override `self.save_iteration` with "
            "what iteration to start with."
        )


def replace(directory: Path) -> None:
    """Moves a committed checkpoint out of the way of a new one, on rank 0."""
    if directories.is_committed(directory):
        away = directory / _REPLACED
        if away.exists():  # of a save that was cut off: what is there is newer
            shutil.rmtree(away)
        directories.state_of(directory).rename(away)
        directories.begin(directory)


def forget_replaced(directory: Path) -> None:
    """Removes what :func:`replace` moved, once the new one is durable."""
    if (directory / _REPLACED).exists():
        shutil.rmtree(directory / _REPLACED)


class Numbered:
    """The directories ``checkpoint_N`` of a project."""

    def __init__(self, root: Path, number: int, limit: int | None) -> None:
        self._root, self._limit = root, limit
        self.next = root / f"checkpoint_{number}"

    def newest(self) -> Path:
        """The newest directory that can be loaded. All ranks call it.

        Raises:
            NotFound: There is none.
        """
        listed: list[Path] = of_rank_0(self._there)
        found = directories.newest(listed)
        if found is None:
            raise sf.NotFound(
                f"load_state(): {self._root} has no checkpoint that was saved to its end, of {len(listed)}: "
                "begin anew, or name a directory"
            )
        return found

    def prune(self, saved: Path, running: Set[Path]) -> None:
        """Removes what ``total_limit`` leaves no place for, once ``saved`` is durable, on rank 0.

        Those with the lowest numbers go, and what was cut off before ``saved``.
        """
        if self._limit is None:
            return
        there = [one for one in self._there() if one not in running]
        others = [one for one in there if one != saved]
        cut_off = [one for one in others if directories.is_ours(one) and not directories.is_committed(one)]
        good = [one for one in others if one not in cut_off]
        old = good[: max(0, len(good) + 1 - self._limit)]
        try:
            directories.remove([*old, *(one for one in cut_off if _number(one) < _number(saved))])
        except OSError as error:
            _log.warning("total_limit=%s: a directory cannot be removed: %s", self._limit, error)

    def _there(self) -> list[Path]:
        if not self._root.is_dir():
            return []
        return sorted((one for one in self._root.iterdir() if _number(one) >= 0 and one.is_dir()), key=_number)


def _number(directory: Path) -> int:
    """The number of a directory; -1 if it has none."""
    match = re.fullmatch(r"checkpoint_(\d+)", directory.name)
    return int(match[1]) if match else -1
