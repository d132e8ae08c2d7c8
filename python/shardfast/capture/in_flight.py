"""Saves in flight: changes of tensors that a save still copies wait for it; other changes are detected.

The list of saves is one for the whole process: a framework announces a change without naming a save, and the
interpreter waits for all saves when it ends.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .. import adapters as frameworks
from .. import native
from ..errors import Error, Invalid, Unavailable
from ..nesting import call, work
from ..progress import Progress, size
from ..state.description import Watched
from .multistep import Ahead

_log = logging.getLogger("shardfast")

GLANCE_S = 0.1
"""How often the thread that watches saves checks whether the process ends."""

REST_S = 2.0
"""How long an ending process waits for what its saves still have to say of themselves."""


class Pending:
    """A save in flight: first *requested*, then *staged* (the state may change), then *committed* (it is durable).

    Attributes:
        url: The checkpoint.
    """

    def __init__(
        self,
        url: str,
        pending: native.Pending,
        watched: Sequence[Watched],
        window: native.Window | None = None,
    ) -> None:
        self.url = url
        self.window = window
        self.ahead: dict[str, Any] | None = None
        self._pending = pending
        self._watched = watched
        self._broken: str | None = None
        self._lock = threading.Lock()
        self._failure: str | None = None
        self._is_raised = False

    def staged(self, timeout_s: float | None = None) -> None:
        """Waits until everything is copied: the state may change in any way.

        Raises:
            Error: What made the save fail, the same on every rank; :class:`Unavailable` if ``timeout_s`` is over first.
        """
        with call("Pending.staged()"), self._raising():
            self.mind(timeout_s)

    def committed(self, timeout_s: float | None = None) -> None:
        """Waits until the checkpoint is durable and visible.

        Raises:
            Error: What made the save fail, the same on every rank; :class:`Unavailable` if ``timeout_s`` is over first.
        """
        with call("Pending.committed()"):
            self.waited(timeout_s)

    def waited(self, timeout_s: float | None = None) -> None:
        """Does what :meth:`committed` does, inside of a call."""
        with self._raising():
            self.end(timeout_s)

    @contextlib.contextmanager
    def _raising(self) -> Iterator[None]:
        try:
            yield
        except Error:
            self._is_raised = self._pending.done() or self._broken is not None
            raise

    def done(self) -> bool:
        """Returns whether the save has ended, with or without success."""
        return self._pending.done()

    def note(self, notes: Mapping[str, str]) -> None:
        """Sets notes that the checkpoint records, if rank 0 sets them before it begins to commit."""
        for name, text in notes.items():
            self._pending.note(name, text)

    def committed_notes(self) -> dict[str, str]:
        """Shardfast's own notes of the checkpoint, after the commit; the same on every rank."""
        return self._pending.committed_notes()

    @property
    def report(self) -> dict[str, Any]:
        """Returns what this rank's part of the save did so far.

        A dict with the milliseconds from the call to the end of each phase (``phases_ms``), what this rank wrote
        (``bytes_written``, ``files_written``), and whether ``replicas`` were compared. The guide's page on tuning
        explains each field and phase.
        """
        report: dict[str, Any] = json.loads(self._pending.report())
        window = self.window
        if window is not None:
            self.ahead = {**json.loads(window.figures()), "reason": window.reason()}
        if self.ahead is not None:
            report["ahead"] = self.ahead
        return report

    @property
    def progress(self) -> Progress:
        """Returns the bytes of this rank's part of the save so far, in all, staged and written.

        The guide's page on running jobs explains ``bytes``, ``staged`` and ``written``.
        """
        return Progress(*self._pending.moved())

    def __repr__(self) -> str:
        """One line: the checkpoint, and how far the save is."""
        try:
            report, progress = json.loads(self._pending.report()), self.progress
        except Error:  # of another process
            return f"<save of {self.url}: begun by another process>"
        phases: dict[str, float] = report["phases_ms"]
        if self.done():
            try:
                self._pending.committed(0.0)
            except Error as error:
                return f"<save of {self.url}: failed: {str(error).splitlines()[0]}>"
            return f"<save of {self.url}: committed after {phases['committed'] / 1e3:.1f} s>"
        if "durable" in phases:
            state = f"{size(progress.written)} written, waiting for the commit"
        elif "staged" in phases:
            state = f"staged, {size(progress.written)} of {size(progress.bytes)} written"
        else:
            state = f"{size(progress.staged)} of {size(progress.bytes)} staged, {size(progress.written)} written"
        failures = len(report["failures"]) + report["failures_left_out"]
        retries = f", {failures} failure{'s' if failures > 1 else ''} of the storage" if failures else ""
        return f"<save of {self.url}: {state}{retries}>"

    def _confirm(self) -> None:
        """Checks once, after the save is staged, whether its tensors were modified; the first caller does it."""
        with self._lock:
            if not self._watched:
                return
            changed = [change for one in self._watched for change in one.changes()]
            self._watched = ()
            if not changed:
                self._pending.confirm_unmodified()
                return
            more = f" (and {len(changed) - 3} more)" if len(changed) > 3 else ""
            self._broken = (
                f"{self.url}: {', '.join(changed[:3])}{more} during capture: call staged() on the save before "
                "modifying tensors other than by an optimizer step or load_state_dict"
            )
            self._pending.confirm_unmodified(Invalid.__name__, self._broken)

    def mind(self, timeout_s: float | None = None) -> None:
        """Does what :meth:`staged` does for a caller that does not report failures."""
        try:
            self._pending.staged(timeout_s)
        except Error:
            if self._pending.done():
                self._watched = ()
            raise
        with work("a check whether tensors changed"):
            self._confirm()
        if self._broken is not None:
            raise Invalid(self._broken)

    def end(self, timeout_s: float | None = None) -> None:
        """Does what :meth:`committed` does, for a thread that no caller waits for."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        if self.is_watched:
            self.mind(timeout_s)
        self._pending.committed(None if until is None else max(until - time.monotonic(), 0.0))

    def stalled(self, seconds: float, *, in_call: bool = True) -> None:
        """Notes that the program has waited in the save's call, or later before it could change the state."""
        with contextlib.suppress(Error):  # of another process
            (self._pending.stalled if in_call else self._pending.waited)(seconds)

    def fail(self, error: Exception) -> None:
        """Notes an error after the save, so that the log shows it if :meth:`raised` is not called."""
        self._failure = str(error)

    def raised(self) -> None:
        """Notes that a caller has got the error."""
        self._is_raised = True

    def over(self, timeout_s: float) -> None:
        """Waits until nothing is done for a save any more that has ended."""
        with contextlib.suppress(Error):  # of another process
            self._pending.over(timeout_s)

    @property
    def is_watched(self) -> bool:
        """Whether tensors that must not change yet are still being copied."""
        return bool(self._watched)

    def conclude(self) -> None:
        """Waits until the save has ended. Logs its error, unless a caller has got it."""
        was_raised = self._is_raised
        try:
            self.waited()
        except Error as error:
            self._failure = self._failure or str(error)
        if self._failure is not None and not was_raised:
            _log.error("the save of %s failed: %s", self.url, self._failure)
        self._is_raised = True

    def __del__(self) -> None:
        try:
            if not in_flight.is_over and not self._is_raised and self._pending.done():
                self.conclude()
        except Exception:  # a save that never began or of another process, or names that an ending Python cleared
            return


class InFlight:
    """The saves of a process that have not ended.

    Attributes:
        waited_s: Seconds that :meth:`staged` has waited in all.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Starts with none: a forked process has neither its parent's saves nor the thread that watches them."""
        self._lock = threading.Lock()
        self._running: tuple[Pending, ...] = ()
        self._alive: weakref.WeakSet[Pending] = weakref.WeakSet()
        self._unstaged: tuple[Pending, ...] = ()
        self._watched: queue.SimpleQueue[Pending | None] = queue.SimpleQueue()
        self._watcher: threading.Thread | None = None
        # Gone through twice in each step of an optimizer: a `WeakSet` takes more time than the rest of the hooks.
        self._aheads: tuple[weakref.ref[Ahead], ...] = ()
        self.is_over = False
        self.waited_s = 0.0

    def prepare(self) -> None:
        """Starts the thread that watches saves, before the first one needs it."""
        with self._lock:
            self._start()

    def _start(self) -> None:
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, name="shardfast-watch", daemon=True)
            self._watcher.start()

    def add(self, pending: Pending) -> None:
        """Watches a save from now on: until it is staged, and at the end of the process."""
        with self._lock:
            before = self._running  # unreferenced saves are freed with this frame, not under the lock
            self._running = (*(one for one in before if not one.done()), pending)
            self._alive.add(pending)
            if pending.is_watched:
                self._unstaged = (*self._unstaged, pending)
                self._start()
                self._watched.put(pending)

    def staged(self) -> None:
        """Waits until no save copies tensors that are about to change. A failed save raises its error itself."""
        if not self._unstaged:
            return
        for pending in self._unstaged:
            began = time.perf_counter()
            try:
                pending.mind()
            except Error as error:
                _log.debug("%s: %s", pending.url, error)
            waited_s = time.perf_counter() - began
            pending.stalled(waited_s, in_call=False)
            self.waited_s += waited_s

    def settled(self, run: str) -> None:
        """Waits until no save into this run is in flight, such as one of a checkpointer that was dropped."""
        for pending in self._running:
            if pending.url.rpartition("/")[0] == run:
                with contextlib.suppress(Error):  # it is raised, or logged, by itself
                    pending.end()

    def changing(self, by: str) -> None:
        """Tensors are about to change that saves copy.

        ``by`` says what changes them; it is empty for a step of an optimizer, which captures ahead follow.
        """
        self.staged()
        if by:
            self.release(f"{by} changed tensors")

    def follow(self, ahead: Ahead) -> None:
        """Tells that capture of every step of an optimizer from now on."""
        for adapter in frameworks.active():
            adapter.follow(self._stepping, self._stepped)
        others = (one for one in self._aheads if one() not in (None, ahead))
        self._aheads = (*others, weakref.ref(ahead))

    def _stepping(self, optimizer: object) -> None:
        with work("an optimizer's step"):
            for one in self._aheads:
                if (ahead := one()) is not None:
                    ahead.stepping(optimizer)

    def _stepped(self, optimizer: object) -> None:
        with work("an optimizer's step"):
            for one in self._aheads:
                if (ahead := one()) is not None:
                    ahead.stepped(optimizer)

    def release(self, reason: str) -> None:
        """Gives back what is captured ahead of saves: tensors change otherwise than by steps."""
        for one in self._aheads:
            if (ahead := one()) is not None:
                ahead.release(reason)

    def conclude(self) -> None:
        """Waits until every save has ended. For the end of the process: no save is watched any more afterwards."""
        try:
            for pending in (*self._running, *self._alive):
                pending.conclude()
            until = time.monotonic() + REST_S
            for pending in self._running:
                pending.over(max(until - time.monotonic(), 0.0))
            native.flush(max(until - time.monotonic(), 0.0))
            _say_refused()
        finally:
            # An interpreter that ends kills threads that return to it from Rust, which aborts the process.
            self.is_over = True
            native.interpreter_ends()
            self._watched.put(None)
            if self._watcher is not None:
                self._watcher.join()

    def _watch(self) -> None:
        """In the background: checks each save, as soon as it is staged, for modified tensors."""
        # Woken by a save that begins, it must not take a core from the program.
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        while (pending := self._watched.get()) is not None:
            while not self.is_over:
                try:
                    pending.mind(GLANCE_S)
                except Unavailable:
                    if not pending.done():
                        continue
                except Error as error:
                    _log.debug("%s: %s", pending.url, error)
                break
            with self._lock:
                self._unstaged = tuple(one for one in self._unstaged if one is not pending)
            del pending
            _say_refused()


def _say_refused() -> None:
    """Logs once that the endpoint of OTLP refuses what this process exports."""
    if refusal := native.export_refused():
        _log.warning("what is exported over OTLP does not arrive: %s", refusal)


in_flight = InFlight()
"""This process's saves."""

atexit.register(in_flight.conclude)
os.register_at_fork(after_in_child=in_flight.forget)
