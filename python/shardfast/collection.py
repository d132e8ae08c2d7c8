"""Python's garbage collector, while many objects are made at once."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Paused:
    """Prevents collections inside, for code that makes many objects that are all still needed.

    The collector runs whenever the number of objects has grown by a threshold: to describe thousands of tensors, that
    costs more than all else. Its generations stay as they are, with the program's own garbage in them.
    """

    def __enter__(self) -> None:
        self._was_enabled = gc.isenabled()  # if not, the program collects explicitly
        gc.disable()

    def __exit__(self, *raised: object) -> None:
        if self._was_enabled:
            gc.enable()


def paused(function: Callable[P, T]) -> Callable[P, T]:
    """Prevents collections while ``function`` runs, which frees all that it made except its result."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with Paused():
            return function(*args, **kwargs)

    return call
