"""The iteration with which a training of Megatron's loop goes on, and what stands in its way."""

from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace
from typing import Any, NamedTuple

import shardfast as sf

from .megatron_trackers import checkpoint_of, iteration_in, tracker_in
from .trackers import Trackers, below, is_far, of_rank_0


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
    following = (args.iteration // args.save_interval + 1) * args.save_interval
    url = checkpoint_of(args.save, following)

    def expect() -> None:
        is_taken = not is_far(url) and _is_megatrons(url.removeprefix("file://"), megatron)
        with contextlib.suppress(sf.NotFound):
            sf.mapped(url).close()
            is_taken = True
        if is_taken:
            raise sf.Conflict(
                f"{url} is there already, and the training begins at iteration {args.iteration} and would save there: "
                f"to go on from iteration {following}, pass --ckpt-step {following} or write "
                f"{following} into {tracker.name}; to train again from {args.iteration}, move {url} and later ones away"
            )

    of_rank_0(expect)


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
        if not is_far(place) and _is_megatrons(url.removeprefix("file://"), megatron):
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
