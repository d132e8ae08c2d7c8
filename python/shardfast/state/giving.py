"""Gives what was loaded to the state's objects; what they raise comes with their place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .. import adapters as frameworks
from ..errors import Corrupt, Error, Invalid
from .catalog import Refused
from .entries import Entry, ShardedEntry, ValueEntry
from .stateful import Stateful
from .values import reason


def expect_none_in_use(entries: Sequence[Entry], selects: Callable[[str], bool]) -> list[str]:
    """Says of which data loaders the program would go on with the old position after a load."""
    problems = []
    for entry in entries:
        if isinstance(entry, (ValueEntry, ShardedEntry)) and selects(f"{entry.key}/{entry.name}"):
            try:
                frameworks.expect_unused(entry.stateful)
            except Refused as refused:
                problems.append(f"{entry.key}/{entry.name}: {refused}")
    return problems


def given(entry: ValueEntry | ShardedEntry, value: object) -> Callable[[], None]:
    """Returns the call that gives a made value to what stands at a place in the state.

    Raises:
        Error: What stands there refuses it.
    """
    stateful = entry.stateful
    if stateful is None:
        return lambda: entry.put(value)
    if isinstance(stateful, Stateful):
        return checked(stateful, value, entry.place)
    try:
        frameworks.expect_as_saved(stateful, value)
    except Refused as refused:
        raise Invalid(f"{entry.place}: {refused}") from refused
    return lambda: load_into(stateful, value, entry.place)


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


def load_into(stateful: Any, value: object, place: str) -> None:
    """Gives an object what was saved of it. An exception of its own goes on as it is, with a note that says where."""
    try:
        stateful.load_state_dict(value)
    except Refused as refused:
        raise Invalid(f"{place}: {refused}") from refused
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
