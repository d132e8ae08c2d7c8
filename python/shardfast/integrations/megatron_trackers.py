"""The places of Megatron's loop: ``--save`` and ``--load``, the checkpoints of iterations in them, and their trackers.

``<place>/iter_0004000`` is a checkpoint. The tracker names the newest iteration that is durable: in a directory it is
Megatron's own file, ``latest_checkpointed_iteration.txt``, in an object store a run of that name with one small
checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import shardfast as sf

from .places import below
from .trackers import FileTracker, Trackers

TRACKER = "latest_checkpointed_iteration"


def checkpoint_of(place: str, iteration: int) -> str:
    """The checkpoint of an iteration, where Megatron has it."""
    return below(place, f"iter_{iteration:07d}")


def trackers() -> Trackers:
    """The trackers of a training."""
    return Trackers(f"{TRACKER}.txt", TRACKER)


def tracker_in(place: str) -> FileTracker:
    """The tracker of a directory, before the ranks have met."""
    return FileTracker(place, f"{TRACKER}.txt")


def iteration_in(tracker: Any) -> int | str | None:
    """The iteration that a tracker names, ``"release"`` of a directory that Megatron wrote, or ``None`` without one."""
    text = tracker.read()
    if text is not None and text != "release" and not text.isdecimal():
        raise sf.Invalid(f"{tracker.name}: expected an iteration, found {text[:40]!r}: write the number of one there")
    return text if text is None or text == "release" else int(text)


@contextlib.contextmanager
def whole_parameters(model: Sequence[Any]) -> Iterator[None]:
    """While a save begins: no parameters that the next forward pass would gather (``--overlap-param-gather``)."""
    chunks = [chunk for chunk in model if getattr(chunk, "remove_forward_pre_hook_handles", None)]
    for chunk in chunks:
        chunk.disable_forward_pre_hook(param_sync=True)
    try:
        yield
    finally:
        for chunk in chunks:
            chunk.enable_forward_pre_hook()
