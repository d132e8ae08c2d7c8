"""Directories of a torchtitan training: ``step-N``, each with a checkpoint in it, or with what torchtitan wrote."""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path

import shardfast as sf

from .directories import STATE, is_committed, is_ours, newest, remove, state_of
from .places import directory_of, is_far, of_rank_0

_log = logging.getLogger("shardfast")

_NAME = re.compile(r"step-(\d+)")
_OF_TORCHTITAN = (".metadata", "model.safetensors.index.json")


def expect_directory(option: str, place: str) -> Path:
    """The directory of an option.

    Raises:
        Unsupported: It is in an object store.
    """
    if is_far(place):
        raise sf.Unsupported(f"{option}: {place}: expected a directory; shardfast saves for torchtitan to file systems")
    return directory_of(place).absolute()


def step_of(folder: Path, step: int) -> Path:
    """The directory of a step."""
    return folder / f"step-{step}"


def steps(folder: Path) -> list[int]:
    """The steps that have a directory, in order."""
    names = os.listdir(folder) if folder.is_dir() else []
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


def _counts(directory: Path) -> bool:
    """Whether a training can go on from a directory; torchtitan asks the same of its own."""
    return is_committed(directory) or any((directory / name).is_file() for name in _OF_TORCHTITAN)


def newest_step(folder: Path) -> int | None:
    """The step to go on from; half-written directories are passed over, and named in the log. All ranks call it."""

    def look() -> list[Path]:
        there = [step_of(folder, step) for step in steps(folder)]
        for directory in there:
            _finish(directory)
        return [directory for directory in there if is_ours(directory) or _counts(directory)]

    found = newest(of_rank_0(look))
    return None if found is None else int(found.name.removeprefix("step-"))


def checkpoint_of(directory: Path) -> Path | None:
    """The checkpoint of ours that a directory has, or is; ``None`` if it is torchtitan's. All ranks call it.

    Raises:
        NotFound: There is no directory, or it was not saved to its end.
    """

    def look() -> Path | None:
        _finish(directory)
        if (directory / "COMMIT").is_file():
            return directory
        if not directory.is_dir():
            raise sf.NotFound(f"{directory}: there is no such directory")
        if not is_ours(directory):
            return None
        if not is_committed(directory):
            raise sf.NotFound(f"{directory} was not saved to its end: load another step (load_step=)")
        return state_of(directory)

    found: Path | None = of_rank_0(look)
    return found


def _saving(directory: Path) -> Path:
    return directory / f".{STATE}.saving"


def _replaced(directory: Path) -> Path:
    return directory / f".{STATE}.replaced"


def prepare(directory: Path) -> tuple[Path, bool]:
    """Makes the directory of a step; where its checkpoint is saved, and whether it replaces one. Rank 0 calls it."""
    _finish(directory)
    is_again = is_committed(directory)
    place = _saving(directory) if is_again else state_of(directory)
    if is_again:
        shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True, exist_ok=True)
    return place, is_again


def replace(directory: Path) -> None:
    """Puts a durable checkpoint in the place of the one before it. Rank 0 calls it."""
    shutil.rmtree(_replaced(directory), ignore_errors=True)
    if state_of(directory).exists():
        state_of(directory).rename(_replaced(directory))
    _saving(directory).rename(state_of(directory))
    shutil.rmtree(_replaced(directory), ignore_errors=True)


def _finish(directory: Path) -> None:
    """Does what a process had begun that died in :func:`replace`."""
    if (_saving(directory) / "COMMIT").is_file():
        replace(directory)


def prune(folder: Path, step: int, keep: int) -> None:
    """Removes what is older than the newest ``keep`` up to a step, which is durable. Rank 0 calls it.

    Later steps, of a training that went back, stay.
    """
    before = [one for one in steps(folder) if one <= step]
    kept = [one for one in before if _counts(step_of(folder, one))][-keep:]
    for one in before:
        if kept and one < kept[0]:
            try:
                remove([step_of(folder, one)])
            except OSError as error:
                _log.warning("%s cannot be removed: %s", step_of(folder, one), error)
