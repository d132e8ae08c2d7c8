"""The iteration with which a training of Megatron's loop goes on, and what stands in its way."""

from __future__ import annotations

import os
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

import shardfast as sf

from .megatron_trackers import checkpoint_of, iteration_in, tracker_in
from .places import below, directory_of, is_far, of_rank_0
from .trackers import Trackers


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
    found: Found | None = of_rank_0(lambda: _looked(place, args, tracker, megatron))
    return found


def names_any(place: str | None, trackers: Trackers) -> bool:
    """Whether the tracker of a place names an iteration; all ranks call it."""
    if place is None:
        return False
    tracker = trackers.of(place)
    return bool(of_rank_0(lambda: iteration_in(tracker) is not None))


def is_ours(place: str, args: Any, megatron: Any) -> bool:
    """Whether Shardfast saved what would be loaded from a place; asked by a process before the ranks have met."""
    if is_far(place):
        return True
    found = _looked(place, args, tracker_in(place), megatron)
    return found is not None and found.values is not None


def expect_free(args: Any, trackers: Trackers, megatron: Any) -> None:
    """Refuses to train towards an iteration that is committed in ``--save`` already; all ranks call it.

    Raises:
        Conflict: It is there: the next save would fail.
    """
    if not args.save or not args.save_interval:
        return
    tracker = trackers.of(args.save)
    every, begin = args.save_interval, args.iteration

    def expect() -> None:
        following = range((begin // every + 1) * every, _last(args) + 1, every)
        taken = next(
            (number for number in _there(args.save, following) if _is_taken(args.save, number, megatron)), None
        )
        if taken is None:
            return
        url = checkpoint_of(args.save, taken)
        go_on = (
            f"to go on from iteration {taken}, pass --ckpt-step {taken} or write {taken} into {tracker.name}; "
            if not args.finetune
            else ""
        )
        raise sf.Conflict(
            f"{url} is there already, and the training begins at iteration {begin} and would save there: {go_on}to "
            f"train from {begin}, move {url} and later ones away, or --save elsewhere"
        )

    of_rank_0(expect)


def _last(args: Any) -> int:
    """The last iteration of a training, as far as its arguments say."""
    return max(int(args.iteration + args.save_interval), getattr(args, "train_iters", None) or 0)


def _there(place: str, numbers: range) -> Iterable[int]:
    """Returns the iterations with a directory; of an object store, which is not listed, the first."""
    if is_far(place):
        return numbers[:1]
    names = os.listdir(directory_of(place)) if directory_of(place).is_dir() else []
    found = [int(name[5:]) for name in names if name.startswith("iter_") and name[5:].isdecimal()]
    return sorted(number for number in found if number in numbers)


def _is_taken(place: str, iteration: int, megatron: Any) -> bool:
    url = checkpoint_of(place, iteration)
    try:
        sf.mapped(url).close()
    except sf.NotFound:
        return not is_far(url) and _is_megatrons(str(directory_of(url)), megatron)
    return True


def _looked(place: str, args: Any, tracker: Any, megatron: Any) -> Found | None:
    asked = getattr(args, "ckpt_step", None)
    iteration: Any = asked or iteration_in(tracker)
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
        if not is_far(place) and _is_megatrons(str(directory_of(url)), megatron):
            return Found(url, iteration, None)
        raise sf.NotFound(
            f"{f'--ckpt-step {asked}' if asked else tracker.name} names iteration {iteration}, and {url} is no "
            "committed checkpoint: name one that is, with --ckpt-step or in the tracker"
        ) from error
    if values.get("iteration") != iteration or "args" not in values:
        found = f"iteration {values['iteration']}" if "iteration" in values else "another state"
        raise sf.Invalid(f"{url}: expected iteration {iteration} of Megatron's loop, found {found}: name another one")
    return Found(url, iteration, values)


def _is_megatrons(path: str, megatron: Any) -> bool:
    if not os.path.isdir(path):
        return False
    try:
        megatron._get_checkpoint_format(path, SimpleNamespace())
    except NotImplementedError:
        return False
    return True
