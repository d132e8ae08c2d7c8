"""Describes a state for a save: its leaves, how each is captured, and what need not be described again.

Describing a state takes long beside copying it, and between saves only values change. So what modules and optimizers
hold is described once. Later saves check that it is unchanged: the same objects in the same slots, tensors at the same
addresses. Between saves nothing of the state is kept alive, its memory included.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from .. import adapters as frameworks
from .. import native
from ..collection import Paused
from ..errors import Invalid
from .catalog import (
    Adapter,
    AliasLeaf,
    Capture,
    Compared,
    Hold,
    Ints,
    Layout,
    Leaf,
    ObjectLeaf,
    Origin,
    Outline,
    Owner,
    Part,
    Refused,
    Source,
    TensorLeaf,
    item_bytes,
)
from .coordinates import coordinates_of
from .entries import (
    BundleEntry,
    Entry,
    ShardedEntry,
    TensorEntry,
    TreeEntry,
    Unit,
    ValueEntry,
    expect_text,
    is_kept,
    keeps_all,
    keeps_bookkeeping,
    keeps_random_states,
    keeps_values,
    name_below,
    rest_of,
    units_of,
    walk_units,
)
from .load_plan import Options
from .parts import Parts, adapter_of, changed_as, joined, native_leaf, numel_of, pieces_of
from .stateful import Stateful, looking_ahead
from .units import REPLICATED, expect_units, has_units
from .values import Lowering, Trail, capture, dotted

SMALL_BYTES_MAX = 1 << 10
"""Tensors up to this size are copied in the call, which costs less than watching them."""

EAGER_BYTES_MAX = 4 << 20
"""Tensors without announced changes are copied in the call up to this size in all."""

STATES_KEPT = 4
"""States of a process that are saved in turn, such as an actor and a critic, and are each described once."""

COMPARED: Sequence[Compared] = ("never", "every save", "first save", "on request")
"""For a tensor with several names, the first of these that any name has applies."""

Notice = Callable[[str], None]
Patterns = tuple[str, ...]
"""Of keys, or of leaves where they hold a slash, as in ``only`` of a load."""


@dataclass(frozen=True)
class Watched:
    """Tensors that are captured lazily and what wraps them, how they were, and their places in the state."""

    hold: native.Hold
    tensors: list[Any]
    stamp: native.Stamp
    places: Sequence[str]

    def changes(self) -> list[str]:
        """Returns what happened to them since."""
        found = self.hold.changes(self.tensors, self.stamp)
        return [f"{self.places[number]} was {what}" for number, what in found]


@dataclass(frozen=True)
class Description:
    """A state at one moment.

    Attributes:
        described: Its leaves and memory.
        values: Those of its object leaves, in order.
        watched: Tensors that are copied later, and may not change before.
        owner: Keeps the memory allocated that is not copied yet.
    """

    described: native.Described
    values: Sequence[native.Value]
    watched: Sequence[Watched]
    owner: object


def describe(state: object, *, pickle: bool = False, notice: Notice | None = None) -> list[Leaf]:
    """The leaves that this rank holds, sorted by key and name. Tensors on a device are copied to the host.

    Args:
        state: As the user gave it.
        pickle: Whether values without a form as data are pickled.
        notice: Called before announced changes of tensors (:meth:`Bundle.announce`); without it no tensor is captured
            lazily.

    Raises:
        Invalid: Naming what cannot be stored, or two things of one name.
    """
    leaves, _ = _Found.of(list(units_of(state)), frameworks.active(), pickle, notice).leaves()
    return sorted(leaves, key=lambda leaf: (leaf.key, leaf.name))


class Describer:
    """Describes states for saves, one after the other, and remembers the last ones.

    Args:
        notice: Called before tensors change that are captured lazily.
    """

    def __init__(self, notice: Notice) -> None:
        self._notice = notice
        self._known: list[_Known] = []
        weak = weakref.ref(self)

        def forget(gone: object) -> None:
            describer = weak()
            if describer is not None:
                describer._known = [known for known in describer._known if known.is_alive]

        self._forget = forget

    def _last(self, units: Sequence[Unit]) -> _Known | None:
        """The last description of the same objects: of those with some of them the one with most."""
        of = [known for known in self._known if known.of(units) is not None]
        return max(of, key=lambda known: len(known.bundles), default=None)

    def prepare(self, state: object, *, pickle: bool, excepted: Patterns = ()) -> Description | None:
        """Describes the state in advance, for the first save; ``None`` for one that a save will refuse."""
        with looking_ahead(), suppress(Exception):
            return self.describe(state, pickle=pickle, excepted=excepted)
        return None

    def tensors(self, state: object) -> tuple[native.Described, object] | None:
        """The leaves of a state as last described, and what keeps their memory allocated; calls no code of the state.

        ``None`` if bundles or their tensors are others than then.
        """
        with Paused():
            units = list(units_of(state))
            known = self._last(units)
            seen = known.seen(units, frameworks.active()) if known is not None else None
        if known is None or seen is None:
            return None
        return known.described, [one.stamp for one in seen.watched]

    def describe(self, state: object, *, pickle: bool, excepted: Patterns = ()) -> Description:
        """The state as it is now. Copies of leaves that ``excepted`` selects are never compared between ranks.

        Raises:
            Invalid: Naming what cannot be stored, or two things of one name.
        """
        adapters = frameworks.active()
        with Paused():
            units = list(units_of(state))
            known = self._last(units)
            description = None
            if known is not None and known.excepted == excepted:
                description = known.again(units, adapters, pickle)
        if description is None:
            with Paused():
                found = _Found.of(units, adapters, pickle, self._notice, excepted)
                description, made = _described(found, self._forget, excepted)
                others = [one for one in self._known if one is not known and one.is_alive]
                self._known = [*([made] if made is not None else []), *others][:STATES_KEPT]
        return description


# The contents of a state


class _Named(NamedTuple):
    """A tensor under one of its names."""

    key: str
    name: str
    layout: Layout
    adapter: Adapter | Parts
    tensor: Any
    place: str
    identity: Hashable
    compared: Compared
    known: Source | None
    """Its memory, if the adapter has returned it."""

    def source(self) -> Source:
        return self.known or self.adapter.source(self.tensor)


class _Leaves:
    """Collects tensors and values under their names."""

    def __init__(self, adapters: Sequence[Adapter], pickle: bool) -> None:
        self.objects: list[ObjectLeaf] = []
        self.named: list[_Named] = []
        self._adapters = adapters
        self._pickle = pickle
        self._places: dict[tuple[str, str], str] = {}

    def tensors_of(self, entry: BundleEntry, tensors: Mapping[str, Any], holders: Mapping[str, Ints]) -> None:
        compared = entry.bundle.compared()
        for name, whole in tensors.items():
            place, when = f"{entry.place}.{name}", compared.get(name, "first save")
            leaf = entry.prefix + name
            self._claim(entry.key, leaf, place)
            for tensor in pieces_of(whole):
                if isinstance(tensor, Part) and tensor.elsewhere:
                    continue
                adapter = adapter_of(tensor, self._adapters)
                layout, identity, source = _origin(adapter, tensor, place)
                if layout.holders is None and name in holders and _is_whole(layout):
                    layout = layout._replace(holders=holders[name])
                named = _Named(entry.key, leaf, layout, adapter, tensor, place, identity, when, source)
                self.named.append(named)

    def values_of(self, key: str, prefix: str, place: str, values: Mapping[str, object]) -> None:
        for name, value in values.items():
            self._value(key, prefix + name, value, keeps_values, f"{place}.{name}", compared="every save")

    def add(self, entry: Entry) -> None:
        if isinstance(entry, TensorEntry):
            self._standing(entry)
        elif isinstance(entry, TreeEntry):
            for leaf in entry.leaves:
                self._standing(leaf)
        elif isinstance(entry, ValueEntry):
            is_object = entry.stateful is not None and not isinstance(entry.stateful, Stateful)
            keeps = keeps_bookkeeping if is_object else keeps_values
            # What an object counts or carries may begin equal on all ranks, and be each rank's own later.
            compared: Compared = "every save" if is_object else "first save"
            self._value(entry.key, entry.name, entry.value, keeps, entry.place, entry.owner, compared)
        elif isinstance(entry, ShardedEntry):
            self._piece(entry)

    def _piece(self, entry: ShardedEntry) -> None:
        try:
            expect_units(entry.value)
        except Refused as refused:
            raise Invalid(f"{entry.place}: {refused}") from refused
        own = entry.sharded.index, entry.sharded.count
        before = len(self.named)
        self._value(entry.key, entry.leaf, entry.value, keeps_values, entry.place, own, "every save")
        for one in self.named[before:] if has_units(entry.value) else ():
            if one.name.startswith(f"{entry.leaf}.{REPLICATED}."):
                raise Invalid(
                    f"{one.place}: tensors of more than 1 MiB in what pieces share are compared nowhere: put it into "
                    "the state beside the loader, or into a unit"
                )

    def _claim(self, key: str, name: str, place: str) -> None:
        expect_text(name, place)
        if (key, name) in self._places:
            other = self._places[key, name]
            raise Invalid(f"two leaves are called {key}/{name}: {other} and {place}; give one of them another name")
        self._places[key, name] = place

    def _standing(self, entry: TensorEntry) -> None:
        origin = _origin(entry.adapter, entry.tensor, entry.place)
        if is_kept(origin.layout, keeps_random_states if entry.pure else keeps_values):
            self._value(entry.key, entry.name, entry.tensor, keeps_all, entry.place)
        else:
            self._laid_out(entry.key, entry.name, entry.adapter, entry.tensor, entry.place, origin)

    def _laid_out(
        self,
        key: str,
        name: str,
        adapter: Adapter | Parts,
        tensor: object,
        place: str,
        origin: Origin,
        compared: Compared = "first save",
    ) -> None:
        self._claim(key, name, place)
        layout, identity, source = origin
        self.named.append(_Named(key, name, layout, adapter, tensor, place, identity, compared, source))

    def _value(
        self,
        key: str,
        name: str,
        value: object,
        keeps: Callable[[Layout], bool],
        place: str,
        owner: Owner = "job",
        compared: Compared = "first save",
    ) -> None:
        self._claim(key, name, place)

        def refer(adapter: Adapter, tensor: object, trail: Trail) -> tuple[str, str] | None:
            if owner == "rank" or not trail or not adapter.refers or is_kept(adapter.layout(tensor), keeps):
                return None
            below = name_below(name, trail)
            where = f"{place}.{dotted(trail)}"
            self._laid_out(key, below, adapter, tensor, where, _origin(adapter, tensor, where), compared)
            return key, below

        captured = capture(value, Lowering(place, self._adapters, refer, self._pickle))
        self.objects.append(ObjectLeaf(key, name, captured, owner))


def _is_whole(layout: Layout) -> bool:
    """Whether this rank holds all of the tensor."""
    return _held_bytes(layout) == math.prod(layout.shape) * item_bytes(layout.dtype)


def _excepted(named: Sequence[_Named], patterns: Patterns) -> Sequence[_Named]:
    """The tensors; those that a pattern selects are never compared. As in ``only`` of a load, a name means itself."""
    if not patterns:
        return named
    known = {name for one in named for name in (one.key, f"{one.key}/{one.name}")}
    chosen = Options(only=patterns, exact=frozenset(known.intersection(patterns)))
    return [one._replace(compared="never") if chosen.selects(f"{one.key}/{one.name}") else one for one in named]


def _origin(adapter: Adapter | Parts, tensor: Any, place: str) -> Origin:
    try:
        return adapter.origin(tensor)
    except Refused as refused:
        raise Invalid(f"{place}: {refused}") from refused


def _held_bytes(layout: Layout) -> int:
    """Bytes of this rank's part."""
    return sum(map(numel_of, layout.regions)) * item_bytes(layout.dtype)


@contextmanager
def _placed(entry: BundleEntry) -> Iterator[None]:
    """Says in errors of a bundle where it stands."""
    try:
        yield
    except Refused as refused:
        raise Invalid(f"{entry.place}: {refused}") from refused


@dataclass(frozen=True)
class _Found:
    """All that a state holds: bundles' tensors first, then other tensors, and the values."""

    adapters: Sequence[Adapter]
    bundles: Sequence[BundleEntry]
    named: Sequence[_Named]
    in_bundles: int
    """How many of ``named`` are bundles' tensors."""

    objects: Sequence[ObjectLeaf]
    coordinates: Sequence[tuple[str, int]]
    announced: Sequence[bool]
    """Of each of ``named``, whether a bundle announces its changes."""

    @staticmethod
    def of(
        units: Sequence[Unit], adapters: list[Adapter], pickle: bool, notice: Notice | None, excepted: Patterns = ()
    ) -> _Found:
        walked = walk_units(units, adapters)
        leaves = _Leaves(walked.adapters, pickle)
        bundles = [entry for entry in walked.entries if isinstance(entry, BundleEntry)]
        announced: dict[int, Any] = {}
        holders = [entry.bundle.holders({}) for entry in bundles]
        tensors = [entry.tensors() for entry in bundles]
        of_parameters = {
            id(of[name]): ranks
            for of, known in zip(tensors, holders, strict=True)
            for name, ranks in known.items()
            if name in of
        }
        for entry, of, known in zip(bundles, tensors, holders, strict=True):
            if notice is not None:
                with _placed(entry):
                    announced.update({id(tensor): tensor for tensor in entry.bundle.announce(notice)})
            leaves.tensors_of(entry, of, {**known, **entry.bundle.holders(of_parameters)})
        in_bundles = len(leaves.named)
        for entry in bundles:
            with _placed(entry):
                values = entry.bundle.values()
            leaves.values_of(entry.key, entry.prefix, entry.place, values)
        for other in walked.entries:
            leaves.add(other)
        are_announced = [id(changed_as(one.tensor)) in announced for one in leaves.named]
        named = _excepted(leaves.named, excepted)
        at = coordinates_of([*(one.bundle for one in bundles), *(one.tensor for one in named[in_bundles:])], adapters)
        return _Found(walked.adapters, bundles, named, in_bundles, leaves.objects, at, are_announced)

    def leaves(self) -> tuple[list[Leaf], dict[tuple[str, str], list[list[int]]]]:
        """The leaves, and for each piece of a tensor leaf the numbers of its names among ``named``."""
        by_identity: dict[Hashable, list[int]] = {}
        for number, named in enumerate(self.named):
            by_identity.setdefault(named.identity, []).append(number)
        tensors: dict[tuple[str, str], list[list[int]]] = {}
        aliases: dict[tuple[str, str], Leaf] = {}
        for numbers in by_identity.values():
            # Every rank must choose the same name for the tensor itself, in any order of its dicts.
            if len(numbers) > 1:
                numbers.sort(key=lambda number: self.named[number][:2])
            first, *others = map(self.named.__getitem__, numbers)
            aliases.update(((one.key, one.name), AliasLeaf(one.key, one.name, first.key, first.name)) for one in others)
            tensors.setdefault((first.key, first.name), []).append(numbers)
        whole = [self._joined(pieces) for pieces in tensors.values()]
        sizes = [_held_bytes(layout) for layout, *_ in whole]
        eager = sum(size for size, (*_, is_announced) in zip(sizes, whole, strict=True) if not is_announced)
        inline = 0  # bytes that are copied in the call
        leaves: list[Leaf] = [*self.objects, *aliases.values()]
        for of, size, (layout, source, compared, is_announced) in zip(tensors, sizes, whole, strict=True):
            is_small = size <= SMALL_BYTES_MAX or (eager <= EAGER_BYTES_MAX and not is_announced)
            how: Capture = "lazy" if is_announced else "eager"
            if source.is_copy:
                how = "owned"
            elif is_small and inline + size <= EAGER_BYTES_MAX and not source.is_on_device:
                how = "inline"
                inline += size
            leaves.append(TensorLeaf(*of, layout, source, how, compared))
        return leaves, tensors

    def _joined(self, pieces: Sequence[Sequence[int]]) -> tuple[Layout, Source, Compared, bool]:
        """Joins a leaf's pieces: its layout, how it is compared, and whether its changes are announced."""
        number = pieces[0][0]
        first = self.named[number]
        try:
            if len(pieces) == 1 == len(pieces[0]):
                return first.layout, first.source(), first.compared, self.announced[number]
            named = [self.named[numbers[0]] for numbers in pieces]
            layout, source = joined([one.layout for one in named], [one.source() for one in named])
        except Refused as refused:
            raise Invalid(f"{first.place}: {refused}") from refused
        names = itertools.chain.from_iterable(pieces)
        compared = min((self.named[number].compared for number in names), key=COMPARED.index)
        is_announced = all(any(map(self.announced.__getitem__, numbers)) for numbers in pieces)
        return layout, source, compared, is_announced


# What is remembered of it


Extras = tuple[list[tuple[str, str, Owner]], list[tuple[str, str, Layout, Hashable]], list[object]]
"""Objects, and tensors outside of bundles, with their memory."""


def _extras(objects: Iterable[ObjectLeaf], named: Iterable[_Named], memory: list[object]) -> Extras:
    return (
        [(leaf.key, leaf.name, leaf.owner) for leaf in objects],
        [(one.key, one.name, one.layout, one.identity) for one in named],
        memory,
    )


@dataclass(frozen=True)
class _Bundle:
    """A described bundle. Its objects are held weakly."""

    key: str
    name: str | None
    place: str
    objects: Sequence[weakref.ref[Any]]
    is_container: bool
    values: Callable[[Sequence[Any]], Mapping[str, object]]

    @staticmethod
    def of(entry: BundleEntry, outline: Outline, forget: Callable[[object], None]) -> _Bundle:
        is_container, objects = _objects(entry.value)
        weak = [weakref.ref(one, forget) for one in objects]
        return _Bundle(entry.key, entry.name, entry.place, weak, is_container, outline.values)

    def is_of(self, value: object) -> bool:
        is_container, objects = _objects(value)
        pairs = zip(objects, self.objects, strict=False)
        is_as_long = is_container is self.is_container and len(objects) == len(self.objects)
        return is_as_long and all(one is weak() for one, weak in pairs)


def _objects(value: object) -> tuple[bool, Sequence[Any]]:
    """Whether a bundle is of several objects, and these."""
    if isinstance(value, dict):
        return True, list(value.values())
    return (True, value) if isinstance(value, (list, tuple)) else (False, [value])


@dataclass(frozen=True)
class _Lazy:
    """Tensors that are captured lazily.

    Attributes:
        hold: Their memory.
        numbers: Theirs among those of all bundles.
        wrapped: Likewise of those that others wrap, which count writes, too.
        places: In the state, for messages.
    """

    hold: native.Hold
    numbers: Sequence[int]
    wrapped: Sequence[int]
    places: Sequence[str]

    def watched(self, own: list[Any]) -> Watched | None:
        """Their present state, with their memory kept; ``None`` if they have other memory than before."""
        stamp = self.hold.stamp(own)
        return None if stamp is None else Watched(self.hold, own, stamp, self.places)


class _Seen(NamedTuple):
    """Bundles that are as they were described: their units, tensors and other entries, and what is watched of them."""

    units: Sequence[Unit]
    tensors: Sequence[Any]
    others: Sequence[Sequence[Any]]
    watched: Sequence[Watched]


@dataclass(frozen=True)
class _Known:
    """A description that can be reused while only values have changed.

    Attributes:
        outline: Shows whether the bundles are the same.
        lazy: What is captured lazily.
        eager: The numbers of what is captured eagerly, but not in the call.
    """

    described: native.Described
    kinds: Sequence[type]
    bundles: Sequence[_Bundle]
    outline: native.Outline
    lazy: Sequence[_Lazy]
    eager: Sequence[int]
    extras: Extras
    excepted: Patterns

    @property
    def is_alive(self) -> bool:
        """Whether all bundles' objects are still there."""
        return all(weak() is not None for bundle in self.bundles for weak in bundle.objects)

    def of(self, units: Sequence[Unit]) -> list[Unit] | None:
        """The units that are its bundles, if these are of the same objects."""
        known = {(bundle.key, bundle.name): bundle for bundle in self.bundles}
        found = [unit for unit in units if (unit.key, unit.name) in known]
        if [(unit.key, unit.name) for unit in found] != list(known):
            return None
        return found if all(known[unit.key, unit.name].is_of(unit.value) for unit in found) else None

    def seen(self, units: Sequence[Unit], adapters: Sequence[Adapter]) -> _Seen | None:
        """The present bundles, if only their values differ."""
        of_bundles = self.of(units)
        if of_bundles is None or list(map(type, adapters)) != self.kinds:
            return None
        try:
            seen = self.outline.again()
        except _UNTOLD:
            return None
        if seen is None:
            return None
        tensors, entries, others = seen
        watched = []
        for lazy in self.lazy:
            own = map(tensors.__getitem__, lazy.numbers)
            one = lazy.watched([*own, *map(entries.__getitem__, lazy.wrapped)])
            if one is None:
                return None
            watched.append(one)
        return _Seen(of_bundles, tensors, others, watched)

    def again(self, units: Sequence[Unit], adapters: Sequence[Adapter], pickle: bool) -> Description | None:
        """The present state, if only its values differ."""
        seen = self.seen(units, adapters)
        if seen is None:
            return None
        of_bundles, tensors, others, watched = seen
        values = [bundle.values(entries) for bundle, entries in zip(self.bundles, others, strict=True)]
        leaves = self._rest(units, of_bundles, values, adapters, pickle)
        if leaves is None:
            return None
        try:
            sources = [named.source() for named in leaves.named]
        except Refused:  # a new description names it
            return None
        if _extras(leaves.objects, leaves.named, [source.memory for source in sources]) != self.extras:
            return None
        owner = ([one.stamp for one in watched], [tensors[number] for number in self.eager], sources)
        return Description(self.described, [leaf.value for leaf in leaves.objects], watched, owner)

    def _rest(
        self,
        units: Sequence[Unit],
        of_bundles: Sequence[Unit],
        values: Sequence[Mapping[str, object]],
        adapters: Sequence[Adapter],
        pickle: bool,
    ) -> _Leaves | None:
        """The values, and tensors outside of bundles; ``None`` if there are other bundles than before."""
        entries = rest_of(units, of_bundles, adapters)
        if entries is None:
            return None
        leaves = _Leaves(adapters, pickle)
        for bundle, of in zip(self.bundles, values, strict=True):
            prefix = f"{bundle.name}." if bundle.name is not None else ""
            leaves.values_of(bundle.key, prefix, bundle.place, of)
        for entry in entries:
            leaves.add(entry)
        return leaves


def outlined(outlines: Sequence[Outline]) -> native.Outline | None:
    """The outline with which later saves check the bundles; ``None`` if they do not support it."""
    given = []
    for one in outlines:
        inside = [(number, *there) for number, there in one.inside.items()]
        given.append((one.objects, one.tensors, one.parameters, one.others, inside, one.members, one.place))
    try:
        return native.Outline(given)
    except _UNTOLD:
        return None


_UNTOLD = (AttributeError, TypeError, ValueError, BufferError, RuntimeError)
"""What a framework raises, or a tensor that does not tell where it lies."""


def held(hold: Hold, wrapped: Sequence[int] = ()) -> native.Hold:
    """Passes on how an adapter holds tensors' memory and notices changes; numbers of those that others wrap."""
    return native.Hold(hold.memory, hold.address, hold.version, hold.retain, wrapped)


def _described(
    found: _Found, forget: Callable[[object], None], excepted: Patterns
) -> tuple[Description, _Known | None]:
    """A description of what was found, and what the next one can reuse."""
    leaves, numbers = found.leaves()
    makers = [
        (entry.key, entry.prefix + value, kind, alike, made, unmade)
        for entry in found.bundles
        for value, kind, alike, made, unmade in entry.bundle.makers()
    ]
    described = native.Described([native_leaf(leaf) for leaf in leaves], makers, found.coordinates)
    tensors = [leaf for leaf in leaves if isinstance(leaf, TensorLeaf)]
    numbers_of: dict[Adapter | Parts, list[int]] = {}
    eager = []
    for leaf in tensors:
        for piece in numbers[leaf.key, leaf.name]:
            number = piece[0]
            if len(piece) > 1:  # its number in a bundle, if it has one
                number = min(piece, key=lambda number: (not found.announced[number], number))
            if leaf.capture == "lazy":
                numbers_of.setdefault(found.named[number].adapter, []).append(number)
            elif leaf.capture == "eager" and number < found.in_bundles:
                eager.append(number)
    lazy, watched = [], []
    for adapter, of in numbers_of.items():
        places = [f"{found.named[number].key}/{found.named[number].name}" for number in of]
        own = [found.named[number].source().owner for number in of]
        outer = [found.named[number].tensor for number in of]  # a part counts the writes of what it lies within
        wrapped = [i for i, one in enumerate(outer) if one is not own[i] and not isinstance(one, Part)]
        lazy.append(_Lazy(held(adapter.hold(own), wrapped), of, [of[i] for i in wrapped], places))
        watched += [one for one in [lazy[-1].watched(own + [outer[i] for i in wrapped])] if one is not None]
    owner = ([one.stamp for one in watched], [leaf.source.owner for leaf in tensors])
    values = [leaf.value for leaf in leaves if isinstance(leaf, ObjectLeaf)]
    description = Description(described, values, watched, owner)
    # Bundles alone tell whether their tensors are still the same; an optimizer's parameters may stand elsewhere.
    is_outside = any(number >= found.in_bundles for of in numbers_of.values() for number in of)
    if is_outside or any(leaf.source.is_copy for leaf in tensors):
        return description, None
    outlines = [outline for outline in (entry.bundle.outline() for entry in found.bundles) if outline is not None]
    outline = outlined(outlines) if len(outlines) == len(found.bundles) else None
    if outline is None:
        return description, None
    bundles = [_Bundle.of(entry, of, forget) for entry, of in zip(found.bundles, outlines, strict=True)]
    extra = found.named[found.in_bundles :]
    of_named = ((number, leaf) for leaf in tensors for piece in numbers[leaf.key, leaf.name] for number in piece)
    memory_of = {number: leaf.source.memory for number, leaf in of_named if number >= found.in_bundles}
    memory: list[object] = [memory_of[number] for number in range(found.in_bundles, len(found.named))]
    extras = _extras(found.objects, extra, memory)
    kinds = list(map(type, found.adapters))
    return description, _Known(described, kinds, bundles, outline, lazy, eager, extras, excepted)
