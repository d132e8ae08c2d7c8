"""Gives what was loaded to the state's objects; what they raise comes with their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .catalog import Refused
from .errors import Corrupt, Error, Invalid
from .state import ShardedEntry
from .stateful import Stateful
from .values import reason


def checked(stateful: Stateful, value: object, place: str) -> Callable[[], None]:
    """Returns the call that gives a made value to an object, which has checked it before."""
    try:
        stateful.check(value)
    except Refused as refused:
        raise Invalid(f"{place}: {refused}") from refused
    except (Error, MemoryError):
        raise
    except Exception as error:
        raise Corrupt(f"{place}: what is stored does not fit: {reason(error)}") from error
    return lambda: stateful.load_state_dict(value)


def give(entry: ShardedEntry, value: object) -> None:
    """Gives a piece what was made for it."""
    if entry.stateful is None:
        entry.put(value)
    else:
        load_into(entry.stateful, value, entry.place)


def load_into(stateful: Any, value: object, place: str) -> None:
    """Gives an object what was saved of it. An exception of its own goes on as it is, with a note that says where."""
    try:
        stateful.load_state_dict(value)
    except Exception as error:
        kind = f"{type(stateful).__module__}.{type(stateful).__qualname__}"
        if hasattr(error, "add_note"):  # Python 3.10 has no notes
            error.add_note(f"in the load_state_dict() of a {kind}, which stands at {place}")
        raise


def installed(install: Callable[[], None], place: str) -> None:
    """Installs what a bundle has received; ``place`` is the bundle's."""
    try:
        install()
    except Refused as refused:
        raise Invalid(f"{place}: {refused}") from refused
