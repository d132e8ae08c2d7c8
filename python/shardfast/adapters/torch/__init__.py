"""PyTorch's tensors as regions; modules and optimizers have files of their own."""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import re
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import increment_version

from ...state.catalog import (
    VALUE_BYTES_MAX,
    Box,
    Destination,
    Flat,
    Hold,
    Ints,
    Layout,
    Memory,
    Module,
    NamedPart,
    Origin,
    Refused,
    Region,
    Source,
    Target,
)
from .hooks import follow_steps, hold_of, is_dtensor
from .memory import (
    ARRAY_DTYPES,
    DTYPES,
    OF_NAME,
    ORDINARY,
    box,
    copy,
    dtype_of,
    expect_memory,
    expect_storable,
    expect_writable,
    fill,
    identity,
    is_direct,
    memory_of,
    named,
    on_host,
    ordinary_address,
)
from .modules import Modules
from .optimizers import Optimizers
from .placement import Placed, chunks, coordinates_in, expect_shape, local_of, placed, text, views
from .refused import expect_understood_owner, expect_understood_tensor

_log = logging.getLogger("shardfast")


@functools.lru_cache(maxsize=4096)
def _whole(dtype: str, shape: Ints) -> Layout:
    """The layout of a plain tensor that has elements."""
    return Layout(dtype, tuple(shape), (Region((0,) * len(shape), tuple(shape)),))


def _one_box(tensor: torch.Tensor, local: torch.Tensor, dtype: str) -> Layout | None:
    """The layout of a ``DTensor`` whose part here is one box, all of ``local``."""
    if tensor.dtype is not local.dtype or chunks(tensor) is not None:
        return None
    there = placed(tensor)
    return _layout(there, dtype) if len(there.regions) == 1 and local.shape == there.local_shape else None


@functools.lru_cache(maxsize=4096)
def _layout(there: Placed, dtype: str) -> Layout:
    return Layout(dtype, there.shape, there.regions, there.text, there.holders)


class _Ordinary(NamedTuple):
    """A contiguous tensor in memory of torch's own, which this rank holds as one box: what most tensors are."""

    layout: Layout
    identity: Hashable
    memory: Memory
    local: torch.Tensor


def _ordinary(tensor: torch.Tensor, dtype: str | None) -> _Ordinary | None:
    """``tensor``, if it is an ordinary one of type ``dtype``: all about it, at once."""
    local = local_of(tensor)
    if type(local) not in ORDINARY or local.layout is not torch.strided or local.is_nested:
        return None
    kind = local.dtype
    if dtype is None or kind is not OF_NAME.get(dtype) or not local.is_contiguous() or not is_direct(local):
        return None
    layout = _whole(dtype, tensor.shape) if local is tensor else _one_box(tensor, local, dtype)
    pointer = ordinary_address(local) if layout is not None else None
    if layout is None or pointer is None:
        return None
    stride, item = local.stride(), local.element_size()
    device = local.device.index if local.is_cuda else None
    is_run = local is not tensor and isinstance(layout.regions[0], Flat)
    memory = Memory(pointer, () if is_run else tuple([step * item for step in stride]), device)
    return _Ordinary(layout, (local.device, pointer, layout.shape, local.shape, stride, kind), memory, local)


class TorchAdapter:
    """PyTorch: plain tensors, ``DTensor``, ``nn.Module`` and ``torch.optim.Optimizer``."""

    refers = True

    def is_tensor(self, value: object) -> bool:
        return isinstance(value, torch.Tensor)

    @named
    def layout(self, tensor: torch.Tensor) -> Layout:
        expect_understood_tensor(tensor)
        is_sharded = is_dtensor(tensor)
        local = local_of(tensor) if is_sharded else tensor
        expect_storable(local)
        if not local.is_meta:  # plans include these, too
            expect_memory(local)
        dtype = DTYPES.get(tensor.dtype)
        if dtype is None:
            hint = ": store torch.view_as_real() of it" if tensor.is_complex() else ""
            raise Refused(f"a tensor of {tensor.dtype} cannot be stored, safetensors has no such type{hint}")
        shape = tuple(tensor.shape)
        if not is_sharded:
            whole = (Region((0,) * len(shape), shape),) if tensor.numel() else ()
            return Layout(dtype, shape, whole)
        if chunks(tensor) is not None:
            return Layout(dtype, shape, tuple(region for region, _ in views(tensor, local)), text(tensor))
        there = placed(tensor)
        expect_shape(there, tensor, local)
        return _layout(there, dtype)

    @named
    def source(self, tensor: torch.Tensor) -> Source:
        local = local_of(tensor)
        if is_direct(local):
            return Source(memory_of(tensor, local), local)
        expect_memory(local)
        with torch.no_grad():
            plain = local.resolve_conj().resolve_neg().cpu()
            return Source(memory_of(tensor, plain), plain, is_copy=plain is not local)

    @named
    def origin(self, tensor: torch.Tensor) -> Origin:
        expect_understood_tensor(tensor)
        found = _ordinary(tensor, DTYPES.get(tensor.dtype))
        if found is None:
            return Origin(self.layout(tensor), self.identity(tensor), None)
        return Origin(found.layout, found.identity, Source((found.memory,), found.local))

    def follow(self, before: Callable[[object], None], after: Callable[[object], None]) -> None:
        follow_steps(before, after)

    def stream(self, device: int) -> int | None:
        return int(torch.cuda.current_stream(device).cuda_stream)

    def hold(self, tensors: Sequence[torch.Tensor]) -> Hold:
        return hold_of(tensors)

    @named
    def target(self, tensor: torch.Tensor, dtype: str) -> Target:
        local = local_of(tensor)
        wanted = dtype_of(dtype)
        expect_memory(local)
        expect_writable(local)
        if local.dtype is wanted and is_direct(local):
            return Target(memory_of(tensor, local), local)
        staging = on_host(local.shape, wanted)
        return Target(memory_of(tensor, staging), staging, lambda: copy(local, staging))

    def wrote(self, owners: Sequence[torch.Tensor]) -> None:
        # A backward through a tensor that was loaded in between then raises, as after `copy_`.
        increment_version([owner for owner in owners if not owner.is_inference()])

    def destination(self, tensor: torch.Tensor, dtype: str) -> Destination:
        expect_understood_tensor(tensor)
        found = _ordinary(tensor, dtype)
        if found is None:
            return self._destination(tensor)
        return Destination(found.layout, found.identity, Target((found.memory,), found.local))

    @named
    def _destination(self, tensor: torch.Tensor) -> Destination:
        layout, local = self.layout(tensor), local_of(tensor)
        if not local.is_meta:
            expect_writable(local)
        return Destination(layout, identity(tensor), None)

    @named
    def written(self, tensor: torch.Tensor) -> Box | None:
        return box(tensor)

    def allocate(self, dtype: str, shape: Ints) -> torch.Tensor:
        return on_host(shape, dtype_of(dtype))

    def view(self, dtype: str, shape: Ints, buffer: Any) -> torch.Tensor:
        tensor = torch.frombuffer(buffer, dtype=dtype_of(dtype)).view(shape)
        expect_memory(tensor)
        return tensor

    @named
    def fill(self, tensor: torch.Tensor, value: object, cast: bool = False) -> None:
        fill(tensor, value, cast)

    def clear(self, tensor: torch.Tensor, start: int, stop: int) -> None:
        with torch.no_grad():
            places = torch.arange(start, stop, device=tensor.device)
            tensor[torch.unravel_index(places, tensor.shape)] = 0

    @named
    def identity(self, tensor: torch.Tensor) -> Hashable:
        return identity(tensor)

    def module(self, value: object) -> Module | None:
        parts: Sequence[Any] = value if isinstance(value, (list, tuple)) else [value]
        if not parts or not all(isinstance(part, nn.Module) for part in parts):
            return None
        modules = Modules(parts)
        return Module(modules, modules.parameters)

    def optimizer(
        self, value: object, names: Mapping[int, Sequence[NamedPart]], beside: Collection[int] = ()
    ) -> Optimizers | None:
        parts: Sequence[Any] = value if isinstance(value, (list, tuple)) else [value]
        if isinstance(value, dict):  # from each parameter to the optimizer that steps it in backward
            parts = list(value.values())
        if not parts:
            return None
        expect_understood_owner(parts[0])  # a list of numbers may be long
        if not isinstance(parts[0], torch.optim.Optimizer):
            return None
        for part in parts[1:]:
            expect_understood_owner(part)
        if not all(isinstance(part, torch.optim.Optimizer) for part in parts):
            return None
        return Optimizers(parts, names, beside)

    def coordinates(self, things: Sequence[object]) -> Mapping[str, int]:
        meshes: dict[int, Any] = {}
        tensor: Any
        for thing in things:
            for tensor in thing.parameters.values() if isinstance(thing, Modules) else (thing,):
                if is_dtensor(tensor):
                    meshes.setdefault(id(tensor.device_mesh), tensor.device_mesh)
        return coordinates_in(list(meshes.values()))

    @named
    def expect_remade(self, tensor: torch.Tensor) -> None:
        if type(tensor) not in ORDINARY and not is_dtensor(tensor):
            expect_understood_tensor(tensor)
            expect_storable(tensor)
            raise Refused(
                f"a {type(tensor).__name__} inside a value would come back as a plain tensor, without what its class "
                "adds: store as_subclass(torch.Tensor) of it and what else it holds, or make it an entry of its own, "
                "which a load fills in place"
            )

    def lower_value(self, value: object) -> tuple[str, object] | None:
        if isinstance(value, torch.Tensor):
            return "array", self._lower_tensor(value)
        if isinstance(value, torch.dtype):
            return "dtype", ["torch", str(value).removeprefix("torch.")]
        if isinstance(value, torch.Size):
            return "torch_size", list(value)
        if isinstance(value, torch.device):
            return "torch_device", str(value)
        if isinstance(value, torch.Generator):
            raise Refused("a torch.Generator cannot be stored: store its get_state()")
        return None

    @named
    def _lower_tensor(self, tensor: torch.Tensor) -> list[object]:
        if is_dtensor(tensor):
            raise Refused(
                "a DTensor cannot be part of a value: make it an entry of its own, or store its full_tensor()"
            )
        expect_storable(tensor)
        name = str(tensor.dtype).removeprefix("torch.")
        if name not in ARRAY_DTYPES:
            raise Refused(f"a tensor of {tensor.dtype} cannot be stored")
        expect_memory(tensor)
        if (size := tensor.numel() * tensor.element_size()) > VALUE_BYTES_MAX:
            raise Refused(f"it has {size} bytes, and a value at most {VALUE_BYTES_MAX}: make it an entry of its own")
        with torch.no_grad():
            data = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        expect_memory(data)
        size = data.numel() * data.element_size()
        return ["torch", name, list(data.shape), ctypes.string_at(data.data_ptr(), size) if size else b""]

    def raise_value(self, tag: str, payload: Any) -> Any:
        if tag == "torch_size":
            return torch.Size(payload)
        if tag == "torch_device":
            try:
                return torch.device(payload)
            except RuntimeError as error:
                raise Refused(f"{payload!r} is no device of this torch") from error
        if tag not in ("array", "dtype") or payload[0] != "torch":
            return NotImplemented
        dtype = ARRAY_DTYPES.get(payload[1]) if tag == "array" else vars(torch).get(payload[1])
        if not isinstance(dtype, torch.dtype):
            raise Refused(f"this torch has no dtype {payload[1]!r}")
        if tag == "dtype":
            return dtype
        _, _, shape, data = payload
        if math.prod(shape) * dtype.itemsize != len(data):
            raise Refused(
                f"a tensor of {dtype} {shape} needs {math.prod(shape) * dtype.itemsize} bytes, has {len(data)}"
            )
        tensor = on_host(shape, dtype)
        ctypes.memmove(tensor.data_ptr(), data, len(data))
        return tensor


TESTED = ("2.7.1", "2.15")
"""The oldest and the newest PyTorch that the tests run with; with the newest count its patch releases."""


def _is_tested(version: str) -> bool:
    oldest, newest, found = ([int(number) for number in re.findall(r"\d+", one)[:3]] for one in (*TESTED, version))
    return oldest <= found and found[: len(newest)] <= newest


def adapter() -> TorchAdapter:
    """The adapter of this framework. Logs a warning where PyTorch is of a version that was not tested."""
    if not _is_tested(torch.__version__):
        _log.warning(
            "this is PyTorch %s, and Shardfast is tested with PyTorch %s to %s: it goes on, and refuses sharded "
            "tensors whose number of elements is not the one that their placements give",
            torch.__version__,
            *TESTED,
        )
    return TorchAdapter()
