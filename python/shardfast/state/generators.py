"""The protocol of a framework's global random generators."""

from __future__ import annotations

from typing import Any, Protocol


class RandomGenerators(Protocol):
    """A framework's global random generators: what a module ``adapters/<framework>/random`` defines."""

    def read(self) -> Any:
        """Their states now, as a value that can be stored."""
        ...

    def check(self, state: Any, /) -> None:
        """Refuses a loaded value that :meth:`write` could not set; changes nothing.

        Raises:
            Refused: If this process has other generators.
            Exception: Any other one, if it is no value of :meth:`read`.
        """
        ...

    def write(self, state: Any, /) -> str | None:
        """Sets them; returns the name of those that are in use here and have no state in the value, if any."""
        ...
