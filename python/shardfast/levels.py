"""A run whose checkpoints are saved on the local disk, and sent to the run's own place in the background."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from . import native
from .capture.background import Background
from .errors import Cancelled, Conflict, Corrupt, Error, Exhausted, Invalid, NotFound, Unsupported
from .schedule import Keep

_log = logging.getLogger("shardfast")

FILE_BYTES = 256 << 20
"""Bytes of tensors in a data file that is sent: of a sending that is cut off, at most one file is sent twice."""

_UNITS = {
    **{unit: 1000**power for power, unit in enumerate(("B", "KB", "MB", "GB", "TB"))},
    **{unit: 1024**power for power, unit in enumerate(("KiB", "MiB", "GiB", "TiB"), 1)},
}
_RATE = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(_UNITS)})/s")


def rate_of(rate: str | None, name: str = "drain") -> int | None:
    """The bytes per second that a text such as ``"1GB/s"`` allows, which ``name`` was given."""
    found = _RATE.fullmatch(rate) if isinstance(rate, str) else None
    bytes_a_second = int(float(found[1]) * _UNITS[found[2]]) if found else 0
    if rate is not None and not 0 < bytes_a_second < 2**63:
        raise Invalid(f"{name}={rate!r}: expected a rate, such as '1GB/s' or '500MiB/s'")
    return bytes_a_second or None


def place_of(local: str | os.PathLike[str], url: str, directory: str) -> str:
    """The run's place on the local disk, below the directory that ``local`` names."""
    if "://" in directory and not directory.startswith("file://"):
        raise Invalid(f"local={os.fspath(local)!r}: expected a directory on a disk of this machine, found a URL")
    directory = os.path.realpath(directory.removeprefix("file://"))
    if "://" not in url or url.startswith("file://"):
        url = os.path.realpath(url.removeprefix("file://"))  # one place has many paths
    try:
        place = native.near_place(directory, url)
    except Exhausted:
        raise
    except Error as error:
        raise Invalid(f"local={os.fspath(local)!r}: {error}") from None
    if place == url or url.startswith(f"{place}/") or place.startswith(f"{url}/"):
        raise Invalid(f"local={os.fspath(local)!r}: expected another place than the run's own, {url}")
    return place


def machine() -> str:
    """The name of this machine since it was started."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


_SEEN = "the disk of local"


def seen_at(place: str) -> tuple[str, str]:
    """The term that all ranks have alike if the directory of the run's place is one directory of one machine."""
    directory = Path(place).parent
    try:
        directory.mkdir(parents=True, exist_ok=True)
        found = directory.stat()
        return _SEEN, f"{machine()} {found.st_dev}:{found.st_ino}"
    except OSError as error:
        raise Invalid(f"local={str(directory)!r}: {error}") from None


@contextlib.contextmanager
def explained(near: str | None) -> Iterator[None]:
    """Says what is wrong if ranks have different disks."""
    try:
        yield
    except Invalid as error:
        if near is None or _SEEN not in str(error):
            raise
        raise Invalid(
            f"local={str(Path(near).parent)!r}: expected ranks of one machine that see one directory there, found "
            "several: what lies on the disk of another machine, no rank could read; leave local= out"
        ) from None


class Draining:
    """Sends the checkpoints of a run to its own place, and applies the rules of both places. Rank 0 has it.

    It may take the place of :class:`native.Retention` for the checkpoints on the local disk.

    Attributes:
        newest: The newest step that this object has sent; ``None`` before.
    """

    HELD = "durable at"

    def __init__(self, url: str, near: str, keep: Keep | None, rate: int | None, timeout_s: float) -> None:
        rules = keep or Keep()
        self.url, self.near = url, near
        self._drain = native.Drain(
            near, url, last=rules.last, every=rules.every, best=rules.best, rate=rate, timeout_s=timeout_s
        )
        self.newest: int | None = None
        self._background, self._process = Background(), os.getpid()
        self._sending: Future[Error | None] | None = None
        self._overtaken: Conflict | None = None
        # What prevented the last sending, and what prevents that of a checkpoint for good.
        self._failure: Error | None = None
        self._refused: Error | None = None
        self._said: set[str] = set()
        self._made: list[int] = []
        # Steps that left the local disk since the last call of retain(), whose files are still there.
        self._left: list[int] = []
        self._has_begun = self._is_cancelled = False

    def begin(self, session: native.Session, url: str) -> None:
        """Sends and deletes from now on only while the job of that session is the newest of the run."""
        self._drain.begin(session)
        self._has_begun = True
        self._background.submit(self._tidy, True)
        self.send()

    def retain(self, made: Sequence[int]) -> tuple[list[int], list[tuple[str, str]]]:
        """Applies the rules of the local disk; see :meth:`native.Retention.retain`.

        Raises:
            Conflict: A newer job saves into the run, so that nothing of this one gets there any more.
        """
        if self._overtaken is not None:
            raise self._overtaken
        self._made = list(made)
        self.send()
        left, spared, skipped = self._drain.retain(made)
        if skipped:
            why = "its room is short, and sending takes longer than the time between saves"
            if self._failure is not None:
                why = f"its room is short, and sending fails: {self._failure}"
            self._warn(
                "%s: step %d has left %s unsent: %s; newer ones are sent, and this is said once",
                *(self.url, skipped[0], self.near, why),
            )
        before, self._left = self._left, []
        return [*before, *left], spared

    def clear(self, steps: Sequence[int] | None) -> list[int]:
        """Deletes files of the local disk; see :meth:`native.Retention.clear`."""
        return self._drain.clear(steps)

    def _tidy(self, is_first: bool) -> None:
        """In the background: applies the rules of the local disk to what was sent, or to what another job left."""
        with contextlib.suppress(Error):  # the next save does it again
            if is_first:
                self.clear(None)
            left, _, _ = self._drain.retain(self._made)
            self._left += left

    def _warn(self, text: str, *arguments: Any) -> None:
        """Logs a warning once."""
        if text not in self._said:
            self._said.add(text)
            _log.warning(text, *arguments)

    def send(self) -> None:
        """Has all that waits sent in the background."""
        if self._process != os.getpid() or self._overtaken is not None or self._is_cancelled:
            return
        if self._sending is None or self._sending.done():
            self._sending = self._background.submit(self._send)

    def _send(self) -> Error | None:
        """In the background: sends until nothing waits; returns what prevents it."""
        failure: Error | None = None
        while True:
            if not threading.main_thread().is_alive():
                self._warn(
                    "%s: the program has ended; its checkpoints are still being sent: Ctrl-C ends that", self.url
                )
            try:
                sent = self._drain.next()
            except (Conflict, Corrupt, Unsupported) as error:
                _log.error("%s", error)
                if isinstance(error, Conflict) and self._drain.is_overtaken():
                    self._overtaken = error
                    return error
                failure = self._failure = self._refused = error
            except NotFound as error:
                _log.warning("%s", error)
            except Error as error:
                if not isinstance(error, Cancelled):
                    _log.warning("%s; it is tried again with the next save", error)
                self._failure = error
                return error
            else:
                if sent is None:
                    return failure
                self._failure = None
                self._note(*sent)
                if self._has_begun:
                    self._tidy(False)

    def _note(self, step: int, bytes_sent: int, spared: list[tuple[str, str]], beside: str | None) -> None:
        """Notes a checkpoint that was sent."""
        self.newest = step
        _log.info("%s: step %d is there: %d bytes were sent", self.url, step, bytes_sent)
        if beside is not None:
            _log.warning("%s: keep= was not applied: %s", self.url, beside)
        for url, reason in spared:
            if url not in self._said:
                self._said.add(url)
                _log.warning("%s matches no rule of keep= and is not deleted: %s", url, reason)

    def failed(self, error: Exception) -> None:
        """Makes room on the local disk if that is why a save has failed."""
        if isinstance(error, Exhausted):
            with contextlib.suppress(Error):
                left, _ = self.retain(self._made)
                self.clear(left)

    def ends_with(self, kind: type[BaseException] | None) -> None:
        """Ends the sending if an error ends the program."""
        if kind is not None and kind is not SystemExit:
            self.cancel()

    def cancel(self) -> None:
        """Ends the sending for good; the next job on this machine goes on with it."""
        self._is_cancelled = True
        self._drain.stop()

    def finish(self, session: native.Session | None) -> None:
        """Waits on rank 0 until all that waits is sent, unless that was cancelled.

        A job that has saved nothing sends what the one before it has not sent, unless a newer one saves elsewhere.

        Raises:
            Error: Something was not sent, and why. It is on the local disk, and the next job there sends it.
            Conflict: A newer job saves into the run.
        """
        if session is None or session.rank != 0 or self._is_cancelled:
            return
        failure: Error | None = None
        try:
            if self._has_begun or self._drain.stand_in():
                for _ in range(2):  # a save may have ended since the background has looked
                    self.send()
                    failure = None if self._sending is None else self._sending.result()
        except BaseException:
            self.cancel()
            raise
        if self._overtaken is not None:
            raise self._overtaken
        failure = failure or self._refused
        if failure is not None:
            raise type(failure)(
                f"{self.url}: every save is {self.HELD} {self.near}, and not all were sent: {failure}. The next job on "
                "this machine sends what it can"
            )
