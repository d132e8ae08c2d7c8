"""Which checkpoint a directory of DeepSpeed's means, and who wrote it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

import shardfast as sf

from .places import below, directory_of, is_far, of_rank_0
from .trackers import Trackers

LATEST = "latest"
"""The file that names the newest checkpoint."""

_TAG_BYTES_MAX = 200
"""File systems allow names of 255 bytes, and what is replaced has a longer one."""


class Found(NamedTuple):
    """A checkpoint to load.

    Attributes:
        url: Where it is.
        tag: What it is called.
        values: What it says of the engine; ``None`` if DeepSpeed wrote it.
    """

    url: str
    tag: str
    values: dict[str, Any] | None


def tag_of(tag: Any) -> str:
    """A tag as the name of a directory.

    Raises:
        Invalid: It is none, or one that is needed for something else.
    """
    name = str(tag)
    if not name or "/" in name or name.startswith("."):
        raise sf.Invalid(f"tag={tag!r}: expected the name of a directory, without a slash, and no dot in front")
    if name == LATEST:
        raise sf.Invalid(f"tag={tag!r}: this file names the newest checkpoint: give the checkpoint another tag")
    if len(name.encode(errors="replace")) > _TAG_BYTES_MAX:
        raise sf.Invalid(f"tag={tag!r}: expected at most {_TAG_BYTES_MAX} bytes, found {len(name.encode())}")
    return name


def find(place: str, tag: str | None, trackers: Trackers) -> Found | None:
    """The checkpoint ``tag`` of a place, or that which ``latest`` names; ``None`` if that names none.

    All ranks call it; rank 0 looks.

    Raises:
        NotFound: ``latest`` names a checkpoint that is not committed.
    """
    tracker = trackers.of(place)
    found: Found | None = of_rank_0(lambda: _looked(place, tag, tracker))
    return found


def _replaced(place: str, name: str) -> Path:
    """Returns the place of a checkpoint while another one of the same tag is saved."""
    return directory_of(place) / f".{name}.replaced"


def is_there(place: str, name: str) -> bool:
    """Whether a directory has a committed checkpoint of that tag; what is in an object store is not looked for.

    All ranks see the same, though others may have begun to save: none commits without this one.
    """
    return not is_far(place) and (directory_of(place) / name / "COMMIT").exists()


def replace(place: str, name: str) -> None:
    """Moves a committed checkpoint out of the way of a new one of the same tag. All ranks call it; rank 0 moves it,
    once all have seen it.

    Raises:
        Conflict: It is in an object store, in which nothing can be moved.
    """
    url = below(place, name)

    def move() -> None:
        if is_far(place):
            raise sf.Conflict(f"{url} is there already: give each checkpoint in an object store a tag of its own")
        there, away = directory_of(url), _replaced(place, name)
        if not _is_committed(url):
            return
        if away.exists():  # of a save that was cut off: what is there is newer
            shutil.rmtree(away)
        there.rename(away)

    dist.barrier()
    of_rank_0(move)


def forget_replaced(place: str, name: str) -> None:
    """Removes what :func:`replace` moved, once the new one is durable."""
    if dist.get_rank() == 0 and not is_far(place) and _replaced(place, name).exists():
        shutil.rmtree(_replaced(place, name))


def expect_directory(place: str) -> None:
    """Refuses ``"keep"`` in an object store.

    Raises:
        Unsupported: It is in one.
    """
    if is_far(place):
        raise sf.Unsupported(
            f'"shardfast": {{"keep": …}}: {place} is in an object store, of which the block removes nothing: leave it '
            "out and let the service expire what is old, or put the engine into the state of a Checkpointer(keep=…)"
        )


def prune(place: str, name: str, keep: int, newest: str | None) -> None:
    """Removes all but ``keep`` checkpoints of engines of a directory, the last of which is ``name``. Rank 0 does.

    Those of later steps than its own stay, as do those that are not committed, and what others wrote.

    Args:
        place: The directory.
        name: What was saved last, and is durable.
        keep: How many stay, ``name`` among them.
        newest: What ``latest`` names, which stays, too.
    """
    root = directory_of(place)
    for cut_off in root.glob(".*.removed"):
        shutil.rmtree(cut_off)
    step = step_of(root / name)
    steps = {path.name: step_of(path) for path in root.iterdir() if not path.name.startswith(".")}
    older = [
        (found, other)
        for other, found in steps.items()
        if found is not None and step is not None and found <= step and other != name
    ]
    for _, other in sorted(older, reverse=True)[keep - 1 :]:
        if other != newest:
            removed = root / f".{other}.removed"
            (root / other).rename(removed)  # a crash leaves nothing that looks like a checkpoint
            shutil.rmtree(removed)


def step_of(path: Path) -> int | None:
    """The step at which an engine was saved; ``None`` if a directory has no committed checkpoint of one."""
    if not (path / "COMMIT").exists():
        return None
    try:
        with sf.mapped(str(path)) as checkpoint:
            steps = checkpoint.value("engine/global_steps")
    except (sf.Error, KeyError):  # one that is broken, or no engine's: not this one's to remove
        return None
    return steps if isinstance(steps, int) else None


def _looked(place: str, tag: str | None, tracker: Any) -> Found | None:
    name = tag or tracker.read()
    if name is None:
        return None
    url = below(place, name)
    if not is_far(place) and _replaced(place, name).exists() and not _is_committed(url):
        url = str(_replaced(place, name))
    try:
        with sf.mapped(url) as checkpoint:
            names = [name for name in checkpoint.value_names() if name.startswith("engine/")]
            values = {name.partition("/")[2]: checkpoint.value(name) for name in names if name != "engine/client"}
    except sf.NotFound as error:
        if not is_far(place) and is_deepspeeds(str(directory_of(url))):
            return Found(url, name, None)
        if tag is not None:
            raise sf.NotFound(f"tag={tag!r}: {url} is no committed checkpoint: name one that is") from error
        raise sf.NotFound(
            f"{tracker.name} names {name!r}, and {url} is no committed checkpoint: pass tag= of one that is"
        ) from error
    if "global_steps" not in values:
        raise sf.Invalid(f"{url} is no checkpoint of an engine: load it with shardfast.load()")
    return Found(url, name, values)


def _is_committed(url: str) -> bool:
    try:
        sf.mapped(url).close()
    except sf.NotFound:
        return False
    return True


def is_deepspeeds(path: str) -> bool:
    """Whether DeepSpeed wrote a directory."""
    return os.path.isdir(path) and any(name.endswith(".pt") for name in os.listdir(path))
