"""When a run is saved, and which of its checkpoints are kept."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import Invalid


@dataclass(frozen=True, slots=True)
class Steps:
    """Due at every step that ``count`` divides."""

    count: int

    def due(self, step: int) -> bool:
        """Whether a save is due after ``step`` steps."""
        return step % self.count == 0


@dataclass(frozen=True, slots=True)
class Keep:
    """Which committed checkpoints of a run stay; ``|`` keeps what either rule keeps. The newest always stays.

    Attributes:
        last: Number of newest checkpoints that stay.
        every: Checkpoints whose step this divides stay.
    """

    last: int | None = None
    every: int | None = None

    def __or__(self, other: Keep) -> Keep:
        counts = [rule.last for rule in (self, other) if rule.last is not None]
        intervals = [rule.every for rule in (self, other) if rule.every is not None]
        if intervals and max(intervals) % min(intervals) != 0:
            raise Invalid(
                f"keep: every({self.every}) | every({other.every}): neither interval is a multiple of the other; "
                "keep every() of a common divisor"
            )
        return Keep(max(counts, default=None), min(intervals, default=None))


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
