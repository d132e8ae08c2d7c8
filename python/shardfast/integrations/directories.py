"""Directories that trainers make: their own files and, in one place below, a checkpoint.

A directory counts once its checkpoint is committed. Tools find their files where they look for them, and a save finds a
place that is its own.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from .places import of_rank_0

_log = logging.getLogger("shardfast")

STATE = "shardfast"
"""The name of the checkpoint in such a directory."""

_COMMIT = "COMMIT"


def state_of(directory: Path) -> Path:
    """The checkpoint of a directory."""
    return directory / STATE


def is_committed(directory: Path) -> bool:
    """Whether a directory's checkpoint is whole."""
    return (state_of(directory) / _COMMIT).is_file()


def is_ours(directory: Path) -> bool:
    """Whether Shardfast began to save into a directory; the trainer wrote all of it otherwise."""
    return state_of(directory).is_dir()


def begin(directory: Path) -> None:
    """Makes a directory, which does not count until its checkpoint is committed. Rank 0 calls it before it writes."""
    state_of(directory).mkdir(parents=True, exist_ok=True)


def newest(directories: Sequence[Path]) -> Path | None:
    """The last directory that can be resumed from, as rank 0 sees it; all ranks call it.

    Half-written directories behind it are passed over and named in the log. One without a checkpoint is the trainer's
    own and counts as it does there.

    Args:
        directories: From the oldest to the newest.
    """

    def look() -> Path | None:
        for directory in reversed(directories):
            if is_committed(directory) or not is_ours(directory):
                return directory
            _log.warning("%s was not saved to its end: it is passed over", directory)
        return None

    found: Path | None = of_rank_0(look)
    return found


def remove(directories: Iterable[Path]) -> None:
    """Removes directories. One that is removed in part is no committed one."""
    for directory in directories:
        (state_of(directory) / _COMMIT).unlink(missing_ok=True)
        shutil.rmtree(directory)
