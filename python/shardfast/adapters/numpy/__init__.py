"""NumPy's arrays and scalars as regions and plain data."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from ...state.catalog import (
    VALUE_BYTES_MAX,
    Box,
    Bundle,
    Destination,
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
    is_writable,
    may_overlap,
)

DTYPES: dict[str, str] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "complex64": "C64",
}
"""safetensors names of element types, by NumPy's names."""

_OF_NAME = {name: dtype for dtype, name in DTYPES.items()}

# Type strings of plain elements; times carry their unit ("<M8[ns]"). No objects, no records.
_TYPE_STRING = re.compile(r"[<>|=](?:[biufcSUV]\d+|[mM]8(?:\[\d*\w+\])?)", re.ASCII)

Array = np.ndarray[Any, np.dtype[Any]]


class NumpyAdapter:
    """NumPy: arrays in host memory, every one whole."""

    refers = False

    def is_tensor(self, value: object) -> bool:
        return type(value) in (np.ndarray, np.memmap) and value.dtype.name in DTYPES  # type: ignore[attr-defined]

    def layout(self, tensor: Array) -> Layout:
        whole = (Region((0,) * tensor.ndim, tensor.shape),) if tensor.size else ()
        return Layout(DTYPES[tensor.dtype.name], tensor.shape, whole)

    def source(self, tensor: Array) -> Source:
        native = np.asarray(tensor, dtype=tensor.dtype.newbyteorder("="))
        return Source(_memory(native), native, is_copy=not tensor.dtype.isnative)

    def origin(self, tensor: Array) -> Origin:
        return Origin(self.layout(tensor), self.identity(tensor), None)

    def stream(self, device: int) -> int | None:
        return None

    def hold(self, tensors: Sequence[Array]) -> Hold:
        raise Refused("NumPy cannot tell whether an array was written")

    def target(self, tensor: Array, dtype: str) -> Target:
        _expect_writable(tensor)
        if DTYPES[tensor.dtype.name] == dtype and tensor.dtype.isnative:
            return Target(_memory(tensor), tensor)
        staging = self.allocate(dtype, tensor.shape)
        return Target(_memory(staging), staging, lambda: np.copyto(tensor, staging, casting="unsafe"))

    def wrote(self, owners: Sequence[Any]) -> None:
        return

    def destination(self, tensor: Array, dtype: str) -> Destination:
        _expect_writable(tensor)
        if dtype not in _OF_NAME:
            raise Refused(f"NumPy has no type for {dtype}")
        return Destination(self.layout(tensor), self.identity(tensor), None)

    def coordinates(self, things: Sequence[object]) -> Mapping[str, int]:
        return {}

    def allocate(self, dtype: str, shape: Ints) -> Array:
        if dtype not in _OF_NAME:
            raise Refused(f"NumPy has no type for {dtype}")
        return np.empty(shape, dtype=_OF_NAME[dtype])

    def view(self, dtype: str, shape: Ints, buffer: Any) -> Array:
        if dtype not in _OF_NAME:
            raise Refused(f"NumPy has no type for {dtype}")
        return np.ndarray(shape, dtype=_OF_NAME[dtype], buffer=buffer)

    def fill(self, tensor: Array, value: object, cast: bool = False) -> None:
        if not isinstance(value, np.ndarray):
            raise Refused(f"the checkpoint holds a {type(value).__name__} where the state has an array")
        is_other = value.dtype.newbyteorder("=") != tensor.dtype.newbyteorder("=")
        if value.shape != tensor.shape or (is_other and not cast):
            raise Refused(
                f"the checkpoint holds an array of {value.dtype} {list(value.shape)} where the state has one of "
                f"{tensor.dtype} {list(tensor.shape)}"
            )
        _expect_writable(tensor)
        np.copyto(tensor, value, casting="unsafe")

    def clear(self, tensor: Array, start: int, stop: int) -> None:
        tensor.flat[start:stop] = 0

    def follow(self, before: Callable[[object], None], after: Callable[[object], None]) -> None:
        pass  # NumPy has no optimizers

    def identity(self, tensor: Array) -> Hashable:
        if tensor.size == 0:
            return id(tensor)
        return (tensor.ctypes.data, tensor.shape, tensor.strides, tensor.dtype.str)

    def written(self, tensor: Array) -> Box | None:
        if tensor.size == 0:
            return None
        return Box("host", tensor.ctypes.data, tensor.shape, tensor.strides, tensor.itemsize)

    def module(self, value: object) -> Module | None:
        return None

    def optimizer(
        self, value: object, names: Mapping[int, Sequence[NamedPart]], beside: Collection[int] = ()
    ) -> Bundle | None:
        return None

    def expect_remade(self, tensor: Array) -> None:
        pass  # tensors here are of NumPy's own classes

    def lower_value(self, value: object) -> tuple[str, object] | None:
        if isinstance(value, np.ndarray):
            if type(value) not in (np.ndarray, np.memmap):
                raise Refused(f"a {type(value).__name__} is more than an array and cannot be stored: store its parts")
            _expect_size(value)
            return "array", ["numpy", _type_string(value.dtype), list(value.shape), value.tobytes()]
        if isinstance(value, np.generic):
            return "numpy_scalar", [_type_string(value.dtype), value.tobytes()]
        if isinstance(value, np.dtype):
            return "dtype", ["numpy", _type_string(value)]
        if isinstance(value, np.random.RandomState):
            raise Refused("a numpy.random.RandomState cannot be stored: store its get_state()")
        if isinstance(value, (np.random.Generator, np.random.BitGenerator)):
            raise Refused("a NumPy random generator cannot be stored: store its bit_generator.state")
        return None

    def raise_value(self, tag: str, payload: Any) -> Any:
        if tag == "numpy_scalar":
            return _array(payload[0], [], payload[1])[()]
        if tag not in ("array", "dtype") or payload[0] != "numpy":
            return NotImplemented
        if tag == "dtype":
            return _dtype(payload[1])
        return _array(*payload[1:])


def _memory(array: Array) -> tuple[Memory, ...]:
    return (Memory(array.ctypes.data, tuple(array.strides)),) if array.size else ()


def _expect_writable(array: Array) -> None:
    """Refuses an array that cannot be loaded into."""
    if not array.size:
        return
    if not array.flags.writeable:
        raise Refused("a read-only array cannot be loaded into: copy() it")
    if may_overlap(array.shape, array.strides):
        raise Refused("a broadcast array, or one whose elements share memory, cannot be loaded into: copy() it")
    owner: object = array
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    if isinstance(owner, np.ndarray):
        return  # NumPy's own memory
    low, high = np.lib.array_utils.byte_bounds(array)
    if not is_writable(low) or not is_writable(high - 1):
        raise Refused("an array over read-only memory cannot be loaded into: copy() it")


def _type_string(dtype: np.dtype[Any]) -> str:
    """NumPy's type string, which includes the byte order."""
    if (
        dtype.hasobject
        or dtype.names is not None
        or dtype.subdtype is not None
        or not _TYPE_STRING.fullmatch(dtype.str)
    ):
        raise Refused(f"an array of {dtype} cannot be stored: only plain elements are data")
    return dtype.str


def _dtype(name: str) -> np.dtype[Any]:
    if not _TYPE_STRING.fullmatch(name):
        raise Refused(f"{name!r} is not a type of plain elements")
    return np.dtype(name)


def _expect_size(array: Array) -> None:
    """Refuses an array that is too large for a value, or has elements of no size, which NumPy cannot make again."""
    what = f"an array of {array.dtype} {list(array.shape)}"
    if array.dtype.itemsize == 0:
        raise Refused(f"{what} cannot be stored: its elements have no bytes")
    if array.nbytes > VALUE_BYTES_MAX:
        is_own = array.dtype.name in DTYPES
        remedy = "make it an entry of its own" if is_own else "store it as elements of another type, with its view()"
        raise Refused(f"{what} has {array.nbytes} bytes, and a value at most {VALUE_BYTES_MAX}: {remedy}")


def _array(name: str, shape: list[int], data: bytes) -> Array:
    dtype = _dtype(name)
    if dtype.itemsize == 0:  # of which NumPy makes elements of one byte or more
        if shape:
            raise Refused(f"an array of {name}, whose elements have no bytes, cannot be made")
        return np.zeros((), dtype=dtype)
    if math.prod(shape) * dtype.itemsize != len(data):
        raise Refused(f"an array of {name} {shape} needs {math.prod(shape) * dtype.itemsize} bytes, has {len(data)}")
    array: Array = np.empty(shape, dtype=dtype)
    ctypes.memmove(array.ctypes.data, data, len(data))
    return array


def adapter() -> NumpyAdapter:
    """The adapter of this framework."""
    return NumpyAdapter()
