"""Tensors of PyTorch that wrap others and name them (``__tensor_flatten__``): quantised weights and optimizer state.

Each inner tensor is a leaf of its own below the name of the outer one, and the rest, by which the class is made again,
is a value. A load fills the inner tensors of an outer one that is there, and compares the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ..catalog import Flat, Part, Refused
from .torch_capture import is_dtensor
from .torch_placement import Placed, placed

CONSTANTS = "constants"
"""The last component of the name of the value with what a wrapping class has beside its tensors."""

_BY_ELEMENT, _BY_BLOCK, _WHOLE = "element", "block", "whole"

_SHARDED: dict[str, dict[str, str]] = {
    "torchao.OptimState8bit": {"codes": _BY_ELEMENT, "scale": _BY_BLOCK, "qmap": _WHOLE},
    "torchao.OptimState4bit": {"codes": _BY_BLOCK, "scale": _BY_BLOCK, "qmap": _WHOLE},
    "torchao.OptimStateFp8": {"codes": _BY_ELEMENT, "scale": _BY_BLOCK},
}
"""Classes of which it is known what their tensors are when the outer one is sharded: one number for each element, one
for each block of consecutive elements, or the same table on all ranks."""


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


class Unwrapped(NamedTuple):
    """What a tensor wraps.

    Attributes:
        tensors: By name below the outer one's.
        constants: The rest: the class and what it was made with.
    """

    tensors: Mapping[str, torch.Tensor | Part]
    constants: dict[str, object]


def wraps(tensor: object) -> bool:
    """Whether it is a tensor, or this rank's part of one, that names the tensors inside it."""
    if type(tensor) in _PLAIN:  # most are
        return False
    inside: Any = getattr(tensor, "_local_tensor", tensor) if is_dtensor(tensor) else tensor
    if not isinstance(inside, torch.Tensor) or not hasattr(type(inside), "__tensor_flatten__"):
        return False
    return not is_dtensor(inside) and not inside.is_nested  # parts of nested ones change their size


def unwrapped(tensor: Any) -> Unwrapped:
    """The tensors inside one of which :func:`wraps` holds.

    Raises:
        Refused: If it is sharded, and its class is not known or its blocks do not end where shards do.
    """
    inside: Any = getattr(tensor, "_local_tensor", tensor) if is_dtensor(tensor) else tensor
    if inside is tensor:
        return Unwrapped(dict(_inner(inside)), _constants(inside))
    kinds = _SHARDED.get(_class_of(inside))
    if kinds is None:
        raise Refused(
            f"a DTensor of {_class_of(inside)}, a class that wraps other tensors: which of these are sharded with it "
            "is not known; save it unsharded, or without quantisation"
        )
    there = placed(tensor)
    found = dict(_inner(inside))
    parts = {name: _part(name, kinds.get(name, ""), one, inside, there) for name, one in found.items()}
    return Unwrapped(parts, _constants(inside, there))


def expect_same_constants(name: str, here: Mapping[str, object], saved: object) -> None:
    """Refuses what was saved of a tensor that another class, or other numbers, would read in another way.

    Raises:
        Refused: With both.
    """
    if here != saved:
        raise Refused(f"{name}: the checkpoint holds a tensor made as {saved!r}, and here is one made as {here!r}")


def inner_tensors(tensor: Any) -> list[torch.Tensor]:
    """Those inside of one of which :func:`wraps` holds."""
    return [inner for _, inner in _inner(getattr(tensor, "_local_tensor", tensor) if is_dtensor(tensor) else tensor)]


def _inner(outer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    names, _ = outer.__tensor_flatten__()
    for name in names:
        tensor = getattr(outer, name)
        if wraps(tensor):
            yield from ((f"{name}.{below}", one) for below, one in _inner(tensor))
        else:
            yield name, tensor


def _constants(outer: Any, there: Placed | None = None) -> dict[str, object]:
    """What makes the outer tensor beside its tensors; of a sharded one as if it were whole."""
    names, context = outer.__tensor_flatten__()
    said: dict[str, object] = {"class": _class_of(outer), "context": _whole(context, outer, there)}
    below = {name: _constants(getattr(outer, name)) for name in names if wraps(getattr(outer, name))}
    return {**said, "inner": below} if below else said


def _whole(context: Any, outer: Any, there: Placed | None) -> Any:
    if there is None:
        return context
    if isinstance(context, (list, tuple)) and not isinstance(context, torch.Size):
        return type(context)(_whole(item, outer, there) for item in context)
    is_shape = isinstance(context, torch.Size) and context == outer.shape
    return torch.Size(there.shape) if is_shape else context


def _part(name: str, kind: str, inner: torch.Tensor, outer: torch.Tensor, there: Placed) -> torch.Tensor | Part:
    if kind == _WHOLE:
        return inner
    if kind == _BY_ELEMENT and inner.shape == outer.shape == torch.Size(there.local_shape):
        return Part(inner, there.shape, there.regions, there.text, there.holders, within=inner)
    numel, local = math.prod(there.shape), math.prod(there.local_shape)
    if kind == _BY_BLOCK and not inner.numel():
        raise Refused(f"its {name!r} is empty on this rank, so that it does not tell how long a block is")
    if kind == _BY_BLOCK and inner.ndim == 1 and len(there.regions) == 1 and local % inner.numel() == 0:
        (region,) = there.regions
        block, is_run = local // inner.numel(), region.lengths[1:] == there.shape[1:]
        first = region.offsets[0] * math.prod(there.shape[1:]) if region.offsets else 0
        if is_run and first % block == 0 and numel % block == 0:
            runs = (Flat(first // block, first // block + inner.numel()),)
            return Part(inner, (numel // block,), runs, there.text, there.holders, within=inner)
    raise Refused(
        f"its {name!r} has shape {tuple(inner.shape)} for a shard {there.local_shape} of {there.shape}: blocks that do "
        "not end where shards do belong to no whole tensor; shard the first dimension in multiples of a block"
    )


def _class_of(tensor: object) -> str:
    """Its library and name: modules of a library are moved from version to version."""
    return f"{type(tensor).__module__.partition('.')[0]}.{type(tensor).__qualname__}"
