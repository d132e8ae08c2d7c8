"""Plain tensors of PyTorch: their element types, where they lie, and what is copied into them."""

from __future__ import annotations

import functools
from collections.abc import Hashable

import torch
from torch import nn

from ..catalog import Memory, Refused
from .torch_capture import is_dtensor
from .torch_placement import local_of, parts, views

DTYPES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float4_e2m1fn_x2: "F4",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
}
"""Element types that safetensors shares with torch, by their safetensors names."""

OF_NAME = {name: dtype for dtype, name in DTYPES.items()}
ARRAY_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*DTYPES, torch.complex128, torch.complex32)}

_LAZY = (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)


def memory(tensor: torch.Tensor, local: torch.Tensor) -> tuple[Memory, ...]:
    """Where each region of ``tensor`` lies; ``local`` has the shape of its local tensor."""
    out = []
    for view in parts(tensor, local):
        item, device = view.element_size(), view.device.index if view.is_cuda else None
        out.append(Memory(view.data_ptr(), tuple([stride * item for stride in view.stride()]), device))
    return tuple(out)


def is_direct(local: torch.Tensor) -> bool:
    """Whether bytes can be copied from and to the tensor's own memory: the host's, or that of a CUDA device."""
    reached = local.is_cpu or (local.is_cuda and torch.version.cuda is not None)
    return reached and not local.is_conj() and not local.is_neg()


@functools.lru_cache(maxsize=64)
def is_plain(kind: type) -> bool:
    """Whether tensors of that type are their memory and nothing else."""
    return not issubclass(kind, _LAZY) and not hasattr(kind, "__tensor_flatten__")


def is_storable(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor is of a kind that can be stored."""
    return is_plain(type(tensor)) and tensor.layout is torch.strided and not tensor.is_quantized


def expect_storable(tensor: torch.Tensor) -> None:
    """Refuses a plain tensor of a kind that cannot be stored."""
    if is_storable(tensor):
        return
    if isinstance(tensor, _LAZY):
        raise Refused(f"a {type(tensor).__name__} has no shape yet: run the module once (a dry run) first")
    if tensor.layout is not torch.strided:
        raise Refused(f"a tensor of layout {tensor.layout} cannot be stored: store its parts, or its to_dense()")
    if tensor.is_quantized:
        raise Refused("a quantized tensor cannot be stored: store its int_repr(), scale and zero point")
    if hasattr(tensor, "__tensor_flatten__") and not is_dtensor(tensor):
        raise Refused(f"a {type(tensor).__name__} wraps other tensors and cannot be stored: store what it wraps")


def expect_memory(local: torch.Tensor) -> None:
    """Refuses a tensor without memory."""
    if local.device.type == "meta":
        raise Refused("a tensor on the meta device has no memory: give it some first (to_empty)")


def identity(tensor: torch.Tensor) -> Hashable:
    """Equal for two tensors exactly if they are the same elements in the same memory."""
    local = local_of(tensor)
    if not is_plain(type(local)) or local.layout is not torch.strided or local.is_meta or local.numel() == 0:
        return id(tensor)
    return (local.device, local.data_ptr(), tensor.shape, local.shape, local.stride(), local.dtype)


def expect_fill(tensor: torch.Tensor, value: object) -> None:
    """Refuses a value that :meth:`fill` could not copy."""
    if tensor.ndim == 0 and isinstance(value, (bool, int, float)):
        try:
            torch.tensor(value, dtype=tensor.dtype, device="cpu")
        except (RuntimeError, OverflowError, ValueError) as error:
            raise Refused(f"the checkpoint holds a {type(value).__name__} that is no {tensor.dtype}") from error
        return
    if not isinstance(value, torch.Tensor):
        raise Refused(f"the checkpoint holds a {type(value).__name__} where a tensor stands here")
    if value.shape != tensor.shape or value.dtype != tensor.dtype:
        raise Refused(
            f"the checkpoint holds a tensor of {value.dtype} {list(value.shape)} where one of {tensor.dtype} "
            f"{list(tensor.shape)} stands here"
        )


def fill(tensor: torch.Tensor, value: object) -> None:
    """Copies a loaded whole value into ``tensor``, each rank its part."""
    expect_fill(tensor, value)
    local = local_of(tensor)
    if not isinstance(value, torch.Tensor):
        copy(local, torch.tensor(value, dtype=local.dtype))
        return
    with torch.no_grad():
        for region, view in views(tensor, local):
            bounds = zip(region.offsets, region.lengths, strict=True)
            copy(view, value[tuple(slice(offset, offset + length) for offset, length in bounds)])


def copy(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Copies elements without autograd, also into tensors made in inference mode."""
    with torch.inference_mode(destination.is_inference()), torch.no_grad():
        destination.copy_(source)
