"""Walks a user's state and says what it holds: entries, and their leaves for a save.

A state is a dict from keys to what is saved under them. Names of leaves:

- A module's leaves are its fully qualified names (FQNs), an optimizer's ``state.<FQN>.<name>`` and ``param_groups``.
- A dict with string keys is walked one level: each entry is a leaf, or a subtree. A subtree of dicts that hold tensors
  only is tensor leaves with dotted names. Any other value is one object leaf, in which larger tensors are references to
  tensor leaves of their own, called after their place in it.
- What is itself a key's value is called ``value``.

Ranks may hold small tensors that differ though nobody said so: random states, positions, token buffers. A tensor leaf
is one tensor for all ranks, so these are kept as part of a value, whose copies are compared between ranks. See
:func:`_is_kept`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import adapters as frameworks
from .catalog import (
    Adapter,
    AliasLeaf,
    Bundle,
    Layout,
    Leaf,
    Module,
    ObjectLeaf,
    PerRank,
    Refused,
    TensorLeaf,
    item_bytes,
)
from .errors import Invalid
from .values import Lowering, Trail, encode, lower

VALUE = "value"
"""The name of the leaf of a key whose value is one value or one tensor."""

KEPT_BYTES_MAX = 1 << 20
RANDOM_STATE_BYTES_MAX = 1 << 16

Put = Callable[[object], None]
"""Replaces an entry in the user's container."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor that stands in a container, at first level or in a subtree of tensors."""

    key: str
    name: str
    adapter: Adapter
    tensor: Any
    put: Put
    pure: bool
    """Whether everything under the key is tensors (a state dict)."""

    place: str = ""


@dataclass(frozen=True)
class TreeEntry:
    """A subtree of dicts that holds tensors only."""

    key: str
    name: str
    value: dict[str, Any]
    leaves: list[TensorEntry]
    put: Put
    place: str = ""


@dataclass(frozen=True)
class BundleEntry:
    """A module or an optimizer; the names of its leaves follow ``prefix``."""

    key: str
    prefix: str
    bundle: Bundle
    place: str = ""


@dataclass(frozen=True)
class ValueEntry:
    """Anything else.

    Attributes:
        value: What is stored; the state dict of an object that has one.
        per_rank: Whether the user declared it as the rank's own.
        stateful: The object whose state dict it is, if any.
    """

    key: str
    name: str
    value: object
    per_rank: bool
    stateful: Any
    put: Put
    place: str = ""


Entry = TensorEntry | TreeEntry | BundleEntry | ValueEntry


@dataclass(frozen=True)
class _Unit:
    """What stands at a key, or directly below one."""

    key: str
    name: str | None
    value: object
    put: Put
    place: str


@dataclass(frozen=True)
class Walked:
    """A state's entries, and the frameworks they are of."""

    entries: list[Entry]
    adapters: list[Adapter]
    module_keys: list[str]
    """The keys under which modules stand: optimizers speak of parameters by FQNs of these."""


def walk(state: object) -> Walked:
    """The entries of a state, in its order.

    Raises:
        Invalid: If it is no state, or something in it is of a kind that cannot be stored.
    """
    adapters = frameworks.active()
    units = list(_units(state, adapters))
    modules: dict[int, Bundle] = {}
    names: dict[int, str] = {}
    module_keys: list[str] = []
    for unit in units:
        module = _module(unit, adapters)
        if module is not None:
            modules[id(unit)] = module.bundle
            module_keys.append(unit.key)
            prefix = f"{unit.name}." if unit.name is not None else ""
            for fqn, parameter in module.parameters.items():
                names.setdefault(id(parameter), prefix + fqn)
    pure_keys = _pure_keys(units, adapters)
    entries = [_entry(unit, adapters, modules.get(id(unit)), names, unit.key in pure_keys) for unit in units]
    return Walked(entries, adapters, module_keys)


def _units(state: object, adapters: Sequence[Adapter]) -> Iterator[_Unit]:
    if not isinstance(state, dict):
        raise Invalid(
            f"the state is a {type(state).__name__}: expected a dict from names to what is saved under them, such as "
            '{"model": model, "optimizer": optimizer}'
        )
    for key, value in state.items():
        if not isinstance(key, str) or not key:
            raise Invalid(f"the state's key {key!r}: expected a name (it becomes a directory of the checkpoint)")
        if _is_walked(value):
            for name, item in value.items():
                yield _Unit(key, name, item, _replacing(value, name), f"{key}.{name}")
        else:
            yield _Unit(key, None, value, _replacing(state, key), key)


def _is_walked(value: object) -> bool:
    is_plain = isinstance(value, dict) and not _is_stateful(value)
    return is_plain and all(isinstance(name, str) for name in value)  # type: ignore[attr-defined]


def _replacing(container: Any, name: Any) -> Put:
    def put(value: object) -> None:
        container[name] = value

    return put


def _is_stateful(value: object) -> bool:
    if isinstance(value, type):
        return False
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _module(unit: _Unit, adapters: Sequence[Adapter]) -> Module | None:
    try:
        answers = (adapter.module(unit.value) for adapter in adapters)
        return next((module for module in answers if module is not None), None)
    except Refused as refused:
        raise Invalid(f"{unit.place}: {refused}") from refused


def _optimizer(unit: _Unit, adapters: Sequence[Adapter], names: Mapping[int, str]) -> Bundle | None:
    try:
        answers = (adapter.optimizer(unit.value, names) for adapter in adapters)
        return next((optimizer for optimizer in answers if optimizer is not None), None)
    except Refused as refused:
        raise Invalid(f"{unit.place}: {refused}") from refused


def _tensors_of_tree(value: object, adapters: Sequence[Adapter]) -> bool:
    """Whether ``value`` is a tensor, or dicts with string keys that hold tensors only, at least one."""
    if isinstance(value, dict):
        if not value or not _is_walked(value):
            return False
        return all(_tensors_of_tree(item, adapters) for item in value.values())
    return any(adapter.is_tensor(value) for adapter in adapters)


def _pure_keys(units: Sequence[_Unit], adapters: Sequence[Adapter]) -> set[str]:
    mixed = {unit.key for unit in units if not _tensors_of_tree(unit.value, adapters)}
    return {unit.key for unit in units} - mixed


def _entry(
    unit: _Unit, adapters: Sequence[Adapter], module: Bundle | None, names: Mapping[int, str], pure: bool
) -> Entry:
    name, value = unit.name if unit.name is not None else VALUE, unit.value
    prefix = f"{unit.name}." if unit.name is not None else ""
    if module is not None:
        return BundleEntry(unit.key, prefix, module, unit.place)
    if isinstance(value, PerRank):
        return _per_rank(unit, name, value)
    optimizer = _optimizer(unit, adapters, names)
    if optimizer is not None:
        return BundleEntry(unit.key, prefix, optimizer, unit.place)
    for adapter in adapters:
        if adapter.is_tensor(value):
            return TensorEntry(unit.key, name, adapter, value, unit.put, pure, unit.place)
    if _is_stateful(value):
        stateful: Any = value
        return ValueEntry(unit.key, name, stateful.state_dict(), False, value, unit.put, unit.place)
    if isinstance(value, dict) and _tensors_of_tree(value, adapters):
        leaves = list(_tree(unit.key, name, value, adapters, pure, unit.place))
        return TreeEntry(unit.key, name, value, leaves, unit.put, unit.place)
    return ValueEntry(unit.key, name, value, False, None, unit.put, unit.place)


def _per_rank(unit: _Unit, name: str, wrapped: PerRank) -> ValueEntry:
    def put(value: object) -> None:
        wrapped.value = value

    if _is_stateful(wrapped.value):
        stateful: Any = wrapped.value
        return ValueEntry(unit.key, name, stateful.state_dict(), True, stateful, put, unit.place)
    return ValueEntry(unit.key, name, wrapped.value, True, None, put, unit.place)


def _tree(
    key: str, name: str, tree: dict[str, Any], adapters: Sequence[Adapter], pure: bool, place: str
) -> Iterator[TensorEntry]:
    for step, value in tree.items():
        below = f"{place}.{step}"
        if isinstance(value, dict):
            yield from _tree(key, f"{name}.{step}", value, adapters, pure, below)
        else:
            adapter = next(adapter for adapter in adapters if adapter.is_tensor(value))
            yield TensorEntry(key, f"{name}.{step}", adapter, value, _replacing(tree, step), pure, below)


def name_below(name: str, trail: Trail) -> str:
    """The name of the tensor leaf at ``trail`` in the value of the object leaf ``name``."""
    return ".".join([name, *map(str, trail)])


# Leaves for a save


def describe(state: object, *, pickle: bool = False) -> list[Leaf]:
    """The leaves that this rank holds, sorted by key and name. Tensors on a device are copied to the host.

    Args:
        pickle: Whether values that cannot be said as data are pickled.

    Raises:
        Invalid: Naming what cannot be stored, or two things of one name.
    """
    walked = walk(state)
    leaves = _Leaves(walked.adapters, pickle)
    for entry in walked.entries:
        leaves.add(entry)
    return sorted(leaves.all(), key=lambda leaf: (leaf.key, leaf.name))


@dataclass(frozen=True)
class _Named:
    """A tensor under one of its names."""

    key: str
    name: str
    layout: Layout
    adapter: Adapter
    tensor: object
    place: str


class _Leaves:
    def __init__(self, adapters: Sequence[Adapter], pickle: bool) -> None:
        self._adapters = adapters
        self._pickle = pickle
        self._places: dict[tuple[str, str], str] = {}
        self._objects: list[ObjectLeaf] = []
        self._tensors: dict[Hashable, list[_Named]] = {}

    def all(self) -> list[Leaf]:
        leaves: list[Leaf] = [*self._objects]
        for names in self._tensors.values():
            # Every rank must choose the same name for the tensor itself, whatever the order of its dicts.
            first, *others = sorted(names, key=lambda named: (named.key, named.name))
            try:
                leaves.append(TensorLeaf(first.key, first.name, first.layout, first.adapter.source(first.tensor)))
            except Refused as refused:
                raise Invalid(f"{first.place}: {refused}") from refused
            leaves += [AliasLeaf(other.key, other.name, first.key, first.name) for other in others]
        return leaves

    def add(self, entry: Entry) -> None:
        if isinstance(entry, TensorEntry):
            self._standing(entry)
        elif isinstance(entry, TreeEntry):
            for leaf in entry.leaves:
                self._standing(leaf)
        elif isinstance(entry, ValueEntry):
            self._value(entry, entry.value, _keeps_values if entry.stateful is None else _keeps_bookkeeping)
        else:
            for name, tensor in entry.bundle.tensors().items():
                adapter = next(adapter for adapter in self._adapters if adapter.is_tensor(tensor))
                self._tensor(entry.key, entry.prefix + name, adapter, tensor, f"{entry.place}.{name}")
            for name, value in entry.bundle.values().items():
                below = ValueEntry(
                    entry.key, entry.prefix + name, value, False, None, _nowhere, f"{entry.place}.{name}"
                )
                self._value(below, value, _keeps_values)

    def _claim(self, key: str, name: str, place: str) -> None:
        if (key, name) in self._places:
            other = self._places[key, name]
            raise Invalid(f"two leaves are called {key}/{name}: {other} and {place}; give one of them another name")
        self._places[key, name] = place

    def _standing(self, entry: TensorEntry) -> None:
        layout = self._layout(entry.adapter, entry.tensor, entry.place)
        if _is_kept(layout, _keeps_random_states if entry.pure else _keeps_values):
            value = ValueEntry(entry.key, entry.name, entry.tensor, False, None, entry.put, entry.place)
            self._value(value, entry.tensor, _keeps_all)
        else:
            self._tensor(entry.key, entry.name, entry.adapter, entry.tensor, entry.place)

    def _layout(self, adapter: Adapter, tensor: object, place: str) -> Layout:
        try:
            return adapter.layout(tensor)
        except Refused as refused:
            raise Invalid(f"{place}: {refused}") from refused

    def _tensor(self, key: str, name: str, adapter: Adapter, tensor: object, place: str) -> None:
        self._claim(key, name, place)
        layout = self._layout(adapter, tensor, place)
        named = _Named(key, name, layout, adapter, tensor, place)
        self._tensors.setdefault(adapter.identity(tensor), []).append(named)

    def _value(self, entry: ValueEntry, value: object, keeps: Callable[[Layout], bool]) -> None:
        self._claim(entry.key, entry.name, entry.place)

        def refer(adapter: Adapter, tensor: object, trail: Trail) -> tuple[str, str] | None:
            if entry.per_rank or not adapter.refers or _is_kept(adapter.layout(tensor), keeps):
                return None
            name = name_below(entry.name, trail)
            self._tensor(entry.key, name, adapter, tensor, f"{entry.place}.{'.'.join(map(str, trail))}")
            return entry.key, name

        how = Lowering(entry.place, self._adapters, refer, self._pickle)
        encoded = encode(lower(value, how), entry.place)
        self._objects.append(ObjectLeaf(entry.key, entry.name, encoded, entry.per_rank))


def _nowhere(value: object) -> None:
    """Takes what a bundle takes itself."""


def _is_kept(layout: Layout, keeps: Callable[[Layout], bool]) -> bool:
    """Whether a tensor is kept as part of a value instead of as a tensor leaf: whole, small, and of a suspect kind."""
    return not layout.text and keeps(layout)


def _size_bytes(layout: Layout) -> int:
    return math.prod(layout.shape) * item_bytes(layout.dtype)


def _keeps_values(layout: Layout) -> bool:
    """Beside other values, such as arguments and counters."""
    return _size_bytes(layout) <= KEPT_BYTES_MAX


def _keeps_bookkeeping(layout: Layout) -> bool:
    """In the state dict of an object: whole numbers count and point, floats were learned."""
    is_whole_number = layout.dtype == "BOOL" or layout.dtype[0] in "UI"
    return is_whole_number and _size_bytes(layout) <= KEPT_BYTES_MAX


def _keeps_random_states(layout: Layout) -> bool:
    """In a dict of tensors only."""
    return layout.dtype == "U8" and len(layout.shape) == 1 and _size_bytes(layout) <= RANDOM_STATE_BYTES_MAX


def _keeps_all(layout: Layout) -> bool:
    return True
