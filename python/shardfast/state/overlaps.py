"""Which of a load's destinations lie over each other in memory: a load writes each element once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from .catalog import Adapter, Box, Refused

_RUNS_MAX = 1 << 20
"""Of so many runs of elements each is looked up; boxes of more that may meet are taken to."""


def written(adapter: Adapter, tensor: Any) -> Box | None:
    """Returns the memory that a load writes of a tensor; ``None`` if it makes a new one in its place."""
    try:
        return adapter.written(tensor)
    except Refused:
        return None


class _Steps(NamedTuple):
    """A box as runs of bytes: where the first begins, how long each is, and steps to others, the longest step first."""

    start: int
    run: int
    steps: tuple[tuple[int, int], ...]
    """How long, and how often."""

    @property
    def runs(self) -> int:
        """The number of runs."""
        return math.prod(times for _, times in self.steps)

    @property
    def stop(self) -> int:
        """The end of the last run."""
        return self.start + sum(step * (times - 1) for step, times in self.steps) + self.run


def overlaps(boxes: Sequence[Box]) -> Iterator[tuple[int, int]]:
    """Pairs of numbers of boxes that share a byte."""
    found = [(box.space, _steps(box), number) for number, box in enumerate(boxes) if 0 not in box.lengths]
    found.sort(key=lambda one: (str(one[0]), one[1].start))
    open_: list[tuple[object, _Steps, int]] = []
    for space, steps, number in found:
        open_ = [one for one in open_ if one[0] == space and one[1].stop > steps.start]
        for _, other, its_number in open_:
            if _meet(other, steps):
                yield its_number, number
        open_.append((space, steps, number))


def _steps(box: Box) -> _Steps:
    start, run = box.pointer, box.item
    steps: list[tuple[int, int]] = []
    for stride, length in sorted(
        (abs(stride), length) for stride, length in zip(box.strides, box.lengths, strict=True)
    ):
        if length == 1:
            continue
        if stride == run and not steps:
            run *= length
        else:
            steps.append((stride, length))
    for stride, length in zip(box.strides, box.lengths, strict=True):
        start += min(stride, 0) * (length - 1)
    return _Steps(start, run, tuple(reversed(steps)))


def _meet(one: _Steps, other: _Steps) -> bool:
    if one.runs > other.runs:
        one, other = other, one
    if one.runs > _RUNS_MAX:
        return True
    return any(_holds(other, 0, other.start, start, start + one.run) for start in _starts(one, 0, one.start))


def _starts(box: _Steps, depth: int, start: int) -> Iterator[int]:
    if depth == len(box.steps):
        yield start
        return
    step, times = box.steps[depth]
    for number in range(times):
        yield from _starts(box, depth + 1, start + number * step)


def _holds(box: _Steps, depth: int, start: int, low: int, high: int) -> bool:
    """Whether a byte in ``low..high`` is one of the runs below ``start``, of the steps from ``depth`` on."""
    if depth == len(box.steps):
        return low < start + box.run and start < high
    step, times = box.steps[depth]
    inside = sum(length * (count - 1) for length, count in box.steps[depth + 1 :]) + box.run
    first = max(0, (low - start - inside) // step + 1)
    last = min(times - 1, (high - 1 - start) // step)
    if last - first > 1:  # all of one in between lies there
        return True
    return any(_holds(box, depth + 1, start + number * step, low, high) for number in range(first, last + 1))
