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
    kill may have left it half-written. This passes such a directory over and names it in the log. The newest one is
    that of the latest step. Of a directory that DeepSpeed wrote only DeepSpeed can tell whether it is whole. Every rank
    calls it.

    Args:
        directory: Where the trainer's directories are, such as its ``output_dir``. One that is not there holds none.

    Returns:
        The path of one of them; ``None`` if there is none, so that a training starts.

    Raises:
        Invalid: It is an engine's own directory.
        Unsupported: It is in an object store, in which trainers make no directories.
    """
    place = absolute(str(directory))
    if is_far(place):
        raise sf.Unsupported(f"newest({directory}): expected a directory of a file system, in which trainers save")
    found: str | None = of_rank_0(lambda: _looked(directory_of(place)))
    return found


def _looked(root: Path) -> str | None:
    if (root / LATEST).exists():
        raise sf.Invalid(
            f"newest({root}): an engine saved there by itself: engine.load_checkpoint() takes what {LATEST} names. "
            "Expected a directory in which a trainer makes one for each save"
        )
    found: list[tuple[int, float, str]] = []
    names = sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    for directory in (root / name for name in names if not name.startswith((".", "tmp-"))):
        latest = directory / LATEST
        text = latest.read_text(encoding="utf-8", errors="replace").strip() if latest.is_file() else ""
        step = _step(directory / text) if text else None
        if step is not None:
            found.append((step, latest.stat().st_mtime, str(directory)))
        elif text or _is_begun(directory):
            _log.warning("%s was not saved to its end: it is passed over", directory)
    return max(found)[2] if found else None


def _step(checkpoint: Path) -> int | None:
    """The step of a checkpoint; -1 if DeepSpeed wrote it under a tag without one; ``None`` if it does not count."""
    step = step_of(checkpoint)
    if step is None and is_deepspeeds(str(checkpoint)):
        number = re.search(r"(\d+)$", checkpoint.name)
        step = int(number[1]) if number else -1
    return step


def _is_begun(directory: Path) -> bool:
    """Whether an engine began to save into a directory; others may be anything."""
    return any((path / part).is_dir() for path in directory.iterdir() for part in ("model", "engine", "optimizer"))
