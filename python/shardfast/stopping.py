"""Signals that tell a training to stop: all ranks do so after the same step, whichever of them was told."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from . import interval, native
from .errors import Error, Invalid

_log = logging.getLogger("shardfast")

JOB_END = "SLURM_JOB_END_TIME"
"""Variable with the time at which Slurm ends the job, in seconds since 1970."""


class Stopping(Exception):
    """Ends the loop of a training that was told to stop, once the state is durable.

    Attributes:
        step: The step after which all ranks stop, whose checkpoint is durable.
    """

    def __init__(self, step: int, url: str) -> None:
        super().__init__(step, url)
        self.step = step

    def __str__(self) -> str:
        step, url = self.args
        return f"told to stop: step {step} of {url} is durable"


def signals_of(on_signal: Any) -> tuple[signal.Signals, ...]:
    """The signals that ``on_signal`` names.

    Raises:
        Invalid: For what is no signal, and for one that no program can catch.
    """
    names = [on_signal] if isinstance(on_signal, (str, int)) else on_signal
    if not isinstance(names, Sequence) or not names:
        raise Invalid(f"on_signal={on_signal!r}: expected the name of a signal, such as 'SIGUSR1', or several")
    found = []
    for name in names:
        try:
            number = signal.Signals[name] if isinstance(name, str) else signal.Signals(name)
        except (KeyError, ValueError, TypeError):
            raise Invalid(
                f"on_signal={name!r}: expected the name of a signal, such as 'SIGUSR1' or 'SIGTERM'"
            ) from None
        if number in (signal.SIGKILL, signal.SIGSTOP):
            raise Invalid(f"on_signal={name!r}: no program can catch it: let the scheduler send another one before it")
        found.append(number)
    return tuple(dict.fromkeys(found))


def seconds_of(within: Any) -> float | None:
    """The seconds that a program has after the signal.

    Raises:
        Invalid: For what is no time above zero.
    """
    if within is None:
        return None
    if isinstance(within, str):
        try:
            return interval.time_of(within)
        except Invalid as error:
            raise Invalid(f"within={error}") from None
    if isinstance(within, bool) or not isinstance(within, (int, float)) or not 0 < within < float("inf"):
        raise Invalid(f"within={within!r}: expected how long the program has after the signal: seconds, or '90s'")
    return float(within)


class Told:
    """The signals of one checkpointer, and the agreement of the ranks behind them.

    Handlers that were there before are called after this one. A forked process, such as a worker of a data loader,
    takes the signal and does nothing more.

    Args:
        signals: What the training is told to stop by.
        within_s: How long the program has after the signal, in seconds.

    Raises:
        Invalid: Outside of the main thread, where Python sets no handlers.
    """

    def __init__(self, signals: tuple[signal.Signals, ...], within_s: float | None) -> None:
        self._within_s, self._process = within_s, os.getpid()
        self._at: float | None = None
        self._session: native.Session | None = None
        self._agreement: native.Stopping | None = None
        self._said = False
        self._before: dict[int, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            names = ", ".join(one.name for one in signals)
            raise Invalid(f"on_signal={names}: Python sets handlers of signals in the main thread: make it there")
        for number in signals:
            self._before[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._process:
            self._at = self._at or time.time()
            self._tell()
        before: Callable[[int, FrameType | None], Any] | Any = self._before.get(number)
        # That of Ctrl-C ends the program at once.
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)

    def _tell(self) -> None:
        if self._agreement is not None:
            with contextlib.suppress(Error):  # a process without threads left is told again by its next step
                self._agreement.tell()

    def passed(self, session: native.Session, timeout_s: float) -> bool:
        """Counts a step of the training; whether all ranks stop after it."""
        if self._session is not session:
            if self._agreement is not None:
                self._agreement.end()
            self._session, self._agreement = session, native.Stopping(session, timeout_s)
        if self._at is not None:
            self._tell()
        assert self._agreement is not None
        is_last = self._agreement.passed()
        failure = None if is_last or self._said else self._agreement.failure()
        if failure is not None:
            self._said = True
            _log.error("the training was told to stop, but its ranks cannot agree on a step: %s", failure)
        return is_last

    def left_s(self) -> float | None:
        """How long the program still has, in seconds, as far as that is known."""
        ends = []
        if self._within_s is not None:
            ends.append((self._at or time.time()) + self._within_s)
        with contextlib.suppress(KeyError, ValueError):
            ends.append(float(os.environ[JOB_END]))
        return min(ends) - time.time() if ends else None

    def end(self) -> None:
        """Gives the signals back to the handlers that were there before, unless others took them since.

        Once the training was told, a signal without one is still caught: schedulers repeat it, and it would end the
        program before its own end.
        """
        if os.getpid() != self._process:
            return
        if self._agreement is not None:
            self._agreement.end()
        for number, before in self._before.items():
            with contextlib.suppress(ValueError):  # not the main thread
                is_ours = signal.getsignal(number) == self._handle
                if is_ours and (callable(before) or self._at is None):
                    signal.signal(number, signal.SIG_DFL if before is None else before)
