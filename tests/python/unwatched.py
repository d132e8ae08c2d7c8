"""Saves that the watching thread does not see, so that what a test does to their tensors comes before any check."""

import contextlib
from collections.abc import Iterator
from queue import SimpleQueue

from shardfast.capture.in_flight import Pending, in_flight


class Aside:
    """Stands for the queue from which the thread that watches saves takes them: it gets none that begins now."""

    def __init__(self, queue: SimpleQueue) -> None:
        self.queue = queue
        self.held: list[Pending] = []

    def put(self, pending: Pending) -> None:
        self.held.append(pending)

    def get(self) -> Pending:
        return self.queue.get()


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """A save that begins here is checked when the test waits for it, however soon all is copied. Also a decorator."""
    aside = Aside(in_flight._watched)
    in_flight._watched = aside
    try:
        yield
    finally:
        in_flight._watched = aside.queue
        for pending in aside.held:
            aside.queue.put(pending)
