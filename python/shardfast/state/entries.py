"""Walks a user's state and yields what it holds: entries.

A state is a dict from keys to what is saved under them. Names of leaves:

- A module's leaves are its fully qualified names (FQNs), an optimizer's ``state.<FQN>.<name>`` and ``param_groups``.
- A dict with string keys is walked one level: each entry is a leaf, or a subtree. A subtree of dicts that hold tensors
  only is tensor leaves with dotted names. Any other value is one object leaf, in which larger tensors are references to
  tensor leaves of their own, called after their place in it.
- What is itself a key's value is called ``value``.

Ranks may hold small tensors that differ without being declared: random states, positions, token buffers. A tensor leaf
is one tensor for all ranks, so these are kept as part of a value, whose copies are compared between ranks. See
:func:`is_kept`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .. import adapters as frameworks
from ..errors import Invalid
from .catalog import Adapter, Bundle, Layout, Module, NamedPart, Owner, Refused, item_bytes
from .parts import changed_as, name_of, pieces_of
from .stateful import PerRank, Sharded, expect_own_piece
from .values import DEPTH_MAX, Trail, dotted, where

PIECE = ".piece."
"""Between the name of a value in pieces and the number of one."""

VALUE = "value"
"""The name of the leaf of a key whose value is one value or one tensor."""

KEPT_BYTES_MAX = 1 << 20
RANDOM_STATE_BYTES_MAX = 1 << 16

Put = Callable[[object], None]
"""Replaces an entry in the user's container."""


class TensorEntry(NamedTuple):
    """A tensor in a container, at first level or in a subtree of tensors."""

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
    name: str | None = None
    value: Any = None
    """The module or optimizer, or the list or dict of them."""

    owned: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """For an optimizer the names of its parameters, by the keys under which they stand."""

    exact: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Likewise the names of those of which some rank keeps a copy that is more exact."""

    def tensors(self) -> Mapping[str, Any]:
        """The bundle's tensors and parts.

        Raises:
            Invalid: Naming one that cannot be stored.
        """
        try:
            return self.bundle.tensors()
        except Refused as refused:
            raise Invalid(f"{self.place}: {refused}") from refused


@dataclass(frozen=True)
class ValueEntry:
    """Anything else.

    Attributes:
        value: What is stored; the state dict of an object that has one.
        owner: Whose it is, as the user declared it.
        stateful: The object whose state dict it is, if any.
    """

    key: str
    name: str
    value: object
    owner: Owner
    stateful: Any
    put: Put
    place: str = ""


@dataclass(frozen=True)
class ShardedEntry:
    """One of several pieces.

    Attributes:
        value: What is stored; the state dict of an object that has one.
        sharded: The user's word for it.
        stateful: The object whose state dict it is, if any.
    """

    key: str
    name: str
    value: object
    sharded: Sharded
    stateful: Any
    put: Put
    place: str = ""

    @property
    def leaf(self) -> str:
        """The name of the piece's leaf."""
        return f"{self.name}{PIECE}{self.sharded.index}"

    def merged(self, shared: list[Any]) -> list[Any]:
        """Merges what each piece shares, where the object knows how different pieces become one."""
        merge = getattr(self.stateful, "merged", None)
        return shared if merge is None else merge(shared)

    @property
    def subject(self) -> str:
        """The name of the class whose state it is."""
        subject: str | None = getattr(self.stateful, "subject", None)
        return subject or type(self.sharded.value if self.stateful is None else self.stateful).__name__

    @property
    def split(self) -> Callable[[Any, int], Sequence[Any]] | None:
        """Splits a unit; ``None`` if the object has no such method."""
        split = getattr(self.sharded.value if self.stateful is None else self.stateful, "split", None)
        return split if callable(split) else None


Entry = TensorEntry | TreeEntry | BundleEntry | ValueEntry | ShardedEntry


@dataclass(eq=False)
class Unit:
    """The object at a key, or directly below one. Its state dict is made once.

    Attributes:
        container: Its container, as in ``container[step]``.
        step: See there.
    """

    key: str
    name: str | None
    value: object
    container: Any
    step: str
    place: str

    def put(self, value: object) -> None:
        """Replaces the value in its container."""
        self.container[self.step] = value

    @functools.cached_property
    def state_dict(self) -> object:
        """That of the value, of one that has a state dict."""
        try:
            return self.stateful.state_dict()
        except Refused as refused:
            raise Invalid(f"{self.place}: {refused}") from refused

    @functools.cached_property
    def stateful(self) -> Any:
        """The value, or what stands for it, that has a state dict; ``None`` without one."""
        value: Any = self.value.value if isinstance(self.value, (PerRank, Sharded)) else self.value
        stands = frameworks.stands_for(value) if isinstance(self.value, Sharded) else None
        return stands or (value if _is_stateful(value) else None)


@dataclass(frozen=True)
class Walked:
    """A state's entries, and the frameworks they are of."""

    entries: list[Entry]
    adapters: list[Adapter]


@dataclass(frozen=True)
class _Named:
    """The names of what an optimizer may own, and their keys, by ``id``."""

    names: dict[int, list[NamedPart]]
    keys: dict[int, str]
    beside: frozenset[int] = frozenset()
    """``id`` of all objects of the state."""

    def add(self, tensor: object, key: str, name: str) -> None:
        """The first name of a tensor or a part counts."""
        if self.keys.setdefault(id(changed_as(tensor)), key) == key:
            name_of(tensor, name, self.names)

    def by_key(self, parameters: Mapping[str, Any]) -> dict[str, frozenset[str]]:
        """The names of an optimizer's parameters, by the keys under which they stand."""
        found: dict[str, set[str]] = {}
        for fqn, parameter in parameters.items():
            found.setdefault(self.keys[id(parameter)], set()).add(fqn)
        return {key: frozenset(fqns) for key, fqns in found.items()}


def walk(state: object) -> Walked:
    """The entries of a state, in its order.

    Raises:
        Invalid: If it is no state, or something in it is of a kind that cannot be stored.
    """
    return walk_units(list(units_of(state)), frameworks.active())


def walk_units(units: Sequence[Unit], adapters: list[Adapter]) -> Walked:
    """Walks a state's units as :func:`walk` does."""
    _expect_readers(units)
    modules: dict[int, Bundle] = {}
    named = _Named({}, {}, frozenset(id(changed) for unit in units for changed in _objects_of(unit.value)))
    owners = [_owner(unit.value, adapters) for unit in units]
    for unit, owner in zip(units, owners, strict=True):
        module = _module(unit, adapters) if owner is None else None
        if module is not None:
            modules[id(unit)] = module.bundle
            prefix = f"{unit.name}." if unit.name is not None else ""
            for fqn, parameter in module.parameters.items():
                for piece in pieces_of(parameter):
                    named.add(piece, unit.key, prefix + fqn)
    for unit, owner in zip(units, owners, strict=True):
        for name, tensor in _standing(unit, owner, adapters):
            named.add(tensor, unit.key, name)
    pure_keys = _pure_keys(units, owners, adapters)
    entries = [
        _tensor_entry(unit, owner, unit.key in pure_keys)
        if owner is not None
        else _entry(unit, adapters, modules.get(id(unit)), named, unit.key in pure_keys)
        for unit, owner in zip(units, owners, strict=True)
    ]
    return Walked(entries, adapters)


def _objects_of(value: object) -> Iterator[object]:
    """Yields what stands at a key, and the items of a list there."""
    value = value.value if isinstance(value, (PerRank, Sharded)) else value
    yield value
    yield from value if isinstance(value, (list, tuple)) else ()


def _standing(unit: Unit, owner: Adapter | None, adapters: Sequence[Adapter]) -> Iterator[tuple[str, Any]]:
    """The tensors outside of bundles, with their names: optimizers may own a dict of parameters like a module's."""
    if owner is not None:
        yield unit.name if unit.name is not None else VALUE, unit.value
    elif isinstance(unit.value, dict) and unit.name is not None and _tensors_of_tree(unit.value, adapters):
        for leaf in _tree(unit.key, unit.name, unit.value, adapters, True, unit.place):
            yield leaf.name, leaf.tensor


def _expect_readers(units: Sequence[Unit]) -> None:
    """Refuses readers of data that are another piece than is declared, or whose position is not known."""
    readers = [unit for unit in units if unit.stateful is not None]  # most are tensors, and each save comes here
    for unit in readers:
        expect_own_piece(unit.place, unit.value, unit.stateful)
    frameworks.expect_positions((unit.place, unit.stateful) for unit in readers)


def rest_of(units: Sequence[Unit], bundles: Sequence[Unit], adapters: Sequence[Adapter]) -> list[Entry] | None:
    """The entries of a state beside some bundles; ``None`` if there are other bundles, too."""
    _expect_readers(units)
    rest = [unit for unit in units if not any(unit is bundle for bundle in bundles)]
    owners = [_owner(unit.value, adapters) for unit in rest]
    pure_keys = _pure_keys(rest, owners, adapters) - {bundle.key for bundle in bundles}
    entries: list[Entry] = []
    try:
        for unit, owner in zip(rest, owners, strict=True):
            if owner is not None:
                entries.append(_tensor_entry(unit, owner, unit.key in pure_keys))
            elif _module(unit, adapters) is not None:
                return None
            else:
                entries.append(_entry(unit, adapters, None, _Named({}, {}), unit.key in pure_keys))
    except Invalid:  # a new optimizer, whose parameters have no names here
        return None
    return None if any(isinstance(entry, BundleEntry) for entry in entries) else entries


def units_of(state: object) -> Iterator[Unit]:
    """The objects at the keys of a state, and directly below keys that hold dicts.

    Raises:
        Invalid: If it is no state.
    """
    if not isinstance(state, dict):
        raise Invalid(
            f"the state is a {type(state).__name__}: expected a dict from names to what is saved under them, such as "
            '{"model": model, "optimizer": optimizer}'
        )
    for key, value in state.items():
        if not isinstance(key, str) or not key:
            raise Invalid(f"the state's key {key!r}: expected a name (it becomes a directory of the checkpoint)")
        expect_text(key, f"the state's key {key!r}")
        if _is_walked(value):
            for name, item in value.items():
                yield Unit(key, name, item, value, name, _place_below(key, name))
        else:
            yield Unit(key, None, value, state, key, key)


def in_use(entries: Sequence[Entry], selects: Callable[[str], bool]) -> list[str]:
    """Lists the data loaders with which the program would go on at the old position after a load."""
    problems = []
    for entry in entries:
        if isinstance(entry, (ValueEntry, ShardedEntry)) and selects(f"{entry.key}/{entry.name}"):
            try:
                frameworks.expect_unused(entry.stateful)
            except Refused as refused:
                problems.append(f"{entry.key}/{entry.name}: {refused}")
    return problems


def expect_text(name: str, place: str) -> None:
    """Refuses a name that no file and no message can hold.

    Raises:
        Invalid: With the place, the name in it escaped.
    """
    if name.isascii():
        return
    try:
        name.encode()
    except UnicodeEncodeError as error:
        where = place.encode("ascii", "backslashreplace").decode()
        letter = f"U+{ord(name[error.start]):04X}"
        raise Invalid(
            f"{where}: expected a name of valid Unicode text, found a lone surrogate ({letter}): rename it"
        ) from error


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


def _owner(value: object, adapters: Sequence[Adapter]) -> Adapter | None:
    """The adapter of which ``value`` is a tensor."""
    for adapter in adapters:
        if adapter.is_tensor(value):
            return adapter
    return None


def _module(unit: Unit, adapters: Sequence[Adapter]) -> Module | None:
    try:
        answers = (framework.module(unit.value) for framework in (*frameworks.built_on_others(), *adapters))
        return next((module for module in answers if module is not None), None)
    except Refused as refused:
        raise Invalid(f"{unit.place}: {refused}") from refused


def _optimizer(unit: Unit, adapters: Sequence[Adapter], named: _Named) -> Bundle | None:
    known = (*frameworks.built_on_others(), *adapters)
    try:
        answers = (framework.optimizer(unit.value, named.names, named.beside) for framework in known)
        return next((optimizer for optimizer in answers if optimizer is not None), None)
    except Refused as refused:
        raise Invalid(f"{unit.place}: {refused}") from refused


def _tensors_of_tree(value: object, adapters: Sequence[Adapter], depth: int = DEPTH_MAX) -> bool:
    """Whether ``value`` is a tensor, or dicts with string keys that hold tensors only, at least one."""
    if isinstance(value, dict):
        if not value or not depth or not _is_walked(value):
            return False  # a dict that contains itself, among others, is a value, and refused as one
        return all(_tensors_of_tree(item, adapters, depth - 1) for item in value.values())
    return _owner(value, adapters) is not None


def _pure_keys(units: Sequence[Unit], owners: Sequence[Adapter | None], adapters: Sequence[Adapter]) -> set[str]:
    pairs = zip(units, owners, strict=True)
    mixed = {unit.key for unit, owner in pairs if owner is None and not _tensors_of_tree(unit.value, adapters)}
    return {unit.key for unit in units} - mixed


def _tensor_entry(unit: Unit, adapter: Adapter, pure: bool) -> TensorEntry:
    name = unit.name if unit.name is not None else VALUE
    return TensorEntry(unit.key, name, adapter, unit.value, unit.put, pure, unit.place)


def _entry(
    unit: Unit,
    adapters: Sequence[Adapter],
    module: Bundle | None,
    named: _Named,
    pure: bool,
) -> Entry:
    name, value = unit.name if unit.name is not None else VALUE, unit.value
    prefix = f"{unit.name}." if unit.name is not None else ""
    if module is not None:
        return BundleEntry(unit.key, prefix, module, unit.place, unit.name, value)
    if isinstance(value, PerRank):
        return _per_rank(unit, name, value)
    if isinstance(value, Sharded):
        return _sharded(unit, name, value)
    optimizer = _optimizer(unit, adapters, named)
    if optimizer is not None:
        owned, exact = named.by_key(optimizer.parameters), named.by_key(optimizer.masters())
        return BundleEntry(unit.key, prefix, optimizer, unit.place, unit.name, value, owned, exact)
    if _is_stateful(value):
        return ValueEntry(unit.key, name, unit.state_dict, "job", value, unit.put, unit.place)
    if isinstance(value, dict) and _tensors_of_tree(value, adapters):
        leaves = list(_tree(unit.key, name, value, adapters, pure, unit.place))
        return TreeEntry(unit.key, name, value, leaves, unit.put, unit.place)
    return ValueEntry(unit.key, name, value, "job", None, unit.put, unit.place)


def _per_rank(unit: Unit, name: str, wrapped: PerRank) -> ValueEntry:
    def put(value: object) -> None:
        wrapped.value = value

    if _is_stateful(wrapped.value):
        return ValueEntry(unit.key, name, unit.state_dict, "rank", wrapped.value, put, unit.place)
    return ValueEntry(unit.key, name, wrapped.value, "rank", None, put, unit.place)


def _sharded(unit: Unit, name: str, wrapped: Sharded) -> ShardedEntry:
    def put(value: object) -> None:
        wrapped.value = value

    if unit.stateful is not None:
        return ShardedEntry(unit.key, name, unit.state_dict, wrapped, unit.stateful, put, unit.place)
    return ShardedEntry(unit.key, name, wrapped.value, wrapped, None, put, unit.place)


def _place_below(place: str, step: str) -> str:
    """The place of an entry; a key with a dot looks other than two keys."""
    return where(place, (step,)) if "." in step else f"{place}.{step}"


def _tree(
    key: str, name: str, tree: dict[str, Any], adapters: Sequence[Adapter], pure: bool, place: str
) -> Iterator[TensorEntry]:
    for step, value in tree.items():
        below = _place_below(place, step)
        if isinstance(value, dict):
            yield from _tree(key, f"{name}.{step}", value, adapters, pure, below)
        else:
            adapter = next(adapter for adapter in adapters if adapter.is_tensor(value))
            yield TensorEntry(key, f"{name}.{step}", adapter, value, _replacing(tree, step), pure, below)


def name_below(name: str, trail: Trail) -> str:
    """The name of the tensor leaf at ``trail`` in the value of the object leaf ``name``."""
    return f"{name}.{dotted(trail)}" if trail else name


# Which tensors are part of a value


def is_kept(layout: Layout, keeps: Callable[[Layout], bool]) -> bool:
    """Whether a tensor is part of a value instead of a tensor leaf: whole, small, of a kind that may differ by rank."""
    return not layout.text and keeps(layout)


def _size_bytes(layout: Layout) -> int:
    return math.prod(layout.shape) * item_bytes(layout.dtype)


def keeps_values(layout: Layout) -> bool:
    """Beside other values, such as arguments and counters."""
    return _size_bytes(layout) <= KEPT_BYTES_MAX


def keeps_bookkeeping(layout: Layout) -> bool:
    """In the state dict of an object: integers are counters and positions, floats are learned."""
    is_whole_number = layout.dtype == "BOOL" or layout.dtype[0] in "UI"
    return is_whole_number and _size_bytes(layout) <= KEPT_BYTES_MAX


def keeps_random_states(layout: Layout) -> bool:
    """In a dict of tensors only."""
    return layout.dtype == "U8" and len(layout.shape) == 1 and _size_bytes(layout) <= RANDOM_STATE_BYTES_MAX


def keeps_all(layout: Layout) -> bool:
    """The items of a container of values."""
    return True
