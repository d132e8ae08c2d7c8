"""Python's garbage collector, while much is made at once."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """No collection inside, for what makes many objects that are all still needed.

    The collector runs whenever so many are there more than before, and looks at everything that the process holds: of
    thousands of tensors each one described costs more for that than for all else. Neither does it look at what was made
    once it goes on: that counts as old, like all that is young then.
    """
    if not gc.isenabled():  # the program collects when it likes to
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() == 0:  # a program that froze objects keeps them so
            gc.freeze()
            gc.unfreeze()
        gc.enable()
