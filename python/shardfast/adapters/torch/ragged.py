"""Runs of flattened tensors, as veScale's ``RaggedShard`` gives them to ranks.

The placement is known by the name of its class and read by its attributes; veScale is never imported. None of its
methods is called: a class that never called the ``__init__`` of PyTorch's base ends the process there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...state.catalog import Flat, Ints, Refused, Region

NAMES = frozenset({"RaggedShard", "_StridedRaggedShard"})
"""Names of the classes."""

_UNITS_SHOWN_MAX = 16  # in the text of a layout, which every tensor has


class Ragged(NamedTuple):
    """A placement that gives each rank of a mesh dimension a run of the flattened tensor.

    It cuts what all other placements leave of the tensor, wherever it stands among them.

    Attributes:
        kind: The name of its class.
        dims: The tensor's first dimensions, which the runs may cut through.
        units: The length of each rank's run, in parts of the whole.
        split: Into how many parts placements on its right cut the first dimension; 1 where that is not said.
    """

    kind: str
    dims: Ints
    units: Ints
    split: int

    def is_partial(self) -> bool:
        return False

    def is_replicate(self) -> bool:
        return False

    def is_shard(self) -> bool:
        return False

    def __repr__(self) -> str:
        shown = self.units if len(self.units) <= _UNITS_SHOWN_MAX else f"{sum(self.units)} for {len(self.units)} ranks"
        split = f", split_factor={self.split}" if self.split != 1 else ""
        return f"{self.kind.lstrip('_')}({self.dims}, {shown}{split})"


def ragged_of(placement: Any, axis: int) -> Ragged:
    """Reads a placement whose class has one of :data:`NAMES`.

    Raises:
        Refused: If its attributes are not those of veScale's.
    """
    kind = type(placement)
    said = tuple(getattr(placement, name, None) for name in ("dims", "local_units"))
    split = getattr(placement, "split_factor", 1)
    who = f"a DTensor with a placement of class {kind.__module__}.{kind.__qualname__} on mesh dimension {axis}"
    if not all(map(_are_counts, said)) or not _are_counts((split,)) or split < 1:
        raise Refused(
            f"{who}: expected dims and local_units as tuples of counts, and a split_factor that is a count if there "
            f"is one, as veScale's class has them, found {said[0]!r}, {said[1]!r} and {split!r}: redistribute() it to "
            "Shard or Replicate first"
        )
    dims, units = (tuple(map(int, one)) for one in said if one is not None)
    if dims != tuple(range(len(dims))):
        raise Refused(
            f"{who}: expected its dims to be the first dimensions of the tensor, (0, 1, ...), found {dims}: "
            "redistribute() it to Shard or Replicate first"
        )
    return Ragged(kind.__name__, dims, units, int(split))


def _are_counts(value: object) -> bool:
    return isinstance(value, (tuple, list)) and all(isinstance(one, int) and one >= 0 for one in value)


def find_ragged(placements: Sequence[Any], sizes: Ints, ndim: int) -> tuple[int, Ragged] | None:
    """The mesh dimension on which a tensor of ``ndim`` dimensions is cut into runs, and by which placement.

    Raises:
        Refused: If its counts are not those of the mesh, or it is not the only one.
    """
    found = [(axis, one) for axis, one in enumerate(placements) if type(one) is Ragged]
    if not found:
        return None
    if len(found) > 1:
        raise Refused(f"a DTensor with placements {tuple(placements)!r}: expected at most one RaggedShard")
    axis, ragged = found[0]
    who = f"a DTensor with placement {ragged!r} on mesh dimension {axis}"
    if len(ragged.units) != sizes[axis] or not sum(ragged.units):
        raise Refused(
            f"{who}, which has {sizes[axis]} ranks: expected a unit count for each of them, and one that is not 0, "
            f"found {len(ragged.units)} with the sum {sum(ragged.units)}"
        )
    if len(ragged.dims) > ndim:
        raise Refused(f"{who} and {ndim} dimensions: expected no more than these in its dims")
    others = [(size, one) for size, one in zip(sizes, placements, strict=True) if hasattr(one, "split_factor")]
    if others:
        raise Refused(f"{who}, beside {others[0][1]!r}: what each of them cuts of the tensor is not known")
    on_the_right = zip(sizes[axis + 1 :], placements[axis + 1 :], strict=True)
    parts = math.prod(size for size, one in on_the_right if one.is_shard() and one.dim in (0, -ndim))
    if ragged.split not in (1, parts):
        # veScale's functions that scatter and gather take one run here, and its description of the class says several.
        raise Refused(
            f"{who}, whose split_factor counts the parts into which Shard(0) on its right cuts the tensor: expected "
            f"{parts} or 1, found {ragged.split}; which elements it holds is not known: redistribute() it to Shard or "
            "Replicate first"
        )
    return axis, ragged


def run_of(ragged: Ragged, index: int, boxes: Sequence[Region], shape: Ints) -> tuple[Flat, ...]:
    """The run of one rank in the box that the other placements leave; none if it is empty.

    Args:
        ragged: The placement.
        index: The rank's coordinate on its mesh dimension.
        boxes: What the other placements leave: one box, or none.
        shape: That of the tensor.

    Raises:
        Refused: If the units do not divide the box.
    """
    whole = sum(ragged.units)
    for box in boxes:
        numel = math.prod(box.lengths)
        if numel % whole:
            raise Refused(
                f"a DTensor with placement {ragged!r} of {numel} elements, which is no multiple of its {whole} units"
            )
        start = sum(ragged.units[:index]) * (numel // whole)
        stop = start + ragged.units[index] * (numel // whole)
        if start < stop:
            return (Flat(start, stop, None if box.lengths == shape else box),)
    return ()


def elements_of(whole: torch.Tensor, region: Region | Flat) -> torch.Tensor:
    """The elements of ``whole`` in a region, in the region's shape; of a run in one dimension."""
    if isinstance(region, Flat):
        box = whole if region.box is None else elements_of(whole, region.box)
        return box.reshape(-1)[region.start : region.stop]
    bounds = zip(region.offsets, region.lengths, strict=True)
    return whole[tuple(slice(offset, offset + length) for offset, length in bounds)]
