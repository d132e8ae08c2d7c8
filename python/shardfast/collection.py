"""Python's garbage collector, while much is made at once."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Paused:
    """No collection inside, for what makes many objects that are all still needed.

    The collector runs whenever so many are there more than before: of thousands of tensors each one described costs
    more for that than for all else. Its generations are left as they are, with the program's own garbage in them.
    """

    def __enter__(self) -> None:
        self._was_enabled = gc.isenabled()  # else the program collects when it likes to
        gc.disable()

    def __exit__(self, *raised: object) -> None:
        if self._was_enabled:
            gc.enable()


def paused(function: Callable[P, T]) -> Callable[P, T]:
    """No collection while ``function`` runs, after which all that it made but its result is gone again."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with Paused():
            return function(*args, **kwargs)

    return call
