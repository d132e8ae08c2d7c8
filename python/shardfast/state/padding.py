"""Leaves whose first axis ends in padding that depends on the layout, as a vocabulary's does on tensor parallelism.

Their layout, as text, says how many elements along the axis are none, at least and at most. A load into another length
takes the elements that both have, and sets the others to 0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from .catalog import Flat, Ints, Layout, Region


def padded(least: int, most: int) -> str:
    """The layout, as text, of a leaf of which ``least`` to ``most`` elements along the first axis are no padding."""
    return f"Padded({least}..{most})"


_PADDED = re.compile(r"Padded\((\d+)\.\.(\d+)\)")


def differ_by_padding(shape: Sequence[int], text: str, other: Sequence[int], other_text: str) -> bool:
    """Whether two shapes differ by padding alone: both layouts have it, and one length without it fits both."""
    one, two = _PADDED.fullmatch(text), _PADDED.fullmatch(other_text)
    if one is None or two is None or tuple(shape[1:]) != tuple(other[1:]):
        return False
    return max(int(one[1]), int(two[1])) <= min(int(one[2]), int(two[2]))


def other_padding(text: str, here: str) -> str:
    """Why two padded lengths are not of one thing, for an error; empty if they are not both padded."""
    found = [match for match in map(_PADDED.fullmatch, (text, here)) if match is not None]
    counts = [one[1] if one[1] == one[2] else f"{one[1]} to {one[2]}" for one in found]
    if len(counts) < 2:
        return ""
    return f", of which {counts[0]} there and {counts[1]} here are no padding"


def first_rows(layout: Layout, rows: int | None) -> Sequence[Region | Flat | None]:
    """Cuts each region to the first ``rows`` of the tensor, where its elements begin.

    ``None`` for a region of which nothing does; the regions themselves if all rows are meant, ``None``.
    """
    if rows is None:
        return layout.regions
    return [_first_rows(region, layout.shape, rows) for region in layout.regions]


def _first_rows(region: Region | Flat, shape: Ints, rows: int) -> Region | Flat | None:
    box = region if isinstance(region, Region) else region.box or Region((0,) * len(shape), shape)
    kept = max(min(rows - box.offsets[0], box.lengths[0]), 0)
    box = Region(box.offsets, (kept, *box.lengths[1:]))
    if isinstance(region, Region):
        return box if kept else None
    stop = min(region.stop, math.prod(box.lengths))
    return Flat(region.start, stop, region.box and box) if region.start < stop else None


def said(name: str, rows: int, here: int) -> str:
    """Describes a leaf with ``rows`` along its first axis in the checkpoint, and ``here`` in the state, for a plan."""
    if rows < here:
        return f"{name}: rows {rows:,} to {here - 1:,} here are padding (the checkpoint has {rows:,}) and become 0"
    return f"{name}: rows {here:,} to {rows - 1:,} of the checkpoint are padding (there are {here:,} here) and are left"
