"""When a run is saved, and which of its checkpoints are kept."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from . import interval
from .errors import Invalid
from .interval import NOTE, Costs, Record, spoken

FIRST = 50
"""The interval in steps before a save was measured, and after one that failed."""


class Schedule:
    """When a run is saved; this one never. The checkpointer says what happens, :meth:`due` and :meth:`next_due` answer.

    All ranks must get the same answers without asking each other. So these depend only on what all ranks have alike:
    the steps, which saves were begun, and how those have ended that every rank knows of.
    """

    __slots__ = ()

    def of_run(self) -> Schedule:
        """Returns this schedule at the beginning of a run."""
        return self

    def due(self, step: int) -> bool:
        """Returns whether a save is due after ``step`` steps."""
        return False

    def next_due(self, step: int) -> int | None:
        """Returns the first step after ``step`` at which a save is due; ``None`` if that is not known yet."""
        return None

    def steps_max(self) -> int | None:
        """Returns the most steps from one save that is due to the next; ``None`` if there is no bound."""
        return None

    def restored(self, step: int, notes: Mapping[str, str], seconds: float) -> None:
        """The run goes on from a checkpoint with these notes, whose load took so long. No save is in flight."""

    def step_ended(self, step: int, *, in_flight: bool) -> None:
        """``step`` steps have ended; ``in_flight``: a save still is, or something is being captured ahead of one."""

    def capture_begun(self) -> None:
        """From now on part of the state is captured, ahead of the next save."""

    def save_begun(self, step: int) -> int:
        """A save begins, due or not; returns its number. Of the last two numbers no save is in flight but the last."""
        return 0

    def waited(self, seconds: float) -> None:
        """The training has waited so long for the save that was begun last."""

    def committed(self, number: int, notes: Mapping[str, str], lag_s: float) -> None:
        """A save has committed with these notes, so long after it began. May be called from another thread."""

    def notes(self) -> dict[str, str]:
        """Returns what the next checkpoint notes; rank 0's counts."""
        return {}


@dataclass(frozen=True, slots=True)
class Steps(Schedule):
    """Due at every step that ``count`` divides."""

    count: int

    def __str__(self) -> str:
        return f"every {self.count} steps"

    def due(self, step: int) -> bool:
        """Returns whether a save is due after ``step`` steps."""
        return step % self.count == 0

    def next_due(self, step: int) -> int:
        """Returns the first step after ``step`` at which a save is due."""
        return (step // self.count + 1) * self.count

    def steps_max(self) -> int:
        """Returns the interval."""
        return self.count


class Optimal(Schedule):
    """Due where the least time is wasted by saves and by failures together; see :func:`optimal`.

    The figure that rank 0 has when it commits a save reaches every rank with the outcome, and sets the interval behind
    the save after next: when that one begins, every rank knows the outcome, since two saves at most are in flight. A
    save that failed, or whose outcome a rank does not know, has no figure. The interval behind the save after next then
    ends at the next multiple of a fixed number of steps. If an outcome reached only some ranks, their next saves
    are due at different steps and fail; but so the ranks meet again, since multiples are the same for all.

    Args:
        mtbf_s: Expected mean time between failures of the job, in seconds.
        at_least: Lower bound of the interval, in steps.
        at_most: Upper bound of the interval, in steps.
        clock: Seconds that never go back.
    """

    def __init__(
        self, mtbf_s: float, at_least: int, at_most: int | None, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._mtbf_s, self._at_least, self._at_most, self._clock = mtbf_s, at_least, at_most, clock
        self._first = self._bounded(FIRST)
        self._costs = Costs(clock)
        self._restarts, self._trained_s, self._restart_s = 0, 0.0, 0.0
        self._number, self._seen, self._due = 0, 0, self._first
        self._base: Record | None = None
        self._newest: Record | None = None
        self._outcomes: dict[int, Record | None] = {}

    def __repr__(self) -> str:
        return f"optimal(mtbf={self._mtbf_s}, at_least={self._at_least}, at_most={self._at_most})"

    def __str__(self) -> str:
        """The newest interval, what it rests on, the waste that is expected, and what is due next, in words."""
        record = self._newest
        if record is None or record.figure is None:
            said = f"every {self._first} steps until saves are measured"
            return (
                f"{said}; one failure in {spoken(self._mtbf_s)} is expected; the next save is due at step {self._due}"
            )
        figure, steps = record.figure, self._bounded(record.figure.steps)
        why = {
            "waste": "",
            "storage": ", as often as the storage takes saves",
            "at_least": f", since at_least={self._at_least}",
            "at_most": f", since at_most={self._at_most}",
        }
        restarts = f"{record.restarts} restart{'' if record.restarts == 1 else 's'}"
        return (
            f"every {steps} steps ({spoken(steps * figure.step_s)}){why.get(figure.limit, '')}: a save costs "
            f"{spoken(figure.cost_s)} and commits after {spoken(figure.lag_s)}; one failure in {spoken(figure.mtbf_s)} "
            f"is expected ({restarts} in {spoken(record.trained_s)}); expected waste {_share(figure.waste)}; "
            f"the next save is due at step {self._due}"
        )

    def of_run(self) -> Optimal:
        """Returns a schedule with the same arguments that has measured nothing."""
        return Optimal(self._mtbf_s, self._at_least, self._at_most, clock=self._clock)

    def due(self, step: int) -> bool:
        """Returns whether a save is due after ``step`` steps."""
        return step >= self._due

    def next_due(self, step: int) -> int | None:
        """Returns the first step after ``step`` at which a save is due; ``None`` until a save that is due has begun."""
        return self._due if step < self._due else None

    def steps_max(self) -> int | None:
        """Returns the upper bound of the interval."""
        return self._at_most

    def restored(self, step: int, notes: Mapping[str, str], seconds: float) -> None:
        """Goes on from what the checkpoint notes, the same on every rank."""
        record = Record.read(notes.get(NOTE))
        if self._costs.trained_s == 0:  # otherwise the program went back by itself
            self._restart_s = seconds
            if record is not None:
                self._restarts, self._trained_s = record.restarts + 1, record.trained_s
        self._base, self._newest = record, None if record is None else self._as_now(record)
        self._costs.restored(record.figure if record else None)
        self._number, self._outcomes, self._seen = 0, {}, step
        self._due = self._soon_after(step)

    def step_ended(self, step: int, *, in_flight: bool) -> None:
        """Measures the step."""
        if step < self._seen:  # the program went back to an earlier step by itself
            self._due = min(self._due, self._after(step, None))
        self._seen = step
        self._costs.step_ended(in_flight=in_flight)

    def save_begun(self, step: int) -> int:
        """Measures the save, and sets the step of the next one; returns its number."""
        self._costs.save_begun()
        self._number += 1
        # The first two saves have none two before them.
        if self._number <= 2:
            self._due = self._soon_after(step)
        else:
            self._due = self._after(step, self._outcomes.pop(self._number - 2, None))
        return self._number

    def capture_begun(self) -> None:
        """Measures the steps from here on as those of the next save."""
        self._costs.capture_begun()

    def waited(self, seconds: float) -> None:
        """Counts the wait as a cost of the save that was begun last."""
        self._costs.waited(seconds)

    def committed(self, number: int, notes: Mapping[str, str], lag_s: float) -> None:
        """Keeps rank 0's figure for the interval behind the save after next."""
        self._costs.committed(lag_s)
        record = Record.read(notes.get(NOTE))
        self._outcomes[number] = record
        self._newest = record or self._newest

    def _as_now(self, record: Record) -> Record:
        """A record with the interval that follows from it now: after a restart, by this call's arguments."""
        noted = record.figure
        if noted is None:
            return record
        mtbf_s = interval.mean_time_between_failures(self._mtbf_s, self._restarts, record.trained_s)
        figure = interval.best(
            (noted.step_s, noted.cost_s, noted.lag_s),
            mtbf_s=mtbf_s,
            restart_s=record.restart_s,
            at_least=self._at_least,
            at_most=self._at_most,
        )
        return replace(record, restarts=self._restarts, figure=figure)

    def notes(self) -> dict[str, str]:
        """Returns the record of the run so far, with the interval that follows from what this rank measured."""
        trained_s = self._trained_s + self._costs.trained_s
        figure = self._costs.figure(
            mtbf_s=interval.mean_time_between_failures(self._mtbf_s, self._restarts, trained_s),
            restart_s=self._restart_s,
            at_least=self._at_least,
            at_most=self._at_most,
        )
        return {NOTE: Record(self._restarts, trained_s, self._restart_s, figure).text()}

    def _after(self, step: int, record: Record | None) -> int:
        """The step at which the interval behind a save at ``step`` ends."""
        if record is None or record.figure is None:
            return (step // self._first + 1) * self._first
        return step + self._bounded(record.figure.steps)

    def _soon_after(self, step: int) -> int:
        """The same for the first saves behind a restart, which the interval of the checkpoint may put off too far.

        It knows neither of this restart nor of what else has changed, such as the mean time that the user expects.
        Where restarts come before the next save they are never counted, and nothing would ever shorten it.
        """
        return min(self._after(step, self._base), self._after(step, None))

    def _bounded(self, steps: int) -> int:
        steps = max(steps, self._at_least)
        return steps if self._at_most is None else min(steps, self._at_most)


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
        if not isinstance(other, Keep):
            raise Invalid(f"keep: {self!r} | {other!r}: expected two rules, such as shardfast.last(3)")
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


def optimal(*, mtbf: str | float, at_least: int = 1, at_most: int | None = None) -> Optimal:
    """Saves as often as wastes least: ``Checkpointer(url, every=sf.optimal(mtbf="6h"))``.

    Frequent saves take time from the training, rare ones lose more of it at a failure. What a save costs and how soon
    it commits are measured while the run trains; ``print(ckpt.every)`` shows them. The first three saves come every 50
    steps. Later intervals follow rank 0's measurements, the same on every rank.

    Args:
        mtbf: The mean time between failures of the whole job that you expect: a time such as ``"6h"``, ``"30m"`` or
            ``"2d"``, or seconds. It counts like one failure seen in that time, so restarts of the run soon outweigh it.
        at_least: The smallest number of steps from one save to the next.
        at_most: The largest number of steps from one save to the next, and so about the most steps that a failure
            loses. It holds even if the storage takes longer; the training then waits for the storage.

    Raises:
        Invalid: For an ``mtbf`` that is no time above zero, and for bounds that are no numbers of steps or contradict
            each other.
    """
    if isinstance(mtbf, str):
        try:
            seconds = interval.time_of(mtbf)
        except Invalid as error:
            raise Invalid(f"mtbf={error}") from None
    else:
        is_number = isinstance(mtbf, (int, float)) and not isinstance(mtbf, bool)
        if not (is_number and 0 < mtbf <= sys.float_info.max):
            raise Invalid(
                f"mtbf={mtbf!r}: expected the mean time between failures: seconds above zero, or a text such as '6h'"
            )
        seconds = float(mtbf)
    for name, steps in (("at_least", at_least), ("at_most", 1 if at_most is None else at_most)):
        if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps < 2**63:
            raise Invalid(f"{name}={steps!r}: expected a number of steps of at least 1, and below 2**63")
    if at_most is not None and at_most < at_least:
        raise Invalid(
            f"at_least={at_least}, at_most={at_most}: expected at_least to be the smaller one; lower it or raise "
            "at_most"
        )
    return Optimal(seconds, at_least, at_most)


def last(count: int) -> Keep:
    """Keeps the newest ``count`` checkpoints: ``Checkpointer(url, keep=sf.last(3))``."""
    return Keep(last=_positive("last", count))


def every(count: int) -> Keep:
    """Keeps checkpoints whose step ``count`` divides: ``Checkpointer(url, keep=sf.last(3) | sf.every(10_000))``."""
    return Keep(every=_positive("every", count))


def _share(waste: float) -> str:
    """A waste in percent; one that no training survives without its size, as ``shardfast interval`` says it."""
    return f"{waste:.2%}" if waste <= 10 else "more than 1000%"


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
        value = None
        if not isinstance(metric, (str, bytes, bytearray)):  # a text is no number, though float() reads it
            with contextlib.suppress(TypeError, ValueError, RuntimeError, OverflowError):
                value = float(metric)
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


def expect_rules(every: Schedule | None, keep: Keep | None, over: int) -> None:
    """Refuses what is neither a schedule nor a rule, and captures over more steps than there are between saves."""
    if every is not None and not isinstance(every, Schedule):
        raise Invalid(f"every={every!r}: expected when to save, such as sf.steps(200)")
    if keep is not None and not isinstance(keep, Keep):
        raise Invalid(f"keep={keep!r}: expected what to keep, such as sf.last(3) | sf.every(10_000)")
    apart = None if every is None else every.steps_max()
    if apart is not None and over > apart:
        raise Invalid(
            f"over={over}: expected no more steps than there are between saves, and every= says {apart} at most: "
            "capture over fewer steps, or save less often"
        )
