"""Signals that tell a training to stop: all ranks do so after the same step, whichever of them was told."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from . import adapters, interval, native
from .errors import Error, Invalid
from .session import current, group_of

_log = logging.getLogger("shardfast")

FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP)
"""Signals of a program's own faults: a handler that returns from one runs into it again."""

JOB_END = "SLURM_JOB_END_TIME"
"""Variable with the time at which Slurm ends the job, in seconds since 1970."""


_told: set[Told] = set()
"""Those that take signals in this process."""

_untaken: set[int] = set()
"""Signals that came after the last step of a checkpointer: for the next one that takes them."""


def _in_forked_child() -> None:
    """Lets a forked process end by its parent's ``SIGTERM`` alone, as at the end of ``multiprocessing``'s programs.

    A worker of a data loader goes on where all processes of the job get the signal.
    """
    for told in _told:
        told.forked()


os.register_at_fork(after_in_child=_in_forked_child)


def outlive_signals(worker: int = 0) -> None:
    """Lets a spawned worker of a data loader outlive ``SIGTERM``, ``SIGUSR1`` and ``SIGUSR2``.

    Schedulers send these to all processes of a job. The worker still ends when its training ends it, or has ended.
    Forked workers need no such call if the ``Checkpointer`` with ``on_signal`` was made before them.

    Args:
        worker: Number of the worker, which ``DataLoader`` gives to its ``worker_init_fn``.
    """
    native.outlive([signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2], os.getppid(), 0)


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
        if isinstance(name, bool) or number in FAULTS:
            raise Invalid(f"on_signal={name!r}: expected a signal that others send, such as 'SIGUSR1' or 'SIGTERM'")
        if number in (signal.SIGKILL, signal.SIGSTOP):
            raise Invalid(f"on_signal={name!r}: no program can catch it: let the scheduler send another one before it")
        found.append(number)
    return tuple(dict.fromkeys(found))


def seconds_of(within: Any) -> float | Path | None:
    """The seconds that a program has after the signal, or the file that tells when the program ends.

    Raises:
        Invalid: For what is no time above zero, and no path.
    """
    if within is None:
        return None
    if isinstance(within, os.PathLike) or (isinstance(within, str) and "/" in within):
        return Path(within)
    if isinstance(within, str):
        try:
            return interval.time_of(within)
        except Invalid as error:
            raise Invalid(f"within={error}") from None
    if isinstance(within, bool) or not isinstance(within, (int, float)) or not 0 < within < float("inf"):
        what = "seconds, '90s', or the path of a file ('./end') with the time of the end in seconds since 1970"
        raise Invalid(f"within={within!r}: expected how long the program has after the signal: {what}")
    return float(within)


def lasts_s_of(report: dict[str, Any]) -> float | None:
    """The time from the call of a save to its commit, by its report, in seconds; ``None`` if it has not committed."""
    committed_ms = report["phases_ms"].get("committed")
    return None if committed_ms is None else committed_ms / 1e3


def asked(on_signal: Any, within: Any, raise_stopping: bool) -> tuple[tuple[signal.Signals, ...], float | Path | None]:
    """The signals that a training is told to stop by, and how long it has then.

    Raises:
        Invalid: For what is no signal and no time, and for what says how a training stops that nothing tells to.
    """
    if on_signal is not None:
        return signals_of(on_signal), seconds_of(within)
    for name, is_given in (("within", within is not None), ("raise_stopping", raise_stopping)):
        if is_given:
            raise Invalid(f"{name}=: expected on_signal= beside it: without, nothing tells the training to stop")
    return (), None


handler_of: Callable[[int], Any] = getattr(sys.modules.get("_signal"), "getsignal", signal.getsignal)
"""The handler of a signal, without the search for an enum of it that takes most of ``signal.getsignal``."""


class Told:
    """The signals of one checkpointer, and the agreement of the ranks behind them.

    Handlers that were there before are called after this one, and so are those that others set later in its place: the
    next step takes the signal again. A forked process, such as a worker of a data loader,
    takes the signal and does nothing more.

    Args:
        signals: What the training is told to stop by.
        within: How long the program has after the signal, in seconds; or a file with the time of its end.

    Raises:
        Invalid: Outside of the main thread, where Python sets no handlers.
    """

    def __init__(self, signals: tuple[signal.Signals, ...], within: float | Path | None) -> None:
        self._within, self._process = within, os.getpid()
        self._at: float | None = None
        # What the last save took, from its call to its commit.
        self._lasts_s: float | None = None
        self._session: native.Session | None = None
        self._job: Any = None
        self._agreement: native.Stopping | None = None
        self._said = self._is_handling = self._has_stopped = False
        self._before: dict[int, Any] = {}
        self._warned: set[str] = set()
        self._came: set[int] = set()
        if threading.current_thread() is not threading.main_thread():
            names = ", ".join(one.name for one in signals)
            raise Invalid(f"on_signal={names}: Python sets handlers of signals in the main thread: make it there")
        # One object, and plain numbers: each step looks whether the handlers are still these.
        self._mine, self._numbers = self._handle, tuple(map(int, signals))
        for number in self._numbers:
            self._before[number] = signal.signal(number, self._mine)
        # One that was never closed would keep its signal to itself.
        untaken = _untaken.union(*(one._came for one in _told if not one._has_stopped))
        _told.add(self)
        if came := untaken.intersection(signals):
            _untaken.difference_update(came)
            self._came, self._at = came, time.time()

    def forked(self) -> None:
        """Prepares a process that was just forked for signals."""
        term = signal.SIGTERM
        if term in self._before:
            if self._before[term] == signal.SIG_DFL:
                native.outlive([term], self._process)
            adapters.call_in_worker(functools.partial(native.outlive, [term], self._process, 0))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._process:
            self._came.add(number)
            self._at = self._at or time.time()
            self._tell()
        before: Callable[[int, FrameType | None], Any] | Any = self._before.get(number)
        # That of Ctrl-C ends the program at once. One that was set later may call this one.
        if callable(before) and before is not signal.default_int_handler and not self._is_handling:
            self._is_handling = True
            try:
                before(number, frame)
            finally:
                self._is_handling = False

    def _take_again(self) -> None:
        """Puts this handler in front of one that was set later, such as that of a trainer."""
        for number in self._numbers:
            if handler_of(number) is not self._mine and threading.current_thread() is threading.main_thread():
                self._before[number] = signal.signal(number, self._mine)

    def _tell(self) -> None:
        if self._agreement is not None:
            with contextlib.suppress(Error):  # a process without threads left is told again by its next step
                self._agreement.tell()

    def passed(self, timeout_s: float, process_group: Any = None) -> bool:
        """Counts a step of the training; whether all ranks stop after it."""
        job = group_of(process_group)
        if self._session is None or job is not self._job or os.getpid() != self._process:
            session = current(timeout_s, process_group)
            if self._session is not session:
                if self._agreement is not None:
                    self._agreement.end()
                self._session, self._agreement = session, native.Stopping(session, timeout_s)
            self._job = job
        self._take_again()
        if self._at is not None:
            self._tell()
        assert self._agreement is not None
        is_last = self._has_stopped = self._agreement.passed()
        failure = None if is_last or self._said else self._agreement.failure()
        if failure is not None:
            self._said = True
            _log.error("the training was told to stop, but its ranks cannot agree on a step: %s", failure)
        return is_last

    def left_s(self) -> float | None:
        """How long the program still has, in seconds, as far as that is known."""
        ends = [self._time_of(JOB_END, os.environ.get(JOB_END, ""))]
        if isinstance(self._within, Path):
            text = ""
            with contextlib.suppress(OSError, ValueError):  # it is not there yet, or no text
                if self._within.is_file():  # a pipe would wait for its writer
                    text = self._within.read_text()
            ends.append(self._time_of(f"within={str(self._within)!r}", text))
        elif self._within is not None:
            ends.append((self._at or time.time()) + self._within)
        known = [end for end in ends if end is not None]
        return min(known) - time.time() if known else None

    def say(self, url: str, step: int) -> None:
        """Logs that all ranks save ``step``, and if that takes longer than is left, by what the last save took."""
        left_s = self.left_s()
        said = "" if left_s is None else f", in {interval.spoken(left_s)}" if left_s > 0 else ", and its time is over"
        _log.warning("%s: told to stop%s: all ranks save step %d", url, said, step)
        lasts_s = self._lasts_s
        if left_s is not None and lasts_s is not None and lasts_s > left_s:
            _log.error(
                "%s: step %d will not be durable in time: a save of this run takes about %s, and %s are left",
                url,
                step,
                interval.spoken(lasts_s),
                interval.spoken(max(left_s, 0.0)),
            )

    def saved(self, url: str, report: dict[str, Any]) -> None:
        """Notes what a save took; warns, once, if that is longer than the program has after a signal."""
        lasts_s = self._lasts_s = lasts_s_of(report) or self._lasts_s
        if not isinstance(self._within, float) or lasts_s is None or lasts_s <= self._within or url in self._warned:
            return
        self._warned.add(url)
        _log.warning(
            "%s: a save of this run takes about %s, and within= leaves %s after a signal: the last save will not be "
            "durable in time",
            url,
            interval.spoken(lasts_s),
            interval.spoken(self._within),
        )

    def _time_of(self, name: str, text: str) -> float | None:
        """The time that a text tells; ``None`` for an empty text, and, with a warning, for one that tells none."""
        if not text.strip():
            return None
        with contextlib.suppress(ValueError):
            if math.isfinite(end := float(text)):
                return end
        if name not in self._warned:
            self._warned.add(name)
            _log.warning("%s: expected a time in seconds since 1970, found %r: it is ignored", name, text[:60])
        return None

    def leave(self) -> Callable[[], None]:
        """Takes no more part in an agreement; returns :meth:`end`.

        Signals are still taken until then: what is in flight must not die of one.
        """
        if self._agreement is not None and os.getpid() == self._process:
            self._agreement.end()
        return self.end

    def end(self) -> None:
        """Gives the signals back to the handlers that were there before, unless others took them since.

        Once the training has stopped, a signal without one is still caught: schedulers repeat it, and it would end the
        program before its own end.
        """
        if os.getpid() != self._process:
            return
        self.leave()
        _told.discard(self)
        if self._at is not None and not self._has_stopped:
            _untaken.update(self._came)
            why = "could not be agreed on" if self._said else "came after the last step of this checkpointer"
            _log.warning(
                "%s %s, so that it stopped nothing: the next Checkpointer of this process with that on_signal stops "
                "after its first step",
                *(", ".join(signal.Signals(number).name for number in sorted(self._came)), why),
            )
        for number, before in self._before.items():
            for other in _told:  # that was made later gives the signal back past this one
                if other._before.get(number) is self._mine:
                    other._before[number] = before
            with contextlib.suppress(ValueError):  # not the main thread
                if handler_of(number) is not self._mine:
                    continue
                if callable(before) or before == signal.SIG_IGN or not self._has_stopped:
                    signal.signal(number, signal.SIG_DFL if before is None else before)
                else:  # an interpreter that ends takes its handlers away, but not this
                    atexit.register(signal.signal, number, signal.SIG_IGN)
