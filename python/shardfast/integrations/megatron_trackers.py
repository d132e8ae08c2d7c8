"""The places of Megatron's loop: ``--save`` and ``--load``, the checkpoints of iterations in them, and their trackers.

``<place>/iter_0004000`` is a checkpoint. The tracker names the newest iteration that is durable: in a directory it is
Megatron's own file, ``latest_checkpointed_iteration.txt``, in an object store a run of that name with one small
checkpoint. It is written after the commit of the iteration that it names.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist

import shardfast as sf

TRACKER = "latest_checkpointed_iteration"


def is_far(place: str) -> bool:
    """Whether a place is no directory of a file system."""
    return "://" in place and not place.startswith("file://")


def below(place: str, name: str) -> str:
    """The path or URL of ``name`` in a place; the query of a URL stays behind it."""
    head, mark, query = place.partition("?") if is_far(place) else (place, "", "")
    return f"{head.rstrip('/')}/{name}{mark}{query}"


def checkpoint_of(place: str, iteration: int) -> str:
    """The checkpoint of an iteration, where Megatron has it."""
    return below(place, f"iter_{iteration:07d}")


class DirectoryTracker:
    """The tracker of a directory."""

    def __init__(self, place: str) -> None:
        self._path = Path(place.removeprefix("file://")) / f"{TRACKER}.txt"
        self.name = str(self._path)

    def read(self) -> int | str | None:
        """The iteration, ``"release"`` of a directory that Megatron wrote, or ``None`` without a tracker."""
        try:
            text = self._path.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return None
        if text != "release" and not text.isdecimal():
            raise sf.Invalid(f"{self.name}: expected an iteration, found {text[:40]!r}: write the number of one there")
        return text if text == "release" else int(text)

    def write(self, iteration: int) -> None:
        """Names an iteration; a reader sees the old one or the new one."""
        handle, path = tempfile.mkstemp(prefix=f".{TRACKER}-", dir=self._path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(str(iteration))
                file.flush()
                os.fchmod(file.fileno(), 0o644)
                os.fsync(file.fileno())
            os.replace(path, self._path)
        except BaseException:
            os.unlink(path)
            raise
        parent = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)


class _RunTracker:
    """The tracker of an object store, of which rank 0 is the only rank."""

    def __init__(self, place: str, group: Any) -> None:
        self.name = below(place, TRACKER)
        # An iteration before the newest one is saved again when a training goes back.
        self._run = sf.Checkpointer(self.name, keep=sf.last(1), rewind=True, process_group=group)

    def read(self) -> int | None:
        """The iteration, or ``None`` without a tracker."""
        iteration = self._run.restore({"training": {"iteration": None}})
        return iteration if self._run.newest is not None else None

    def write(self, iteration: int) -> None:
        """Names an iteration, durably."""
        self._run.save(iteration, {"training": {"iteration": iteration}})
        self._run.wait()


class _NoTracker:
    """The tracker of other ranks than 0, which neither read nor write it."""

    def __init__(self, place: str) -> None:
        self.name = below(place, TRACKER)

    def write(self, iteration: int) -> None:
        """Does nothing."""


class Trackers:
    """The trackers of the places that a loop uses."""

    def __init__(self) -> None:
        self._known: dict[str, Any] = {}
        self._group: Any = None

    def of(self, place: str) -> Any:
        """The tracker of a place. All ranks call it, in one order."""
        if place not in self._known:
            if is_far(place) and self._group is None:
                self._group = dist.new_group([0], backend="gloo")
            if dist.get_rank() > 0:
                self._known[place] = _NoTracker(place)
            else:
                self._known[place] = _RunTracker(place, self._group) if is_far(place) else DirectoryTracker(place)
        return self._known[place]


class Saves:
    """Asynchronous saves in flight, in their order."""

    def __init__(self) -> None:
        self._running: list[tuple[Future[None], Callable[[], None]]] = []
        # Of one thread: trackers are written in the order of the saves.
        self._background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shardfast-tracker")

    def add(self, pending: sf.Pending, tracker: Any, iteration: int, conclude: Callable[[], None]) -> None:
        """Takes a save that has begun; ``conclude`` is called by :meth:`settle` once the tracker names it."""
        self._running.append((self._background.submit(_name_after_commit, pending, tracker, iteration), conclude))

    def settle(self, most: int | None) -> None:
        """Concludes the saves that have ended; with ``most``, waits until at most so many are in flight."""
        while self._running:
            future, conclude = self._running[0]
            if not future.done() and (most is None or len(self._running) <= most):
                break
            del self._running[0]
            future.result()
            conclude()


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


def _name_after_commit(pending: sf.Pending, tracker: Any, iteration: int) -> None:
    """Waits until a save is durable; then the tracker names its iteration."""
    pending.committed()
    tracker.write(iteration)
