"""Which saved leaf goes where in a state: matched by name, checked, bound to memory, installed.

Everything is matched and checked before memory is written, so that one error lists every problem. The engine fills
tensors in place. Values are made and installed last, once all bytes are there and verified.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import Corrupt, Error, Invalid
from .catalog import Adapter, Box, Destination, Refused, SavedAlias, SavedLeaf, SavedObject, SavedTensor
from .entries import BundleEntry, Put, ShardedEntry, TensorEntry, TreeEntry, ValueEntry, Walked, expect_text
from .giving import given, installed
from .load_plan import LoadPlan, Options, by_ranks, moved
from .masters import EXACT, Masters
from .overlaps import overlaps, written
from .padding import differ_by_padding, other_padding, said
from .parts import Parts, adapter_of, pieces_of, shared_as_saved
from .sharded import Made, as_value
from .stateful import Stateful
from .values import Raising, Trail, decode, dotted, raise_value, reason, tensors_in
from .wants import Want, referred

_log = logging.getLogger("shardfast")


@dataclass(frozen=True)
class _Value:
    """A value to make from saved copies."""

    leaf: SavedObject
    name: str
    copies: list[int]
    place: str
    receive: Put
    current: dict[Trail, tuple[Adapter, Any]]
    """Tensors in the present value that may be filled, by their trails."""

    merges: bool


_Found = tuple[object, "Want | None", "Box | None"]
"""What may be written: a name, or the number of a value and a trail in it; the want of a leaf; its memory."""


@dataclass(frozen=True)
class _Received:
    """A module or optimizer, and what is loaded for it.

    Attributes:
        created: Tensors that were made for it, by leaf name.
        values: Its loaded values, likewise.
        absent: Leaves that it has and the checkpoint does not, which it drops.
        decisive: Of values that merge the number of copies that decide, by leaf name.
    """

    entry: BundleEntry
    created: dict[str, Any] = field(default_factory=dict)
    values: dict[str, object] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)
    decisive: dict[str, int] = field(default_factory=dict)


class Matching:
    """A state matched with the leaves of a checkpoint. Neither is changed before :meth:`install`.

    Attributes:
        plan: What was found.
        touched: Indices of the saved leaves that have a place in this rank's state.
    """

    def __init__(
        self,
        walked: Walked,
        saved: Sequence[SavedLeaf],
        plan: LoadPlan,
        options: Options,
        *,
        rank: int,
        world: int,
        saved_world: int,
        dry: bool = False,
    ) -> None:
        self.plan = plan
        self.touched: set[int] = set()
        self._options = options
        self._adapters = walked.adapters
        self._rank, self._world, self._saved_world, self._dry = rank, world, saved_world, dry
        self._saved = {(leaf.key, leaf.name): leaf for leaf in saved}
        self._keys_of: dict[str, list[str]] = {}
        for leaf in saved if options.rename is not None else ():
            self._keys_of.setdefault(leaf.name, []).append(leaf.key)
        self._referred: dict[tuple[str, str], list[SavedLeaf]] = referred(saved)
        self._ours = self._renamed(saved, walked)
        known = {name for key, below in self._ours for name in (key, f"{key}/{below}")}
        self._options = options = dataclasses.replace(options, exact=frozenset(known.intersection(options.only)))
        bundles = [entry for entry in walked.entries if isinstance(entry, BundleEntry)]
        self._masters = Masters(saved, self._ours, bundles, options.selects)
        self._wants: list[Want] = []
        self.devices = set[int]()
        self._values: list[_Value] = []
        self._filled: dict[Hashable, tuple[int, str]] = {}
        self._bound: dict[int, Any] = {}
        self._loaded: dict[tuple[str, str], Any] = {}
        self._bundles: list[_Received] = []
        self._finish: list[tuple[str, Callable[[], None]]] = []
        self._finish_last: list[tuple[str, Callable[[], None]]] = []
        self._left: list[str] = []
        self._shared: set[object] = set()
        self._install: list[Callable[[], None]] = []
        self._install_last: list[Callable[[], None]] = []
        self._made: list[Made] = []
        self._texts = set[str]()  # how tensors are laid out here
        self._owners: list[object] = []
        # Optimizers last: their state may be what stands elsewhere.
        for entry in sorted(walked.entries, key=lambda entry: isinstance(entry, BundleEntry) and bool(entry.owned)):
            if isinstance(entry, TensorEntry):
                self._into(entry.key, entry.name, entry.adapter, entry.tensor, entry.place, entry.put)
            elif isinstance(entry, TreeEntry):
                self._tree(entry)
            elif isinstance(entry, ShardedEntry):
                self._entry(as_value(entry))
            elif isinstance(entry, ValueEntry):
                self._entry(entry)
            else:
                self._bundle(entry)
        self._apart()
        self.plan.problems += options.asked(self._values, moved(saved, self._texts) if world == saved_world else "")
        for pattern in options.only:
            chosen = Options(only=(pattern,), exact=options.exact)
            if not any(chosen.selects(f"{key}/{name}") for key, name in self._ours):
                self.plan.problems.append(f"only: {pattern!r} selects nothing that is in the checkpoint")

    # Names

    def _rename(self, name: str) -> str:
        rename = self._options.rename
        if rename is None:
            return name
        new = rename(name) if callable(rename) else rename.get(name, name)
        if not isinstance(new, str) or "/" not in new:
            raise Invalid(f"rename: {name!r} becomes {new!r}: expected a name of the form key/name")
        return new

    def _parameter(self, entry: BundleEntry) -> Callable[[str], str]:
        """The present name of a saved parameter inside a bundle's values: optimizers follow renamed parameters."""

        def present(fqn: str) -> str:
            for key in self._keys_of.get(fqn, ()):
                new_key, _, new = self._rename(f"{key}/{fqn}").partition("/")
                if new in entry.owned.get(new_key, ()):
                    return new
            return fqn

        return present

    def _renamed(self, saved: Sequence[SavedLeaf], walked: Walked) -> dict[tuple[str, str], SavedLeaf]:
        """The saved leaves by their names in this state."""
        if self._options.rename is None:
            return dict(self._saved)
        if isinstance(self._options.rename, Mapping):
            known = {f"{leaf.key}/{leaf.name}" for leaf in saved}
            unknown = [name for name in self._options.rename if name not in known]
            self.plan.problems += [f"rename: the checkpoint has no leaf {name}" for name in unknown]
        bundles: dict[str, list[BundleEntry]] = {}
        for entry in walked.entries:
            if isinstance(entry, BundleEntry):
                bundles.setdefault(entry.key, []).append(entry)
        ours: dict[tuple[str, str], SavedLeaf] = {}
        for leaf in saved:
            old = f"{leaf.key}/{leaf.name}"
            new = self._rename(old)
            for entry in bundles.get(leaf.key, ()) if new == old else ():
                if leaf.name.startswith(entry.prefix):
                    below = entry.bundle.renamed(leaf.name.removeprefix(entry.prefix), self._parameter(entry))
                    new = f"{leaf.key}/{entry.prefix}{below}"
            key, _, name = new.partition("/")
            other = ours.setdefault((key, name), leaf)
            if other is not leaf:
                self.plan.problems.append(f"rename: {other.key}/{other.name} and {old} both become {new}")
            if new != old:
                self.plan.renamed[old] = new
        return ours

    def _find(self, key: str, name: str) -> SavedLeaf | None:
        """The saved leaf for a place in the state; ``None`` if ``only`` does not select it."""
        full = f"{key}/{name}"
        expect_text(name, full)
        if not self._options.selects(full):
            return None
        leaf = self._ours.get((key, name)) or self._masters.stand_in(key, name)
        if leaf is None:
            self.plan.missing.append(full)
        return leaf

    def _tensor_of(self, leaf: SavedLeaf) -> SavedTensor | None:
        """The tensor leaf that a leaf is or refers to; marks it as touched."""
        self.touched.add(leaf.index)
        if isinstance(leaf, SavedAlias):
            target = self._saved.get((leaf.of_key, leaf.of_name))
            if not isinstance(target, SavedTensor):
                raise Corrupt(f"{leaf.key}/{leaf.name} is an alias of {leaf.of_key}/{leaf.of_name}, which is no tensor")
            self.touched.add(target.index)
            return target
        return leaf if isinstance(leaf, SavedTensor) else None

    # Tensors

    def _into(
        self, key: str, name: str, adapter: Adapter | Parts, tensor: Any, place: str, put: Put | None = None
    ) -> None:
        """Loads what is saved under the name into a tensor of the state; ``put`` replaces it."""
        leaf = self._find(key, name)
        if leaf is None:
            return
        saved = self._tensor_of(leaf)
        if saved is not None:
            self._fill(saved, adapter, tensor, key, name)
            return

        # Not self, which would then refer to itself and keep the state alive.
        shared, number = self._shared, len(self._values)

        def receive(value: object) -> None:
            if value is tensor:  # filled already
                return
            try:
                if put is None or isinstance(adapter, Parts) or (number, ()) not in shared:
                    adapter.fill(tensor, value)
                else:
                    layout = adapter.layout(tensor)
                    own = adapter.allocate(layout.dtype, layout.shape)
                    adapter.fill(own, value)
                    put(own)
            except Refused as refused:
                raise Invalid(f"{place}: {refused}") from refused

        self._value(leaf, place, receive, tensor if put is not None else None)

    def _fill(self, saved: SavedTensor, adapter: Adapter | Parts, tensor: Any, key: str, below: str) -> None:
        """Checks a saved tensor against one of the state, and adds a want."""
        name = f"{key}/{below}"
        try:
            destination = adapter.destination(tensor, saved.dtype)
            filled, _ = self._filled.get(destination.identity, (None, ""))
            chosen = self._masters.choose(saved, key, below, destination.layout.dtype, filled)
            if chosen.saved is not saved:
                saved = chosen.saved
                destination = adapter.destination(tensor, saved.dtype)
        except Refused as refused:
            self.plan.problems.append(f"{name}: {refused}")
            return
        self.touched.add(saved.index)
        if chosen.note and chosen.note not in self.plan.masters:
            self.plan.masters.append(chosen.note)
        layout = destination.layout
        self._texts.add(layout.text)
        if layout.shape != saved.shape and not differ_by_padding(saved.shape, saved.layout, layout.shape, layout.text):
            problem = f"shape: {name} is {list(saved.shape)} in the checkpoint and {list(layout.shape)} here"
            self.plan.problems.append(problem + other_padding(saved.layout, layout.text))
            return
        if layout.dtype != saved.dtype and not chosen.converts:
            if not self._options.cast:
                self.plan.problems.append(f"dtype: {name} is {saved.dtype} in the checkpoint and {layout.dtype} here")
                return
            self.plan.cast[name] = (saved.dtype, layout.dtype)
        self._want(saved, adapter, tensor, destination, name)

    def _want(
        self, saved: SavedTensor, adapter: Adapter | Parts, tensor: Any, destination: Destination, name: str
    ) -> None:
        index, other = self._filled.setdefault(destination.identity, (saved.index, name))
        if other == name:
            self._bound.setdefault(index, tensor)
            self._wants.append(Want(saved, adapter, tensor, destination, name, self._padded(saved, destination, name)))
        elif index != saved.index:
            is_of_one_key = name.partition("/")[0] == other.partition("/")[0]
            if self._options.strict or not is_of_one_key:
                what = "tied" if is_of_one_key else "overlap"
                self.plan.problems.append(f"{what}: {name} and {other} are one tensor here and two in the checkpoint")
            else:
                self._left.append(name)
            return
        if name not in self.plan.tensors[-1:]:  # of a leaf in several tensors, once
            self.plan.tensors.append(name)

    def _padded(self, saved: SavedTensor, destination: Destination, name: str) -> int | None:
        """How many rows the checkpoint has of a leaf that has more here, with padding."""
        shape = destination.layout.shape
        if shape == saved.shape:
            return None
        note = said(name, saved.shape[0], shape[0])
        if note not in self.plan.padded:
            self.plan.padded.append(note)
        return saved.shape[0] if saved.shape[0] < shape[0] else None

    # Values

    def _entry(self, entry: ValueEntry) -> None:
        leaf = self._find(entry.key, entry.name)
        if leaf is None:
            self._explain_tree(entry.key, entry.name)
            return

        # Not self, which would then refer to itself and keep the state alive.
        install, install_last = self._install, self._install_last

        def receive(value: object) -> None:
            (install_last if isinstance(entry.stateful, Stateful) else install).append(given(entry, value))

        saved = self._tensor_of(leaf)
        if saved is not None:
            receive_tensor = self._allocate(saved, f"{entry.key}/{entry.name}")
            if receive_tensor is not None:
                receive(receive_tensor)
        else:
            self._value(leaf, entry.place, receive, entry.value)

    def _tree(self, entry: TreeEntry) -> None:
        # The checkpoint decides: a subtree with other things than tensors was saved as one value.
        leaf = self._ours.get((entry.key, entry.name))
        if isinstance(leaf, SavedObject):
            value = ValueEntry(entry.key, entry.name, entry.value, "job", None, entry.put, entry.place)
            self._entry(value)
            return
        for below in entry.leaves:
            self._into(below.key, below.name, below.adapter, below.tensor, below.place, below.put)

    def _explain_tree(self, key: str, name: str) -> None:
        """Notes a problem if tensors are saved below a name under which the state has something else."""
        below = sum(1 for other_key, other in self._ours if other_key == key and other.startswith(f"{name}."))
        if below and self._options.selects(f"{key}/{name}"):
            self.plan.problems.append(
                f"{key}/{name} is a dict of {below} tensors in the checkpoint: put a dict of such tensors there to fill"
            )

    def _allocate(self, saved: SavedTensor, name: str) -> Any:
        """Makes a plain tensor of the state's first framework and adds a want."""
        if not self._adapters:
            self.plan.problems.append(f"{name} is a tensor in the checkpoint: import a framework to hold it")
            return None
        adapter = self._adapters[0]
        try:
            tensor = adapter.allocate(saved.dtype, saved.shape)
            destination = adapter.destination(tensor, saved.dtype)
        except Refused as refused:
            self.plan.problems.append(f"{name}: {refused}")
            return None
        self._want(saved, adapter, tensor, destination, name)
        return tensor

    def _value(
        self, leaf: SavedLeaf, place: str, receive: Put, current: object, merged: Callable[[int], None] | None = None
    ) -> None:
        """Adds wants for the saved value of a leaf, and for the tensors that it refers to.

        ``merged`` is called with the number of copies that decide, if ``receive`` gets all of them.
        """
        if not isinstance(leaf, SavedObject):
            return
        name = f"{leaf.key}/{leaf.name}"
        name = self.plan.renamed.get(name, name)
        chosen = self._options.copy_for(leaf, self._rank, self._world, self._saved_world)
        if merged is None:
            copies = self._copies(leaf, name, chosen)
        else:
            copies, decisive = self._options.ranked(leaf, chosen)
            merged(decisive)
        if not copies:
            return
        self.plan.values.append(name)
        now = {trail: (adapter, tensor) for trail, adapter, tensor in tensors_in(current, self._adapters)}
        self._values.append(_Value(leaf, name, copies, place, receive, now, merged is not None))

    def _apart(self) -> None:
        """Sees to it that no element is written twice; then adds the wants of the tensors below values.

        A load fills a tensor inside a value in place if no other destination shares its memory; else it makes a new
        one.
        """
        own: list[_Found] = [(want.place, want, want.adapter.written(want.tensor)) for want in self._wants]
        inside: list[_Found] = [
            ((number, trail), None, written(adapter, tensor))
            for number, value in enumerate(self._values)
            for trail, (adapter, tensor) in value.current.items()
        ]
        found = [one for one in (*own, *inside) if one[2] is not None]
        shared = self._shared
        for numbers in overlaps([box for _, _, box in found if box is not None]):
            one, other = (found[number] for number in sorted(numbers))
            if one[1] is not None and other[1] is not None:
                self._overlap(one[1], other[1])
            shared.update(name for name, want, _ in (one, other) if want is None)
        for number, value in enumerate(self._values):
            now = {trail: there for trail, there in value.current.items() if (number, trail) not in shared}
            value.current.clear()
            value.current.update(now)
            self._refer(value.leaf, value.name, {dotted(trail): there for trail, there in now.items()})

    def _overlap(self, one: Want, other: Want) -> None:
        """Notes that two leaves lie over each other. A lazy view of all of another leaf is compared instead."""
        (first, second) = ((want, want.adapter.written(want.tensor)) for want in (one, other))
        if first[1] is not None and first[1].is_lazy:
            first, second = second, first
        is_view = second[1] is not None and second[1].is_lazy and second[1]._replace(is_lazy=False) == first[1]
        lazy, adapter = second[0], second[0].adapter
        if is_view and not isinstance(adapter, Parts) and not lazy.destination.layout.text:  # a whole tensor
            self._compare(lazy, adapter, first[0].place)
            return
        self.plan.problems.append(
            f"overlap: {one.place} and {other.place} lie over each other in memory here, and are two tensors in the "
            "checkpoint"
        )

    def _compare(self, lazy: Want, adapter: Adapter, filled: str) -> None:
        """Loads elsewhere what is saved for a lazy view, and compares it once the leaf below is filled."""
        staging = adapter.allocate(lazy.leaf.dtype, lazy.leaf.shape)
        destination = adapter.destination(staging, lazy.leaf.dtype)
        number = next(number for number, want in enumerate(self._wants) if want is lazy)
        self._wants[number] = lazy._replace(tensor=staging, destination=destination)

        def finish() -> None:
            if adapter.lower_value(lazy.tensor) != adapter.lower_value(staging):
                raise Refused(
                    f"it is a view of {filled} here, and what is saved for it is not what that view reads: "
                    "clone() it before the load"
                )

        self._finish_last.append((lazy.place, finish))

    def _refer(self, leaf: SavedObject, name: str, now: Mapping[str, tuple[Adapter, Any]]) -> None:
        """Adds wants for the tensors below a value: into the present ones if they fit, else into new ones."""
        below = self._referred.get((leaf.key, leaf.name), [])
        for other in sorted(below, key=lambda other: isinstance(other, SavedAlias)):
            saved = self._tensor_of(other)
            if saved is None:
                continue
            tied = self._loaded.get((saved.key, saved.name)) if isinstance(other, SavedAlias) else None
            path = other.name[len(leaf.name) + 1 :]
            tensor = tied if tied is not None else self._fitting(saved, now.get(path), f"{name}.{path}")
            self._loaded[other.key, other.name] = tensor

    def _fitting(self, saved: SavedTensor, now: tuple[Adapter, Any] | None, name: str) -> Any:
        if now is not None:
            adapter, tensor = now
            try:
                destination = adapter.destination(tensor, saved.dtype)
            except Refused:
                return self._allocate(saved, name)
            if destination.layout.shape == saved.shape and destination.layout.dtype == saved.dtype:
                self._want(saved, adapter, tensor, destination, name)
                return tensor
        return self._allocate(saved, name)

    def _copies(self, leaf: SavedObject, name: str, chosen: int | None) -> list[int]:
        """The saved copy for this rank."""
        if len(leaf.copies) == 1:
            return [0]
        if chosen is not None:
            return [chosen]
        self.plan.problems.append(
            f"per rank: {name} was saved by {self._saved_world} ranks with {len(leaf.copies)} different values, and "
            f"this job has {self._world} ranks"
        )
        return []

    # Modules and optimizers

    def _bundle(self, entry: BundleEntry) -> None:
        bundle = _Received(entry)
        self._bundles.append(bundle)
        tensors, values = entry.tensors(), entry.bundle.values()
        # A saved bundle is complete; its values, which are always saved, show that it was saved.
        is_saved = any(
            (entry.key, entry.prefix + name) in self._ours
            and self._options.selects(f"{entry.key}/{entry.prefix}{name}")
            for name in values
            if not entry.bundle.drops(name)
        )
        for name in [*tensors, *values] if is_saved else ():
            full = f"{entry.key}/{entry.prefix}{name}"
            is_absent = (entry.key, entry.prefix + name) not in self._ours and self._options.selects(full)
            if is_absent and entry.bundle.drops(name):
                bundle.absent.append(name)
                self.plan.dropped.append(full)
        absent = set(bundle.absent)
        for name, tensor in tensors.items():
            for piece in pieces_of(tensor) if name not in absent else ():
                adapter = adapter_of(piece, self._adapters)
                self._into(entry.key, entry.prefix + name, adapter, piece, f"{entry.place}.{name}")
        for name, value in values.items():
            stays = self._masters.leaves_scaler(entry, name) if is_saved else ""
            self.plan.masters += [stays] if stays else []
            leaf = self._find(entry.key, entry.prefix + name) if name not in absent and not stays else None
            if leaf is not None:
                self._accept(bundle, name, leaf, value)
        # For state that is made lazily the checkpoint shows what there will be.
        owned = {other.index for below in self._referred.values() for other in below}
        for (key, name), leaf in self._ours.items():
            below = name.removeprefix(entry.prefix)
            if key != entry.key or not name.startswith(entry.prefix) or below in tensors or below in values:
                continue
            is_selected = leaf.index not in owned and self._options.selects(f"{key}/{name}")
            is_master = self._masters.is_superseded(leaf, entry, below)
            if is_selected and entry.bundle.accepts(below, is_master=is_master):
                self._accept(bundle, below, leaf, None)
            elif is_selected and is_master:
                self.touched.add(leaf.index)  # not needed

    def _accept(self, bundle: _Received, name: str, leaf: SavedLeaf, current: object) -> None:
        entry = bundle.entry
        saved = self._tensor_of(leaf)
        full = f"{entry.key}/{entry.prefix}{name}"
        if saved is None:
            place, values, decisive = f"{entry.place}.{name}", bundle.values, bundle.decisive
            merged = functools.partial(decisive.__setitem__, name) if entry.bundle.merges(name) else None
            self._value(leaf, place, lambda value: values.update({name: value}), current, merged)
            return
        if not entry.bundle.accepts(name):
            self.plan.problems.append(f"kind: {full} is a tensor in the checkpoint and a value here")
            return
        fqn, layout, stepped = self._beside(entry, name)
        dtype = saved.dtype
        try:
            if (self._options.cast or self._masters.lacks(entry, fqn)) and stepped == dtype and saved.shape:
                # As the optimizer makes it: of the type of what it steps, where it was.
                owner = entry.bundle.parameters[fqn]
                is_exact = any(fqn in fqns for fqns in entry.exact.values())
                dtype = EXACT if is_exact else adapter_of(owner, self._adapters).layout(owner).dtype
                if dtype != saved.dtype and not self._options.cast:
                    self.plan.problems.append(f"dtype: {full} is {saved.dtype} in the checkpoint and {dtype} here")
                    return
            tensor = entry.bundle.create(name, dtype, saved.shape, layout=saved.layout, beside=layout, dry=self._dry)
            adapter = adapter_of(tensor, self._adapters)
            tensor = shared_as_saved(self._bound.get(saved.index), tensor, adapter)
            pieces = [(piece, adapter.destination(piece, saved.dtype)) for piece in pieces_of(tensor)]
        except Refused as refused:
            self.plan.problems.append(f"{full}: {refused}")
            return
        bundle.created[name] = tensor
        if dtype != saved.dtype:
            self.plan.cast[full] = (saved.dtype, dtype)
        for piece, destination in pieces:
            self._want(saved, adapter, piece, destination, full)

    def _beside(self, entry: BundleEntry, name: str) -> tuple[str, str, str]:
        """The parameter with state called ``name``, its saved layout, as text, and the type that was stepped for it."""
        for key, fqns in entry.owned.items():
            path = name.partition(".")[2]
            while path := path.rpartition(".")[0]:
                leaf = self._ours.get((key, path))
                if path in fqns and leaf is not None:
                    own = self._saved.get((leaf.of_key, leaf.of_name)) if isinstance(leaf, SavedAlias) else leaf
                    if not isinstance(own, SavedTensor):
                        return path, leaf.layout, ""
                    return path, leaf.layout, (self._masters.of(own, key) or own).dtype
        return "", "", ""

    def take(self, made: Sequence[Made], problems: Sequence[str]) -> None:
        """Takes values that were made already, and what prevents others."""
        self.plan.problems += problems
        for one in made:
            self.touched.update(one.leaves)
            self.plan.values.append(f"{one.entry.key}/{one.entry.name}")
            self._made.append(one)

    # From a plan to a filled state

    def forecast_wants(self) -> list[tuple[Any, ...]]:
        """The wants without memory, for a plan only."""
        return [native for want in self._wants for native in want.forecast()]

    def bind(self) -> list[tuple[Any, ...]]:
        """The wants with their memory, which this object keeps allocated."""
        out = []
        owners: dict[Adapter | Parts, list[object]] = {}
        for want in self._wants:
            try:
                target = want.destination.target or want.adapter.target(want.tensor, want.leaf.dtype)
            except Refused as refused:
                raise Invalid(f"{want.place}: {refused}") from refused
            owners.setdefault(want.adapter, []).append(target.owner)
            if target.finish is not None:
                self._finish.append((want.place, target.finish))
            if want.rows is not None and isinstance(want.adapter, Parts):
                clear = functools.partial(want.adapter.clear_behind, want.tensor, want.rows)
                self._finish_last.append((want.place, clear))
            for native, memory in want.bound(target):
                self.devices.update(memory.where)
                out.append(native)
        for adapter, of in owners.items():
            adapter.wrote(of)
        self._owners += owners.values()
        return out

    def value_wants(self) -> list[tuple[int, int]]:
        """Saved leaf and copy of every value that is wanted, in order."""
        return [(value.leaf.index, copy) for value in self._values for copy in value.copies]

    def make(self, encoded: Sequence[bytes]) -> None:
        """Makes the values from their bytes (in the order of :meth:`value_wants`), and has their takers check them."""
        for place, finish in (*self._finish, *self._finish_last):
            try:
                finish()
            except Refused as refused:
                raise Invalid(f"{place}: {refused}") from refused
        remaining = iter(encoded)
        for value in self._values:
            made = [self._raise(value, next(remaining)) for _ in value.copies]
            value.receive(made if value.merges else made[0])
        self._install_last += [given(one.entry, one.value) for one in self._made]
        for bundle in self._bundles:
            entry = bundle.entry
            try:
                restored = entry.bundle.restore(
                    bundle.created,
                    bundle.values,
                    self._parameter(entry),
                    strict=self._options.strict,
                    absent=bundle.absent,
                    decisive=bundle.decisive,
                )
            except Refused as refused:
                raise Invalid(f"{entry.place}: {refused}") from refused
            except (Error, MemoryError):
                raise
            except Exception as error:  # of a value that no bundle has
                raise Corrupt(f"{entry.place}: what is stored does not fit: {reason(error)}") from error
            self._install.append(functools.partial(installed, restored.install, entry.place))
            missing = {f"{entry.key}/{entry.prefix}{name}" for name in restored.missing}
            self.plan.missing += sorted(missing)
            self.plan.dropped = [name for name in self.plan.dropped if name not in missing]
            self.plan.unexpected += [f"{entry.key}/{entry.prefix}{name}" for name in restored.unexpected]

    def install(self) -> None:
        """Installs what was loaded and made. What is read at each save comes last: installing may draw numbers."""
        if self._masters.rounded and self._rank == 0:
            _log.warning("%s: %s", self.plan.url, self._masters.warning())
        for install in [*self._install, *self._install_last]:
            install()

    def _raise(self, value: _Value, encoded: bytes) -> Any:
        def referred(key: str, name: str) -> Any:
            if (key, name) not in self._loaded:
                raise Corrupt(f"{value.place}: it refers to the tensor {key}/{name}, which the checkpoint lacks")
            return self._loaded[key, name]

        def settle(tensor: object, trail: Trail) -> object:
            if trail not in value.current:
                return tensor
            adapter, standing = value.current[trail]
            try:
                adapter.fill(standing, tensor)
            except Refused:
                return tensor
            return standing

        how = Raising(value.place, self._adapters, referred, settle, self._options.pickle)
        return raise_value(decode(encoded, value.place), how)

    # All ranks' findings

    def own_problems(self) -> list[str]:
        """What prevents the load on this rank, except unexpected leaves."""
        missing = [f"missing: {name} is not in the checkpoint" for name in self.plan.missing]
        return [*(missing if self._options.strict else []), *self.plan.problems]

    def conclude(self, untouched: Sequence[int], problems: Sequence[tuple[Sequence[int], str]]) -> None:
        """Takes all ranks' findings: saved leaves that none has a place for, and all problems."""
        indices = set(untouched)
        names: dict[str, list[str]] = {}
        for (key, name), leaf in self._ours.items():
            if leaf.index in indices and self._options.selects(f"{key}/{name}"):
                names.setdefault(key, []).append(f"{leaf.key}/{leaf.name}")
        self.plan.unexpected = [*self._left, *(name for below in names.values() for name in below)]
        lines = [by_ranks(ranks, problem, self._world) for ranks, problem in problems]
        indices |= self._masters.indices  # a parameter may take one of an optimizer that is not in the state
        touched_keys = {key for (key, _), leaf in self._ours.items() if leaf.index not in indices}
        for key, below in names.items() if self._options.strict else ():
            if key in touched_keys:
                lines += [f"unexpected: {name} is in the checkpoint only" for name in below]
            else:
                count = f"{len(below)} leaves" if len(below) > 1 else "one leaf"
                lines.append(f"unexpected: {key}, all of it ({count}), is in the checkpoint only")
        self.plan.problems = lines
