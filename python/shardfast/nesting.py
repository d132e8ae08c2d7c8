"""One call at a time in each thread: a signal's handler runs in the middle of whatever its thread does."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from .errors import Invalid


class _Thread(threading.local):
    inside = ""
    """The call that this thread makes; empty if none."""


_thread = _Thread()


@contextlib.contextmanager
def call(what: str) -> Iterator[None]:
    """While ``what`` is called. Also a decorator.

    Raises:
        Invalid: This thread is in the middle of another call, whose locks it would wait for.
    """
    if _thread.inside:
        raise Invalid(
            f"{what} was called while the same thread is in {_thread.inside}, as a signal's handler may: let the "
            f"handler only note the signal, and call {what} from the training's loop"
        )
    with work(what):
        yield


@contextlib.contextmanager
def work(what: str) -> Iterator[None]:
    """While something is done that a call, which a signal's handler makes, must not meet; a part of a call, or none."""
    outer = _thread.inside
    _thread.inside = outer or what
    try:
        yield
    finally:
        _thread.inside = outer
