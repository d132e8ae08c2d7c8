"""Decodes the values of Shardfast checkpoints with nothing but Python's standard library.

Written from section 9 of ``docs/format.md`` alone.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import math
import pathlib
import re
import struct
import uuid
import zoneinfo
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class Corrupt(Exception):
    """The bytes are not what was written."""


class Unsupported(Exception):
    """Another program can read this."""


def need(condition: bool, message: str) -> None:
    """Raises ``Corrupt`` unless the condition holds."""
    if not condition:
        raise Corrupt(message)


@dataclass(eq=True)
class Tagged:
    """A value that the standard library has no type for, or whose type this reader will not import."""

    name: str
    payload: Any

    def __hash__(self) -> int:
        return hash((self.name, repr(self.payload)))


def _make_datetime(v: list[Any]) -> datetime.datetime | Tagged:
    if isinstance(v[8], Tagged):
        return Tagged("datetime", v)
    return datetime.datetime(v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[8], fold=v[7])


def _make_time(v: list[Any]) -> datetime.time | Tagged:
    if isinstance(v[5], Tagged):
        return Tagged("time", v)
    return datetime.time(v[0], v[1], v[2], v[3], v[5], fold=v[4])


def _make_zone(value: Any) -> datetime.tzinfo | Tagged:
    if isinstance(value, str):
        try:
            return zoneinfo.ZoneInfo(value)
        except zoneinfo.ZoneInfoNotFoundError:
            return Tagged("time_zone", value)
    return datetime.timezone(datetime.timedelta(microseconds=value))


def _make_path(v: list[Any]) -> pathlib.PurePath:
    return (pathlib.PureWindowsPath if "Windows" in v[0] else pathlib.PurePosixPath)(v[1])


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: type(value) in kinds


def _items(*checks: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda v: (
        type(v) is list and len(v) == len(checks) and all(check(x) for check, x in zip(checks, v, strict=True))
    )


def _type(value: Any) -> bool:
    return type(value) is str and re.fullmatch(r"[^:]+:[^:]+", value, re.DOTALL) is not None


def _fields(value: Any) -> bool:
    return type(value) is dict and all(type(key) is str for key in value)


def _small(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _null_or(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


def _ints(value: Any) -> bool:
    return type(value) is list and all(type(x) is int for x in value)


def _framework(value: Any) -> bool:
    return value in ("torch", "numpy") and type(value) is str


def _array(value: Any) -> bool:
    if not _items(_framework, _is(str), _ints, _is(bytes))(value):
        return False
    numel = math.prod(value[2])
    size = len(value[3])
    return all(map(_small, value[2])) and numel < 2**64 and (size % numel == 0 if numel else size == 0)


def _path_class(value: Any) -> bool:
    return value in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath") and type(value) is str


def _any(_: Any) -> bool:
    return True


_int, _str, _bytes, _list, _map, _float = _is(int), _is(str), _is(bytes), _is(list), _is(dict), _is(float)
_zone = _null_or(lambda v: isinstance(v, datetime.tzinfo) or (isinstance(v, Tagged) and v.name == "time_zone"))


def _attributable(value: Any) -> bool:
    return type(value) in (collections.OrderedDict, collections.Counter)


def _make_attributed(payload: Any) -> Any:
    made, attributes = payload
    vars(made).update(attributes)
    return made


def _keep(name: str) -> Callable[[Any], Any]:
    return lambda payload: Tagged(name, payload)


# In the order of their numbers, from 57600: name, whether the payload fits, what to make of it.
TAGS: list[tuple[str, Callable[[Any], bool], Callable[[Any], Any]]] = [
    ("tuple", _list, tuple),
    ("set", _list, set),
    ("frozenset", _list, frozenset),
    ("bytearray", _bytes, bytearray),
    ("complex", _items(_float, _float), lambda v: complex(*v)),
    ("surrogate_str", _bytes, lambda v: v.decode("utf-8", "surrogatepass")),
    ("range", _items(_int, _int, _int), lambda v: range(*v)),
    ("slice", _items(_any, _any, _any), lambda v: slice(*v)),
    ("ellipsis", lambda v: v is None, lambda _: ...),
    ("ordered_dict", _map, collections.OrderedDict),
    ("default_dict", _items(_null_or(_type), _map), _keep("default_dict")),
    ("counter", _map, collections.Counter),
    ("deque", _items(_null_or(_small), _list), lambda v: collections.deque(v[1], v[0])),
    ("named_tuple", _items(_type, _fields), _keep("named_tuple")),
    ("namespace", _items(_type, _fields), _keep("namespace")),
    ("dataclass", _items(_type, _fields), _keep("dataclass")),
    ("enum", _items(_type, _null_or(_str), _any), _keep("enum")),
    ("path", _items(_path_class, _str), _make_path),
    ("datetime", _items(*[_int] * 8, _zone), _make_datetime),
    ("date", _items(_int, _int, _int), lambda v: datetime.date(*v)),
    ("time", _items(*[_int] * 5, _zone), _make_time),
    ("timedelta", _items(_int, _int, _int), lambda v: datetime.timedelta(*v)),
    ("time_zone", lambda v: type(v) is str or (type(v) is int and -(2**63) <= v < 2**63), _make_zone),
    ("decimal", _str, decimal.Decimal),
    ("fraction", _items(_int, _int), lambda v: fractions.Fraction(*v)),
    ("uuid", lambda v: type(v) is bytes and len(v) == 16, lambda v: uuid.UUID(bytes=v)),
    ("tensor_ref", _items(_str, _str), _keep("tensor_ref")),
    ("array", _array, _keep("array")),
    ("numpy_scalar", _items(_str, _bytes), _keep("numpy_scalar")),
    ("dtype", _items(_framework, _str), _keep("dtype")),
    ("torch_size", _ints, _keep("torch_size")),
    ("torch_device", _str, _keep("torch_device")),
    ("pickle", _bytes, _keep("pickle")),
    ("attributed", _items(_attributable, _fields), _make_attributed),
]
FIRST_TAG = 57_600
DEPTH_MAX = 64


class _Cbor:
    """A reader of one CBOR item."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, count: int) -> bytes:
        need(count <= len(self.data) - self.at, f"object: {count} bytes wanted at {self.at} of {len(self.data)}")
        self.at += count
        return self.data[self.at - count : self.at]

    def argument(self, info: int) -> int:
        if info < 24:
            return info
        need(info < 28, f"object: byte {self.at - 1}: no definite length")
        return int.from_bytes(self.take(1 << (info - 24)), "big")

    def item(self, depth: int, inside: str | None = None) -> Any:
        head = self.take(1)[0]
        major, info = head >> 5, head & 31
        if major == 7:
            if info == 27:
                return struct.unpack(">d", self.take(8))[0]
            need(info in (20, 21, 22), f"object: byte {self.at - 1}: {head:02x} has no meaning here")
            return (False, True, None)[info - 20]
        n = self.argument(info)
        if major == 0:
            return n
        if major == 1:
            return -1 - n
        if major == 2:
            return self.take(n)
        if major == 3:
            return self.take(n).decode()
        if major == 6:
            return self.tagged(n, depth, inside)
        need(depth < DEPTH_MAX, "object: nested too deep")
        need(n * (major - 3) <= len(self.data) - self.at, "object: more items than bytes")
        if major == 4:
            return [self.item(depth + 1) for _ in range(n)]
        result = {}
        for _ in range(n):
            key = self.item(depth + 1)
            result[key] = self.item(depth + 1)
        return result

    def tagged(self, number: int, depth: int, inside: str | None) -> Any:
        if number in (2, 3):
            head = self.take(1)[0]
            need(head >> 5 == 2, "object: a bignum without bytes")
            n = int.from_bytes(self.take(self.argument(head & 31)), "big")
            return n if number == 2 else -1 - n
        if not FIRST_TAG <= number < FIRST_TAG + len(TAGS):
            raise Unsupported(f"object: the tag {number} is not known")
        name, fits, make = TAGS[number - FIRST_TAG]
        need(inside is None, f"object: {name} stands directly in {inside}")
        payload = self.item(depth, name)
        need(fits(payload), f"object: {name}: found {payload!r}")
        return make(payload)


def decode_object(data: bytes) -> Any:
    """The Python value of an encoded object. Types that would have to be imported stay :class:`Tagged`."""
    reader = _Cbor(data)
    try:
        value = reader.item(0)
    except UnicodeDecodeError as error:
        raise Corrupt(f"object: {error}") from error
    except (ValueError, TypeError, ArithmeticError) as error:
        # A 31st of February, a list as a key: well-formed, but no Python value.
        raise Unsupported(f"object: {error}") from error
    need(reader.at == len(data), f"object: {len(data) - reader.at} bytes too many")
    return value
