"""Costs of saves to a training, measured while it runs, and the interval between saves that follows."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from statistics import median

from . import native

NOTE = "shardfast.interval"
"""The note of a checkpoint that holds a :class:`Record`."""

QUIET_STEPS = 200
"""Steps without a save in flight that are remembered: with them the others are compared."""

QUIET_STEPS_MIN = 5
"""Fewer tell nothing of what a step takes."""

SAVES = 7
"""Saves whose cost and lag are remembered. Their median counts, so one save beside an evaluation changes nothing."""


@dataclass(frozen=True, slots=True)
class Figure:
    """An interval, and why.

    Attributes:
        steps: Steps from one save to the next.
        step_s: A step without a save in flight, in seconds.
        cost_s: What a save costs the training, in seconds.
        lag_s: From the saved step to the commit, in seconds.
        mtbf_s: Mean time between failures, in seconds.
        waste: Expected seconds lost for each second of training.
        limit: What decided: ``"waste"``, ``"storage"``, ``"at_least"`` or ``"at_most"``.
    """

    steps: int
    step_s: float
    cost_s: float
    lag_s: float
    mtbf_s: float
    waste: float
    limit: str


@dataclass(frozen=True, slots=True)
class Record:
    """Notes of a checkpoint about its run, which survive restarts.

    Attributes:
        restarts: How often the run was restarted.
        trained_s: Seconds that its steps have taken, also before restarts.
        restart_s: How long the last restart took to load its checkpoint.
        figure: Rank 0's interval; ``None`` before a save was measured.
    """

    restarts: int = 0
    trained_s: float = 0.0
    restart_s: float = 0.0
    figure: Figure | None = None

    def text(self) -> str:
        """Returns the record as the text of a note."""
        return json.dumps(asdict(self))

    @staticmethod
    def read(text: str | None) -> Record | None:
        """The record that a note holds; ``None`` for what is none, such as the note of another version."""
        try:
            found = json.loads(text or "")
            figure = found.pop("figure")
            record = Record(**found, figure=None if figure is None else Figure(**figure))
            numbers = [record.restarts, record.trained_s, record.restart_s]
            if record.figure is not None:
                numbers += [*asdict(record.figure).values()][:-1]
            is_sound = all(math.isfinite(number) and number >= 0 for number in numbers)
            is_sound &= isinstance(record.restarts, int) and (record.figure is None or _is_interval(record.figure))
        except (ValueError, TypeError, AttributeError, KeyError):
            return None
        return record if is_sound else None


def _is_interval(figure: Figure) -> bool:
    return isinstance(figure.steps, int) and figure.steps >= 1


class _Flight:
    """The steps during which one save was captured and written.

    Attributes:
        is_ahead: Whether the save has not begun: part of it is being captured ahead of it.
    """

    def __init__(self, now: float, *, is_ahead: bool) -> None:
        self.began, self.steps, self.seconds, self.waited_s, self.is_ahead = now, 0, 0.0, 0.0, is_ahead


class Costs:
    """Measures what saves cost: by how much steps take longer while one is in flight than quiet ones.

    Every step counts from the end of the one before, so waits in calls, waits of the optimizer and slower steps all
    count. A stall that the host does not see, since a device has it, counts as soon as the host waits for the device.

    Args:
        clock: Seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._last: float | None = None
        self._flight: _Flight | None = None
        self._quiet: deque[float] = deque(maxlen=QUIET_STEPS)
        self._first: float | None = None
        self._costs: deque[float] = deque(maxlen=SAVES)
        self._lags: deque[float] = deque(maxlen=SAVES)
        self._noted: Figure | None = None
        self.trained_s = 0.0

    def restored(self, figure: Figure | None) -> None:
        """Starts anew with what a checkpoint notes: the time until the next step is no step's."""
        self._last = self._flight = None
        self._noted = figure
        if figure is not None and not self._costs:
            self._costs.append(figure.cost_s)
            self._lags.append(figure.lag_s)

    def step_ended(self, *, in_flight: bool) -> None:
        """A step has ended; ``in_flight``: a save still is captured or written. None of these steps is a quiet one."""
        now = self._clock()
        if self._last is not None:
            seconds = now - self._last
            self.trained_s += seconds
            if self._flight is None:
                self._quiet.append(seconds)
            else:
                self._flight.steps += 1
                self._flight.seconds += seconds
        self._last = now
        if not in_flight:
            self._land()

    def capture_begun(self) -> None:
        """Part of a save is captured ahead of it. If another one is in flight, what follows counts for the new one."""
        self._land()
        self._flight = _Flight(self._clock(), is_ahead=True)

    def save_begun(self) -> None:
        """A save begins. If another one is in flight, what follows counts for the new one."""
        if self._flight is None or not self._flight.is_ahead:
            self._land()
            self._flight = _Flight(self._clock(), is_ahead=False)
        self._flight.began, self._flight.is_ahead = self._clock(), False

    def waited(self, seconds: float) -> None:
        """The training has waited so long for the save in flight: it costs this at least."""
        if self._flight is not None:
            self._flight.waited_s += seconds

    def committed(self, lag_s: float) -> None:
        """A save has committed, so long after its step. May be called from another thread."""
        self._lags.append(lag_s)

    def _land(self) -> None:
        if self._flight is None:
            return
        if self._flight.is_ahead:  # let go: the save itself is still to come
            self._flight = None
            return
        cost = self._cost(self._flight)
        # The first save of a process costs more: memory is made, the state described, replicas are compared.
        if self._first is None:
            self._first = cost
        else:
            self._costs.append(cost)
        self._flight = None

    def _cost(self, flight: _Flight) -> float:
        beyond = flight.seconds - flight.steps * self._quiet_s(flight.steps) if self._is_known() else 0.0
        return max(flight.waited_s, beyond, 0.0)

    def _is_known(self) -> bool:
        return len(self._quiet) >= QUIET_STEPS_MIN

    def _quiet_s(self, steps: int) -> float:
        """Returns how long one of ``steps`` quiet steps takes.

        The median over runs of steps, as long as there are five of them: it passes over an evaluation now and then as a
        median does, but counts what a few steps in each run take longer as a mean does, as in the sum that it is
        compared with.
        """
        quiet = list(self._quiet)
        length = max(1, min(steps, len(quiet) // 5))
        runs = [sum(quiet[end - length : end]) for end in range(len(quiet), length - 1, -length)]
        return median(runs) / length

    def measured(self) -> tuple[float, float, float] | None:
        """A quiet step, the cost of a save and its lag, in seconds; ``None`` before a save was measured.

        While the first save is in flight, it counts with what it has cost so far.
        """
        flight, known = self._flight, list(self._costs)
        if flight is not None and flight.is_ahead:
            flight = None
        if known:
            cost = median(known)
        elif self._first is not None:
            cost = self._first
        elif flight is not None:
            cost = self._cost(flight)
        else:
            return None
        lags = list(self._lags) or ([] if flight is None else [self._clock() - flight.began])
        if self._is_known():
            step = self._quiet_s(1)
        elif self._noted is not None:
            step = self._noted.step_s
        elif flight is not None and flight.steps:
            step = flight.seconds / flight.steps
        else:
            step = median(self._quiet) if self._quiet else 0.0
        return None if step <= 0 or not lags else (step, cost, median(lags))

    def figure(self, *, mtbf_s: float, restart_s: float, at_least: int, at_most: int | None) -> Figure | None:
        """The interval that wastes least by what was measured; ``None`` before a save was measured."""
        measured = self.measured()
        if measured is None:
            return None
        return best(measured, mtbf_s=mtbf_s, restart_s=restart_s, at_least=at_least, at_most=at_most)


def best(
    measured: tuple[float, float, float], *, mtbf_s: float, restart_s: float, at_least: int, at_most: int | None
) -> Figure:
    """The interval that wastes least, by a quiet step, the cost of a save and its lag, in seconds."""
    step_s, cost_s, lag_s = measured
    steps, waste, limit = native.best_interval(
        step_s=step_s,
        cost_s=cost_s,
        lag_s=lag_s,
        mtbf_s=mtbf_s,
        restart_s=restart_s,
        at_least=at_least,
        at_most=at_most,
    )
    return Figure(steps, step_s, cost_s, lag_s, mtbf_s, waste, limit)


def mean_time_between_failures(expected_s: float, restarts: int, trained_s: float) -> float:
    """The mean time between failures, in seconds, by what the user expects and what was seen."""
    return native.mean_time_between_failures(expected_s, restarts, trained_s)


def time_of(text: str) -> float:
    """The seconds that a text such as ``"6h"`` says.

    Raises:
        Invalid: For what is no time above zero.
    """
    return native.time_of(text)


def spoken(seconds: float) -> str:
    """A time for people: ``0.25 ms``, ``12 s``, ``6 h``, with three digits at most."""
    units: Iterable[tuple[float, str]] = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))
    for size, unit in units:
        if seconds >= 2 * size or (unit == "s" and seconds >= 1):
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else "1 s"
