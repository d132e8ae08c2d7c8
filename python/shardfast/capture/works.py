"""Work of the user's that waits for a save to be durable."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

_log = logging.getLogger("shardfast")

PATIENCE_S = 10.0
"""How long work may take before the log says that saves wait for it."""


class Works:
    """Work by the step that it waits for, in the order of its saves."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, Future[Any], Callable[[str], Any]]] = deque()
        self._thread: int | None = None

    def add(self, step: int, work: Callable[[str], T]) -> Future[T]:
        """Has ``work`` called by a later :meth:`do` of that step or a later one."""
        future: Future[T] = Future()
        self._waiting.append((step, future, work))
        return future

    def is_here(self) -> bool:
        """Whether this thread does such work now."""
        return self._thread == threading.get_ident()

    def do(self, step: int, failure_of: Callable[[int], Exception | None], place_of: Callable[[int], str]) -> None:
        """Does what waits for saves up to that step, which have ended: each of them well, or with a failure."""
        while self._waiting and self._waiting[0][0] <= step:
            of, future, work = self._waiting.popleft()
            failure, place = failure_of(of), place_of(of)
            if failure is not None:
                future.set_exception(failure)
                continue
            said = "%s: what when_durable() was given takes long, and saves wait for it"
            slow = threading.Timer(PATIENCE_S, _log.warning, (said, place))
            slow.daemon = True
            slow.start()
            self._thread = threading.get_ident()
            try:
                future.set_result(work(place))
            except BaseException as error:
                future.set_exception(error)
            finally:
                self._thread = None
                slow.cancel()
