"""A run and its checkpoints: restored at the start, saved when due, kept by a rule."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

from . import adapters as frameworks
from . import native
from .capture.background import Background, interpreter_ends
from .capture.durations import Durations
from .capture.in_flight import REST_S, Pending, in_flight
from .capture.multistep import Ahead
from .errors import Corrupt, Error, Invalid, Unavailable
from .interval import spoken
from .nesting import call
from .schedule import Keep, Schedule, noted
from .session import TIMEOUT_S, current, expect_timeout, met, prepare
from .state.description import Describer
from .state.entries import units_of
from .state.load_plan import LoadPlan, Options, Rename
from .state.stateful import Sharded
from .stopping import Stopping, Told, seconds_of, signals_of
from .verbs import Url, begin, concluding, expect_step, expect_url, fill, patterns, prepared

_log = logging.getLogger("shardfast")

IN_FLIGHT_MAX = 2
"""Saves of a run that may be in flight: one that is copied, and one that becomes durable."""

INTERRUPTED_S = 5.0
"""How long each save that is in flight is waited for once Ctrl-C ends a ``with`` block, in seconds."""

P = ParamSpec("P")
T = TypeVar("T")


def _one_at_a_time(method: Callable[Concatenate[Checkpointer, P], T]) -> Callable[Concatenate[Checkpointer, P], T]:
    """A method that waits for other threads' calls of the same object."""

    @functools.wraps(method)
    def alone(self: Checkpointer, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with call(f"Checkpointer.{method.__name__}()"), self._calls:
            return method(self, *args, **kwargs)

    return alone


class Checkpointer:
    """Saves and restores the checkpoints of one run, each called ``<url>/step-<step>``. Every rank of the job has one.

    Up to two saves are in flight; a third one waits until the oldest is durable. A failure in the background is raised
    by the next call of any method, once, and does not prevent the next save. If no method is called any more, the log
    shows it at the end of the process.

    Example::

        with sf.Checkpointer("runs/gpt", every=sf.steps(200), keep=sf.last(3)) as ckpt:
            for step in range(ckpt.restore(state), total):
                ...
                ckpt.step(step + 1, state)

    Args:
        url: The directory of the run: a path or a URL. A relative path starts at the current directory of this call,
            ``~`` at the home directory. The directory may hold anything else, such as logs: Shardfast looks only at
            directories ``step-<step>``. Those are the checkpoints' own; a save into one that holds other files is
            refused.
        every: When :meth:`step` saves, such as ``sf.steps(200)`` or ``sf.optimal(mtbf="6h")``; without it only
            :meth:`save` does. The same on every rank.
        keep: Which checkpoints stay, such as ``sf.last(3) | sf.every(10_000)``; without it all of them. Others are
            taken back only after a newer one is durable and was seen to be complete; their files are deleted with the
            next save, so that a reader can finish. Shardfast deletes only its own files: if you put a file of
            your own into a checkpoint's directory, the checkpoint stays, and the log says so once. What
            ``shardfast pin`` pinned stays, too.
        pickle: As in :func:`shardfast.save` and :func:`shardfast.load`.
        prove: As in :func:`shardfast.save`.
        prove_except: As in :func:`shardfast.save`.
        over: Steps over which each save is captured: ``1`` copies all of it from the save on, until the next step of
            the optimizer; a larger number copies a part in the steps before the save, and rolls it forward with the
            gradients. ``print(ckpt.capture)`` tells what is done, and why.
        rewind: Move committed checkpoints of the step at which the training begins, and later ones, out of its way, to
            ``<url>/abandoned-…``; nothing is deleted. Without it the first :meth:`step` refuses to begin there, unless
            :meth:`restore` has restored the newest one: else a restart would restore them.
        on_signal: The signal, or several, that tells the training to stop, such as ``"SIGUSR1"`` or
            ``["SIGTERM", "SIGUSR1"]``, whichever rank gets it. All ranks then save at the same :meth:`step`, wait until
            that is durable, and have ``stopping`` set. Handlers that are there before are called, too.
        raise_stopping: Raise :class:`shardfast.Stopping` then, instead of returning from :meth:`step`.
        within: How long the program has after the signal, such as ``"90s"``, or seconds. The log says so at once if the
            save takes longer, by what saves of this run have taken. ``SLURM_JOB_END_TIME`` counts, too.
        process_group: As in :func:`shardfast.save`: only its ranks have this checkpointer.
        timeout_s: How long ranks wait for each other, in seconds; and how long the rules of ``keep`` wait for storage
            that does not answer.

    Attributes:
        url: The directory of the run.
        every: When :meth:`step` saves; ``print(ckpt.every)`` says it in words. ``None`` if it never does.
        newest: The step of the newest save that was begun or restored by this object; ``None`` before.
        committed: The newest step that this object knows to be durable; ``None`` before.
        restored: What :meth:`restore` loaded; ``None`` before.
        report: What this rank's part of the newest save that has ended did: the dict of :attr:`Pending.report`;
            ``None`` before. Its ``ahead`` says over how many steps the save was captured, and why in one.
        capture: How saves are captured, as a text: see ``over``.
        stopping: Whether the training was told to stop, and the newest step of it is durable on all ranks.
    """

    def __init__(
        self,
        url: Url,
        *,
        every: Schedule | None = None,
        keep: Keep | None = None,
        pickle: bool = False,
        prove: bool | None = None,
        prove_except: str | Sequence[str] = (),
        over: int = 1,
        rewind: bool = False,
        on_signal: str | int | Sequence[str | int] | None = None,
        raise_stopping: bool = False,
        within: str | float | None = None,
        process_group: Any = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        if every is not None and not isinstance(every, Schedule):
            raise Invalid(f"every={every!r}: expected when to save, such as sf.steps(200)")
        if keep is not None and not isinstance(keep, Keep):
            raise Invalid(f"keep={keep!r}: expected what to keep, such as sf.last(3) | sf.every(10_000)")
        capture = Ahead(over)
        apart = None if every is None else every.steps_max()
        if apart is not None and over > apart:
            raise Invalid(
                f"over={over}: expected no more steps than there are between saves, and every= says {apart} at most: "
                "capture over fewer steps, or save less often"
            )
        signals, within_s = () if on_signal is None else signals_of(on_signal), seconds_of(within)
        self.url = expect_url(url)
        if self.url == "/" or self.url.endswith(("://", ":///")):
            raise Invalid(f"{os.fspath(url)}: expected the directory of a run, found the root of the file system")
        self.newest: int | None = None
        self.committed: int | None = None
        self.restored: LoadPlan | None = None
        self.report: dict[str, Any] | None = None
        self._durations = Durations()
        self.every = None if every is None else every.of_run()
        self._schedule = self.every or Schedule()
        # What the schedule has counted of in_flight.waited_s.
        self._waited_s = in_flight.waited_s
        self._is_root = False
        self._keep = keep
        self._pickle = pickle
        self._prove = prove
        self._prove_except = prove_except
        self._process_group = process_group
        self._timeout_s = expect_timeout(timeout_s)
        self._rewind = rewind
        # What all ranks must have alike; None once they were asked.
        names = [one.name for one in signals]
        self._terms: list[tuple[str, str]] | None = [
            ("every", repr(every)),
            ("over", str(over)),
            ("on_signal", repr(names[0] if len(names) == 1 else names or None)),
        ]
        self.stopping, self._raise_stopping = False, raise_stopping
        # The run is known to hold nothing committed of this step or a later one, but what this object saves.
        self._free_from: int | None = None
        self._closed = False
        self._calls = threading.Lock()
        self._describer = Describer(in_flight.changing)
        self._is_prepared = False
        self.capture = capture
        self._running: list[tuple[Pending, Future[None]]] = []
        self._retention: native.Retention | None = None
        if keep is not None:
            self._retention = native.Retention(
                self.url, last=keep.last, every=keep.every, best=keep.best, timeout_s=timeout_s
            )
        # Steps that were taken back, and whose files are still there; None if that is not known.
        self._leaving: list[int] | None = None
        self._spared: set[str] = set()
        # The steps whose saves were begun, in that order.
        self._made: list[int] = []
        self._background, self._process = Background(), os.getpid()
        # Work that is not done before the first save stops the training then.
        frameworks.active()
        frameworks.built_on_others()
        in_flight.prepare()
        if not self.capture.is_off:
            in_flight.follow(self.capture)
        prepare(process_group)
        self._told = Told(signals, within_s) if signals else None

    @_one_at_a_time
    def restore(
        self,
        state: dict[str, Any],
        *,
        step: int | None = None,
        older: bool = False,
        strict: bool = True,
        rename: Rename | None = None,
        cast: bool = False,
        only: str | Sequence[str] = (),
        per_rank: str = "error",
        progress: bool = False,
    ) -> int:
        """Loads the newest committed checkpoint of the run into ``state``, or that of ``step``. Every rank calls it.

        Passes over steps whose save was cut off, with a warning in the log. The other arguments, and the errors, are
        those of :func:`shardfast.load`.

        Args:
            step: The step to go back to. Later committed ones stay where they are; see ``rewind`` of this class.
            older: If the newest committed checkpoint is damaged, load the one before it. Without this it is an error.
                The damaged ones move out of the way when the training goes on, as with ``rewind``.

        Returns:
            The step that was restored; 0 when the run has no committed checkpoint.
        """
        self._settle(0)
        began = time.perf_counter()
        session = current(self._timeout_s, self._process_group)
        options = prepared(
            session,
            lambda: Options(strict, rename, cast, patterns(only), per_rank, self._pickle),
            self._timeout_s,
        )
        self._agree("restore", session)
        if step is not None:
            prepared(session, lambda: self._expect_asked(step, older), self._timeout_s)
            place, after_s = native.step_url(self.url, step), time.perf_counter() - began
            checkpoint = native.open(session, place, timeout_s=self._timeout_s, after_s=after_s)
            with concluding(checkpoint):
                self._expect_of(step, checkpoint)
            self.restored = fill(session, checkpoint, state, options, self._timeout_s, progress=progress)
            self._was_restored(step, checkpoint, state, began)
            self._free_from = None
            return step
        below: int | None = None
        while True:
            after_s = time.perf_counter() - began if below is None else 0.0
            found, skipped = native.newest(
                session, self.url, older=older, below=below, timeout_s=self._timeout_s, after_s=after_s
            )
            if found is None:
                if below is not None:
                    raise Corrupt(f"{self.url}: every committed checkpoint is damaged")
                if session.rank == 0:
                    self._say_nothing_restored(skipped)
                self._free_from = 0
                return 0
            newest, checkpoint = found
            with concluding(checkpoint):
                self._expect_of(newest, checkpoint)
            for reason in skipped if session.rank == 0 else ():
                _log.warning("passed over %s", reason)
            try:
                self.restored = fill(session, checkpoint, state, options, self._timeout_s, progress=progress)
            except Corrupt as error:  # the same on every rank
                if not older:
                    raise
                _log.warning("passed over %s: %s", checkpoint.url, error)
                below = newest
                continue
            self._was_restored(newest, checkpoint, state, began)
            self._rewind = self._rewind or older
            self._free_from = None if older else newest + 1
            return newest

    def _expect_asked(self, step: int, older: bool) -> None:
        expect_step(step)
        if older:
            raise Invalid(f"restore(step={step}, older=True): expected one of them: a step names its checkpoint")

    def _expect_of(self, step: int, checkpoint: native.Checkpoint) -> None:
        recorded = checkpoint.info["step"]
        if recorded not in (None, step):
            raise Invalid(
                f"{checkpoint.url}: expected the checkpoint of step {step}, found that of step {recorded}, which was "
                f"copied or renamed: move it to {native.step_url(self.url, recorded)}, or out of the run"
            )

    def _was_restored(self, step: int, checkpoint: native.Checkpoint, state: dict[str, Any], began: float) -> None:
        self.newest = self.committed = step
        self._prepare(state)
        self._schedule.restored(step, checkpoint.info["user"], time.perf_counter() - began)

    def _agree(self, call: str, session: native.Session) -> None:
        """Checks once, in a call of all ranks, that all of them were told the same."""
        if self._terms is not None:
            session.expect_same(call, self.url, self._terms, self._timeout_s)
            self._terms = None

    def _begin_at(self, step: int) -> None:
        """Refuses to save into a run whose checkpoints a restart would restore instead; or moves these away."""
        is_back = self.newest is not None and step < self.newest
        if self._free_from is not None and self._free_from <= step and not is_back:
            return
        expect_step(step)
        self._settle(0)  # what is in flight may be of a later step
        session = current(self._timeout_s, self._process_group)
        self._agree("begin", session)
        moved = native.begin_run(session, self.url, step, rewind=self._rewind, timeout_s=self._timeout_s)
        self._free_from = step
        if moved is not None and session.rank == 0:
            steps, into = moved
            _log.warning("%s: steps %s moved to %s: the training goes on at step %d", self.url, steps, into, step)

    def _say_nothing_restored(self, skipped: Sequence[str]) -> None:
        if not skipped:
            _log.info("%s: no checkpoint there, so nothing is restored and the training begins at step 0", self.url)
            return
        _log.warning(
            "%s: nothing is restored and the training begins at step 0, though the run has %d step%s: the newest is %s",
            self.url,
            len(skipped),
            "s" if len(skipped) > 1 else "",
            skipped[0],
        )

    @_one_at_a_time
    def step(self, step: int, state: dict[str, Any], *, metrics: Mapping[str, float] | None = None) -> bool:
        """Saves if a save is due after ``step`` steps. Every rank calls it after each step.

        Returns when everything is copied that may change before the next step of the optimizer; see
        :func:`shardfast.save_async`. The first call of a run looks at the whole state, at about 25 us a tensor, and
        calls each ``state_dict()`` and :class:`Stateful` once, so that the first save finds it known.

        Args:
            step: The number of steps that the training has made.
            state: As in :func:`shardfast.save`.
            metrics: Numbers by name that the checkpoint records, if a save is due: rank 0's. ``keep=sf.best(name)``
                compares them, ``shardfast inspect`` shows them.

        Returns:
            Whether it saved.

        Raises:
            Error: What failed in the background since the last call (the save that is due has begun all the same), or
                why this save cannot be made.
            Stopping: With ``raise_stopping``, when the training was told to stop and this step is durable.
        """
        self._begin_at(step)
        self._step_ended(step)
        is_last = self._told is not None and self._is_last(step)
        if not is_last and not self._schedule.due(step):
            if not self._is_prepared:
                self._prepare(state)
            self._settle(None)
            self._approach(step, state)
            return False
        self._expect_open(step)
        self._save(step, state, metrics)
        if is_last:
            self._settle(0)
            self.stopping = True
            if self._raise_stopping:
                raise Stopping(step, self.url)
            return True
        self._approach(step, state)
        return True

    def _is_last(self, step: int) -> bool:
        """Whether the ranks agree to stop after this step, since one was told to."""
        assert self._told is not None
        session = current(self._timeout_s, self._process_group)
        if self.stopping or not self._told.passed(session, self._timeout_s):
            return False
        left_s, report = self._told.left_s(), self.report
        said = "" if left_s is None else f", in {spoken(left_s)}" if left_s > 0 else ", and its time is over"
        _log.warning("%s: told to stop%s: all ranks save step %d", self.url, said, step)
        lasts_s = report["phases_ms"]["committed"] / 1e3 if report and "committed" in report["phases_ms"] else None
        if left_s is not None and lasts_s is not None and lasts_s > left_s:
            _log.error(
                "%s: step %d will not be durable in time: a save of this run takes about %s, and %s are left",
                self.url,
                step,
                spoken(lasts_s),
                spoken(max(left_s, 0.0)),
            )
        return True

    def _approach(self, step: int, state: dict[str, Any]) -> None:
        """Prepares for the next save that is due: data loaders, and captures ahead of it if it is near enough."""
        due = self._schedule.next_due(step)
        left = None if due is None else due - step
        if left is not None:
            values = (unit.value for unit in units_of(state))
            frameworks.expect_save((one.value if isinstance(one, Sharded) else one for one in values), left)
        if self.capture.is_off:
            return
        self.capture.passed()
        if left is None:
            self.capture.reason = "its schedule does not tell when the next save is due"
        session = met(self._process_group)
        if session is None or left is None or not self.capture.opens(left):
            return
        described = self._describer.tensors(state)
        if described is None:
            self.capture.reason = "the state has other tensors than at its last save, or some outside of modules"
        else:
            in_flight.follow(self.capture)
            self.capture.open(session, *described, state, left)
        if self.capture.is_open:
            self._schedule.capture_begun()

    def _step_ended(self, step: int) -> None:
        """Lets the schedule measure the step; rank 0 gives its newest notes to the saves in flight."""
        running = [pending for pending, _ in self._running if not pending.done()]
        self._count_waits()
        self._schedule.step_ended(step, in_flight=bool(running) or self.capture.is_open)
        if running and self._is_root:
            notes = self._schedule.notes()
            for pending in running:
                pending.note(notes)

    def _count_waits(self) -> None:
        """Passes on how long optimizers have waited for saves since the last call."""
        before, self._waited_s = self._waited_s, in_flight.waited_s
        self._schedule.waited(self._waited_s - before)

    def _prepare(self, state: dict[str, Any]) -> None:
        """Describes the state and makes page-locked memory for it, so that the first save need not."""
        self._is_prepared = True
        description = self._describer.prepare(state, pickle=self._pickle, excepted=patterns(self._prove_except))
        session = met(self._process_group)
        if session is not None and description is not None:
            with contextlib.suppress(Error):  # what is wrong with a device is an error of the save
                session.reserve(description.described)

    @_one_at_a_time
    def save(self, step: int, state: dict[str, Any], *, metrics: Mapping[str, float] | None = None) -> None:
        """Saves now, as :meth:`step` does when a save is due."""
        self._expect_open(step)
        session = current(self._timeout_s, self._process_group)
        prepared(session, lambda: expect_step(step), self._timeout_s)
        self._begin_at(step)
        self._save(step, state, metrics)

    def _save(self, step: int, state: dict[str, Any], metrics: Mapping[str, float] | None) -> None:
        expect_step(step)
        self._count_waits()
        began = time.perf_counter()
        try:
            self._settle(IN_FLIGHT_MAX - 1)
        except Exception:
            # The other ranks begin this save too: they must not wait for a rank that still has an error to raise.
            self._begin(step, state, metrics)
            raise
        self._begin(step, state, metrics)
        self._waited_s = in_flight.waited_s  # those waits are a part of the call
        self._schedule.waited(time.perf_counter() - began)

    def _expect_open(self, step: int) -> None:
        reason = "this checkpointer is closed"
        if not self._closed:
            if not interpreter_ends():
                return
            reason = "the interpreter ends, and runs what was registered with atexit: save before the program ends"
        raise Invalid(f"{self.url}: step {step} cannot be saved: {reason}")

    def _begin(self, step: int, state: dict[str, Any], metrics: Mapping[str, float] | None) -> None:
        number = self._schedule.save_begun(step)
        url = native.step_url(self.url, step)
        session = current(self._timeout_s, self._process_group)
        self._is_root = session.rank == 0
        pending = begin(
            session,
            self._describer,
            url,
            state,
            step=step,
            user=lambda: {**noted(metrics, self._keep), **self._schedule.notes()},
            pickle=self._pickle,
            prove=self._prove,
            prove_except=self._prove_except,
            timeout_s=self._timeout_s,
            window=self.capture.take,
        )
        window = pending.window
        if window is None:
            pending.ahead = {"steps": 1, "reason": self.capture.reason}
        else:
            self._schedule.waited(self.capture.waited_in(window))
        self.newest = step
        self._made.append(step)
        retention = self._retention if self._is_root else None
        leaving, self._leaving = self._leaving, []
        concluding = self._in_background(self._conclude, step, number, pending, retention, leaving)
        self._running.append((pending, concluding))

    def _in_background(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Runs work after what is in the background; a forked child has no thread of its parent's."""
        if self._process != os.getpid():
            self._background, self._process = Background(), os.getpid()
        return self._background.submit(work, *arguments)

    def _conclude(
        self,
        step: int,
        number: int,
        pending: Pending,
        retention: native.Retention | None,
        leaving: list[int] | None,
    ) -> None:
        """In the background: the second round of retention, the end of the save, then the first round."""
        try:
            failure = self._clear(retention, leaving)
            pending.end()
            self._ended(pending, is_committed=True)
            unusual = self._durations.noticed(pending.report["phases_ms"])
            if unusual is not None:
                _log.warning("the save of %s: %s; `shardfast report %s` says more", pending.url, unusual, self.url)
            self.committed = max(step, self.committed or 0)
            lag_s = pending.report["phases_ms"]["committed"] / 1e3
            self._schedule.committed(number, pending.committed_notes(), lag_s)
            if retention is not None:
                # What left between the begin of this save and now: its round is over, too.
                failure = self._clear(retention, self._leaving) or failure
                left, spared = retention.retain(self._made)
                self._leaving = None if self._leaving is None else left
                for url, reason in spared:
                    if url not in self._spared:
                        self._spared.add(url)
                        _log.warning("%s matches no rule of keep= and is not deleted: %s", url, reason)
            if failure is not None:
                raise failure
        except Exception as error:
            self._ended(pending, is_committed=False)
            pending.fail(error)  # for the log, if no later call of this object raises it
            raise

    def _ended(self, pending: Pending, *, is_committed: bool) -> None:
        """Notes what a save did that has ended. What was captured ahead of it would keep the tensors' memory."""
        self.report, window = pending.report, pending.window
        if window is not None:
            self.capture.ended(window, self.report["ahead"], is_committed=is_committed)
            pending.window = None

    def _clear(self, retention: native.Retention | None, leaving: list[int] | None) -> Exception | None:
        """Deletes the files of checkpoints that were taken back before the save began; returns what went wrong."""
        if retention is None or leaving == []:
            return None
        try:
            retention.clear(leaving)
        except Error as error:
            self._leaving = None  # looked for again
            return error
        return None

    def _settle(self, most: int | None, within_s: float | None = None) -> None:
        """Raises errors of the background, once; with ``most``, waits until at most so many saves are in flight.

        ``within_s`` bounds the wait for each save: one that takes longer counts as failed.
        """
        failures: list[Exception] = []
        while self._running:
            pending, concluding = self._running[0]
            pending.done()  # raises in a forked process, where no save would ever end
            if not concluding.done() and (most is None or len(self._running) <= most):
                break
            failure: BaseException | None
            try:
                failure = concluding.exception(within_s)
            except FutureTimeoutError:
                failure = Unavailable(f"{pending.url}: it is not durable yet, and Ctrl-C ends the program")
            del self._running[0]
            if isinstance(failure, Exception):
                failures.append(failure)
                pending.raised()
            del failure, concluding, pending
        try:
            if len(failures) > 1 and isinstance(failures[0], Error):
                raise type(failures[0])("\n".join(map(str, failures)))
            if failures:
                raise failures[0]
        finally:  # an exception that its own traceback refers to would keep all frames, and with them the state
            del failures

    @_one_at_a_time
    def wait(self) -> None:
        """Waits until every save is durable. Raises what failed."""
        self._settle(0)

    @_one_at_a_time
    def close(self) -> None:
        """Waits until every save is durable. Raises what failed. Afterwards the checkpointer cannot save.

        Unless an exception is on its way, the run counts as ended: ``shardfast watch`` expects no more saves of it,
        until there is a newer one.
        """
        self._close(None)

    def _close(self, within_s: float | None) -> None:
        was_closed, self._closed = self._closed, True
        if self._told is not None:
            self._told.end()
        self.capture.release("this checkpointer is closed")
        newest = [pending for pending, _ in self._running][-1:]
        try:
            self._settle(0, within_s)
        except Exception:
            if within_s is None:
                self._rest(newest)
            raise
        self._rest(newest)
        if self._is_root and self._made and not was_closed and sys.exc_info()[0] is None:
            native.note_end(self.url, REST_S)

    def _rest(self, newest: list[Pending]) -> None:
        """Waits for what the background still does once saves have ended."""
        self._background.wait()
        for pending in newest:
            pending.over(REST_S)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is not None and issubclass(kind, KeyboardInterrupt):
                with self._calls:
                    self._close(INTERRUPTED_S)
            else:
                self.close()
        except Exception as failure:
            if error is None:
                raise
            # The error that ends the block is raised instead.
            _log.error("the last save failed: %s", failure)
