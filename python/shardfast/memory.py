"""A run whose checkpoints are saved in the memory of processes, one for each machine, that outlive the training."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from . import native
from .capture.background import Background
from .errors import Conflict, Error, Exhausted, Invalid, Unavailable
from .levels import Draining, rate_of
from .schedule import Keep, Schedule, Steps
from .stopping import Stopping

_log = logging.getLogger("shardfast")

LINGER_S = 600.0
"""How long a keeper waits without a process that uses it, in seconds."""

SILENT_S = 1.0
"""Seconds after which a keeper that has not answered is stopped: one that is gone tells so at once."""

UNASKED = 20
"""Saves for which such a keeper is not asked again."""

WHOLE = 2
"""States that memory holds: a whole one and one in the making. Later a save without room is a warning."""

DOMAIN = "SHARDFAST_DOMAIN"
"""The variable that names what this machine fails with, such as its rack."""


@dataclass(frozen=True, slots=True)
class Copies:
    """Files in memory that other machines have, too, so that so many machines may be lost at once."""

    count: int
    rate: int | None = None


def copies(count: int, rate: str | None = None) -> Copies:
    """Asks for so many copies of what is in a machine's memory, in that of others, by ``Checkpointer(peers=…)``.

    Args:
        count: Number of other machines that have each file.
        rate: Bytes that a machine sends in a second at most, such as ``"1GB/s"``; no bound unless it is given.

    Raises:
        Invalid: ``count`` is no positive whole number, or ``rate`` is no rate.
    """
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise Invalid(f"copies({count!r}): expected a positive whole number")
    return Copies(count, rate_of(rate, "rate"))


class Both(Schedule):
    """Due when the memory is, or the run itself."""

    __slots__ = ("_every", "_memory")

    def __init__(self, memory: Steps, every: Steps | None) -> None:
        self._memory, self._every = memory, every

    def due(self, step: int) -> bool:
        """Returns whether a save is due after ``step`` steps."""
        return self._memory.due(step) or (self._every is not None and self._every.due(step))

    def next_due(self, step: int) -> int:
        """Returns the first step after ``step`` at which a save is due."""
        own = self._memory.next_due(step)
        return own if self._every is None else min(own, self._every.next_due(step))

    def steps_max(self) -> int:
        """Returns the interval of the memory."""
        return self._memory.count


class Memory:
    """The keepers of a run, one for each machine, as the ranks use them.

    Attributes:
        place: The run's place in its memory.
        is_passed: Whether saves go past the memory, since the machine may go.
        schedule: When a save is due, to memory or to the run's own place.
    """

    def __init__(
        self,
        url: str,
        memory: Schedule,
        peers: Copies | None,
        every: Schedule | None,
        local: str | os.PathLike[str] | None,
        over: int,
        timeout_s: float,
    ) -> None:
        if not isinstance(memory, Steps):
            raise Invalid(f"memory={memory!r}: expected a number of steps, such as sf.steps(5)")
        if every is not None and not isinstance(every, Steps):
            raise Invalid(f"every={every}: expected a number of steps beside memory=, such as sf.steps(500)")
        if every is not None and memory.count > every.count:
            raise Invalid(
                f"memory={memory}: expected it more often than every=, which is {every}: a save to memory costs less "
                "than one to the run's own place"
            )
        if local is not None:
            raise Invalid("memory= and local=: expected one of them: what is in memory is sent to the run's own place")
        if url.startswith(("memory://", "keeper://")):
            raise Invalid(f"{url}: expected a run whose own place outlives this machine's processes, beside memory=")
        if over > 1:
            raise Invalid(f"over={over}: expected 1 beside memory=, whose saves are too near each other for more")
        if peers is not None and not isinstance(peers, Copies):
            raise Invalid(f"peers={peers!r}: expected a number of copies, such as sf.copies(1)")
        self.url, self.every, self._peers = url, every, peers
        self._met: native.Keepers | None = None
        self._timeout_s = timeout_s
        self._name, self.place = native.memory_place(url)
        self.schedule = Both(memory, every)
        self._background = Background()
        self._reviving: Future[None] | None = None
        self._is_lost = self.is_passed = False
        # A newer job saves into the run; known to rank 0.
        self.overtaken: Conflict | None = None
        self._unasked = 0
        self._adopted: int | None = None
        # Steps whose saves into memory were begun and have not failed.
        self._begun: set[int] = set()

    def begin(self, session: native.Session, call: str, timeout_s: float) -> None:
        """Starts the keeper of each machine, unless it runs, and has them meet, in a call of all ranks."""
        self._met = native.meet_keepers(
            session,
            call,
            self.url,
            linger_s=LINGER_S,
            copies=0 if self._peers is None else self._peers.count,
            rate=None if self._peers is None else self._peers.rate,
            domain=os.environ.get(DOMAIN, "").strip() or None,
            timeout_s=timeout_s,
        )

    def place_of(self, session: native.Session, step: int) -> str | None:
        """The place to which a step is saved: the memory, or the run's own if the keeper is lost; or none.

        A keeper that is lost is started again, for the next save.
        """
        if self.is_passed:
            return self.url
        assert self._met is not None
        is_due = self.every is not None and self.every.due(step)
        process, was_lost = self._asked(), self._is_lost
        if process is not None:
            self._is_lost = False
            if was_lost:
                _log.warning("%s: a keeper has begun; saves go to memory again", self.url)
            if session.rank == 0:
                self._adopt(session, process, step)
        else:
            self._is_lost = True
            if self._met.is_lowest and (self._reviving is None or self._reviving.done()):
                self._reviving = self._background.submit(self._revive)
            if is_due or not was_lost:
                _log.warning(
                    "%s: the keeper of this machine does not answer: step %d is %s; training goes on without memory "
                    "until a new keeper has begun",
                    *(self.url, step, "saved to the run's own place" if is_due else "not saved"),
                )
        if session.rank == 0:
            self._expect_newest(session)
        # Ranks whose keeper answers do not know of the others: a save into memory fails then on all, and at steps of
        # the run's own place the ranks ask each other. A keeper that is being started may answer, and not know the
        # others yet.
        is_there = process is not None
        if session.world > 1 and is_due:
            is_ready = is_there and (self._reviving is None or self._reviving.done())
            is_there = session.are_all(f"keepers of {self.url}", is_ready, self._timeout_s)
        elif session.world > 1 and not is_there:
            try:  # the other ranks begin this save, and must not wait for this one
                session.refuse(Unavailable.__name__, f"{self.url}: a keeper does not answer", self._timeout_s)
            except Error as agreed:
                if isinstance(agreed, Conflict):
                    raise
        if is_there:
            self._begun.add(step)
            return self.place
        return self.url if is_due else None

    def _expect_newest(self, session: native.Session) -> None:
        """On rank 0: fails the save that all ranks begin if a newer job saves into the run, so that none does."""
        if self.overtaken is not None:
            session.refuse(Conflict.__name__, str(self.overtaken), self._timeout_s)

    def _asked(self) -> int | None:
        """The keeper's process, if it answers. A silent one is not asked again for a few saves, which would wait."""
        if self._unasked > 0:
            self._unasked -= 1
            return None
        began = time.monotonic()
        process = native.keeper_process(self._name)
        if process is None and time.monotonic() - began > SILENT_S:
            self._unasked = UNASKED
        return process

    def _adopt(self, session: native.Session, process: int, step: int) -> None:
        """Has a keeper that knows nothing of this job count what it saves from this step on as the run's history."""
        if process == self._adopted:
            return
        try:
            native.adopt_near(session, self.url, self.place, step)
            self._adopted = process
        except Conflict as error:
            self.overtaken = error
        except Error as error:
            _log.warning("%s; it is tried again with the next save", error)

    def _revive(self) -> None:
        """In the background on the lowest rank of a machine: starts a keeper in place of one that is lost."""
        assert self._met is not None
        try:
            self._met.revive()
        except Error as error:
            _log.warning("%s; it is tried again with the next save", error)

    def absorbs(self, url: str, step: int, error: Exception) -> bool:
        """Whether the failure of a save costs the memory's level alone; says so."""
        self._begun.discard(step)
        if isinstance(error, Exhausted) and sum(one < step for one in self._begun) < WHOLE:
            return False  # nor will the memory hold the next one
        is_due = self.every is not None and self.every.due(step)
        if is_due or not url.startswith(self.place) or not isinstance(error, Error) or isinstance(error, Conflict):
            return False
        _log.warning("%s; step %d is not in memory, and training goes on", error, step)
        return True

    def wait(self) -> None:
        """Waits until no keeper is being started."""
        if self._reviving is not None:
            self._reviving.result()

    def newest(self) -> int | None:
        """The newest step that was saved into memory."""
        return max(self._begun, default=None)

    def has_others(self, session: native.Session) -> bool:
        """Whether processes use the keeper that are no ranks of this job."""
        return native.keeper_users(self._name) > session.world

    def is_there(self) -> bool:
        """Whether the keeper answers."""
        return native.keeper_process(self._name) is not None

    def dismiss(self) -> None:
        """Has the keepers of all machines end."""
        with suppress(Error):  # it ends by itself, too
            native.dismiss_keeper(self._name, all=True)


class MemoryDraining(Draining):
    """Sends the steps of the memory that the run's own place is to have, and the newest one at the end."""

    HELD = "in memory, at"

    def __init__(self, memory: Memory, keep: Keep | None, rate: int | None, timeout_s: float) -> None:
        super().__init__(memory.url, memory.place, keep, rate, timeout_s)
        self._memory, self._is_finished = memory, False
        self._drain.send_every(None if memory.every is None else memory.every.count)

    def retain(self, made: Sequence[int]) -> tuple[list[int], list[tuple[str, str]]]:
        """Applies the rules of the memory, whose room is free at once: readers hold what they have opened."""
        try:
            left, spared = super().retain(made)
            self.clear(left)
        except Conflict as error:
            self._memory.overtaken = error
            raise
        except Unavailable as error:  # what is in memory is not known now, and costs no save
            _log.warning("%s; it is tried again with the next save", error)
            return [], []
        return [], spared

    def ends_with(self, kind: type[BaseException] | None) -> None:
        """Ends the sending with the program's error; not when the training was told to stop: its machine may go."""
        if kind is None or not issubclass(kind, Stopping):
            super().ends_with(kind)

    def finish(self, session: native.Session | None) -> None:
        """Waits until the newest step is at the run's own place, and has the keeper end, unless another job uses it.

        Raises:
            Unavailable: The keeper has died with the newest step.
        """
        if session is None or session.rank != 0 or self._is_cancelled or self._is_finished:
            return
        self._is_finished = True
        self._memory.wait()
        if self._memory.is_there():
            if not self._has_begun and self._memory.has_others(session):
                return
            self._drain.choose_newest()
            super().finish(session)
            self._memory.dismiss()
        self.newest, saved = self._drain.reached(), self._memory.newest()
        if saved is not None and (self.newest is None or self.newest < saved):
            raise Unavailable(
                f"{self.url}: the keeper of this machine has ended, and with it step {saved}, which was in its memory "
                f"alone: the run's own place has {'none' if self.newest is None else f'step {self.newest} at most'}"
            )


def expect_nearer(local: object, memory: object, peers: object, drain: object) -> None:
    """Refuses what says how a nearer place is used where there is none."""
    if drain is not None and local is None and memory is None:
        raise Invalid(f"drain={drain!r}: expected local= or memory= beside it: without, nothing is sent")
    if peers is not None and memory is None:
        raise Invalid(f"peers={peers!r}: expected memory= beside it: what is in memory is copied to other machines")


def nearer(
    memory: Memory | None, drain: tuple[str, str] | None, keep: Keep | None, rate: int | None, timeout_s: float
) -> tuple[str | None, Any]:
    """The nearer place of a run, and who sends from there: from memory, or from a local disk's place."""
    if memory is not None:
        return memory.place, MemoryDraining(memory, keep, rate, timeout_s)
    if drain is None:
        return None, None
    url, near = drain
    return near, Draining(url, near, keep, rate, timeout_s)
