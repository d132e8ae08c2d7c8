"""Python's garbage collector, while much is made at once."""

from __future__ import annotations

import gc


class Paused:
    """No collection inside, for what makes many objects that are all still needed.

    The collector runs whenever so many are there more than before, and looks at everything that the process holds: of
    thousands of tensors each one described costs more for that than for all else. Neither does it look at what was made
    once it goes on: that counts as old, like all that is young then.
    """

    def __enter__(self) -> None:
        self._was_enabled = gc.isenabled()  # else the program collects when it likes to
        gc.disable()

    def __exit__(self, *raised: object) -> None:
        if not self._was_enabled:
            return
        if gc.get_freeze_count() == 0:  # a program that froze objects keeps them so
            gc.freeze()
            gc.unfreeze()
        gc.enable()
