"""Python values as plain data and back: data, never code, unless the user asks for pickle by name.

:func:`capture` says a value in ``None``, ``bool``, ``int``, ``float``, ``str``, ``bytes``, ``list``, ``dict`` and
:class:`Tagged` (the table of tags is that of ``docs/format.md``) and encodes that; :func:`decode` makes it from its
bytes again. :func:`raise_value` makes the value again. It imports nothing and calls
nothing that the checkpoint names: dataclasses, enums and named tuples come back only if this process has already
imported their class and it still fits, and without running their constructors.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import enum
import fractions
import pathlib
import pickle as pickling
import sys
import types
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from . import _native
from ._native import Tagged
from .catalog import Adapter, PerRank, Refused
from .errors import Corrupt, Invalid, Unsupported

DEPTH_MAX = 64
"""Deepest nesting of a value, as in the format."""

Trail = tuple[object, ...]
"""Keys and indices from an entry of the state down to a value in it."""

_FACTORIES = {
    f"builtins:{kind.__name__}": kind for kind in (bool, int, float, complex, str, bytes, list, tuple, dict, set)
}
_NAMESPACES = ("argparse:Namespace", "types:SimpleNamespace")
_ATOMS = frozenset({type(None), bool, int, float, bytes})


def decode(data: bytes, place: str) -> object:
    """The lowered value of its bytes; ``place`` says in errors where it stands."""
    try:
        return _native.decode(data)
    except (Invalid, TypeError) as error:
        raise Corrupt(f"{place}: {error}") from error
    except (Corrupt, Unsupported) as error:
        raise type(error)(f"{place}: {error}") from error


def where(place: str, trail: Trail) -> str:
    """The place of a value as one would write it in Python: ``extra.args.lr``, ``extra.sizes[3]``."""
    words = [f".{step}" if isinstance(step, str) and step.isidentifier() else f"[{step!r}]" for step in trail]
    return place + "".join(words if len(words) <= 16 else [*words[:16], "..."])


# From values to data


@dataclass(frozen=True)
class Lowering:
    """How values of one leaf are lowered.

    Attributes:
        place: Where the leaf stands, for errors.
        adapters: Of the frameworks in use.
        refer: Called with a tensor inside the value and its trail: the key and name of the tensor leaf that it becomes,
            or ``None`` to keep it as part of the value.
        pickle: Whether what cannot be said as data is pickled.
    """

    place: str
    adapters: Sequence[Adapter]
    refer: Callable[[Adapter, object, Trail], tuple[str, str] | None] = lambda adapter, tensor, trail: None
    pickle: bool = False


def capture(value: object, how: Lowering) -> _native.Value:
    """The encoding of ``value`` as it is now.

    Raises:
        Invalid: Naming the place of what cannot be stored.
    """
    return _native.Value(value, _Lower(how).strange, how.place)


class _Lower:
    """Lowers what is no plain container of plain values; those Rust walks through itself, and then comes here."""

    def __init__(self, how: Lowering) -> None:
        self._how = how
        self._open: set[int] = set()

    def strange(self, value: object, trail: Trail) -> object:
        """A value that Rust does not know, or a container that it knows and does not enter."""
        if type(value) in (list, dict, tuple):
            raise self._not_entered(value, trail)
        return self.value(value, trail)

    def _not_entered(self, value: object, trail: Trail) -> Invalid:
        if len(trail) >= DEPTH_MAX:
            return self._invalid(f"nested deeper than {DEPTH_MAX} levels", trail)
        return self._invalid(f"a {type(value).__name__} that contains itself cannot be stored", trail)

    def value(self, value: object, trail: Trail) -> object:
        if type(value) in _ATOMS:
            return value
        if type(value) is str:
            return _lower_text(value)
        if id(value) in self._open or len(trail) >= DEPTH_MAX:
            raise self._not_entered(value, trail)
        self._open.add(id(value))
        try:
            return self._compound(value, trail)
        except Refused as refused:
            if self._how.pickle:
                return self._pickled(value, trail)
            raise self._invalid(str(refused), trail) from refused
        finally:
            self._open.discard(id(value))

    def _invalid(self, what: str, trail: Trail) -> Invalid:
        return Invalid(f"{where(self._how.place, trail)}: {what}")

    def _items(self, values: Any, trail: Trail) -> list[object]:
        return [self.value(item, (*trail, index)) for index, item in enumerate(values)]

    def _map(self, values: Any, trail: Trail) -> dict[object, object]:
        return {self.value(key, (*trail, key)): self.value(value, (*trail, key)) for key, value in values.items()}

    def _compound(self, value: Any, trail: Trail) -> object:
        kind = type(value)
        if kind is list:
            return self._items(value, trail)
        if kind is dict:
            return self._map(value, trail)
        if kind is PerRank:
            raise self._invalid(
                "a PerRank can stand as a key's value or directly below it, not deeper: wrap the whole entry", trail
            )
        for adapter in self._how.adapters:
            if adapter.is_tensor(value):
                return self._tensor(adapter, value, trail)
            lowered = adapter.lower_value(value)
            if lowered is not None:
                return Tagged(*lowered)
        if kind in (tuple, set, frozenset):
            return Tagged(kind.__name__, self._items(value, trail))
        if kind is collections.OrderedDict:
            return Tagged("ordered_dict", self._map(value, trail))
        if kind is collections.Counter:
            return Tagged("counter", self._map(value, trail))
        if kind is collections.deque:
            return Tagged("deque", [value.maxlen, self._items(value, trail)])
        if kind is collections.defaultdict:
            factory = None if value.default_factory is None else _type_name(value.default_factory)
            if factory is not None and factory not in _FACTORIES:
                raise Refused("a defaultdict whose factory is no builtin type cannot be stored: store dict(...) of it")
            return Tagged("default_dict", [factory, self._map(value, trail)])
        if kind is slice:
            return Tagged("slice", self._items((value.start, value.stop, value.step), trail))
        return self._scalar(value) or self._record(value, trail)

    def _tensor(self, adapter: Adapter, tensor: object, trail: Trail) -> object:
        try:
            reference = self._how.refer(adapter, tensor, trail)
            lowered = ("tensor_ref", list(reference)) if reference is not None else adapter.lower_value(tensor)
        except Refused as refused:  # never pickled: a pickle would hide it from a load in another layout
            raise self._invalid(str(refused), trail) from refused
        return Tagged(*lowered) if lowered is not None else None

    def _scalar(self, value: Any) -> object:
        kind = type(value)
        if kind is bytearray:
            return Tagged("bytearray", bytes(value))
        if kind is complex:
            return Tagged("complex", [value.real, value.imag])
        if kind is range:
            return Tagged("range", [value.start, value.stop, value.step])
        if value is ...:
            return Tagged("ellipsis", None)
        if isinstance(value, pathlib.PurePath) and kind.__module__.split(".")[0] == "pathlib":
            return Tagged("path", [kind.__name__, _lower_text(str(value))])
        if kind is datetime.datetime:
            parts = [value.year, value.month, value.day, value.hour, value.minute, value.second, value.microsecond]
            return Tagged("datetime", [*parts, value.fold, _lower_zone(value.tzinfo)])
        if kind is datetime.date:
            return Tagged("date", [value.year, value.month, value.day])
        if kind is datetime.time:
            parts = [value.hour, value.minute, value.second, value.microsecond]
            return Tagged("time", [*parts, value.fold, _lower_zone(value.tzinfo)])
        if kind is datetime.timedelta:
            return Tagged("timedelta", [value.days, value.seconds, value.microseconds])
        if isinstance(value, datetime.tzinfo):
            return _lower_zone(value)
        if kind is decimal.Decimal:
            return Tagged("decimal", str(value))
        if kind is fractions.Fraction:
            return Tagged("fraction", [value.numerator, value.denominator])
        if kind is uuid.UUID:
            return Tagged("uuid", value.bytes)
        return None

    def _record(self, value: Any, trail: Trail) -> object:
        """A value of a class with named parts."""
        name = _type_name(type(value))
        record: Any = value
        if name in _NAMESPACES:
            return Tagged("namespace", [name, self._map(vars(value), trail)])
        is_enum = isinstance(value, enum.Enum)
        is_tuple = isinstance(value, tuple) and hasattr(value, "_fields")
        is_data = is_dataclass(value) and not isinstance(
            value, (type, dict, list, tuple, set, frozenset, str, bytes, int)
        )
        if not (is_enum or is_tuple or is_data):
            raise Refused(_refusal(value))
        if _class(name) is not type(value):
            raise Refused(f"a {name} cannot be stored: a load could not find its class again by that name")
        if is_enum:
            member = record.name if record.name in type(record).__members__ else None  # flags may be combined
            return Tagged("enum", [name, member, self.value(record.value, (*trail, "value"))])
        if is_tuple:
            parts = dict(zip(record._fields, record, strict=True))
            return Tagged("named_tuple", [name, self._map(parts, trail)])
        missing = [field.name for field in fields(record) if not hasattr(record, field.name)]
        if missing:
            raise Refused(f"a {name} cannot be stored while its fields {missing} are not set")
        parts = {field.name: getattr(record, field.name) for field in fields(record)}
        return Tagged("dataclass", [name, self._map(parts, trail)])

    def _pickled(self, value: object, trail: Trail) -> object:
        try:
            return Tagged("pickle", pickling.dumps(value))
        except Exception as error:  # whatever the value's own code raises
            raise self._invalid(f"it cannot be pickled either: {type(error).__name__}: {error}", trail) from error


def _refusal(value: object) -> str:
    if not isinstance(value, type) and callable(getattr(value, "state_dict", None)):
        return (
            f"a {type(value).__name__} keeps its state in state_dict(): give it as a key's value or directly below a "
            "key, or store its state_dict()"
        )
    if isinstance(value, type) or callable(value):
        named = getattr(value, "__qualname__", type(value).__name__)
        return f"a {type(value).__name__} ({named}) is code and cannot be stored: store its name"
    return (
        f"a {type(value).__module__}.{type(value).__qualname__} cannot be stored: say it in plain data (dict, list, "
        "dataclass, array), give it state_dict() and load_state_dict() and an entry of its own, or pass pickle=True"
    )


def _lower_text(text: str) -> object:
    try:
        text.encode()
    except UnicodeEncodeError:
        return Tagged("surrogate_str", text.encode("utf-8", "surrogatepass"))
    return text


def _lower_zone(zone: datetime.tzinfo | None) -> object:
    if zone is None:
        return None
    if type(zone) is datetime.timezone:
        offset = zone.utcoffset(None)
        return Tagged("time_zone", (offset.days * 86_400 + offset.seconds) * 1_000_000 + offset.microseconds)
    key = getattr(zone, "key", None)
    if type(zone).__module__.startswith("zoneinfo") and isinstance(key, str):
        return Tagged("time_zone", key)
    raise Refused(f"a time zone of type {type(zone).__name__} cannot be stored: use datetime.timezone or ZoneInfo")


def _type_name(kind: object) -> str:
    return f"{getattr(kind, '__module__', '?')}:{getattr(kind, '__qualname__', '?')}"


def _class(name: str) -> type | None:
    """The class of that name among the modules that are imported already; runs no code of any of them."""
    module, _, path = name.partition(":")
    found: object = sys.modules.get(module)
    for part in path.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    return found if isinstance(found, type) else None


def tensors_in(value: object, adapters: Sequence[Adapter]) -> Iterator[tuple[Trail, Adapter, Any]]:
    """The tensors inside plain containers, with their trails; what else there is, is passed over."""
    pending: list[tuple[Trail, object, tuple[int, ...]]] = [((), value, ())]
    while pending:
        trail, current, around = pending.pop()
        owner = next((adapter for adapter in adapters if adapter.is_tensor(current)), None)
        if owner is not None:
            yield trail, owner, current
        elif len(trail) > DEPTH_MAX or id(current) in around:  # what contains itself has no end
            continue
        elif isinstance(current, dict):
            inside = (*around, id(current))
            pending += [((*trail, key), item, inside) for key, item in current.items()]
        elif isinstance(current, (list, tuple)):
            inside = (*around, id(current))
            names = getattr(current, "_fields", range(len(current)))
            pending += [((*trail, name), item, inside) for name, item in zip(names, current, strict=True)]


# From data to values


@dataclass(frozen=True)
class Raising:
    """How the values of one leaf are made again.

    Attributes:
        place: Where the leaf stands, for errors.
        adapters: Of the frameworks in use.
        referred: The loaded tensor of a tensor leaf, by its key and name in the checkpoint.
        settle: Called with a tensor that was part of the value, and its trail: the tensor to put there, itself or one
            that stands there already and was filled.
        pickle: Whether pickles are loaded.
    """

    place: str
    adapters: Sequence[Adapter]
    referred: Callable[[str, str], object]
    settle: Callable[[object, Trail], object] = lambda tensor, trail: tensor
    pickle: bool = False


def raise_value(lowered: object, how: Raising) -> Any:
    """The value that :func:`capture` lowered.

    Raises:
        Unsupported: If it needs a class or a framework that this process has not imported.
        Invalid: If it holds a pickle and the user did not ask for pickles.
        Corrupt: If no value can be made of it.
    """
    return _Raise(how).value(lowered, ())


class _Raise:
    def __init__(self, how: Raising) -> None:
        self._how = how

    def value(self, lowered: Any, trail: Trail) -> Any:
        kind = type(lowered)
        if kind is list:
            return self._items(lowered, trail)
        if kind is dict:
            return self._map(lowered, trail)
        if kind is not Tagged:
            return lowered
        try:
            return self._tagged(lowered.tag, lowered.value, trail)
        except Refused as refused:
            raise Unsupported(f"{where(self._how.place, trail)}: {refused}") from refused
        except (ValueError, TypeError, KeyError, OverflowError, ArithmeticError) as error:
            message = f"{where(self._how.place, trail)}: no {lowered.tag} can be made of what is stored: {error}"
            raise Corrupt(message) from error

    def _items(self, lowered: list[Any], trail: Trail) -> list[Any]:
        return [self.value(item, (*trail, index)) for index, item in enumerate(lowered)]

    def _map(self, lowered: dict[Any, Any], trail: Trail) -> dict[Any, Any]:
        out = {}
        for key, item in lowered.items():
            name = self.value(key, (*trail, "key"))
            out[name] = self.value(item, (*trail, name))
        return out

    def _tagged(self, tag: str, payload: Any, trail: Trail) -> Any:
        if tag in ("tuple", "set", "frozenset"):
            return {"tuple": tuple, "set": set, "frozenset": frozenset}[tag](self._items(payload, trail))
        if tag == "tensor_ref":
            return self._how.referred(*payload)
        if tag == "ordered_dict":
            return collections.OrderedDict(self._map(payload, trail))
        if tag == "counter":
            counter: collections.Counter[Any] = collections.Counter()
            counter.update(self._map(payload, trail))
            return counter
        if tag == "deque":
            return collections.deque(self._items(payload[1], trail), payload[0])
        if tag == "default_dict":
            factory = None if payload[0] is None else _FACTORIES.get(payload[0])
            if payload[0] is not None and factory is None:
                raise Refused(f"a defaultdict made with {payload[0]}, which is no builtin type")
            return collections.defaultdict(factory, self._map(payload[1], trail))
        if tag in ("named_tuple", "namespace", "dataclass", "enum"):
            return self._record(tag, payload, trail)
        if tag == "pickle":
            return self._unpickled(payload, trail)
        if tag in _SCALARS:
            return _SCALARS[tag](self.value(payload, trail) if tag == "slice" else _plain(payload))
        for adapter in self._how.adapters:
            value = adapter.raise_value(tag, payload)
            if value is not NotImplemented:
                return self._how.settle(value, trail) if tag == "array" else value
        raise Refused(f"a {tag} of a framework that this process has not imported: import it before loading")

    def _record(self, tag: str, payload: Any, trail: Trail) -> Any:
        name = payload[0]
        if tag == "namespace":
            if name not in _NAMESPACES:
                raise Refused(f"a namespace of type {name}, which is unknown")
            made: Any = types.SimpleNamespace() if name == "types:SimpleNamespace" else argparse.Namespace()
            vars(made).update(self._map(payload[1], trail))
            return made
        kind: Any = _class(name)
        expected = {"named_tuple": tuple, "enum": enum.Enum}.get(tag, object)
        fits = kind is not None and issubclass(kind, expected) and (tag != "dataclass" or is_dataclass(kind))
        if not fits:
            module = name.partition(":")[0]
            raise Refused(
                f"a {tag.replace('_', ' ')} {name} is stored here, and this process has no such class: import {module} "
                "before loading, or leave this leaf out (only=...)"
            )
        if tag == "enum":
            if payload[1] is None:
                return kind(self.value(payload[2], trail))
            if payload[1] not in kind.__members__:
                raise Refused(f"the enum {name} has no member {payload[1]!r} here")
            return kind.__members__[payload[1]]
        parts = self._map(payload[1], trail)
        names = list(kind._fields) if tag == "named_tuple" else [field.name for field in fields(kind)]
        if sorted(names) != sorted(parts):
            raise Refused(f"a {name} was saved with the fields {sorted(parts)}; the class here has {sorted(names)}")
        if tag == "named_tuple":
            return tuple.__new__(kind, [parts[field] for field in names])
        made = object.__new__(kind)
        for field, part in parts.items():
            object.__setattr__(made, field, part)
        return made

    def _unpickled(self, payload: bytes, trail: Trail) -> Any:
        place = where(self._how.place, trail)
        if not self._how.pickle:
            raise Invalid(
                f"{place}: stored as a pickle, which can run any code when it is loaded: pass pickle=True if you trust "
                "who wrote this checkpoint"
            )
        try:
            return pickling.loads(payload)
        except Exception as error:  # whatever the pickle's own code raises
            raise Unsupported(f"{place}: its pickle cannot be loaded: {type(error).__name__}: {error}") from error


def _plain(payload: Any) -> Any:
    """The payload of a scalar: tags inside are text or a time zone."""
    if type(payload) is Tagged:
        return _SCALARS[payload.tag](payload.value)
    return [_plain(item) for item in payload] if type(payload) is list else payload


def _raise_path(payload: Any) -> pathlib.PurePath:
    name, text = payload
    kind = getattr(pathlib, name)
    if isinstance(pathlib.Path(), kind) or name.startswith("Pure"):
        return kind(text)  # type: ignore[no-any-return]
    raise Refused(f"a {name} cannot be made on this system")


def _raise_clock(clock: Any, payload: list[Any]) -> Any:
    return clock.replace(fold=payload[-2], tzinfo=payload[-1])


def _raise_zone(payload: int | str) -> datetime.tzinfo:
    if isinstance(payload, int):
        return datetime.timezone(datetime.timedelta(microseconds=payload))
    import zoneinfo  # reads the system's tables, which few need

    try:
        return zoneinfo.ZoneInfo(payload)
    except zoneinfo.ZoneInfoNotFoundError as error:
        raise Refused(f"this system knows no time zone {payload!r}") from error


_SCALARS: dict[str, Callable[[Any], Any]] = {
    "bytearray": bytearray,
    "complex": lambda payload: complex(*payload),
    "surrogate_str": lambda payload: payload.decode("utf-8", "surrogatepass"),
    "range": lambda payload: range(*payload),
    "slice": lambda payload: slice(*payload),
    "ellipsis": lambda payload: ...,
    "path": _raise_path,
    "datetime": lambda payload: _raise_clock(datetime.datetime(*payload[:7]), payload),
    "date": lambda payload: datetime.date(*payload),
    "time": lambda payload: _raise_clock(datetime.time(*payload[:4]), payload),
    "timedelta": lambda payload: datetime.timedelta(*payload),
    "time_zone": _raise_zone,
    "decimal": decimal.Decimal,
    "fraction": lambda payload: fractions.Fraction(*payload),
    "uuid": lambda payload: uuid.UUID(bytes=payload),
}
