"""Where the iterations of Megatron's loop are, and which one a resume begins with.

``<place>/iter_0004000`` is a checkpoint. The tracker names the newest iteration that is durable: in a directory it is
Megatron's own file, ``latest_checkpointed_iteration.txt``, in an object store a run of that name with one small
checkpoint. It is written after the commit of the iteration that it names.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

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


class _File:
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


class _Run:
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


class _Other:
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
                self._known[place] = _Other(place)
            else:
                self._known[place] = _Run(place, self._group) if is_far(place) else _File(place)
        return self._known[place]


class Found(NamedTuple):
    """The iteration with which a training goes on.

    Attributes:
        url: Its checkpoint.
        iteration: Its number; 0 for a release of Megatron's.
        values: What the checkpoint says of the training; ``None`` if Megatron wrote it.
    """

    url: str
    iteration: int
    values: dict[str, Any] | None


def find(place: str | None, args: Any, trackers: Trackers, megatron: Any) -> Found | None:
    """The iteration that ``--ckpt-step`` names, or else the tracker of a place; ``None`` if neither does.

    All ranks call it; rank 0 looks.

    Raises:
        NotFound: There is no such iteration, or its save did not commit.
    """
    if place is None:
        return None
    tracker = trackers.of(place)
    found: Found | None = _of_rank_0(lambda: _looked(place, args, tracker, megatron))
    return found


def is_ours(place: str, args: Any, megatron: Any) -> bool:
    """Whether Shardfast saved what would be loaded from a place; asked by a process before the ranks have met."""
    if is_far(place):
        return True
    found = _looked(place, args, _File(place), megatron)
    return found is not None and found.values is not None


def expect_free(args: Any, trackers: Trackers) -> None:
    """Refuses to train towards an iteration that is committed in ``--save`` already; all ranks call it.

    Raises:
        Conflict: It is there: the next save would fail.
    """
    if not args.save or not args.save_interval:
        return
    tracker = trackers.of(args.save)
    following = (args.iteration // args.save_interval + 1) * args.save_interval
    url = checkpoint_of(args.save, following)

    def expect() -> None:
        with contextlib.suppress(sf.NotFound), sf.mapped(url):
            raise sf.Conflict(
                f"{url} is committed already, and the training begins at iteration {args.iteration}, behind which it "
                f"would save there: to go on from iteration {following}, pass --ckpt-step {following} or write "
                f"{following} into {tracker.name}; to train again from {args.iteration}, move {url} and later ones away"
            )

    _of_rank_0(expect)


def _of_rank_0(call: Callable[[], Any]) -> Any:
    """What ``call`` returns or raises on rank 0, on all ranks."""
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[1] = call()
        except sf.Error as error:
            outcome[0] = type(error).__name__, str(error)
        except OSError as error:
            outcome[0] = sf.Unavailable.__name__, str(error)
    dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        kind, message = outcome[0]
        raise getattr(sf, kind)(message)
    return outcome[1]


def _looked(place: str, args: Any, tracker: Any, megatron: Any) -> Found | None:
    asked = getattr(args, "ckpt_step", None)
    iteration = asked or tracker.read()
    if iteration is None:
        return None
    if iteration == "release":
        return Found(below(place, "release"), 0, None)
    url = checkpoint_of(place, iteration)
    try:
        with sf.mapped(url) as checkpoint:
            names = [name for name in checkpoint.value_names() if name.startswith("training/")]
            values = {name.partition("/")[2]: checkpoint.value(name) for name in names}
    except sf.NotFound as error:
        if not is_far(place) and _is_megatrons(url.removeprefix("file://"), megatron):
            return Found(url, iteration, None)
        raise sf.NotFound(
            f"{f'--ckpt-step {asked}' if asked else tracker.name} names iteration {iteration}, and {url} is no "
            "committed checkpoint: name one that is, with --ckpt-step or in the tracker"
        ) from error
    if "args" not in values:
        raise sf.Invalid(f"{url}: expected a checkpoint of Megatron's loop, found one without training/args")
    return Found(url, iteration, values)


def _is_megatrons(path: str, megatron: Any) -> bool:
    if not os.path.isdir(path):
        return False
    try:
        megatron._get_checkpoint_format(path, SimpleNamespace())
    except NotImplementedError:
        return False
    return True
