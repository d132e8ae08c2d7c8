"""Parts of tensors, given as plain tensors and their places: an adapter for them, built on that of the plain ones."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .catalog import (
    Adapter,
    AliasLeaf,
    Box,
    Destination,
    Flat,
    Hold,
    Ints,
    Layout,
    Leaf,
    Memory,
    NamedPart,
    ObjectLeaf,
    Origin,
    Part,
    Refused,
    Region,
    Source,
    Target,
    item_bytes,
)
from .padding import first_rows


def pieces_of(tensor: Any) -> Sequence[Any]:
    """Returns a leaf's pieces on this rank: a tensor or a part, and the parts of it that lie in other memory."""
    return (tensor, *tensor.others) if isinstance(tensor, Part) and tensor.others else (tensor,)


def joined(layouts: Sequence[Layout], sources: Sequence[Source]) -> tuple[Layout, Source]:
    """One leaf's pieces, which lie in different memory, as one; what several pieces have is taken from the first."""
    memory: dict[Region | Flat, Memory] = {}
    for layout, source in zip(layouts, sources, strict=True):
        for region, of in zip(layout.regions, source.memory, strict=True):
            memory.setdefault(region, of)
    owners = [source.owner for source in sources]
    source = Source(tuple(memory.values()), owners, any(source.is_copy for source in sources))
    return layouts[0]._replace(regions=tuple(memory)), source


def adapter_of(tensor: object, adapters: Sequence[Adapter]) -> Adapter | Parts:
    """Returns the adapter of a tensor of a bundle, or of a part of one."""
    plain = tensor.tensor if isinstance(tensor, Part) else tensor
    adapter = next(filter(lambda adapter: adapter.is_tensor(plain), adapters))
    return adapter if plain is tensor else Parts(adapter)


def shared_as_saved(other: Any, tensor: Any, adapter: Adapter | Parts) -> Any:
    """Replaces a tensor that a load made by ``other``, which the same saved one fills, if that is alike.

    They were one tensor when they were saved. What a state holds of a trained tensor is that without its gradient.
    """
    if other is None or isinstance(other, Part) or isinstance(tensor, Part):
        return tensor
    if type(other) is not type(tensor) and hasattr(other, "detach"):
        other = other.detach()
    is_alike = type(other) is type(tensor) and getattr(other, "device", None) == getattr(tensor, "device", None)
    return other if is_alike and adapter.layout(other) == adapter.layout(tensor) else tensor


def name_of(tensor: object, name: str, names: dict[int, list[NamedPart]]) -> bool:
    """Notes the name of a module's tensor or part, by ``id`` of what an optimizer steps; the first one of each counts.

    Returns:
        Whether it was noted.
    """
    part = tensor if isinstance(tensor, Part) else None
    known = names.setdefault(id(changed_as(tensor)), [])
    if any(other is part for _, other in known):
        return False
    known.append((name, part))
    return True


def names_of(parameters: Mapping[str, object]) -> dict[int, list[NamedPart]]:
    """The names of a module's parameters, as :meth:`Objects.optimizer` takes them."""
    names: dict[int, list[NamedPart]] = {}
    for name, parameter in parameters.items():
        name_of(parameter, name, names)
    return names


def changed_as(tensor: object) -> object:
    """The object that a bundle announces changes of: the tensor itself, or what a part lies within."""
    return tensor.within if isinstance(tensor, Part) and tensor.within is not None else tensor


@dataclass(frozen=True, slots=True)
class Parts:
    """Answers for parts as an :class:`Adapter` does for tensors.

    Attributes:
        plain: The adapter of the plain tensors.
    """

    plain: Adapter

    def is_tensor(self, value: object) -> bool:
        """Whether it is a part."""
        return isinstance(value, Part)

    def layout(self, part: Part) -> Layout:
        """The part's place, with the element type of the plain tensor."""
        return _layout(part, self.plain.layout(part.tensor))

    def identity(self, part: Part) -> Hashable:
        """Equal for the same elements of one memory, except of leaves that are not tied."""
        return _identity(part, self.plain.identity(part.tensor))

    def source(self, part: Part) -> Source:
        """The plain tensor's memory, by region."""
        source, plain = self.plain.source(part.tensor), self.plain.layout(part.tensor)
        return Source(_memory(part, plain, source.memory, plain.dtype), source.owner, source.is_copy)

    def origin(self, part: Part) -> Origin:
        """All of these at once."""
        plain = self.plain.origin(part.tensor)
        layout, source = _layout(part, plain.layout), plain.source
        if source is not None:
            source = Source(_memory(part, plain.layout, source.memory, layout.dtype), source.owner)
        return Origin(layout, _identity(part, plain.identity), source)

    def destination(self, part: Part, dtype: str) -> Destination:
        """The layout, and the memory if a load may write there."""
        if part.refusal:
            raise Refused(part.refusal)
        plain = self.plain.destination(part.tensor, dtype)
        layout, target = _layout(part, plain.layout), plain.target
        if target is not None:
            target = None if part.several is not None else _placed(part, plain.layout, target, dtype)
        return Destination(layout, _identity(part, plain.identity), target)

    def target(self, part: Part, dtype: str) -> Target:
        """Memory for a load. Where several leaves have one memory, the first fills it, the others are compared."""
        plain = self.plain.layout(part.tensor)
        if part.several is None or not part.several:
            if part.several is not None:
                part.several.append(part.name)
            return _placed(part, plain, self.plain.target(part.tensor, dtype), dtype)
        # What is loaded for the first leaf stays, and this one is compared with it.
        staging = self.plain.allocate(plain.dtype, plain.shape)
        target, first = self.plain.target(staging, dtype), part.several[0]

        def compare() -> None:
            if target.finish is not None:
                target.finish()
            if self.plain.lower_value(part.tensor) != self.plain.lower_value(staging):
                raise Refused(
                    f"it differs from {first} in the checkpoint, and here both lie in one tensor: load into a layout "
                    "that keeps them apart"
                )

        return Target(_memory(part, plain, target.memory, dtype), target.owner, compare)

    def written(self, part: Part) -> Box | None:
        """That of the plain tensor; ``None`` where several leaves are compared and not written over each other."""
        return None if part.several is not None else self.plain.written(part.tensor)

    def hold(self, tensors: Sequence[Any]) -> Hold:
        """Holds the plain tensors of the parts."""
        return self.plain.hold(tensors)

    def wrote(self, owners: Sequence[Any]) -> None:
        """Tells of writes into the plain tensors."""
        self.plain.wrote(owners)

    def clear_behind(self, part: Part, rows: int) -> None:
        """Sets to 0 what lies behind the first ``rows`` of the whole tensor."""
        layout, at = Layout("", part.shape, part.regions), 0
        for region, first in zip(part.regions, first_rows(layout, rows), strict=True):
            kept, size = numel_of(first) if first is not None else 0, numel_of(region)
            if kept < size:
                self.plain.clear(part.tensor, at + kept, at + size)
            at += size

    def fill(self, part: Part, value: object, cast: bool = False) -> None:
        """Copies a value where several leaves have one memory; no value is a part of a tensor."""
        if part.several is None:
            raise Refused("the checkpoint holds a value where this rank has a part of a tensor")
        self.plain.fill(part.tensor, value, cast)


def _layout(part: Part, plain: Layout) -> Layout:
    given, needed = math.prod(plain.shape), sum(map(numel_of, part.regions))
    if given != needed:
        raise Refused(f"its part here has {given} elements, and its place in {list(part.shape)} has {needed}")
    return Layout(plain.dtype, part.shape, part.regions, part.text, part.holders)


def _identity(part: Part, plain: Hashable) -> Hashable:
    return plain, part.shape, part.regions, part.name if part.several is not None else ""


def _memory(part: Part, plain: Layout, memory: Sequence[Memory], dtype: str) -> tuple[Memory, ...]:
    """Finds the memory of each region of a part in that of the plain tensor; ``dtype`` is that of its elements."""
    if not part.regions:
        return ()
    (there,) = memory
    first, item = part.regions[0], item_bytes(dtype)
    if len(part.regions) == 1 and isinstance(first, Region) and first.lengths == plain.shape:
        return (there,)
    expected = row_major(plain.shape, item)
    steps = zip(plain.shape, there.strides_bytes, expected, strict=True)
    if any(size > 1 and stride != wanted for size, stride, wanted in steps):
        raise Refused("its part here is not contiguous, so that a run of its elements lies nowhere: make it contiguous")
    out, pointer = [], there.pointer
    for region in part.regions:
        strides = () if isinstance(region, Flat) else row_major(region.lengths, item)
        out.append(Memory(pointer, strides, there.device))
        pointer += numel_of(region) * item
    return tuple(out)


def _placed(part: Part, plain: Layout, target: Target, dtype: str) -> Target:
    return Target(_memory(part, plain, target.memory, dtype), target.owner, target.finish)


def flat_run(region: Flat, memory: Memory) -> tuple[Any, ...]:
    """A run and where it lies, as Rust takes it."""
    box = () if region.box is None else (tuple(region.box),)
    return ("flat", region.start, region.stop, memory.pointer, *box, *memory.where)


def native_want(leaf: int, region: Region | Flat, memory: Memory) -> tuple[Any, ...]:
    """Returns what a load fills of a saved leaf, by its number, as Rust takes it.

    ``(leaf, offsets, lengths, pointer, strides_bytes)`` or ``(leaf, "flat", start, stop, pointer)``, with the box at
    the end if the run is one's, and the number of the CUDA device if the memory is one's.
    """
    if isinstance(region, Flat):
        return (leaf, *flat_run(region, memory))
    return (leaf, region.offsets, region.lengths, memory.pointer, memory.strides_bytes, *memory.where)


def numel_of(region: Region | Flat) -> int:
    """The number of elements."""
    return region.stop - region.start if isinstance(region, Flat) else math.prod(region.lengths)


def row_major(lengths: Sequence[int], item: int) -> Ints:
    """The distances in bytes between neighbours per dimension, of elements of ``item`` bytes in row-major order."""
    strides = []
    for length in reversed(lengths):
        strides.append(item)
        item *= length
    return tuple(strides[::-1])


def native_leaf(leaf: Leaf) -> tuple[Any, ...]:
    """A leaf as Rust takes it."""
    if isinstance(leaf, ObjectLeaf):
        return ("object", leaf.key, leaf.name, "", leaf.owner)
    if isinstance(leaf, AliasLeaf):
        return ("alias", leaf.key, leaf.name, "", leaf.of_key, leaf.of_name)
    layout = leaf.layout
    parts: list[tuple[Any, ...]] = []
    for region, memory in zip(layout.regions, leaf.source.memory, strict=True):
        if isinstance(region, Flat):
            parts.append(flat_run(region, memory))
        else:
            parts.append((region.offsets, region.lengths, memory.pointer, memory.strides_bytes, *memory.where))
    return (
        "tensor",
        leaf.key,
        leaf.name,
        layout.text,
        layout.dtype,
        layout.shape,
        parts,
        leaf.capture,
        layout.holders,
        leaf.compared,
    )
