"""Places of a rank's part of a tensor: regions of the global shape, and views of this rank's memory.

A ``DTensor``'s place follows from its mesh and placements: per tensor dimension, runs of indices are cut by the rule of
``torch.chunk``, one mesh dimension after the other. That is exact for every placement that shards, ``_StridedShard``
without its right-hand ``Shard`` included, where a rank holds several runs; no communication, no index vectors.
veScale's ``RaggedShard`` gives a run of what the others leave (:mod:`.ragged`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from ...state.catalog import Flat, Ints, Refused, Region
from .hooks import is_dtensor
from .ragged import NAMES, Ragged, find_ragged, ragged_of, run_of

Run = tuple[int, int]
"""``(start, length)`` of consecutive indices of one dimension."""


def _part(runs: Sequence[Run], start: int, stop: int) -> list[Run]:
    """Elements ``[start, stop)`` of the concatenated runs, as runs; neighbours are joined."""
    out: list[Run] = []
    for first, length in runs:
        low, high = max(start, 0), min(stop, length)
        if low < high:
            if out and sum(out[-1]) == first + low:
                out[-1] = (out[-1][0], out[-1][1] + high - low)
            else:
                out.append((first + low, high - low))
        start, stop = start - length, stop - length
    return out


def _chunk(runs: Sequence[Run], parts: int, index: int) -> list[Run]:
    """Part ``index`` of the runs cut by the rule of ``torch.chunk``, empty where that gives fewer parts."""
    size = math.ceil(sum(length for _, length in runs) / parts)
    return _part(runs, index * size, (index + 1) * size)


Cut = tuple[int, int, int, int]
"""Tensor dimension, size of the mesh dimension, this rank's coordinate there, split factor (1 for a plain Shard)."""


def cut(shape: Ints, cuts: tuple[Cut, ...]) -> tuple[tuple[Region, ...], tuple[Ints, ...], Ints]:
    """The regions of a tensor of ``shape`` cut in that order, where each begins in the local tensor, and its shape."""
    dims: list[list[Run]] = [[(0, length)] if length else [] for length in shape]
    for dim, parts, index, split in cuts:
        groups = [_chunk(dims[dim], split, group) for group in range(split)] if split > 1 else [dims[dim]]
        pieces = [run for group in groups for run in _chunk(group, parts, index)]
        dims[dim] = _part(pieces, 0, shape[dim])
    placed: list[list[tuple[int, Run]]] = []
    for runs in dims:
        starts = itertools.accumulate((length for _, length in runs), initial=0)
        placed.append(list(zip(starts, runs, strict=False)))
    regions, local = [], []
    for combination in itertools.product(*placed):
        regions.append(Region(tuple(r[0] for _, r in combination), tuple(r[1] for _, r in combination)))
        local.append(tuple(start for start, _ in combination))
    return tuple(regions), tuple(local), tuple(sum(length for _, length in runs) for runs in dims)


def _cuts(
    ndim: int, sizes: Ints, coordinate: Ints | None, placements: tuple[Any, ...], shard_order: tuple[Any, ...]
) -> tuple[Cut, ...] | None:
    """How a DTensor is cut, in the order of application; ``None`` on a rank outside its mesh."""
    cuts: list[tuple[int, Cut]] = []
    # A layout that was sharded in another order than from left to right has that in its spec.
    turn = {axis: place for entry in shard_order for place, axis in enumerate(entry.mesh_dims)}
    for axis, placement in enumerate(placements):
        if placement.is_partial():
            raise Refused(
                f"a DTensor with placement {placement!r} on mesh dimension {axis} is an unreduced partial sum: "
                "redistribute() it to Shard or Replicate first"
            )
        split = 1
        if is_strided(placement):
            split = int(placement.split_factor)
        elif placement.is_replicate() or type(placement) is Ragged:
            continue
        elif not placement.is_shard():
            raise Refused(f"a DTensor with placement {placement!r} on mesh dimension {axis} is of an unknown kind")
        if coordinate is not None:
            cuts.append((turn.get(axis, axis), (placement.dim % ndim, sizes[axis], coordinate[axis], split)))
    return None if coordinate is None else tuple(cut for _, cut in sorted(cuts, key=lambda item: item[0]))


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """Place of this rank's part of DTensors of one shape and placement. One object for all: equal to itself.

    Attributes:
        shape: Theirs.
        regions: Its regions.
        starts: Where each begins in the local tensor; empty for a run, which is all of it.
        local_shape: That of the local tensor; of one that holds a run, that of its elements in one dimension.
        text: The layout as text.
        holders: The ranks that hold the same regions, if the mesh shows them.
    """

    shape: Ints
    regions: tuple[Region | Flat, ...]
    starts: tuple[Ints, ...]
    local_shape: Ints
    text: str
    holders: Ints | None

    @property
    def is_run(self) -> bool:
        """Whether this rank's part is a run of elements."""
        return bool(self.regions) and isinstance(self.regions[0], Flat)


class _Same:
    """A mesh as part of a key: equal to itself only, which is faster to check than equality of meshes."""

    __slots__ = ("mesh",)

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh

    def __hash__(self) -> int:
        return id(self.mesh)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.mesh is other.mesh


def placements_of(tensor: Any) -> tuple[Any, ...]:
    """The placements of a DTensor, all of PyTorch's own classes, or :class:`Ragged` for one of veScale's.

    Raises:
        Refused: If one is of another class. That may place in another way; and if it never called the ``__init__`` of
            its base, reading any attribute of the base is undefined: it gives anything, or ends the process.
    """
    placements: tuple[Any, ...] = tensor.placements
    is_ragged = False
    for axis, kind in enumerate(map(type, placements)):
        if kind.__name__ in NAMES:
            is_ragged = True
        elif not kind.__module__.startswith("torch."):
            raise Refused(
                f"a DTensor with a placement of class {kind.__module__}.{kind.__qualname__} on mesh dimension {axis}, "
                "of an unknown kind: redistribute() it to Shard or Replicate first"
            )
    if not is_ragged:
        return placements
    return tuple(
        ragged_of(placement, axis) if type(placement).__name__ in NAMES else placement
        for axis, placement in enumerate(placements)
    )


def placed(tensor: Any) -> Placed:
    """Returns the place of this rank's part of a DTensor, by its mesh and placements.

    Raises:
        Refused: If its placements name no part of it.
    """
    mesh, placements = tensor.device_mesh, placements_of(tensor)
    shard_order = getattr(getattr(tensor, "_spec", None), "shard_order", None) or ()
    # A placement of a subclass equals one of its base.
    kinds = tuple(map(type, placements))
    coordinate = mesh.get_coordinate()
    where = coordinate if coordinate is None else tuple(coordinate)
    return _placed(tensor.shape, _Same(mesh), where, placements, kinds, shard_order)


@functools.lru_cache(maxsize=1024)
def _placed(
    shape: Ints,
    same: _Same,
    coordinate: Ints | None,
    placements: tuple[Any, ...],
    kinds: tuple[type, ...],
    shard_order: tuple[Any, ...],
) -> Placed:
    sizes = tuple(map(int, same.mesh.shape))
    where = None if coordinate is None else tuple(map(int, coordinate))
    if where is not None and torch.distributed.is_initialized():
        _expect_one_order(same.mesh, where, placements)
    ragged = find_ragged(placements, sizes, len(shape))
    cuts = _cuts(len(shape), sizes, where, placements, shard_order)
    boxes, starts, local_shape = cut(tuple(shape), cuts) if cuts is not None else ((), (), (0,))
    regions: tuple[Region | Flat, ...] = boxes
    if ragged is not None and where is not None:
        runs = run_of(ragged[1], where[ragged[0]], boxes, tuple(shape))
        regions, starts, local_shape = runs, (), (sum(run.stop - run.start for run in runs),)
    holders = _holders(same.mesh, where, placements)
    return Placed(tuple(shape), regions, starts, local_shape, _text(same.mesh, placements), holders)


def is_ragged(tensor: Any) -> bool:
    """Whether it is a DTensor of whose elements a rank holds a run."""
    if not is_dtensor(tensor) or chunks(tensor) is not None:
        return False
    return any(type(placement).__name__ in NAMES for placement in tensor.placements)


def empty_like(parameter: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A new tensor that is placed as ``parameter`` is.

    Raises:
        Refused: If it cannot be made.
    """
    if not is_ragged(parameter):
        return torch.empty_like(parameter, dtype=dtype, device=device, requires_grad=False)
    # No operation on the parameter: PyTorch's rules for one call methods of its placements.
    local = torch.empty_like(local_of(parameter), dtype=dtype, device=device, requires_grad=False)
    kind = type(parameter)
    try:
        spec = copy.copy(parameter._spec)
        spec.tensor_meta = spec.tensor_meta._replace(dtype=dtype)
        made: torch.Tensor = kind(local, spec, requires_grad=False)
        is_alike = local_of(made) is local and placed(made) is placed(parameter)
    except Exception as error:
        raise Refused(f"{_not_made(parameter)} ({type(error).__name__}: {error})") from error
    if not is_alike:
        raise Refused(f"{_not_made(parameter)} (it came out as {text(made)})")
    return made


def _not_made(parameter: Any) -> str:
    return (
        f"its parameter is a {type(parameter).__module__}.{type(parameter).__qualname__} in {text(parameter)}, of "
        "which a load cannot make another: step the optimizer once before the load"
    )


def empty_beside(parameter: Any, shape: Ints, dtype: torch.dtype, device: torch.device, *, is_replicated: bool) -> Any:
    """A new ``DTensor`` of ``shape`` on the mesh of ``parameter``: state of it that has other dimensions.

    It is sharded like the parameter if its dimensions are certainly some of the parameter's, as with row-wise and
    factored moments; else, or with ``is_replicated``, it is replicated, which takes more memory. Norms of the two
    round differently.
    """
    if is_ragged(parameter):
        raise Refused(
            f"it has shape {list(shape)}, and its parameter one of {list(parameter.shape)} in {text(parameter)}: how "
            "its class places such state is not known: step the optimizer once before the load, which shows it"
        )
    whole = tuple(parameter.shape)
    placements = []
    for placement in placements_of(parameter):
        is_cut = not is_replicated and type(placement) is torch.distributed.tensor.Shard
        axis = _axis_of(placement.dim, whole, shape) if is_cut else None
        placements.append(torch.distributed.tensor.Replicate() if axis is None else type(placement)(axis))
    mesh = parameter.device_mesh
    sizes, coordinate = tuple(map(int, mesh.shape)), mesh.get_coordinate()
    where = None if coordinate is None else tuple(map(int, coordinate))
    cuts = _cuts(len(shape), sizes, where, tuple(placements), ())
    local_shape = cut(shape, cuts)[2] if cuts is not None else (0,)
    stride = tuple(itertools.accumulate((*shape[:0:-1],), operator.mul, initial=1))[::-1]
    local = torch.empty(local_shape, dtype=dtype, device=device)
    return torch.distributed.tensor.DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def _axis_of(dim: int, whole: Ints, shape: Ints) -> int | None:
    """The dimension of ``shape`` that is ``dim`` of ``whole``, if there is only one way to match them.

    Dimensions of ``whole`` may be left out, or be 1 where their number is the same.
    """
    dim %= len(whole)
    if len(shape) == len(whole):
        fits = all(ours in (theirs, 1) for ours, theirs in zip(shape, whole, strict=True))
        return dim if fits and shape[dim] == whole[dim] else None
    kept = [
        dims for dims in itertools.combinations(range(len(whole)), len(shape)) if tuple(whole[d] for d in dims) == shape
    ]
    axes = {dims.index(dim) if dim in dims else None for dims in kept}
    return axes.pop() if len(axes) == 1 else None


def coordinates_in(meshes: Sequence[Any]) -> dict[str, int]:
    """Returns this rank's coordinates in meshes and in those that they are slices of, by the name of the dimension.

    Of dimensions without names, those of a mesh of several are called by their numbers, ``mesh0`` and so on; the one
    of a mesh of one would be the rank once more, as would be that of a mesh of one that others are slices of. A mesh
    that raises is left out.
    """
    found: dict[str, int] = {}
    for mesh in meshes:
        with contextlib.suppress(Exception):
            root = getattr(mesh, "_get_root_mesh", lambda mesh=mesh: mesh)()
            for one in (mesh, root) if root.ndim > 1 else (mesh,):
                numbers = tuple(f"mesh{axis}" for axis in range(one.ndim)) if one.ndim > 1 else ()
                places = zip(one.mesh_dim_names or numbers, one.shape, one.get_coordinate() or (), strict=False)
                for name, size, at in places:
                    if size > 1:
                        found.setdefault(name, int(at))
    return found


def text_of_flat(strategy: str, ranks: int, *, keeps_shapes: bool) -> str:
    """The layout of what lies in a flat parameter, as text; ``keeps_shapes`` if an optimizer steps whole parameters."""
    return f"FSDP1({strategy}, {ranks} ranks{', whole parameters' if keeps_shapes else ''})"


def text_of_run(stage: int, ranks: int) -> str:
    """The layout of what DeepSpeed's ZeRO has cut or put into flat buffers, as text."""
    return f"ZeRO({stage}, {ranks} ranks)"


def is_flat(layout: str) -> bool:
    """Whether a layout, as text, is one in which an optimizer steps runs of a flat parameter."""
    return layout.startswith(("FSDP1(", "ZeRO(")) and not layout.endswith(", whole parameters)")


def everyone() -> Ints:
    """All ranks of the job."""
    return tuple(range(torch.distributed.get_world_size()))


def _expect_one_order(mesh: Any, coordinate: Ints, placements: tuple[Any, ...]) -> None:
    """Refuses a mesh dimension that lists its ranks in another order than its process group does, by their numbers.

    There PyTorch's collectives (``distribute_tensor``, ``full_tensor``) take shards in the group's order, and what cuts
    by coordinates takes them in the mesh's: which one a tensor was cut by cannot be told.
    """
    for axis, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        line = mesh.mesh[tuple(slice(None) if at == axis else index for at, index in enumerate(coordinate))].tolist()
        if line != sorted(line):
            raise Refused(
                f"a DTensor with placement {placement!r} on mesh dimension {axis}, which lists ranks {line}: its "
                f"shards are in that order or, as PyTorch's collectives take them, in that of {sorted(line)}: make "
                "the mesh of ranks that ascend"
            )


def _holders(mesh: Any, coordinate: Ints | None, placements: tuple[Any, ...]) -> Ints | None:
    """The ranks with this rank's part; ``None`` if the mesh leaves ranks out, which may hold anything."""
    distributed = torch.distributed
    if coordinate is None or not distributed.is_initialized() or mesh.size() != distributed.get_world_size():
        return None
    ranks = mesh.mesh
    same = tuple(
        slice(None) if placement.is_replicate() else at for placement, at in zip(placements, coordinate, strict=True)
    )
    return tuple(sorted(map(int, ranks[same].reshape(-1).tolist())))


def mesh_covers_job(tensor: Any) -> bool:
    """Whether a DTensor's mesh leaves out no rank of the job."""
    return int(tensor.device_mesh.size()) == torch.distributed.get_world_size()


def text(tensor: Any) -> str:
    """The layout of a DTensor as text: ``mesh(dp=2, tp=2) [Shard(0), Replicate()]``."""
    return _text(tensor.device_mesh, placements_of(tensor))


def _text(mesh: Any, placements: tuple[Any, ...]) -> str:
    names, sizes = mesh.mesh_dim_names, tuple(mesh.shape)
    axes = ", ".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True)) if names else str(sizes)[1:-1]
    words = []
    for placement in placements:
        if type(placement) is Ragged:
            words.append(repr(placement))
            continue
        kind = type(placement).__name__.lstrip("_")
        split = f", split_factor={placement.split_factor}" if hasattr(placement, "split_factor") else ""
        words.append(f"{kind}({placement.dim}{split})" if hasattr(placement, "dim") else f"{kind}()")
    return f"mesh({axes}) [{', '.join(words)}]"


def chunks(tensor: Any) -> list[Region] | None:
    """The regions that another library attached to the local tensor, because its placements are not correct."""
    attached = getattr(getattr(tensor, "_local_tensor", None), "__create_chunk_list__", None)
    if attached is None:
        return None
    chunks = [Region(tuple(map(int, chunk.offsets)), tuple(map(int, chunk.sizes))) for chunk in attached()]
    return [chunk for chunk in chunks if 0 not in chunk.lengths]


def local_of(tensor: Any) -> torch.Tensor:
    """The memory of this rank as a plain tensor: no autograd, no communication."""
    if not is_dtensor(tensor):
        return tensor  # type: ignore[no-any-return]
    inside = getattr(tensor, "_local_tensor", None)
    if type(inside) is torch.Tensor:
        return inside  # as `to_local` returns it without autograd
    with torch.no_grad():
        local = tensor.to_local()
    if hasattr(local, "trigger_wait"):  # a collective is still in flight
        local = local.wait()
    return local  # type: ignore[no-any-return]


def views(tensor: Any, local: torch.Tensor) -> list[tuple[Region | Flat, torch.Tensor]]:
    """The regions of ``tensor`` with views of ``local``, which has the shape of its local tensor."""
    if not is_dtensor(tensor):
        shape = tuple(tensor.shape)
        return [(Region((0,) * len(shape), shape), local)] if local.numel() else []
    attached = chunks(tensor)
    if attached is not None:
        sizes = [math.prod(chunk.lengths) for chunk in attached]
        _expect_numel(sum(sizes), local, "the attached chunk list")
        if len(attached) == 1 and attached[0].lengths == tuple(local.shape):
            return [(attached[0], local)]
        if not local.is_contiguous():
            raise Refused("a DTensor whose local tensor is not contiguous and holds several chunks: make it contiguous")
        parts = torch.split(local.reshape(-1), sizes)
        return [(chunk, part.view(chunk.lengths)) for chunk, part in zip(attached, parts, strict=True)]
    there = placed(tensor)
    expect_shape(there, tensor, local)
    if len(there.regions) == 1:
        return [(there.regions[0], local.view(-1) if there.is_run else local)]
    out: list[tuple[Region | Flat, torch.Tensor]] = []
    for region, start in zip(boxes_of(there), there.starts, strict=True):
        index = tuple(slice(first, first + length) for first, length in zip(start, region.lengths, strict=True))
        out.append((region, local[index]))
    return out


def parts(tensor: Any, local: torch.Tensor) -> list[torch.Tensor]:
    """The views of :func:`views`, of a tensor whose regions are known already."""
    if local.numel() == 0:
        return []
    # A rank's part is one box, unless strides or another library cut it.
    if not is_dtensor(tensor) or (chunks(tensor) is None and not any(map(is_strided, tensor.placements))):
        return [local]
    return [view for _, view in views(tensor, local)]


def is_strided(placement: Any) -> bool:
    """Whether a dimension is cut in another order than that of the mesh: by FSDP2, below tensor parallelism."""
    return type(placement).__name__ == "_StridedShard"


def _expect_numel(numel: int, local: torch.Tensor, who: str) -> None:
    if numel != local.numel():
        raise Refused(f"a DTensor whose local tensor has {local.numel()} elements, where {who} gives {numel}")


def boxes_of(there: Placed) -> tuple[Region, ...]:
    """The regions of a part that is no run."""
    if there.is_run:
        raise Refused(f"a DTensor in {there.text}, of whose elements each rank has a run: boxes are needed here")
    return cast("tuple[Region, ...]", there.regions)


def expect_shape(there: Placed, tensor: Any, local: torch.Tensor) -> None:
    """Refuses a local tensor of another shape than the placement gives, or of another number of elements than a run."""
    if there.is_run and local.numel() == there.local_shape[0]:
        if not local.is_contiguous():
            raise Refused(f"a DTensor in {there.text} whose local tensor is not contiguous: make it contiguous")
        return
    if there.is_run:
        raise Refused(
            f"a DTensor whose local tensor has {local.numel()} elements, where {there.text} gives this rank "
            f"{there.local_shape[0]} of {math.prod(there.shape)}: the library that made it does not say which it holds"
        )
    if local.shape != there.local_shape and (there.regions or local.numel()):
        raise Refused(
            f"a DTensor whose local tensor has shape {tuple(local.shape)}, where its mesh and placements "
            f"{placements_of(tensor)!r} give {there.local_shape}: the library that made it does not say which part it "
            "holds"
        )
