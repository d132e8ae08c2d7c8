"""Directories and prefixes of object stores, as saves and loads read them; and what one rank finds there, for all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import torch.distributed as dist

import shardfast as sf


def is_far(place: str) -> bool:
    """Whether a place is no directory of a file system."""
    return "://" in place and not place.startswith("file://")


_STORES = ("s3", "gs", "az")


def directory_of(place: str) -> Path:
    """The directory that a path or a ``file://`` URL means, as saves and loads read it.

    Raises:
        Invalid: It is a URL of another host, or a relative one.
    """
    if not place.startswith("file://"):
        return Path(place).expanduser()
    host, slash, path = place.removeprefix("file://").partition("/")
    if host not in ("", "localhost") or not slash:
        raise sf.Invalid(f"{place}: expected file:///absolute/path")
    return Path(f"/{unquote(path)}")


def absolute(place: str) -> str:
    """The same place from any working directory."""
    return place if "://" in place else str(directory_of(place).absolute())


def expect_place(place: str) -> None:
    """Refuses what is neither a directory nor in an object store; each rank asks for itself.

    Raises:
        Invalid: It is another URL.
    """
    if not is_far(place):
        directory_of(place)
    elif place.partition("://")[0] not in _STORES:
        raise sf.Invalid(f"{place}: expected a directory, or a URL that begins with {'://, '.join(_STORES)}://")


def below(place: str, name: str) -> str:
    """The path or URL of ``name`` in a place; the query of a URL stays behind it."""
    head, mark, query = place.partition("?") if is_far(place) else (place, "", "")
    return f"{head.rstrip('/')}/{name}{mark}{query}"


def of_rank_0(call: Callable[[], Any]) -> Any:
    """Returns or raises what ``call`` does on rank 0, on all ranks; in a process without a group, here."""
    if not dist.is_initialized():
        return call()
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[1] = call()
        except Exception as error:  # the other ranks wait for this one
            kind = type(error) if isinstance(error, sf.Error) else sf.Unavailable
            outcome[0] = kind.__name__, str(error) if isinstance(error, sf.Error) else repr(error)
    dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        kind, message = outcome[0]
        raise getattr(sf, kind)(message)
    return outcome[1]
