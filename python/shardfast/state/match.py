"""Finds which saved leaf fills what of a state, and what prevents a load.

Everything is matched and checked before memory is written, so that one error lists every problem.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from ..errors import Corrupt, Error, Invalid
from .catalog import Adapter, Box, Destination, Refused, SavedAlias, SavedLeaf, SavedObject, SavedTensor
from .entries import PIECE, BundleEntry, Put, ShardedEntry, TensorEntry, TreeEntry, ValueEntry, Walked, expect_text
from .install import Installation, Received, Value, filling, give
from .load_plan import ARGUMENTS, LoadPlan, Options, Rename, by_ranks, copy_of_rank, moved
from .masters import EXACT, Masters
from .overlaps import overlaps, written
from .padding import differ_by_padding, other_padding, said
from .parts import Parts, adapter_of, pieces_of, shared_as_saved
from .sharded import Pieces, as_value
from .values import Raising, decode, dotted, is_pickle, raise_value, tensors_in
from .wants import Want, referred

_Found = tuple[object, "Want | None", "Box | None"]
"""What may be written: a name, or the number of a value and a trail in it; the want of a leaf; its memory."""


class _Names:
    """Names here of what a checkpoint holds, by ``rename``."""

    def __init__(self, saved: Sequence[SavedLeaf], rename: Rename | None) -> None:
        self._rename = rename
        self._keys_of: dict[str, list[str]] = {}
        for leaf in saved if rename is not None else ():
            self._keys_of.setdefault(leaf.name, []).append(leaf.key)

    def renamed(self, name: str) -> str:
        """Returns the name here of a leaf ``key/name``."""
        rename = self._rename
        if rename is None:
            return name
        new = rename(name) if callable(rename) else rename.get(name, name)
        if not isinstance(new, str) or "/" not in new:
            raise Invalid(f"rename: {name!r} becomes {new!r}: expected a name of the form key/name")
        return new

    def present(self, entry: BundleEntry) -> Callable[[str], str]:
        """Returns the renaming of parameters inside a bundle's values: optimizers follow renamed parameters."""

        def present(fqn: str) -> str:
            for key in self._keys_of.get(fqn, ()):
                new_key, _, new = self.renamed(f"{key}/{fqn}").partition("/")
                if new in entry.owned.get(new_key, ()):
                    return new
            return fqn

        return present


class Match:
    """A state matched with the leaves of a checkpoint, on this rank. Neither is changed.

    Attributes:
        plan: Findings for the user.
        installation: Everything that the load fills, makes and installs.
    """

    def __init__(
        self,
        pieces: Pieces,
        saved: Sequence[SavedLeaf],
        *,
        url: str,
        step: int | None,
        rank: int,
        world: int,
        saved_world: int,
        dry: bool = False,
    ) -> None:
        walked, options = pieces.walked, pieces.options
        self.plan = LoadPlan(url, step)
        self._touched: set[int] = set()
        self._adapters = walked.adapters
        self._rank, self._world, self._saved_world, self._dry = rank, world, saved_world, dry
        self._saved = {(leaf.key, leaf.name): leaf for leaf in saved}
        self._names = _Names(saved, options.rename)
        self._referred: dict[tuple[str, str], list[SavedLeaf]] = referred(saved)
        self._ours = self._renamed(saved, walked, options.rename)
        known = {name for key, below in self._ours for name in (key, f"{key}/{below}")}
        self._options = options = dataclasses.replace(options, exact=frozenset(known.intersection(options.only)))
        bundles = [entry for entry in walked.entries if isinstance(entry, BundleEntry)]
        self._masters = Masters(saved, self._ours, bundles, options.selects)
        self.installation = Installation(self.plan, options, walked.adapters)
        self._filled: dict[Hashable, tuple[int, str]] = {}
        self._bound: dict[int, Any] = {}
        self._left: list[str] = []
        self._shared: set[object] = set()
        self._small: list[tuple[Value, str, Adapter | Parts, Any]] = []  # tensors that values fill, by name
        self._texts = set[str]()  # how tensors are laid out here
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
        self._expect_same_ranks(moved(saved, self._texts) if world == saved_world else "")
        for pattern in options.only:
            chosen = Options(only=(pattern,), exact=options.exact)
            if not any(chosen.selects(f"{key}/{name}") for key, name in self._ours):
                self.plan.problems.append(f"only: {pattern!r} selects nothing that is in the checkpoint")
        self._take(pieces)
        self.installation.warning = self._masters.warning() if self._masters.rounded and rank == 0 else ""

    # Names

    def _renamed(
        self, saved: Sequence[SavedLeaf], walked: Walked, rename: Rename | None
    ) -> dict[tuple[str, str], SavedLeaf]:
        """Returns the saved leaves by their names in this state."""
        if rename is None:
            return dict(self._saved)
        if isinstance(rename, Mapping):
            known = {f"{leaf.key}/{leaf.name}" for leaf in saved}
            unknown = [name for name in rename if name not in known]
            self.plan.problems += [f"rename: the checkpoint has no leaf {name}" for name in unknown]
        bundles: dict[str, list[BundleEntry]] = {}
        for entry in walked.entries:
            if isinstance(entry, BundleEntry):
                bundles.setdefault(entry.key, []).append(entry)
        ours: dict[tuple[str, str], SavedLeaf] = {}
        for leaf in saved:
            old = f"{leaf.key}/{leaf.name}"
            new = self._names.renamed(old)
            for entry in bundles.get(leaf.key, ()) if new == old else ():
                if leaf.name.startswith(entry.prefix):
                    below = entry.bundle.renamed(leaf.name.removeprefix(entry.prefix), self._names.present(entry))
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
        self._touched.add(leaf.index)
        if isinstance(leaf, SavedAlias):
            target = self._saved.get((leaf.of_key, leaf.of_name))
            if not isinstance(target, SavedTensor):
                raise Corrupt(f"{leaf.key}/{leaf.name} is an alias of {leaf.of_key}/{leaf.of_name}, which is no tensor")
            self._touched.add(target.index)
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
        is_shared = functools.partial(self._shared.__contains__, (len(self.installation.values), ()))
        full = f"{key}/{name}"
        receive = filling(adapter, tensor, put, full, is_shared, self.plan.cast if self._options.cast else None)
        self._value(leaf, place, receive, tensor if put is not None else None)
        self._small += [
            (value, full, adapter, tensor) for value in self.installation.values[-1:] if value.receive is receive
        ]

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
        self._touched.add(saved.index)
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
            self.installation.wants.append(
                Want(saved, adapter, tensor, destination, name, self._padded(saved, destination, name))
            )
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

        receive = functools.partial(give, self.installation.installs, entry)
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
        below = sum(
            1
            for (other_key, other), leaf in self._ours.items()
            if other_key == key and other.startswith(f"{name}.") and not other.startswith(f"{name}{PIECE}")
            if not isinstance(leaf, SavedObject)
        )
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
        self.installation.values.append(Value(leaf, name, copies, place, receive, now, merged is not None))

    def _apart(self) -> None:
        """Sees to it that no element is written twice; then adds the wants of the tensors below values.

        A load fills a tensor inside a value in place if no other destination shares its memory; else it makes a new
        one.
        """
        own: list[_Found] = [(want.place, want, want.adapter.written(want.tensor)) for want in self.installation.wants]
        inside: list[_Found] = [
            ((number, trail), None, written(adapter, tensor))
            for number, value in enumerate(self.installation.values)
            for trail, (adapter, tensor) in value.current.items()
        ]
        found = [one for one in (*own, *inside) if one[2] is not None]
        shared = self._shared
        for numbers in overlaps([box for _, _, box in found if box is not None]):
            one, other = (found[number] for number in sorted(numbers))
            if one[1] is not None and other[1] is not None:
                self._overlap(one[1], other[1])
            shared.update(name for name, want, _ in (one, other) if want is None)
        for number, value in enumerate(self.installation.values):
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
        number = next(number for number, want in enumerate(self.installation.wants) if want is lazy)
        self.installation.wants[number] = lazy._replace(tensor=staging, destination=destination)

        def finish() -> None:
            if adapter.lower_value(lazy.tensor) != adapter.lower_value(staging):
                raise Refused(
                    f"it is a view of {filled} here, and what is saved for it is not what that view reads: "
                    "clone() it before the load"
                )

        self.installation.finish_last.append((lazy.place, finish))

    def _refer(self, leaf: SavedObject, name: str, now: Mapping[str, tuple[Adapter, Any]]) -> None:
        """Adds wants for the tensors below a value: into the present ones if they fit, else into new ones."""
        below = self._referred.get((leaf.key, leaf.name), [])
        for other in sorted(below, key=lambda other: isinstance(other, SavedAlias)):
            saved = self._tensor_of(other)
            if saved is None:
                continue
            tied = self.installation.loaded.get((saved.key, saved.name)) if isinstance(other, SavedAlias) else None
            path = other.name[len(leaf.name) + 1 :]
            tensor = tied if tied is not None else self._fitting(saved, now.get(path), f"{name}.{path}")
            self.installation.loaded[other.key, other.name] = tensor

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

    def _expect_same_ranks(self, moved: str) -> None:
        """Has values be those of rank 0 if the ranks have moved and the user says so; else notes problems."""
        for value in self.installation.values if moved else ():
            count = 1 if value.merges else len(value.leaf.copies)
            if count > 1 and self._options.per_rank == "error":
                problem = f"per rank: {value.name} has {count} different values, and the ranks moved: {moved}"
                self.plan.problems.append(problem)
            elif count > 1 and self._options.per_rank == "rank0":
                value.copies[:] = [copy_of_rank(value.leaf, 0) or 0]

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
        bundle = Received(entry, self._names.present(entry))
        self.installation.bundles.append(bundle)
        described = entry.bundle.descriptions()
        tensors = entry.tensors()
        values = {name: value for name, value in entry.bundle.values().items() if name not in described}
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
        if described:
            missing = set(self.plan.missing)
            named = ((name, f"{entry.key}/{entry.prefix}{name}") for name in [*tensors, *values])
            bundle.filled.update(name for name, at in named if self._options.selects(at) and at not in missing)
        for name, above in described.items():
            ends = [one.removeprefix(above) for one in bundle.filled if one.startswith(above)]
            leaf = self._description(entry, above, name.removeprefix(above), ends)
            if ends and isinstance(leaf, SavedObject):
                self._accept(bundle, name, leaf, None)
        # For state that is made lazily the checkpoint shows what there will be.
        owned = {other.index for below in self._referred.values() for other in below}
        for (key, name), leaf in self._ours.items():
            below = name.removeprefix(entry.prefix)
            if key != entry.key or not name.startswith(entry.prefix) or below in tensors or below in values:
                continue
            if isinstance(leaf, SavedObject) and entry.bundle.describes(below):
                self._touched.add(leaf.index)
                continue
            is_selected = leaf.index not in owned and self._options.selects(f"{key}/{name}")
            is_master = self._masters.is_superseded(leaf, entry, below)
            if is_selected and entry.bundle.accepts(below, is_master=is_master):
                self._accept(bundle, below, leaf, None)
            elif is_selected and is_master:
                self._touched.add(leaf.index)  # not needed

    def _description(self, entry: BundleEntry, above: str, name: str, ends: Sequence[str]) -> SavedLeaf | None:
        """The saved description, called ``name``, of leaves whose names here are ``above`` and one of ``ends``.

        It stands beside these in the checkpoint, where ``rename`` may have named them alone.
        """
        for one in ends:
            leaf = self._ours.get((entry.key, f"{entry.prefix}{above}{one}"))
            was = leaf.name.removesuffix(one) if leaf is not None and leaf.name.endswith(one) else None
            if leaf is not None and was is not None and (was == "" or was.endswith(".")):
                return self._saved.get((leaf.key, was + name))
        return self._ours.get((entry.key, f"{entry.prefix}{above}{name}"))

    def _accept(self, bundle: Received, name: str, leaf: SavedLeaf, current: object) -> None:
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

    def _take(self, pieces: Pieces) -> None:
        """Takes values in pieces that were made already, and what prevents others."""
        self.plan.problems += pieces.problems
        self._touched.update(pieces.otherwise)
        for made in pieces.made:
            self._touched.update(made.leaves)
            self.plan.values.append(f"{made.entry.key}/{made.entry.name}")
        self.installation.made = pieces.made
        for traffic in pieces.traffic:
            self.plan.add(traffic)

    def foresee(self, read: Callable[[list[tuple[int, int]]], Sequence[bytes]]) -> None:
        """Notes what a load would find wrong with values that fill tensors; ``read`` gives these values, encoded."""
        copies = [(value.leaf.index, value.copies[0]) for value, *_ in self._small]
        encoded = read(copies) if copies else []
        for (value, name, adapter, tensor), data in zip(self._small, encoded, strict=True):
            lowered = decode(data, value.place)
            if is_pickle(lowered):
                continue
            try:
                made = raise_value(lowered, Raising(value.place, self._adapters, lambda key, name: None))
                self._foresee(name, adapter, tensor, made)
            except Refused as refused:
                self.plan.problems.append(f"{name}: {refused}")
            except Error as error:
                self.plan.problems.append(str(error))

    def _foresee(self, name: str, adapter: Adapter | Parts, tensor: Any, value: object) -> None:
        """Notes what prevents a value from filling a tensor, which stays as it is."""
        if isinstance(adapter, Parts):
            if tensor.several is None:
                adapter.fill(tensor, value)  # refuses
            adapter, tensor = adapter.plain, tensor.tensor
        here = adapter.layout(tensor)
        if not adapter.is_tensor(value):
            adapter.fill(adapter.allocate(here.dtype, () if not here.shape else (0,)), value)
            return
        saved = adapter.layout(value)
        if saved.shape != here.shape:
            self.plan.problems.append(
                f"shape: {name} is {list(saved.shape)} in the checkpoint and {list(here.shape)} here"
            )
        elif saved.dtype != here.dtype and self._options.cast:
            self.plan.cast[name] = saved.dtype, here.dtype
        elif saved.dtype != here.dtype:
            self.plan.problems.append(f"dtype: {name} is {saved.dtype} in the checkpoint and {here.dtype} here")

    # All ranks' findings

    def findings(self) -> tuple[list[int], list[str]]:
        """Returns the numbers of saved leaves with a place in this rank's state, and what prevents the load here."""
        missing = [f"missing: {name} is not in the checkpoint" for name in self.plan.missing]
        problems = [*self._options.asked(), *(missing if self._options.strict else []), *self.plan.problems]
        return sorted(self._touched), problems

    def conclude(self, untouched: Sequence[int], problems: Sequence[tuple[Sequence[int], str]]) -> None:
        """Takes all ranks' findings: saved leaves that none has a place for, and all problems."""
        indices = set(untouched)
        names: dict[str, list[str]] = {}
        for (key, name), leaf in self._ours.items():
            if leaf.index in indices and self._options.selects(f"{key}/{name}"):
                names.setdefault(key, []).append(f"{leaf.key}/{leaf.name}")
        self.plan.unexpected = [*self._left, *(name for below in names.values() for name in below)]
        asked = [(ranks, text) for ranks, text in problems if text.startswith(ARGUMENTS)]
        if any(len(ranks) < self._world for ranks, _ in asked):  # then ranks would not find the same
            self.plan.problems = [by_ranks(ranks, text, self._world) for ranks, text in asked]
            return
        lines = [by_ranks(ranks, text, self._world) for ranks, text in problems if (ranks, text) not in asked]
        indices |= self._masters.indices  # a parameter may take one of an optimizer that is not in the state
        touched_keys = {key for (key, _), leaf in self._ours.items() if leaf.index not in indices}
        for key, below in names.items() if self._options.strict else ():
            if key in touched_keys:
                lines += [f"unexpected: {name} is in the checkpoint only" for name in below]
            else:
                count = f"{len(below)} leaves" if len(below) > 1 else "one leaf"
                lines.append(f"unexpected: {key}, all of it ({count}), is in the checkpoint only")
        self.plan.problems = lines
