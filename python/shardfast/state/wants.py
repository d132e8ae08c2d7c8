"""Destinations of a load, from saved tensors, as Rust takes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from .catalog import Adapter, Destination, Flat, Memory, SavedLeaf, SavedObject, SavedTensor, Target, item_bytes
from .padding import first_rows
from .parts import Parts, native_want, row_major


class Want(NamedTuple):
    """A tensor to fill from a saved one."""

    leaf: SavedTensor
    adapter: Adapter | Parts
    tensor: Any
    destination: Destination
    place: str
    rows: int | None = None
    """How many the checkpoint has, where those behind them are padding here."""

    def forecast(self) -> Iterator[tuple[Any, ...]]:
        """Its regions without memory, for a plan only."""
        for region in first_rows(self.destination.layout, self.rows):
            if region is not None:
                strides = () if isinstance(region, Flat) else row_major(region.lengths, item_bytes(self.leaf.dtype))
                yield native_want(self.leaf.index, region, Memory(0, strides))

    def bound(self, target: Target) -> Iterator[tuple[tuple[Any, ...], Memory]]:
        """Its regions in the memory of ``target``, as far as the checkpoint has them."""
        for region, memory in zip(first_rows(self.destination.layout, self.rows), target.memory, strict=True):
            if region is not None:
                yield native_want(self.leaf.index, region, memory), memory


def referred(saved: Sequence[SavedLeaf]) -> dict[tuple[str, str], list[SavedLeaf]]:
    """The tensor leaves below each object leaf, by names."""
    out: dict[tuple[str, str], list[SavedLeaf]] = {}
    objects = {(leaf.key, leaf.name) for leaf in saved if isinstance(leaf, SavedObject)}
    for leaf in saved if objects else ():
        if isinstance(leaf, SavedObject):
            continue
        end = leaf.name.find(".")
        while end > 0:
            if (leaf.key, leaf.name[:end]) in objects:
                out.setdefault((leaf.key, leaf.name[:end]), []).append(leaf)
                break
            end = leaf.name.find(".", end + 1)
    return out
