"""Plain tensors of PyTorch: their element types, their memory, and copies into them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import nn

from ...state.catalog import Box, Memory, Refused, is_writable, may_overlap
from .placement import is_ragged, local_of, parts, views
from .ragged import elements_of

_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float4_e2m1fn_x2": "F4",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "complex64": "C64",
}
"""safetensors names of element types, by torch's names."""

DTYPES: dict[torch.dtype, str] = {getattr(torch, ours): dtype for ours, dtype in _NAMES.items() if hasattr(torch, ours)}
"""Element types that safetensors shares with this torch, by their safetensors names."""

OF_NAME = {name: dtype for dtype, name in DTYPES.items()}
"""The reverse, without the types that this torch lacks: see :func:`dtype_of`."""

ARRAY_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*DTYPES, torch.complex128, torch.complex32)}

ORDINARY = frozenset({torch.Tensor, nn.Parameter})
"""The types of tensors that have nothing beside their memory."""

_LAZY = (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)


def dtype_of(name: str) -> torch.dtype:
    """The element type of that safetensors name.

    Raises:
        Refused: If this torch has none.
    """
    if name not in OF_NAME:
        raise Refused(f"PyTorch {torch.__version__} has no type for {name} (a newer one may have it)")
    return OF_NAME[name]


P = ParamSpec("P")
T = TypeVar("T")


def named(
    method: Callable[Concatenate[Any, torch.Tensor, P], T],
) -> Callable[Concatenate[Any, torch.Tensor, P], T]:
    """Turns PyTorch's exceptions about a tensor into :class:`Refused`, so that the adapter's caller names its leaf."""

    @functools.wraps(method)
    def refusing(self: Any, tensor: torch.Tensor, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(self, tensor, *args, **kwargs)
        except (Refused, MemoryError):
            raise
        except Exception as error:  # includes exceptions of a tensor subclass or of a mode
            what = str(error).strip().partition("\n")[0]
            raise Refused(
                f"PyTorch cannot inspect a {type(tensor).__name__}: {type(error).__name__}: {what}"
            ) from error

    return refusing


def memory_of(tensor: torch.Tensor, local: torch.Tensor) -> tuple[Memory, ...]:
    """Returns the memory of each region of ``tensor``; ``local`` has the shape of its local tensor."""
    expect_memory(local)
    out, is_run = [], is_ragged(tensor)
    for view in parts(tensor, local):
        item, device = view.element_size(), view.device.index if view.is_cuda else None
        strides = () if is_run else tuple([stride * item for stride in view.stride()])
        out.append(Memory(view.data_ptr(), strides, device))
    return tuple(out)


def box(tensor: torch.Tensor) -> Box | None:
    """The memory of a tensor, or of its local one; ``None`` if it has none of its own."""
    local = local_of(tensor)
    if not is_storable(local) or local.is_meta or not local.numel():
        return None
    try:
        pointer, item = local.data_ptr(), local.element_size()
    except (RuntimeError, NotImplementedError):
        return None
    strides = tuple([stride * item for stride in local.stride()])
    space = "host" if local.device.type == "cpu" else local.device  # memory that NumPy may have, too
    return Box(space, pointer, tuple(local.shape), strides, item, local.is_conj() or local.is_neg())


def is_direct(local: torch.Tensor) -> bool:
    """Whether bytes can be copied from and to the tensor's own memory: the host's, or that of a CUDA device."""
    reached = local.is_cpu or (local.is_cuda and torch.version.cuda is not None)
    return reached and not local.is_conj() and not local.is_neg()


@functools.lru_cache(maxsize=64)
def is_plain(kind: type) -> bool:
    """Whether tensors of that type are their memory and nothing else."""
    if issubclass(kind, _LAZY) or hasattr(kind, "__tensor_flatten__"):
        return False
    return getattr(kind, "__torch_dispatch__", None) is torch.Tensor.__torch_dispatch__


def is_storable(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor is of a kind that can be stored."""
    is_strided = is_plain(type(tensor)) and not tensor.is_nested and tensor.layout is torch.strided
    return is_strided and not tensor.is_quantized


def expect_storable(tensor: torch.Tensor) -> None:
    """Refuses a plain tensor of a kind that cannot be stored."""
    if is_storable(tensor):
        return
    kind = type(tensor).__name__
    if isinstance(tensor, _LAZY):
        raise Refused(f"a {kind} has no shape yet: run the module once (a dry run) first")
    if tensor.is_nested:
        raise Refused("a nested tensor cannot be stored: store its parts, those of unbind()")
    if tensor.layout is not torch.strided:
        raise Refused(f"a tensor of layout {tensor.layout} cannot be stored: store its parts, or its to_dense()")
    if is_plain(type(tensor)):
        raise Refused("a quantized tensor cannot be stored: store its int_repr(), scale and zero point")
    if hasattr(tensor, "__tensor_flatten__"):
        raise Refused(f"a {kind} wraps other tensors and cannot be stored: store what it wraps")
    raise Refused(
        f"a {kind} is more than its memory, it defines __torch_dispatch__, and cannot be stored: store the plain "
        "tensors that it is made of"
    )


def expect_memory(local: torch.Tensor) -> None:
    """Refuses a tensor that does not lie completely in memory of its own storage."""
    if local.is_meta:
        raise Refused("a tensor on the meta device has no memory: give it some first (to_empty)")
    if not (local.is_cpu or local.is_cuda):  # of other devices a copy is made
        return
    if not is_plain(type(local)):  # a mode replaced a plain one
        kind = type(local).__name__
        raise Refused(f"a {kind} has no memory of its own: save and load outside of the mode that makes such tensors")
    numel = local.numel()
    if not numel:
        return
    try:
        held_bytes, address = local.untyped_storage().nbytes(), local.data_ptr()
    except (RuntimeError, NotImplementedError):
        held_bytes = address = 0
        is_wrapped = True
    else:
        is_wrapped = not address and bool(held_bytes)
    if is_wrapped:
        raise Refused(
            "a tensor inside of vmap, grad, functionalize or another transform has no memory of its own: save and "
            "load outside of it"
        )
    if not local.is_contiguous():
        numel = 1 + sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True))
    needed_bytes = (local.storage_offset() + numel) * local.element_size()
    if needed_bytes > held_bytes:
        raise Refused(
            f"a tensor whose storage has {held_bytes} bytes and needs {needed_bytes} has no memory: its storage was "
            "freed or made smaller (FSDP frees parameters between their uses)"
        )


def ordinary_address(local: torch.Tensor) -> int | None:
    """Returns the address of a contiguous tensor of a plain kind, if all of it is memory of torch's own."""
    try:
        storage, address, numel = local.untyped_storage(), local.data_ptr(), local.numel()
    except (RuntimeError, NotImplementedError):
        return None
    is_there = (local.storage_offset() + numel) * local.element_size() <= storage.nbytes()
    return address if numel and address and is_there and storage.resizable() else None


def expect_writable(local: torch.Tensor) -> None:
    """Refuses a tensor that cannot be loaded into, of those in whose memory the bytes would be written."""
    if not local.is_contiguous() and may_overlap(local.shape, local.stride()):
        raise Refused("an expanded tensor, or one whose elements share memory, cannot be loaded into: clone() it")
    # The memory of torch's own allocators is writable, and their storages can be resized.
    if local.is_cpu and local.numel() and not local.untyped_storage().resizable():
        first = local.data_ptr()
        steps = ((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True))
        if not is_writable(first) or not is_writable(first + sum(steps) * local.element_size()):
            raise Refused(
                "a tensor over read-only memory (a file that was mapped to be read, with mmap_mode='r') cannot be "
                "loaded into: clone() it"
            )


def on_host(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A new ordinary tensor in the host's memory, whatever defaults and modes are in force."""
    with torch.inference_mode(False), torch.no_grad():
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
    expect_memory(tensor)
    return tensor


def identity(tensor: torch.Tensor) -> Hashable:
    """Equal for two tensors exactly if they are the same elements in the same memory."""
    local = local_of(tensor)
    if not is_storable(local) or local.is_meta or local.numel() == 0:
        return id(tensor)
    try:
        where = (local.device, local.data_ptr(), tensor.shape, local.shape, local.stride(), local.dtype)
    except (RuntimeError, NotImplementedError):  # it has no memory
        return id(tensor)
    # A lazy view reads other values from the same bytes.
    is_lazy = local.is_conj() or local.is_neg()
    return (*where, local.is_conj(), local.is_neg()) if is_lazy else where


def expect_fill(tensor: torch.Tensor, value: object, cast: bool = False) -> None:
    """Refuses a value that :meth:`fill` could not copy."""
    local = local_of(tensor)
    expect_storable(local)
    expect_memory(local)
    expect_writable(local)
    if tensor.ndim == 0 and isinstance(value, (bool, int, float)):
        try:
            kept = torch.tensor(value, dtype=tensor.dtype, device="cpu").item()
        except (RuntimeError, OverflowError, ValueError) as error:
            raise Refused(f"the checkpoint holds a {type(value).__name__} that is no {tensor.dtype}") from error
        # A fraction is rounded, as the tensor's own type rounds each.
        is_rounded = isinstance(value, float) and tensor.dtype.is_floating_point and math.isfinite(kept)
        if kept != value and kept == kept and not is_rounded:
            raise Refused(f"the checkpoint holds {value!r}, which as {tensor.dtype} is {kept!r}")
        return
    if not isinstance(value, torch.Tensor):
        raise Refused(f"the checkpoint holds a {type(value).__name__} where the state has a tensor")
    if value.shape != tensor.shape or (value.dtype != tensor.dtype and not cast):
        raise Refused(
            f"the checkpoint holds a tensor of {value.dtype} {list(value.shape)} where the state has one of "
            f"{tensor.dtype} {list(tensor.shape)}"
        )


def fill(tensor: torch.Tensor, value: object, cast: bool = False) -> None:
    """Copies a loaded whole value into ``tensor``, each rank its part; with ``cast`` it converts the elements."""
    expect_fill(tensor, value, cast)
    local = local_of(tensor)
    if not isinstance(value, torch.Tensor):
        copy(local, torch.tensor(value, dtype=local.dtype, device="cpu"))
        return
    with torch.no_grad():
        for region, view in views(tensor, local):
            copy(view, elements_of(value, region))


def zero_rest(buffers: Iterable[torch.Tensor], parts: Iterable[torch.Tensor]) -> None:
    """Sets new buffers to zero where none of the parts lies: padding, and what a load does not fill."""
    filled: dict[int, list[tuple[int, int]]] = {}
    for part in parts:
        start = int(part.storage_offset())
        filled.setdefault(part.untyped_storage().data_ptr(), []).append((start, start + part.numel()))
    for buffer in buffers:
        at, flat = 0, buffer.reshape(-1)
        for start, stop in sorted(filled.get(buffer.untyped_storage().data_ptr(), [])):
            flat[at : max(start, at)] = 0
            at = max(at, stop)
        flat[at:] = 0


def copy(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Copies elements without autograd, also into tensors made in inference mode."""
    with torch.inference_mode(destination.is_inference()), torch.no_grad():
        destination.copy_(source)
