"""The newest of the directories that a trainer made, each for one save of its engine."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import shardfast as sf

from .deepspeed_places import LATEST, is_deepspeeds, step_of
from .places import absolute, directory_of, is_far, of_rank_0

_log = logging.getLogger("shardfast")


def newest(directory: str | Path) -> str | None:
    """The newest directory below ``directory`` from which an engine can go on, as ``resume_from_checkpoint=`` takes it.

    Trainers make a directory for each save, with a tag and ``latest`` in it, and resume from the newest one, though a
    kill may have left it half-written. This passes such a directory over and names it in the log. Every rank calls it.

    Args:
        directory: Where the trainer's directories are, such as its ``output_dir``. One that is not there holds none.

    Returns:
        The path of one of them; ``None`` if there is none, so that a training starts.

    Raises:
        Unsupported: It is in an object store, in which trainers make no directories.
    """
    place = absolute(str(directory))
    if is_far(place):
        raise sf.Unsupported(f"newest({directory}): expected a directory of a file system, in which trainers save")
    found: str | None = of_rank_0(lambda: _looked(directory_of(place)))
    return found


def _looked(root: Path) -> str | None:
    directories = [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    for directory in sorted(directories, key=_order, reverse=True):
        latest = directory / LATEST
        tag = directory / latest.read_text(encoding="utf-8").strip() if latest.is_file() else None
        if tag is not None and (step_of(tag) is not None or is_deepspeeds(str(tag))):
            return str(directory)
        if tag is not None or _is_begun(directory):
            _log.warning("%s was not saved to its end: it is passed over", directory)
    return None


def _order(directory: Path) -> tuple[int, float]:
    """By the number that the name ends with, as trainers count; by time where it ends with none."""
    number = re.search(r"(\d+)$", directory.name)
    return int(number[1]) if number else -1, directory.stat().st_mtime


def _is_begun(directory: Path) -> bool:
    """Whether an engine began to save into a directory; others may be anything."""
    return any((path / part).is_dir() for path in directory.iterdir() for part in ("model", "engine", "optimizer"))
