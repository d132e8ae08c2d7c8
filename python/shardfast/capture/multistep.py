"""Captures ahead of a save: what the optimizers step is copied in the steps before it, and rolled forward.

A window opens some steps before a save is due. Between steps blocks of parameters and moments are copied; behind each
step the gradients that it used are copied, and applied to the blocks. The save finds these bytes on the host, and
proves that they are those of the tensors. What is not known to have the same bits is captured in one step: see
``over=`` of :class:`~shardfast.Checkpointer`.
"""

from __future__ import annotations

import contextlib
import enum
import json
import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from .. import adapters as frameworks
from .. import native
from ..errors import Error, Invalid
from ..state.catalog import Ints, Refused
from ..state.entries import BundleEntry, units_of, walk_units
from .stepping import Steps

_log = logging.getLogger("shardfast")

REHEARSAL_STEPS = 2
"""Steps that a rehearsal sees before its save: with one, implementations that differ later could agree."""


class Phase(enum.Enum):
    """Phases of captures ahead of saves; each says why a save in it is captured in one step."""

    OFF = "over=1 says so"
    UNREHEARSED = "nothing was rehearsed yet"
    REHEARSING = "its optimizers are being rehearsed"
    READY = ""
    OPEN = "its window is open"
    REFUTED = "a save found that tensors were changed by something else than steps of the optimizer"


def _why(error: Exception) -> str:
    """An error as a reason: ours says what is wrong by itself."""
    return str(error) if isinstance(error, (Error, Refused)) else f"{type(error).__name__}: {error}"


def _spoken(size: float) -> str:
    """Bytes for people, with three digits: ``31.5 GB``."""
    unit, name = next((one for one in ((1e9, "GB"), (1e6, "MB")) if size >= one[0]), (1e3, "kB"))
    return f"{size / unit:.3g} {name}"


@dataclass(eq=False, repr=False)
class Ahead:
    """The captures of one checkpointer.

    Args:
        over: Steps over which a save is captured.

    Attributes:
        reason: Why saves are captured in one step now; empty if they are not.
    """

    over: int
    reason: str = ""
    _variants: dict[Hashable, tuple[str | None, str]] = field(default_factory=dict)
    _of: object = None
    _steps: Sequence[Steps] = ()
    _window: native.Window | None = None
    _phase: Phase = Phase.OFF
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _classes: Sequence[Hashable] = ()
    _is_waited: bool = False
    _pace: tuple[float, float] | None = None
    # Steps between saves, as the last one was followed by; steps to the next save at the last call.
    _interval: int = 0
    _left: int = 0
    # Why a part is captured in one step where the others are not.
    _rest: str = ""
    _figures: deque[dict[str, float]] = field(default_factory=lambda: deque(maxlen=64))
    _saves: int = 0
    _stamps: deque[float] = field(default_factory=lambda: deque(maxlen=64))

    def __post_init__(self) -> None:
        if isinstance(self.over, bool) or not isinstance(self.over, int) or self.over < 1:
            raise Invalid(f"over={self.over!r}: expected a number of steps of at least 1")
        self._enter(Phase.OFF if self.over == 1 else Phase.UNREHEARSED)

    def _enter(self, phase: Phase) -> None:
        """Goes on in another phase, unless a thread that concludes saves has found the captures refuted."""
        with self._lock:
            self._phase = Phase.REFUTED if self._phase is Phase.REFUTED else phase
            if self._phase is not Phase.OPEN:
                self.reason = self._phase.value

    @property
    def is_off(self) -> bool:
        """Whether no window is ever opened."""
        return self._phase is Phase.OFF

    @property
    def is_open(self) -> bool:
        """Whether something is being captured ahead of a save now."""
        return self._window is not None

    @property
    def steps(self) -> int:
        """Steps over which the next save is captured: no more than there are between saves."""
        return min(self.over, self._interval) if self._interval else self.over

    def _step_ms(self) -> float:
        """Milliseconds of a step of the training; 0 if that is not known."""
        stamps = list(self._stamps)  # the training adds to it meanwhile
        lasted = [later - earlier for earlier, later in pairwise(stamps)]
        return statistics.median(lasted) * 1e3 if lasted else 0.0

    def opens(self, left: int | None) -> bool:
        """Whether a window opens now, so many steps before the next save that is due."""
        if self.is_off or left is None:
            return False
        self._interval = left if left >= self._left else self._interval  # the first call behind a save
        self._left = left
        if self._window is not None:
            return False
        if self._interval == 1:
            self.reason = "every step is saved"
            return False
        return left == self.steps - 1 or (left == REHEARSAL_STEPS and self._phase is Phase.UNREHEARSED)

    def open(
        self, session: native.Session, described: native.Described, owner: object, state: object, left: int
    ) -> None:
        """Opens a window over what the optimizers of the state step.

        ``described`` are the leaves of that state, ``owner`` keeps their memory allocated.
        """
        with self._guarded():
            if self._phase is Phase.REFUTED:
                raise Refused(self._phase.value)
            if self._of is not described or not all(steps.is_current() for steps in self._steps):
                entries = walk_units(list(units_of(state)), frameworks.active()).entries
                found = (entry.bundle.steps() for entry in entries if isinstance(entry, BundleEntry))
                self._steps, self._of = [steps for steps in found if steps is not None], described
            known = {unit: self._variants.get(unit[:6]) for steps in self._steps for unit in steps.units}
            refused = [steps.reason for steps in self._steps if steps.reason]
            if not known:
                raise Refused(next(iter(refused), "the state has no optimizer that was stepped"))
            rehearses = None in known.values()
            if rehearses:
                self._enter(Phase.UNREHEARSED)
                if left != REHEARSAL_STEPS:
                    takes = f"which takes {REHEARSAL_STEPS} steps before a save"
                    raise Refused(f"its optimizers are to be rehearsed first, {takes}")
            classes: dict[Hashable, tuple[int, tuple[str, str, str, str, bool | None, str | None]]] = {}
            units: list[tuple[int, int, Ints]] = []
            numbers: list[list[int]] = []
            for steps in self._steps:
                numbers.append([])
                for unit in steps.units:
                    kind = unit[:6]
                    variant = None if rehearses else self._variants[kind][0]
                    if not rehearses and variant is None:
                        numbers[-1].append(-1)
                        continue
                    number, _ = classes.setdefault(kind, (len(classes), (*kind[:5], variant)))
                    numbers[-1].append(len(units))
                    units.append((number, unit.numel, unit.addresses))
            if not units:
                raise Refused(next(why for name, why in self._variants.values() if name is None))
            for steps, of in zip(self._steps, numbers, strict=True):
                steps.begin(left, of)
            streams = self._streams()
            given = [said for _, said in classes.values()]
            window = native.Window(session, described, owner, given, units, streams, self._is_waited, self._pace)
            window.go_on(streams)
            self._window, self._classes = window, list(classes)
            self._enter(Phase.REHEARSING if rehearses else Phase.OPEN)
            without = [variant[1] for variant in known.values() if variant is not None and variant[0] is None]
            self._rest = next(iter([*without, *refused]), "")

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Lets go of what is held after an exception, and notes it as the reason: the training goes on."""
        try:
            yield
        except Exception as error:
            self.release(_why(error))
            self.reason = _why(error)

    def _streams(self) -> dict[int, int]:
        """The streams on which the optimizers' devices work now."""
        return {device: stream for steps in self._steps for device, stream in steps.streams().items()}

    def stepping(self, optimizer: object) -> None:
        """An optimizer is about to step."""
        if self._window is not None:
            with self._guarded():
                self._window.stepping(self._streams())
                for steps in self._steps:
                    steps.stepping(optimizer)

    def stepped(self, optimizer: object) -> None:
        """An optimizer has stepped."""
        if self._window is not None:
            with self._guarded():
                streams = self._streams()
                for steps in self._steps:
                    applied, scalars = steps.taken(optimizer)
                    if applied:
                        self._window.stepped(applied, scalars, steps.place, streams)

    def release(self, reason: str) -> None:
        """Gives back what is held: the next save is captured in one step."""
        if self._window is not None:
            self._window.release(reason)
            self._window = None
            self._enter(Phase.UNREHEARSED if self._phase is Phase.REHEARSING else Phase.READY)
            self.reason = reason

    def take(self, described: native.Described) -> native.Window | None:
        """Returns what was captured ahead of the save of what is described, which begins now; if anything was."""
        phase = self._phase
        if phase is Phase.REFUTED:
            self.release(phase.value)
        elif described is not self._of:
            self.release("the state has other tensors than when its capture began")
        window, self._window = self._window, None
        if window is None:
            return None
        if phase is Phase.OPEN:
            self._enter(Phase.READY)
            return window
        self._enter(Phase.UNREHEARSED)
        try:
            found = window.rehearse(self._streams())
        except Exception as error:  # the save goes on
            self.reason = _why(error)
            return None
        self._is_waited = self._is_waited or not window.are_gradients_left()
        for kind, (name, why, is_known) in zip(self._classes, found, strict=True):
            if is_known:
                self._variants[kind] = (name, why)
        unknown = [why for _, why, is_known in found if not is_known]
        if not unknown:
            self._enter(Phase.READY)
        without = [why for name, why, is_known in found if is_known and name is None]
        if unknown or len(without) == len(found):
            self.reason = [*unknown, *without][0]
        if without:
            _log.info("captured in one step: %s", without[0])
        return None

    @staticmethod
    def waited_in(window: native.Window) -> float:
        """Seconds that the training is known to have waited for copies in that window."""
        figures = json.loads(window.figures())
        return float(figures["wait_ms"] + figures["gradient_ms"]) / 1e3

    def ended(self, window: native.Window, of: dict[str, Any], *, is_committed: bool) -> None:
        """A save with what was captured ahead has ended, and did this."""
        figures = {name: float(figure) for name, figure in of.items() if name != "reason"}
        self._pace = window.pace() or self._pace
        if window.is_refuted() or self._phase is Phase.REFUTED:
            self._enter(Phase.REFUTED)
        elif is_committed and figures["held_bytes"]:
            self._saves += 1
            self._figures.append(figures)
            self._rest = window.reason() or self._rest
        elif is_committed:
            self.reason = window.reason() or "nothing was copied in time"

    def figures(self) -> dict[str, float]:
        """Returns medians of the figures of the last saves that found anything captured; empty without such a save."""
        names = self._figures[0] if self._figures else {}
        return {name: statistics.median(one[name] for one in self._figures) for name in names}

    def passed(self) -> None:
        """A step of the training is over: copies go on."""
        self._stamps.append(time.monotonic())
        if self._phase is Phase.REFUTED:
            self.release(Phase.REFUTED.value)
        if self._window is not None:
            with self._guarded():
                self._window.go_on(self._streams())

    def __str__(self) -> str:
        now = f"in one step, because {self.reason}" if self.reason else ""
        if not self._figures:
            return now or f"over {self.steps} steps from now on"
        of, step_ms = self.figures(), self._step_ms()
        copying = f"copying takes {of['copy_ms'] / step_ms:.1f}; " if step_ms else ""
        rest = f"; the rest in one step, because {self._rest}" if self._rest else ""
        return (
            f"over {of['steps']:.0f} steps: {copying}{_spoken(of['held_bytes'])} replayed and proven in each of "
            f"{self._saves} {'save' if self._saves == 1 else 'saves'}{rest}{'; now ' if now else ''}{now}"
        )
