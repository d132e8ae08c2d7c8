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
from . import levels, native, restoring
from .capture.background import Background, expect_open
from .capture.durations import Durations
from .capture.in_flight import REST_S, Pending, in_flight
from .capture.multistep import Ahead
from .capture.works import Works
from .errors import Conflict, Corrupt, Error, Invalid, Unavailable
from .levels import Draining, explained, place_of, rate_of, seen_at
from .memory import Copies, Memory, expect_nearer, nearer
from .nesting import call
from .schedule import Keep, Schedule, expect_rules, noted
from .session import TIMEOUT_S, current, expect_timeout, met, prepare
from .state.description import Describer
from .state.entries import units_of
from .state.load_plan import LoadPlan, Options, Rename
from .state.stateful import Sharded
from .stopping import Stopping, Told, asked
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
        if self._works.is_here():
            raise Invalid(f"{self.url}: {method.__name__}() in the work of when_durable(), for which calls may wait")
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
            ``~`` at the home directory. The directory may hold anything else, such as logs; directories
            ``step-<step>`` are the checkpoints' own, and a save into one that holds other files is refused.
        every: When :meth:`step` saves, such as ``sf.steps(200)`` or ``sf.optimal(mtbf="6h")``; without it only
            :meth:`save` does. The same on every rank.
        keep: Which checkpoints stay, such as ``sf.last(3) | sf.every(10_000)``; without it all of them. Others are
            taken back only after a newer one is durable and was seen to be complete; their files are deleted with the
            next save, so that a reader can finish. Shardfast deletes only its own files: a checkpoint with a file of
            your own in its directory stays, and the log says so once. What ``shardfast pin`` pinned stays, too.
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
        within: How long the program has after the signal, such as ``"90s"``, or seconds; or the path of a file in which
            the time of the end stands by then, in seconds since 1970. The log says so at once if the save takes longer,
            by what saves of this run have taken. ``SLURM_JOB_END_TIME`` counts, too.
        local: A directory on a disk of this machine, such as ``"/nvme/ckpt"``, for ranks of one machine. Checkpoints
            are saved there and sent to ``url`` in the background. It keeps the newest two and what is still to be sent;
            ``keep`` holds at ``url``. :meth:`restore` takes the newest of both places, each file from the nearer one.
        memory: When to save into memory, such as ``sf.steps(5)``: a process on each machine keeps the newest checkpoint
            for the next program. What ``every`` says, and the newest step at the end, is sent to ``url``.
        peers: How many other machines have each file in memory, too, such as ``sf.copies(1)``.
        drain: The rate at which checkpoints are sent, such as ``"1GB/s"``; without it as fast as both places can.
        process_group: As in :func:`shardfast.save`: only its ranks have this checkpointer.
        timeout_s: How long ranks wait for each other, in seconds, and the rules of ``keep`` for storage that is silent.

    Attributes:
        url: The directory of the run.
        every: When :meth:`step` saves; ``print(ckpt.every)`` says it in words. ``None`` if it never does.
        newest: The step of the newest save that was begun or restored by this object; ``None`` before.
        saved: The step of the newest save that was begun by this object; ``None`` before.
        committed: The newest step that this object knows to be durable, or in ``memory``; ``None`` before.
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
        within: str | float | os.PathLike[str] | None = None,
        local: str | os.PathLike[str] | None = None,
        memory: Schedule | None = None,
        peers: Copies | None = None,
        drain: str | None = None,
        process_group: Any = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        capture = Ahead(over)
        expect_rules(every, keep, over)
        expect_nearer(local, memory, peers, drain)
        rate = rate_of(drain)
        signals, ends = asked(on_signal, within, raise_stopping)
        self.url = expect_url(url)
        restoring.expect_no_root(self.url)
        self.newest: int | None = None
        self.saved: int | None = None
        self.committed: int | None = None
        self.restored: LoadPlan | None = None
        self.report: dict[str, Any] | None = None
        self._durations = Durations()
        self.every = None if every is None else every.of_run()
        self._timeout_s = expect_timeout(timeout_s)
        self._memory = None if memory is None else Memory(self.url, memory, peers, every, local, over, timeout_s)
        self._schedule = self.every or Schedule() if self._memory is None else self._memory.schedule
        # What the schedule has counted of in_flight.waited_s.
        self._waited_s = in_flight.waited_s
        self._is_root = self._has_passed = False  # the latter: the restore has passed over checkpoints
        self._keep = keep
        self._pickle = pickle
        self._prove = prove
        self._prove_except = prove_except
        self._process_group = process_group
        self._rewind = rewind
        # What all ranks must have alike; None once they were asked.
        names = [one.name for one in signals]
        self._terms: list[tuple[str, str]] | None = [
            ("every", repr(every)),
            ("over", str(over)),
            ("local", repr(local)),
            ("memory", repr(memory)),
            ("peers", repr(peers)),
            ("on_signal", repr(names[0] if len(names) == 1 else names or None)),
        ]
        self.stopping, self._raise_stopping = False, raise_stopping
        # The run is known to hold nothing committed of this step or a later one, but what this object saves.
        self._free_from: int | None = None
        # This job is the newest that saves into the run, unless another has begun since.
        self._has_begun = False
        self._closed = self._is_overtaken = False
        self._calls = threading.Lock()
        self._describer = Describer(in_flight.changing)
        self._is_prepared = False
        self.capture = capture
        self._running: list[tuple[Pending, Future[None]]] = []
        disk = None if local is None else (self.url, place_of(local, self.url, expect_url(local)))
        self._near, self._draining = nearer(self._memory, disk, keep, rate, self._timeout_s)
        if disk is not None:
            self._terms.append(seen_at(disk[1]))
        self._place = self._near or self.url
        self._retention: native.Retention | Draining | None = self._draining
        if self._near is None and keep is not None:
            self._retention = native.Retention(
                self.url, last=keep.last, every=keep.every, best=keep.best, timeout_s=timeout_s
            )
        # Steps that were taken back, with files that are still there; None: not known.
        self._leaving: list[int] | None = None
        self._spared: set[str] = set()
        # Steps whose saves were begun, in that order.
        self._made: list[int] = []
        self._works = Works()
        self._background, self._process = Background(), os.getpid()
        # Work that is not done before the first save stops the training then.
        frameworks.active()
        frameworks.built_on_others()
        in_flight.prepare()
        if not self.capture.is_off:
            in_flight.follow(self.capture)
        prepare(process_group)
        self._told = Told(signals, ends) if signals else None

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
        in_flight.settled(self._place)
        began = time.perf_counter()
        session = current(self._timeout_s, self._process_group)
        options = prepared(
            session, lambda: Options(strict, rename, cast, patterns(only), per_rank, self._pickle), self._timeout_s
        )
        if self._near is None and session.rank == 0:
            restoring.say_unasked(self.url)
        self._agree("restore", session)
        if step is not None:
            prepared(session, lambda: restoring.expect_asked(step, older), self._timeout_s)
            after_s = time.perf_counter() - began
            checkpoint = restoring.open_step(session, self.url, self._near, step, self._timeout_s, after_s)
            with concluding(checkpoint):
                restoring.expect_of(self.url, step, checkpoint)
            self.restored = fill(session, checkpoint, state, options, self._timeout_s, progress=progress)
            self._was_restored(step, checkpoint, state, began)
            self._free_from = None
            return step
        below: int | None = None
        lost: list[str] = []
        while True:
            after_s = time.perf_counter() - began if below is None else 0.0
            found, skipped = native.newest(
                session,
                self.url,
                near=self._near,
                older=older,
                below=below,
                timeout_s=self._timeout_s,
                after_s=after_s,
            )
            if found is None:
                if below is not None and not lost:
                    raise Corrupt(f"{self.url}: every committed checkpoint is damaged")
                restoring.say_nothing_restored(session, self.url, [*lost, *skipped])
                self._free_from, self._has_passed = 0, bool(skipped or lost)
                return 0
            newest, checkpoint = found
            with concluding(checkpoint):
                restoring.expect_of(self.url, newest, checkpoint)
            for reason in skipped if session.rank == 0 else ():
                _log.warning("passed over %s", reason)
            try:
                self.restored = fill(session, checkpoint, state, options, self._timeout_s, progress=progress)
            except Corrupt as error:  # the same on every rank
                if not older and not restoring.is_near_alone(checkpoint):
                    raise
                lost = restoring.pass_over(checkpoint, error, lost if below is None or lost else None)
                below = newest
                continue
            self._was_restored(newest, checkpoint, state, began)
            self._rewind = self._rewind or older
            self._free_from, self._has_passed = None if older else newest + 1, bool(skipped) or below is not None
            return newest

    def _was_restored(self, step: int, checkpoint: native.Checkpoint, state: dict[str, Any], began: float) -> None:
        self.newest = self.committed = step
        restoring.say_sources(checkpoint)
        self._prepare(state)
        self._schedule.restored(step, checkpoint.info["user"], time.perf_counter() - began)

    def _agree(self, call: str, session: native.Session) -> None:
        """Checks once, in a call of all ranks, that all of them were told the same; has the keeper run."""
        if self._terms is not None:
            with explained(self._near):
                session.expect_same(call, self.url, self._terms, self._timeout_s)
            self._terms = None
        if self._memory is not None:
            self._memory.begin(session, call, self._timeout_s)

    def _begin_at(self, step: int) -> None:
        """Refuses to save into a run whose checkpoints a restart would restore instead; or moves these away."""
        is_back = self.newest is not None and step < self.newest
        if self._has_begun and self._free_from is not None and self._free_from <= step and not is_back:
            return
        expect_step(step)
        self._settle(0)  # what is in flight may be of a later step
        session = current(self._timeout_s, self._process_group)
        self._agree("begin", session)
        near = None if self._near is None else (self._near, self._rewind or self._has_passed)
        moved = native.begin_run(session, self.url, step, near=near, rewind=self._rewind, timeout_s=self._timeout_s)
        self._free_from, self._has_begun, self._has_passed = step, True, False
        if self._retention is not None and (self._near is None or session.rank == 0):
            self._retention.begin(session, self.url)
        for url, steps, into in moved if session.rank == 0 else ():
            gone = "left memory" if into is None else f"moved to {into}"
            _log.warning("%s: steps %s %s: the training goes on at step %d", url, steps, gone, step)

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
        is_last = self._is_last(step)
        is_saved = self.saved == step and (bool(self._running) or self.committed == step)  # by save()
        if not is_last and (is_saved or not self._schedule.due(step)):
            if not self._is_prepared:
                self._prepare(state)
            self._settle(None)
            self._approach(step, state)
            return False
        expect_open(self.url, step, self._closed)
        if not is_saved:
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
        if self._told is None or self.stopping or not self._told.passed(self._timeout_s, self._process_group):
            return False
        self._told.say(self.url, step)
        if self._memory is not None:
            self._memory.is_passed = True  # the machine may go
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
        expect_open(self.url, step, self._closed)
        session = current(self._timeout_s, self._process_group)
        prepared(session, lambda: expect_step(step), self._timeout_s)
        self._begin_at(step)
        self._save(step, state, metrics)

    def _save(self, step: int, state: dict[str, Any], metrics: Mapping[str, float] | None) -> None:
        expect_step(step)
        if self._memory is not None:
            place = self._memory.place_of(current(self._timeout_s, self._process_group), step)
            if place is None:
                return
            self._place = place
        self._count_waits()
        began = time.perf_counter()
        try:
            # Memory has room for a whole state and one in the making.
            is_to_memory = self._memory is not None and self._place == self._memory.place
            self._settle(0 if is_to_memory else IN_FLIGHT_MAX - 1)
        except Exception:
            # The other ranks begin this save too: they must not wait for a rank that still has an error to raise.
            self._begin(step, state, metrics)
            raise
        self._begin(step, state, metrics)
        self._waited_s = in_flight.waited_s  # those waits are a part of the call
        self._schedule.waited(time.perf_counter() - began)

    def _begin(self, step: int, state: dict[str, Any], metrics: Mapping[str, float] | None) -> None:
        number = self._schedule.save_begun(step)
        url = native.step_url(self._place, step)
        session = current(self._timeout_s, self._process_group)
        self._is_root = session.rank == 0
        try:
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
                file_bytes_max=None if self._near is None else levels.FILE_BYTES,
            )
        except Error as error:
            if self._memory is None or not self._memory.absorbs(url, step, error):
                raise
            return
        window = pending.window
        if window is None:
            pending.ahead = {"steps": 1, "reason": self.capture.reason}
        else:
            self._schedule.waited(self.capture.waited_in(window))
        self.newest = self.saved = step
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
        retention: native.Retention | Draining | None,
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
            self._do_works(step)  # the next save may be durable by now, and this one left to no rule
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
            self._is_overtaken = self._is_overtaken or isinstance(error, Conflict)
            self._ended(pending, is_committed=False)
            if isinstance(retention, Draining):
                retention.failed(error)
            if self._memory is not None and self._memory.absorbs(pending.url, step, error):
                return
            pending.fail(error)  # for the log, if no later call of this object raises it
            raise

    def _ended(self, pending: Pending, *, is_committed: bool) -> None:
        """Notes what a save did that has ended. What was captured ahead of it would keep the tensors' memory."""
        self.report, window = pending.report, pending.window
        if self._told is not None and (self._memory is None or not pending.url.startswith(self._memory.place)):
            self._told.saved(self.url, self.report)  # as the last one will be saved
        if window is not None:
            self.capture.ended(window, self.report["ahead"], is_committed=is_committed)
            pending.window = None

    def _clear(self, retention: native.Retention | Draining | None, leaving: list[int] | None) -> Exception | None:
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
    def when_durable(self, work: Callable[[str], T]) -> Future[T]:
        """Calls ``work`` with the checkpoint's URL once the newest save of this object is durable on all ranks.

        A thread in the background calls it, on the ranks that call this, before ``keep`` can take that checkpoint back.
        Until it returns, no rule of ``keep`` is applied and the save counts as in flight: :meth:`close` waits for it.
        It may not call this object.

        Returns:
            The future of its result. It raises what the save or ``work`` raised.

        Raises:
            Invalid: Nothing was saved by this object yet.
        """
        step = self.saved
        if step is None:
            raise Invalid(f"{self.url}: nothing to wait for: expected a save by this checkpointer before")
        future = self._works.add(step, work)
        # In most cases the end of the save has done it by then.
        self._in_background(self._do_works, step, self._running[-1][1] if self._running else None)
        return future

    def _do_works(self, step: int, saving: Future[None] | None = None) -> None:
        """In the background: does what waits for the save of that step, which has ended."""

        def failure_of(of: int) -> Exception | None:
            if self.committed is not None and self.committed >= of:
                return None
            failure = None if saving is None else saving.exception()
            if isinstance(failure, Exception):
                return failure
            return Unavailable(f"{native.step_url(self._place, of)}: its save has failed")

        self._works.do(step, failure_of, lambda of: native.step_url(self._place, of))

    @_one_at_a_time
    def wait(self) -> None:
        """Waits until every save is durable. Raises what failed."""
        self._settle(0)

    @_one_at_a_time
    def close(self) -> None:
        """Waits until every save is durable. Raises what failed. Afterwards the checkpointer cannot save.

        With ``local`` it also waits until all that is to be sent is at ``url``.

        Unless an exception is on its way, the run counts as ended: ``shardfast watch`` expects no more saves of it,
        until there is a newer one.
        """
        self._close(None)

    def _close(self, within_s: float | None) -> None:
        was_closed, self._closed = self._closed, True
        self.capture.release("this checkpointer is closed")
        newest = [pending for pending, _ in self._running][-1:]
        with contextlib.ExitStack() as ends:
            if self._told is not None:  # before, a signal would end the program with what it waits for here
                ends.callback(self._told.leave())
            try:
                self._settle(0, within_s)
            except Exception:
                if within_s is None:
                    self._rest(newest)
                raise
            self._rest(newest)
            if self._draining is not None:
                self._draining.finish(met(self._process_group))
        is_end = self._is_root and self._made and not was_closed and not self._is_overtaken
        if is_end and sys.exc_info()[0] is None:
            native.note_end(self._place, REST_S)

    def _rest(self, newest: list[Pending]) -> None:
        """Waits for what the background still does once saves have ended."""
        self._background.wait()
        for pending in newest:
            pending.over(REST_S)

    @property
    def drained(self) -> int | None:
        """The newest step that this object has sent to ``url``, on rank 0 and with ``local``; ``None`` before."""
        return None if self._draining is None else self._draining.newest

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._draining is not None:
                self._draining.ends_with(kind)
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
