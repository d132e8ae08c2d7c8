"""When a run is saved, and which of its checkpoints are kept."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import Invalid


@dataclass(frozen=True, slots=True)
class Steps:
    """Due at every step that ``count`` divides."""

    count: int

    def due(self, step: int) -> bool:
        """Whether a save is due after ``step`` steps."""
        return step % self.count == 0

    def next_due(self, step: int) -> int:
        """The first step behind ``step`` at which a save is due."""
        return step + self.count - step % self.count


@dataclass(frozen=True, slots=True)
class Keep:
    """Which committed checkpoints of a run stay; ``|`` keeps what either rule keeps. The newest always stays.

    Attributes:
        last: Number of newest checkpoints that stay.
        every: Checkpoints whose step this divides stay.
        best: The best by a metric stay: its name, how many, and whether larger values are better.
    """

    last: int | None = None
    every: int | None = None
    best: tuple[tuple[str, int, bool], ...] = ()

    def __or__(self, other: Keep) -> Keep:
        counts = [rule.last for rule in (self, other) if rule.last is not None]
        intervals = [rule.every for rule in (self, other) if rule.every is not None]
        if intervals and max(intervals) % min(intervals) != 0:
            raise Invalid(
                f"keep: every({self.every}) | every({other.every}): neither interval is a multiple of the other; "
                "keep every() of a common divisor"
            )
        best: dict[tuple[str, bool], int] = {}
        for metric, count, largest in self.best + other.best:
            best[metric, largest] = max(count, best.get((metric, largest), 0))
        rules = tuple((metric, count, largest) for (metric, largest), count in best.items())
        return Keep(max(counts, default=None), min(intervals, default=None), rules)


def steps(count: int) -> Steps:
    """Saves every ``count`` steps: ``Checkpointer(url, every=sf.steps(200))``."""
    return Steps(_positive("steps", count))


def last(count: int) -> Keep:
    """Keeps the newest ``count`` checkpoints: ``Checkpointer(url, keep=sf.last(3))``."""
    return Keep(last=_positive("last", count))


def every(count: int) -> Keep:
    """Keeps checkpoints whose step ``count`` divides: ``Checkpointer(url, keep=sf.last(3) | sf.every(10_000))``."""
    return Keep(every=_positive("every", count))


def _positive(name: str, count: int) -> int:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise Invalid(f"{name}({count!r}): expected a number of at least 1")
    return count


def best(metric: str, count: int = 1, *, mode: str = "min") -> Keep:
    """Keeps the ``count`` checkpoints with the best values of a metric that each save is given.

    Example::

        ckpt = sf.Checkpointer(url, every=sf.steps(200), keep=sf.last(2) | sf.best("loss"))
        ckpt.step(step, state, metrics={"loss": loss.item()})

    Args:
        metric: Its name in ``metrics=``. Rank 0's value counts.
        count: Number of checkpoints. Of equal values the newer one is better; NaN is never among the best.
        mode: ``"min"`` if smaller values are better, ``"max"`` if larger ones are.
    """
    if not isinstance(metric, str) or not metric:
        raise Invalid(f"best({metric!r}): expected the name of a metric, such as 'loss'")
    if mode not in ("min", "max"):
        raise Invalid(f"best({metric!r}, mode={mode!r}): expected 'min' or 'max'")
    return Keep(best=((metric, _positive("best", count), mode == "max"),))


def noted(metrics: Mapping[str, float] | None, keep: Keep | None) -> dict[str, str]:
    """The metrics of a save as notes of its checkpoint.

    Raises:
        Invalid: For what is no number, and if one is missing that ``keep`` asks for.
    """
    notes = {}
    for name, metric in (metrics or {}).items():
        try:
            value = float(metric)
        except (TypeError, ValueError, RuntimeError):
            value = None
        if not isinstance(name, str) or value is None:
            raise Invalid(f"metrics={{{name!r}: {metric!r}}}: expected numbers by name")
        notes[f"metric.{name}"] = repr(value)
    for name, _, _ in keep.best if keep else ():
        if f"metric.{name}" not in notes:
            raise Invalid(
                f"metrics={dict(metrics or {})}: keep=sf.best({name!r}) needs this metric at each save; "
                f"pass {{{name!r}: {math.nan}}} for a checkpoint that is not to be among the best"
            )
    return notes
