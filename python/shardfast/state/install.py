"""Fills and installs what a match has found: binds memory, makes values, gives them to the state's objects.

The engine fills tensors in place. Values are made when all bytes are there and verified, and installed when every rank
has made its own.
"""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .. import adapters as frameworks
from ..errors import Corrupt, Error, Invalid
from .catalog import Adapter, Refused, SavedObject
from .entries import BundleEntry, Put, ShardedEntry, ValueEntry
from .load_plan import LoadPlan, Options
from .parts import Parts
from .sharded import Made
from .stateful import Stateful
from .units import expect_no_loader
from .values import Raising, Trail, decode, raise_value, reason
from .wants import Want

_log = logging.getLogger("shardfast")


Installs = list[tuple[bool, Callable[[], None]]]
"""Calls that give made values to the state's objects, and whether they come last: installing may draw numbers, which
changes what is read at each save."""


@dataclass(frozen=True)
class Value:
    """A value to make from saved copies."""

    leaf: SavedObject
    name: str
    copies: list[int]
    place: str
    receive: Put
    current: dict[Trail, tuple[Adapter, Any]]
    """Tensors in the present value that may be filled, by their trails."""

    merges: bool


@dataclass(frozen=True)
class Received:
    """A module or optimizer, and what is loaded for it.

    Attributes:
        present: Gives the name here of a parameter in saved values.
        created: Tensors that were made for it, by leaf name.
        values: Its loaded values, likewise.
        absent: Leaves that it has and the checkpoint does not, which it drops.
        decisive: Of values that merge the number of copies that decide, by leaf name.
        filled: Leaves that it has and that are loaded, if it has descriptions.
    """

    entry: BundleEntry
    present: Callable[[str], str]
    created: dict[str, Any] = field(default_factory=dict)
    values: dict[str, object] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)
    decisive: dict[str, int] = field(default_factory=dict)
    filled: set[str] = field(default_factory=set)


class Bound(NamedTuple):
    """Wants of a load, as Rust takes them: regions with their memory, leaf and copy of values, the memory's devices."""

    wants: list[tuple[Any, ...]]
    values: list[tuple[int, int]]
    devices: set[int]


@dataclass
class Installation:
    """Everything that a load fills, makes and installs on this rank.

    Attributes:
        made: Values in pieces that were made already.
        loaded: Tensors below values, by the names of their leaves.
        finish_last: Places, and calls that need all tensors filled.
        warning: Text for the log when all is made; empty for none.
    """

    plan: LoadPlan
    options: Options
    adapters: Sequence[Adapter]
    made: Sequence[Made] = ()
    wants: list[Want] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    bundles: list[Received] = field(default_factory=list)
    loaded: dict[tuple[str, str], Any] = field(default_factory=dict)
    installs: Installs = field(default_factory=list)
    finish_last: list[tuple[str, Callable[[], None]]] = field(default_factory=list)
    warning: str = ""
    _finish: list[tuple[str, Callable[[], None]]] = field(default_factory=list)
    _owners: list[object] = field(default_factory=list)

    def forecast(self) -> Bound:
        """Returns what the load would read, without memory."""
        return Bound([native for want in self.wants for native in want.forecast()], self._copies(), set())

    def bind(self) -> Bound:
        """Returns what to read into which memory, which this object keeps allocated."""
        bound = Bound([], self._copies(), set())
        owners: dict[Adapter | Parts, list[object]] = {}
        for want in self.wants:
            try:
                target = want.destination.target or want.adapter.target(want.tensor, want.leaf.dtype)
            except Refused as refused:
                raise Invalid(f"{want.place}: {refused}") from refused
            owners.setdefault(want.adapter, []).append(target.owner)
            if target.finish is not None:
                self._finish.append((want.place, target.finish))
            if want.rows is not None and isinstance(want.adapter, Parts):
                clear = functools.partial(want.adapter.clear_behind, want.tensor, want.rows)
                self.finish_last.append((want.place, clear))
            for native, memory in want.bound(target):
                bound.devices.update(memory.where)
                bound.wants.append(native)
        for adapter, of in owners.items():
            adapter.wrote(of)
        self._owners += owners.values()
        return bound

    def _copies(self) -> list[tuple[int, int]]:
        return [(value.leaf.index, copy) for value in self.values for copy in value.copies]

    def make(self, encoded: Sequence[bytes]) -> None:
        """Makes the values from their bytes (in the order of :attr:`Bound.values`), and has their takers check them."""
        for place, finish in (*self._finish, *self.finish_last):
            try:
                finish()
            except Refused as refused:
                raise Invalid(f"{place}: {refused}") from refused
        remaining = iter(encoded)
        for value in self.values:
            made = [self._raise(value, next(remaining)) for _ in value.copies]
            value.receive(made if value.merges else made[0])
        self.installs += [(True, given(one.entry, one.value)) for one in self.made]
        for bundle in self.bundles:
            entry = bundle.entry
            try:
                restored = entry.bundle.restore(
                    bundle.created,
                    bundle.values,
                    bundle.present,
                    strict=self.options.strict,
                    absent=bundle.absent,
                    decisive=bundle.decisive,
                    filled=bundle.filled,
                )
            except Refused as refused:
                raise Invalid(f"{entry.place}: {refused}") from refused
            except (Error, MemoryError):
                raise
            except Exception as error:  # of a value that no bundle has
                raise Corrupt(f"{entry.place}: what is stored does not fit: {reason(error)}") from error
            self.installs.append((False, functools.partial(installed, restored.install, entry.place)))
            missing = {f"{entry.key}/{entry.prefix}{name}" for name in restored.missing}
            self.plan.missing += sorted(missing)
            self.plan.dropped = [name for name in self.plan.dropped if name not in missing]
            self.plan.unexpected += [f"{entry.key}/{entry.prefix}{name}" for name in restored.unexpected]

    def install(self) -> None:
        """Installs what was loaded and made."""
        if self.warning:
            _log.warning("%s: %s", self.plan.url, self.warning)
        for _, install in sorted(self.installs, key=operator.itemgetter(0)):
            install()

    def _raise(self, value: Value, encoded: bytes) -> Any:
        def referred(key: str, name: str) -> Any:
            if (key, name) not in self.loaded:
                raise Corrupt(f"{value.place}: it refers to the tensor {key}/{name}, which the checkpoint lacks")
            return self.loaded[key, name]

        def settle(tensor: object, trail: Trail) -> object:
            if trail not in value.current:
                return tensor
            adapter, standing = value.current[trail]
            try:
                adapter.fill(standing, tensor)
            except Refused:
                return tensor
            return standing

        how = Raising(value.place, self.adapters, referred, settle, self.options.pickle)
        return raise_value(decode(encoded, value.place), how)


def filling(
    adapter: Adapter | Parts,
    tensor: Any,
    put: Put | None,
    name: str,
    is_shared: Callable[[], bool],
    casts: dict[str, tuple[str, str]] | None,
) -> Put:
    """Returns what fills a tensor of the state from a value; ``put`` replaces one whose memory others share.

    It converts the elements if there is ``casts``, and notes there the types that differ.
    """

    def receive(value: object) -> None:
        if value is tensor:  # filled already
            return
        cast = casts is not None
        try:
            if put is None or isinstance(adapter, Parts) or not is_shared():
                adapter.fill(tensor, value, cast)
            else:
                layout = adapter.layout(tensor)
                own = adapter.allocate(layout.dtype, layout.shape)
                adapter.fill(own, value, cast)
                put(own)
            if casts is not None and not isinstance(adapter, Parts) and adapter.is_tensor(value):
                was, now = adapter.layout(value).dtype, adapter.layout(tensor).dtype
                casts.update({name: (was, now)} if was != now else {})
        except Refused as refused:
            raise Invalid(f"{name}: {refused}") from refused

    return receive


def give(installs: Installs, entry: ValueEntry, value: object) -> None:
    """Has a made value installed."""
    installs.append((isinstance(entry.stateful, Stateful), given(entry, value)))


def given(entry: ValueEntry | ShardedEntry, value: object) -> Callable[[], None]:
    """Returns the call that gives a made value to what stands at a place in the state.

    Raises:
        Error: What stands there refuses it.
    """
    stateful = entry.stateful
    if stateful is None:
        return lambda: entry.put(value)
    try:
        if not isinstance(stateful, Stateful):
            expect_no_loader(value)
            frameworks.expect_as_saved(stateful, value)
            return lambda: load_into(stateful, value, entry.place)
        try:
            stateful.check(value)
        except (Refused, Error, MemoryError):
            raise
        except Exception as error:
            raise Corrupt(f"{entry.place}: what is stored does not fit: {reason(error)}") from error
    except Refused as refused:
        raise Invalid(f"{entry.place}: {refused}") from refused
    return lambda: load_into(stateful, value, entry.place)


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
