"""Files that name the newest checkpoint of a directory, or of a prefix of an object store, once that is durable.

In a directory it is a text file, replaced as a whole; in an object store a run with one small checkpoint. It is written
after the commit of what it names.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch.distributed as dist

import shardfast as sf

from .places import below, directory_of, expect_place, is_far

_log = logging.getLogger("shardfast")


class FileTracker:
    """A file in a directory.

    Attributes:
        name: The file, for messages.
    """

    def __init__(self, place: str, name: str) -> None:
        self._path = (directory_of(place) / name).absolute()
        self.name = str(self._path)

    def read(self) -> str | None:
        """Returns its text; ``None`` if it is not there.

        Raises:
            Invalid: It cannot be read, or is no text.
        """
        try:
            return self._path.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise sf.Invalid(
                f"{self.name}: expected a text file that names the newest checkpoint, found {error}: move it away"
            ) from error

    def write(self, text: str, step: int) -> None:
        """Replaces what it says; a reader sees the old or the new."""
        handle, path = tempfile.mkstemp(prefix=f".{self._path.name}-", dir=self._path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fchmod(file.fileno(), 0o644)
                os.fsync(file.fileno())
            os.replace(path, self._path)
        except BaseException:
            os.unlink(path)
            raise
        parent = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)


class _RunTracker:
    """A run in an object store, of which rank 0 is the only rank."""

    def __init__(self, place: str, name: str, group: Any) -> None:
        self.name = below(place, name)
        # A step before the newest one is named again when a training goes back.
        self._run = sf.Checkpointer(self.name, keep=sf.last(1), rewind=True, process_group=group)

    def read(self) -> str | None:
        """Returns its text; ``None`` if it is not there."""
        found: dict[str, dict[str, Any]] = {"newest": {"name": None}}
        self._run.restore(found)
        name: str | None = found["newest"]["name"]
        return name

    def write(self, text: str, step: int) -> None:
        """Replaces what it says, durably."""
        self._run.save(step, {"newest": {"name": text}})
        self._run.wait()


class _NoTracker:
    """The tracker of other ranks than 0, which neither read nor write it."""

    def __init__(self, place: str, name: str) -> None:
        self.name = below(place, name)

    def write(self, text: str, step: int) -> None:
        """Writes nothing: rank 0 does."""


class Trackers:
    """The trackers of the places that a loop uses.

    Args:
        file: The name of the file.
        run: That of the run in an object store.
    """

    def __init__(self, file: str, run: str) -> None:
        self._file, self._run_name = file, run
        self._known: dict[str, Any] = {}
        self._group: Any = None

    def of(self, place: str) -> Any:
        """The tracker of a place. All ranks call it, in one order."""
        expect_place(place)
        if place not in self._known:
            if is_far(place) and self._group is None:
                self._group = dist.new_group([0], backend="gloo")
            if dist.get_rank() > 0:
                self._known[place] = _NoTracker(place, self._run_name)
            elif is_far(place):
                self._known[place] = _RunTracker(place, self._run_name, self._group)
            else:
                self._known[place] = FileTracker(place, self._file)
        return self._known[place]


class Saves:
    """Asynchronous saves in flight, in their order."""

    def __init__(self) -> None:
        self._running: list[tuple[Future[None], Callable[[], None]]] = []
        self._background: ThreadPoolExecutor | None = None
        self._process = os.getpid()

    def begin(
        self,
        save: Callable[[], sf.Pending],
        name: Callable[[], None],
        conclude: Callable[[], None] = lambda: None,
        *,
        most: int = 1,
    ) -> None:
        """Begins another save, with at most so many earlier ones in flight.

        Args:
            save: Begins it.
            name: Is called in the background once it is durable: what a tracker writes.
            conclude: Is called by :meth:`settle` afterwards.
            most: See above.

        Raises:
            Error: What an earlier one failed with. The save is begun nevertheless: ranks learn of a failure at other
                times, and make the same saves.
        """
        failed: Exception | None = None
        while True:
            try:
                self.settle(most)
                break
            except Exception as error:
                failed = failed or error
        try:
            pending = save()
        except Exception as error:
            raise error from failed
        # A forked child has no thread of its parent's.
        if self._background is None or self._process != os.getpid():
            # Of one thread: trackers are written in the order of the saves.
            self._background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shardfast-tracker")
            self._process = os.getpid()
        self._running.append((self._background.submit(_name_after_commit, pending, name), conclude))
        if failed is not None:
            raise failed

    def settle(self, most: int | None) -> None:
        """Concludes the saves that have ended; with ``most``, waits until at most so many are in flight.

        Raises:
            Error: What failed, once.
        """
        while self._running:
            future, conclude = self._running[0]
            if not future.done() and (most is None or len(self._running) <= most):
                break
            del self._running[0]
            future.result()
            conclude()


def _name_after_commit(pending: sf.Pending, name: Callable[[], None]) -> None:
    try:
        pending.committed()
        name()
    except Exception as error:
        _log.error("a save failed in the background: %s", error)
        raise
