"""The contract of an adapter as checks that any framework's adapter can call in its own tests.

The checks compare an adapter's answers with memory: every rank's parts must be in bounds, disjoint and together cover
the tensor, replicas must agree, strides must lead to the right elements, and a save must read what a load wrote.

Example::

    def test_my_sharded_tensor(adapter, tensor, all_gather_object):
        whole = check_tensor(adapter, tensor, all_gather_object)
        assert whole == expected_bytes      # row-major, of the global tensor
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .state.catalog import Adapter, Bundle, Flat, Ints, Layout, Memory, Region, Source, item_bytes
from .state.description import held, outlined

Gather = Callable[["Snapshot"], Sequence["Snapshot"]]
"""Collects an object of every rank, by rank, on every rank: what ``torch.distributed.all_gather_object`` does."""


@dataclass(frozen=True)
class Snapshot:
    """One rank's part of a tensor as a save takes it: its layout, and the bytes of each region in row-major order."""

    layout: Layout
    contents: tuple[bytes, ...]


def snapshot(adapter: Adapter, tensor: object) -> Snapshot:
    """Reads this rank's parts of a tensor through the adapter, as a save does."""
    return read(adapter.layout(tensor), adapter.source(tensor))


def read(layout: Layout, source: Source) -> Snapshot:
    """Reads the parts of a tensor from host memory."""
    assert len(layout.regions) == len(source.memory), "an adapter gives memory for each region of the layout"
    item = item_bytes(layout.dtype)
    contents = []
    for region, memory in zip(layout.regions, source.memory, strict=True):
        rows = (ctypes.string_at(address, size) for address, size in _rows(region, memory, item))
        contents.append(b"".join(rows))
    return Snapshot(layout, tuple(contents))


def assemble(snapshots: Sequence[Snapshot]) -> bytes:
    """The global tensor of all ranks' parts, in row-major order.

    Raises:
        AssertionError: If ranks disagree about dtype or shape, a part is empty or out of bounds, a rank's parts
            overlap, elements are missing, or two ranks hold different bytes of the same elements.
    """
    dtype, shape = snapshots[0].layout.dtype, snapshots[0].layout.shape
    item, numel = item_bytes(dtype), math.prod(shape)
    whole, held = bytearray(numel * item), bytearray(numel)
    for rank, one in enumerate(snapshots):
        said = (one.layout.dtype, one.layout.shape)
        assert said == (dtype, shape), f"rank {rank} has a tensor of {said}, rank 0 one of {(dtype, shape)}"
        mine = bytearray(numel)
        for region, data in zip(one.layout.regions, one.contents, strict=True):
            _expect_in_bounds(rank, region, shape)
            taken = 0
            for start, count in _runs(region, shape):
                for element in range(start, start + count):
                    assert not mine[element], f"rank {rank}: two of its parts hold element {element}"
                    mine[element] = 1
                    value = data[taken : taken + item]
                    taken += item
                    place = slice(element * item, (element + 1) * item)
                    assert not held[element] or whole[place] == value, (
                        f"rank {rank}: another value of element {element}"
                    )
                    whole[place], held[element] = value, 1
            assert taken == len(data), f"rank {rank}: {region} has {taken} bytes, its memory {len(data)}"
    missing = numel - sum(held)
    assert missing == 0, f"{missing} of {numel} elements are in no rank's parts"
    return bytes(whole)


def restore(adapter: Adapter, tensor: object, whole: bytes, dtype: str | None = None) -> None:
    """Fills this rank's parts of a tensor from the bytes of the global one, as a load does.

    Args:
        whole: Row-major elements of the global tensor.
        dtype: Their safetensors type; the tensor's own by default.
    """
    layout = adapter.layout(tensor)
    dtype = dtype or layout.dtype
    item, target = item_bytes(dtype), adapter.target(tensor, dtype)
    for region, memory in zip(layout.regions, target.memory, strict=True):
        data = b"".join(whole[start * item : (start + count) * item] for start, count in _runs(region, layout.shape))
        taken = 0
        for address, size in _rows(region, memory, item):
            ctypes.memmove(address, data[taken : taken + size], size)
            taken += size
    if target.finish is not None:
        target.finish()


def check_tensor(adapter: Adapter, tensor: object, gather: Gather = lambda mine: [mine]) -> bytes:
    """Checks everything that the contract says about one tensor, of which every rank gives its own part.

    The tensor is overwritten with other bytes and then restored.

    Args:
        adapter: The adapter under test.
        tensor: This rank's tensor.
        gather: Collects snapshots of all ranks; by default there is one rank.

    Returns:
        The global tensor in row-major order, to be compared with what it should be.

    Raises:
        AssertionError: If the adapter breaks the contract.
    """
    assert adapter.is_tensor(tensor), "an adapter knows its own tensors"
    assert adapter.identity(tensor) == adapter.identity(tensor), "a tensor is identical with itself"
    layout = adapter.layout(tensor)
    assert layout == adapter.layout(tensor), "a layout does not change by being asked for"
    destination, target = adapter.destination(tensor, layout.dtype), adapter.target(tensor, layout.dtype)
    assert destination[:2] == (layout, adapter.identity(tensor)), "a load gets the same as a save"
    origin = adapter.origin(tensor)
    assert origin[:2] == (layout, adapter.identity(tensor)), "one call returns the same as single calls"
    assert origin.source is None or origin.source.memory == adapter.source(tensor).memory
    if destination.target is not None:
        assert target.finish is None, "what is at hand is the tensor's own memory"
        assert destination.target.memory == target.memory, "what is at hand is where a load goes"
    before = snapshot(adapter, tensor)
    whole = assemble(gather(before))
    other = bytes(byte ^ 1 for byte in whole)
    restore(adapter, tensor, other)
    assert adapter.layout(tensor) == layout, "loading does not change a layout"
    assert assemble(gather(snapshot(adapter, tensor))) == other, "a save reads what a load wrote"
    restore(adapter, tensor, whole)
    assert snapshot(adapter, tensor) == before, "loading what was saved changes nothing"
    return whole


def check_view(adapter: Adapter, tensor: object) -> None:
    """Checks that tensors like this one, which is whole and not empty, can be views of foreign memory.

    Raises:
        AssertionError: If the adapter breaks the contract.
    """
    layout, whole = adapter.layout(tensor), assemble([snapshot(adapter, tensor)])
    buffer = bytearray(whole)
    view = adapter.view(layout.dtype, layout.shape, buffer)
    said = adapter.layout(view)
    assert (said.dtype, said.shape) == (layout.dtype, layout.shape), "a view has the type and shape that it was given"
    assert assemble([snapshot(adapter, view)]) == whole, "a view shows the elements of a buffer"
    buffer[:1] = bytes([buffer[0] ^ 1])
    assert assemble([snapshot(adapter, view)]) == bytes(buffer), "a view copies nothing"


def check_announced(adapter: Adapter, bundle: Bundle, change: Callable[[], None]) -> None:
    """Checks that a bundle announces its changes.

    Args:
        adapter: The adapter under test.
        bundle: An optimizer or the like, of which some tensors are announced.
        change: Has the framework change all announced tensors, as its optimizer's step does.

    Raises:
        AssertionError: If the adapter breaks the contract.
    """
    before: list[list[bytes]] = []
    is_over = False

    def contents() -> list[bytes]:
        return [b"".join(snapshot(adapter, tensor).contents) for tensor in tensors]

    def notice(by: str) -> None:
        if not is_over:
            before.append(contents())

    tensors: Sequence[Any] = bundle.announce(notice)
    assert tensors, "the bundle announces changes of some of its tensors"
    first, names = contents(), [*bundle.tensors()]
    (hold, counted), outline = _held(adapter, tensors), bundle.outline()
    outlines = outlined([outline]) if outline is not None else None
    stamp = hold.stamp(counted)
    assert stamp is not None and hold.changes(counted, stamp) == [], "looking at tensors does not change them"
    change()
    is_over = True
    assert before and before[0] == first, "a change is announced before it is made"
    assert all(one != other for one, other in zip(first, contents(), strict=True)), "all announced tensors changed"
    if outlines is not None:
        again = outlines.again()
        assert again is not None, "a change of contents alone leaves a bundle what it was"
        assert len(again[0]) == len(names), "a bundle that is the same has the same tensors"


def check_writes_are_seen(adapter: Adapter, bundle: Bundle, write: Callable[[Any], None]) -> None:
    """Checks that a hold shows which of a bundle's announced tensors ``write`` wrote, without announcement."""
    tensors = bundle.announce(lambda by: None)
    hold, counted = _held(adapter, tensors)
    for number, tensor in enumerate(tensors):
        stamp = hold.stamp(counted)
        assert stamp is not None, "a hold holds its tensors' memory"
        write(tensor)
        assert [changed for changed, _ in hold.changes(counted, stamp)] == [number], "a hold tells which was written"


def _held(adapter: Adapter, tensors: Sequence[Any]) -> tuple[Any, list[Any]]:
    """A hold of tensors' memory, and the tensors that count writes: those of the memory, and those that wrap some."""
    owners: list[Any] = [adapter.source(tensor).owner for tensor in tensors]
    wrapped = [number for number, tensor in enumerate(tensors) if tensor is not owners[number]]
    return held(adapter.hold(owners), wrapped), owners + [tensors[number] for number in wrapped]


def _expect_in_bounds(rank: int, region: Region | Flat, shape: Ints) -> None:
    if isinstance(region, Flat):
        if region.box is not None:
            _expect_in_bounds(rank, region.box, shape)
        lengths = shape if region.box is None else region.box.lengths
        assert 0 <= region.start < region.stop <= math.prod(lengths), f"rank {rank}: {region} in {shape}"
        return
    assert len(region.offsets) == len(region.lengths) == len(shape), f"rank {rank}: {region} in {shape}"
    bounds = zip(region.offsets, region.lengths, shape, strict=True)
    fits = all(0 <= offset < offset + length <= size for offset, length, size in bounds)
    assert fits, f"rank {rank}: {region} is empty or outside of {shape}"


def _runs(region: Region | Flat, shape: Ints) -> Iterator[tuple[int, int]]:
    """The region's elements in row-major order as runs ``(first flat index, count)`` of the global tensor."""
    if isinstance(region, Flat):
        runs = [(0, math.prod(shape))] if region.box is None else _runs(region.box, shape)
        skipped = 0
        for start, count in runs:
            first, last = max(region.start - skipped, 0), min(region.stop - skipped, count)
            if first < last:
                yield start + first, last - first
            skipped += count
        return
    if not shape:
        yield 0, 1
        return
    for index in itertools.product(*map(range, region.lengths[:-1])):
        flat = 0
        for place, size, offset in zip((*index, 0), shape, region.offsets, strict=True):
            flat = flat * size + offset + place
        yield flat, region.lengths[-1]


def _rows(region: Region | Flat, memory: Memory, item: int) -> Iterator[tuple[int, int]]:
    """Addresses and sizes of the region's elements in row-major order."""
    if isinstance(region, Flat):
        yield memory.pointer, (region.stop - region.start) * item
        return
    assert len(memory.strides_bytes) == len(region.lengths), f"{region} needs a stride per dimension, has {memory}"
    places = [*map(range, region.lengths)]
    row = region.lengths[-1] if places and memory.strides_bytes[-1] == item else 1
    places[-1:] = [one[::row] for one in places[-1:]]
    for index in itertools.product(*places):
        steps = zip(index, memory.strides_bytes, strict=True)
        yield memory.pointer + sum(place * stride for place, stride in steps), row * item
