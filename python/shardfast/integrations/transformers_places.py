"""Directories ``checkpoint-N`` of a Trainer: which can be resumed from, and which a limit removes.

A save into a directory that counts already moves that aside first, to ``.checkpoint-N.replaced``, until it is durable.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import shardfast as sf

from . import directories
from .places import of_rank_0

_log = logging.getLogger("shardfast")

STATE_FILE = "trainer_state.json"
_NAME = re.compile(r"checkpoint-(\d+)")
_REPLACED = re.compile(r"\.(checkpoint-\d+)\.replaced")
_REMOVED = ".removed"

_choosing = threading.Lock()
"""Held while a save takes a directory, and while old ones are chosen and set aside in the background."""


class Found(NamedTuple):
    """A checkpoint of ours from which a training goes on.

    Attributes:
        directory: Its directory, as the trainer calls it.
        holds: The keys that it has.
        world_size: How many ranks saved it.
    """

    directory: str
    holds: list[str]
    world_size: int

    @property
    def url(self) -> str:
        """The checkpoint in the directory."""
        return url_of(self.directory)


def url_of(directory: str | Path) -> str:
    """Returns the place of a directory's checkpoint, from any working directory."""
    return str(directories.state_of(Path(directory)).absolute())


def newest(output_dir: str) -> str | None:
    """The newest directory that can be resumed from; all ranks call it.

    Args:
        output_dir: The trainer's directory.
    """
    of_rank_0(lambda: _put_back(Path(output_dir)))
    found = directories.newest(_numbered(Path(output_dir)))
    return None if found is None else str(found)


def look(directory: str) -> Found | None:
    """Returns what a directory has to resume from; ``None`` if the trainer wrote it. All ranks call it; rank 0 looks.

    ``trainer_state.json``, which the trainer reads by itself, is written again where a crash has damaged it.

    Raises:
        NotFound: Its checkpoint is not whole.
        Invalid: It is not a Trainer's.
    """
    found: Found | None = of_rank_0(lambda: _looked(Path(directory)))
    return found


def is_ours(directory: str) -> bool:
    """Whether Shardfast saved into a directory, as rank 0 sees it; all ranks call it."""
    return bool(of_rank_0(lambda: directories.is_ours(Path(directory))))


def begin(directory: Path) -> None:
    """Makes a directory for a save. One that counts is moved aside. Rank 0 calls it."""
    with _choosing:
        if _counts(directory):
            away = directory.with_name(f".{directory.name}.replaced")
            if away.exists():  # of a save that was cut off: what is there is newer
                directories.remove([away])
            directory.rename(away)
        elif directories.is_ours(directory):  # what a save that was cut off has left
            shutil.rmtree(directories.state_of(directory))
        directories.begin(directory)


def conclude(directory: Path, limit: int | None, best: str | None, later: Callable[[], Iterable[Path]]) -> None:
    """Removes what a limit allows no longer, now that a directory is durable. Rank 0 calls it.

    It stays itself, as does the best one. What cannot be removed stays, with a warning.

    Args:
        directory: The one that was saved.
        limit: ``save_total_limit``.
        best: The directory of the best model.
        later: Returns those that are being saved.
    """
    try:
        directories.remove(path for path in [directory.with_name(f".{directory.name}.replaced")] if path.exists())
        if limit is None or limit <= 0:
            return
        with _choosing:
            for path in _excess(directory, limit, best, later()):
                (directories.state_of(path) / "COMMIT").unlink(missing_ok=True)
                path.rename(path.with_name(f".{path.name}{_REMOVED}"))
        directories.remove(directory.parent.glob(f".checkpoint-*{_REMOVED}"))
    except OSError as error:
        _log.warning("save_total_limit=%s: %s: an old checkpoint stays", limit, error)


def _excess(directory: Path, limit: int, best: str | None, later: Iterable[Path]) -> list[Path]:
    """The directories that a limit removes, and those that were cut off."""
    spared = {directory.absolute(), *(path.absolute() for path in later)}
    others = [path for path in _aged(directory.parent) if path.absolute() not in spared]
    kept = {directory.absolute()} | ({Path(best).absolute()} if best is not None else set())
    whole = [path for path in others if _counts(path)]
    old = [path for path in whole if path.absolute() not in kept]
    excess = len(whole) + 1 - max(limit, len(kept))
    return [*(path for path in others if path not in whole), *old[: max(excess, 0)]]


def _counts(directory: Path) -> bool:
    """Whether a directory can be resumed from: its checkpoint is whole, or the trainer wrote it to its end."""
    if directories.is_ours(directory):
        return directories.is_committed(directory)
    return (directory / STATE_FILE).is_file()


def _numbered(place: Path) -> list[Path]:
    """The directories ``checkpoint-N`` of a place, by number, without those that the trainer wrote in part."""
    if not place.is_dir():
        return []
    named = [(found, path) for path in place.iterdir() if (found := _NAME.fullmatch(path.name)) and path.is_dir()]
    return [
        path
        for _, path in sorted((int(found[1]), path) for found, path in named)
        if directories.is_ours(path) or (path / STATE_FILE).is_file()
    ]


def _aged(place: Path) -> list[Path]:
    """The directories ``checkpoint-N`` of a place, the oldest first, as the trainer's own limit takes them."""
    from transformers.trainer_utils import sort_checkpoints

    return [path for path in map(Path, sort_checkpoints(str(place), use_mtime=True)) if _NAME.fullmatch(path.name)]


def _put_back(place: Path) -> None:
    """Takes back what was moved aside for saves that were cut off."""
    for away in place.iterdir() if place.is_dir() else ():
        found = _REPLACED.fullmatch(away.name)
        if found is None:
            continue
        directory = place / found[1]
        if _counts(directory):
            directories.remove([away])
            continue
        if directory.exists():
            _log.warning("%s was not saved to its end: what it would have replaced is used", directory)
            shutil.rmtree(directory)
        away.rename(directory)


def _looked(directory: Path) -> Found | None:
    _put_back(directory.parent)
    if not directories.is_ours(directory):
        return None
    if not directories.is_committed(directory):
        raise sf.NotFound(
            f"{directory} was not saved to its end: pass resume_from_checkpoint=True, which takes the newest one that "
            "was, or another path"
        )
    with sf.mapped(url_of(directory)) as checkpoint:
        if "trainer/holds" not in checkpoint.value_names():
            raise sf.Invalid(f"{directory}: expected a checkpoint of a Trainer, found another state")
        holds, world_size = checkpoint.value("trainer/holds"), checkpoint.value("trainer/world_size")
        state: Any = checkpoint.value("trainer/state", rank=0)
    try:
        json.loads((directory / STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        _log.warning("%s is damaged or missing: it is written again from the checkpoint", directory / STATE_FILE)
        (directory / STATE_FILE).write_text(json.dumps(state, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return Found(str(directory), holds, world_size)
