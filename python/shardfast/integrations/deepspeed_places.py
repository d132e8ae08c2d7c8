"""Which checkpoint a directory of DeepSpeed's means, and who wrote it."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import shardfast as sf

from .trackers import Trackers, below, is_far, of_rank_0


class Found(NamedTuple):
    """A checkpoint to load.

    Attributes:
        url: Where it is.
        values: What it says of the engine; ``None`` if DeepSpeed wrote it.
    """

    url: str
    values: dict[str, Any] | None


def tag_of(tag: Any) -> str:
    """A tag as the name of a directory.

    Raises:
        Invalid: It is none.
    """
    name = str(tag)
    if not name or "/" in name or name in (".", ".."):
        raise sf.Invalid(f"tag={tag!r}: expected the name of a directory, without a slash")
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


def _looked(place: str, tag: str | None, tracker: Any) -> Found | None:
    name = tag or tracker.read()
    if name is None:
        return None
    url = below(place, name)
    try:
        with sf.mapped(url) as checkpoint:
            names = [name for name in checkpoint.value_names() if name.startswith("engine/")]
            values = {name.partition("/")[2]: checkpoint.value(name) for name in names if name != "engine/client"}
    except sf.NotFound as error:
        if not is_far(place) and _is_deepspeeds(url.removeprefix("file://")):
            return Found(url, None)
        if tag is not None:
            raise sf.NotFound(f"tag={tag!r}: {url} is no committed checkpoint: name one that is") from error
        raise sf.NotFound(
            f"{tracker.name} names {name!r}, and {url} is no committed checkpoint: pass tag= of one that is"
        ) from error
    if "global_steps" not in values:
        raise sf.Invalid(f"{url} is no checkpoint of an engine: load it with shardfast.load()")
    return Found(url, values)


def _is_deepspeeds(path: str) -> bool:
    """Whether DeepSpeed wrote a directory."""
    return os.path.isdir(path) and any(name.endswith(".pt") for name in os.listdir(path))
