"""Tensors of PyTorch that wrap others and name them (``__tensor_flatten__``): quantised weights and optimizer state.

Each inner tensor is a leaf of its own below the name of the outer one, and the rest, by which the class is made again,
is a value. A load fills the inner tensors of an outer one that is there, and compares the rest.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ...state.catalog import Flat, Inside, Part, Refused, Region
from .hooks import OF_DTENSORS, is_dtensor
from .placement import Placed, boxes_of, placed

CONSTANTS = "constants"
"""The last component of the name of the value with what a wrapping class has beside its tensors."""

_BY_ELEMENT, _BY_BLOCK, _WHOLE, _COMPUTED = "element", "block", "whole", "computed"


class _Known(NamedTuple):
    """A class of which it is known how its tensors are sharded with the outer one.

    Attributes:
        tensors: For each of them: one number for each element, one for each block of elements, the same on all ranks,
            or computed from the others.
        constants: What of its context says how the tensors are read. The rest follows from shapes, or is of this rank.
        is_plain: Whether its one tensor that is not computed has the numbers of the outer one: then it has its name.
    """

    tensors: Mapping[str, str]
    constants: Callable[[Any], Mapping[str, object]] = lambda context: {}
    is_plain: bool = False


def _of_nf4(context: Any) -> Mapping[str, object]:
    # Each rank has its own device. The number of blocks is that of the whole tensor here, and of a shard there.
    meta = context["tensor_meta"]
    sizes = {name: context[name] for name in ("block_size", "scaler_block_size")}
    return {**sizes, "dtype": meta.dtype, "stride": list(meta.original_strides)}


_KNOWN: dict[str, _Known] = {
    # Their type is only how they look from outside; torchao loses it where it makes a DTensor of one.
    "torchao.OptimState8bit": _Known(
        {"codes": _BY_ELEMENT, "scale": _BY_BLOCK, "qmap": _WHOLE}, lambda context: {"signed": context[0]}
    ),
    "torchao.OptimState4bit": _Known(
        {"codes": _BY_BLOCK, "scale": _BY_BLOCK, "qmap": _WHOLE}, lambda context: {"signed": context[0]}
    ),
    "torchao.OptimStateFp8": _Known({"codes": _BY_ELEMENT, "scale": _BY_BLOCK}),
    # Shards of one tensor share the mean of its scales.
    "torchao.NF4Tensor": _Known(
        {
            "quantized_data": _BY_BLOCK,
            "quantized_scalers": _BY_BLOCK,
            "quantization_factor": _BY_BLOCK,
            "scaler_mean": _WHOLE,
            "nf4": _WHOLE,
        },
        _of_nf4,
    ),
    "torchao.Float8Tensor": _Known({"qdata": _BY_ELEMENT, "scale": _BY_BLOCK}, lambda context: {"context": context}),
    # A weight as it is, which is sent as float8 when FSDP gathers it.
    "torchao.WeightWithDynamicFloat8CastTensor": _Known(
        {"_tensor": _BY_ELEMENT, "_precomputed_scale": _COMPUTED}, is_plain=True
    ),
}

_UNKNOWN = _Known({}, lambda context: {"context": context})

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


class Unwrapped(NamedTuple):
    """Contents of a tensor that wraps others.

    Attributes:
        tensors: By name below the outer one's; an empty name is that of the outer one.
        inside: Where each of them is in the outer one.
        constants: The rest: the class and what it was made with. Empty where a plain tensor may take its place.
    """

    tensors: Mapping[str, torch.Tensor | Part]
    inside: Mapping[str, Inside]
    constants: dict[str, object]


def wraps(tensor: object) -> bool:
    """Whether it is a tensor, or this rank's part of one, that names the tensors inside it."""
    if type(tensor) in _PLAIN:  # most are
        return False
    inside = _inside(tensor)
    if not isinstance(inside, torch.Tensor) or not hasattr(type(inside), "__tensor_flatten__"):
        return False
    return not is_dtensor(inside) and not inside.is_nested  # parts of nested ones change their size


def unwrapped(tensor: Any) -> Unwrapped:
    """The tensors inside one of which :func:`wraps` holds.

    Raises:
        Refused: If it is sharded, and its class is not known or its blocks do not end where shards do.
    """
    inside = _inside(tensor)
    known = _KNOWN.get(_class_of(inside))
    if inside is not tensor and known is None:
        raise Refused(
            f"a DTensor of {_class_of(inside)}, a class that wraps other tensors: which of these are sharded with it "
            "is not known; save it unsharded, or without quantisation"
        )
    found: dict[str, torch.Tensor | Part] = dict(_inner(inside))
    if known is not None and found.keys() - known.tensors.keys():
        raise Refused(_of_another_version(inside))
    if known is not None and inside is not tensor:
        there = placed(tensor)
        if there.is_run:
            raise Refused(
                f"a DTensor of {_class_of(inside)} in {there.text}, of whose elements each rank has a run: which of "
                "its blocks that cuts is not known; save it unsharded, or without quantisation"
            )
        for name, one in _inner(inside):
            found[name] = _part(name, known.tensors[name], one, inside, there)
    first, layout = ((), "") if inside is tensor else OF_DTENSORS
    where = {name: Inside((*first, *name.split(".")), layout) for name in found}
    if known is not None and known.is_plain:
        (only,) = found
        return Unwrapped({"": found[only]}, {"": where[only]}, {})
    return Unwrapped(found, where, _constants(inside, tensor))


def constants_of(tensor: Any) -> dict[str, object]:
    """The constants of :func:`unwrapped`, for a class that has some."""
    return _constants(_inside(tensor), tensor)


def joined(name: str, below: str) -> str:
    """The name of a tensor inside of ``name``."""
    return f"{name}.{below}" if below else name


def expect_same_constants(name: str, here: Mapping[str, object], saved: object) -> None:
    """Refuses what was saved of a tensor that another class, or other numbers, would read in another way.

    Raises:
        Refused: With both.
    """
    if here != saved:
        raise Refused(
            f"{name}: the checkpoint holds a tensor made as {saved!r}, and here is one made as {here!r}: make it as it "
            "was saved (quantise it in the same way)"
        )


def inner_tensors(tensor: Any) -> list[torch.Tensor]:
    """Returns the tensors inside of one of which :func:`wraps` holds."""
    return [inner for _, inner in _inner(_inside(tensor))]


def drop_computed(tensor: Any) -> None:
    """Drops what a class has computed from tensors that are changed now; it computes that again when it is needed."""
    inside = _inside(tensor)
    known = _KNOWN.get(_class_of(inside), _UNKNOWN)
    for name in (name for name, kind in known.tensors.items() if kind == _COMPUTED):
        setattr(inside, name, None)


def _inside(tensor: Any) -> Any:
    return getattr(tensor, "_local_tensor", tensor) if is_dtensor(tensor) else tensor


def _inner(outer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    names, _ = outer.__tensor_flatten__()
    kinds = _KNOWN.get(_class_of(outer), _UNKNOWN).tensors
    for name in (name for name in names if kinds.get(name) != _COMPUTED):
        tensor = getattr(outer, name)
        if wraps(tensor):
            yield from ((joined(name, below), one) for below, one in _inner(tensor))
        else:
            yield name, tensor


def _constants(outer: Any, whole: Any) -> dict[str, object]:
    """Returns what else makes the outer tensor; ``whole`` is itself, or the DTensor of which it is a shard."""
    names, context = outer.__tensor_flatten__()
    known = _KNOWN.get(_class_of(outer), _UNKNOWN)
    try:
        said = {"class": _class_of(outer), "shape": list(whole.shape), **_as_data(known.constants(context))}
    except (LookupError, TypeError, AttributeError) as error:
        raise Refused(_of_another_version(outer)) from error
    below = {name: getattr(outer, name) for name in names if wraps(getattr(outer, name))}
    return {**said, "inner": {name: _constants(one, one) for name, one in below.items()}} if below else said


def _of_another_version(outer: Any) -> str:
    names, context = outer.__tensor_flatten__()
    return (
        f"a {_class_of(outer)} that names {names} and {context!r}, which is not what is known of this class: use a "
        "version of its library that the guide names"
    )


def _as_data(value: Any) -> Any:
    """The value in types of Python's own: other classes move from module to module with the versions of a library."""
    if isinstance(value, enum.Enum):
        return [_class_of(value), value.name]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {"class": _class_of(value), **_as_data(parts)}
    if isinstance(value, tuple) and (names := getattr(value, "_fields", None)) is not None:
        return {"class": _class_of(value), **_as_data(dict(zip(names, value, strict=True)))}
    if isinstance(value, (list, tuple)):
        return [_as_data(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _as_data(item) for name, item in value.items()}
    return None if isinstance(value, torch.device) else value  # a rank's own


def _part(name: str, kind: str, inner: torch.Tensor, outer: torch.Tensor, there: Placed) -> torch.Tensor | Part:
    if kind == _WHOLE:
        return inner
    if kind == _BY_BLOCK and not inner.numel():
        raise Refused(f"its {name!r} is empty on this rank, so that it does not tell how long a block is")
    # Several boxes lie behind one another in the local tensor only where whole rows are cut.
    is_rows = all(region.lengths[1:] == there.local_shape[1:] for region in boxes_of(there))
    if kind == _BY_ELEMENT and inner.shape == outer.shape == torch.Size(there.local_shape):
        if len(there.regions) < 2 or is_rows:
            return Part(inner, there.shape, there.regions, there.text, there.holders, within=inner)
    elif kind == _BY_BLOCK and len(there.regions) == 1:
        blocks = _runs(inner, there) if inner.ndim == 1 else _boxes(inner, there)
        if blocks is not None:
            return Part(inner, blocks[0], (blocks[1],), there.text, there.holders, within=inner)
    raise Refused(
        f"its {name!r} has shape {tuple(inner.shape)} for a shard {there.local_shape} of {there.shape}: blocks that do "
        "not end where shards do belong to no whole tensor; shard the first dimension in multiples of a block"
    )


def _runs(inner: torch.Tensor, there: Placed) -> tuple[tuple[int, ...], Flat] | None:
    """The shape of what has one number for each run of elements, and this rank's part; ``None`` if it is no part."""
    (region,) = boxes_of(there)
    numel, local, row = math.prod(there.shape), math.prod(there.local_shape), math.prod(there.shape[1:])
    block = local // inner.numel()
    first = region.offsets[0] * row if region.offsets else 0
    if local % inner.numel() or region.lengths[1:] != there.shape[1:] or first % block or numel % block:
        return None
    return (numel // block,), Flat(first // block, first // block + inner.numel())


def _boxes(inner: torch.Tensor, there: Placed) -> tuple[tuple[int, ...], Region] | None:
    """Likewise of what has one number for each box of elements."""
    (region,) = boxes_of(there)
    if inner.ndim != len(there.shape):
        return None
    block = tuple(length // count for length, count in zip(there.local_shape, inner.shape, strict=True))
    cut = zip(there.local_shape, inner.shape, region.offsets, there.shape, block, strict=True)
    if any(length % count or first % size or whole % size for length, count, first, whole, size in cut):
        return None
    offsets = tuple(first // size for first, size in zip(region.offsets, block, strict=True))
    shape = tuple(whole // size for whole, size in zip(there.shape, block, strict=True))
    return shape, Region(offsets, tuple(inner.shape))


def _class_of(value: object) -> str:
    """Its library and name: modules of a library are moved from version to version."""
    return f"{type(value).__module__.partition('.')[0]}.{type(value).__qualname__}"
