"""Python values as plain data and back: data, never code, unless the user passes ``pickle=True``.

:func:`capture` lowers a value to ``None``, ``bool``, ``int``, ``float``, ``str``, ``bytes``, ``list``, ``dict`` and
:class:`Tagged` (the table of tags is that of ``docs/format.md``) and encodes that; :func:`decode` decodes it.
:func:`raise_value` makes the value again. It imports nothing and calls nothing that the checkpoint names: dataclasses,
enums and named tuples are made only if this process has already imported their class and it still fits, and without
running their constructors.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import enum
import fractions
import functools
import pathlib
import pickle as pickling
import sys
import types
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from .. import adapters as frameworks
from .. import native
from ..errors import Corrupt, Error, Invalid, Unsupported
from ..native import Tagged
from .catalog import Adapter, Refused
from .stateful import PerRank, Sharded

DEPTH_MAX = 64
"""Deepest nesting of a value, as in the format."""

EQUAL_HASHES_MAX = 128
"""Most keys of one dict, or items of one set, with the same hash: looking each up compares it with all of these."""

INTEGER_BITS_MAX = 1 << 15
"""Largest integer of a range or a fraction: making one divides them, in quadratic time."""

Trail = tuple[object, ...]
"""Keys and indices from an entry of the state down to a value in it."""

_ATTRIBUTES = "__dict__"
"""The step of a trail to the attributes of a dict."""

_FACTORIES = {
    f"builtins:{kind.__name__}": kind for kind in (bool, int, float, complex, str, bytes, list, tuple, dict, set)
}
_NAMESPACES = ("argparse:Namespace", "types:SimpleNamespace")
_ATOMS = frozenset({type(None), bool, int, float, bytes})


def decode(data: bytes, place: str) -> object:
    """The lowered value of its bytes; ``place`` is its place for errors."""
    try:
        return native.decode(data)
    except (Corrupt, Unsupported) as error:
        raise type(error)(f"{place}: {error}") from error
    except MemoryError:
        raise
    except Exception as error:  # such as a key that Python cannot hash
        raise Corrupt(f"{place}: no value can be made of what is stored: {reason(error)}") from error


def where(place: str, trail: Trail) -> str:
    """The place of a value as one would write it in Python: ``extra.args.lr``, ``extra.sizes[3]``."""
    is_long = len(trail) > STEPS_SHOWN
    return place + "".join(map(_step_text, trail[:STEPS_SHOWN])) + ("..." if is_long else "")


def dotted(trail: Trail) -> str:
    """The steps of a trail as the end of a name: ``moments.0.mean``."""
    return ".".join(map(_name_of, trail))


def _name_of(step: object) -> str:
    try:
        return str(step)
    except ValueError:  # Python refuses to print long integers in decimal digits
        return hex(step) if isinstance(step, int) else f"{type(step).__name__}-{hash(step):x}"


STEPS_SHOWN = 16
"""Steps of a trail that an error shows."""

TEXT_SHOWN = 80
"""Characters of a key, a name or another exception's text that an error shows."""


def _step_text(step: object) -> str:
    if isinstance(step, str) and step.isidentifier() and len(step) <= TEXT_SHOWN:
        return f".{step}"
    return f"[{shown(step)}]"


def shown(value: object) -> str:
    """The ``repr`` of a value for an error, short. Python refuses to print long integers, and a class may fail."""
    try:
        text = repr(value[: TEXT_SHOWN + 1] if isinstance(value, (str, bytes)) else value)
    except Exception:  # whatever the value's own code raises
        bits = f" of {value.bit_length()} bits" if isinstance(value, int) else ""
        text = f"<{type(value).__name__}{bits}>"
    return _short(text)


def _short(text: str) -> str:
    return text if len(text) <= TEXT_SHOWN else f"{text[: TEXT_SHOWN - 3]}..."


def reason(error: Exception) -> str:
    """The kind and the text of a foreign exception: short, and valid UTF-8 for other ranks."""
    try:
        text = str(error)
    except Exception:  # whatever its own code raises
        text = ""
    text = text[: 4 * TEXT_SHOWN].encode("utf-8", "backslashreplace").decode()  # other ranks are sent it
    return f"{type(error).__name__}: {text}"


def _expect_spread(keys: Collection[object], what: str) -> None:
    """Refuses keys if too many have one hash: each costs a comparison with all of the others.

    Texts and bytes are hashed with a secret of the process; few floats and few integers of 64 bits share a hash.
    """
    if len(keys) <= EQUAL_HASHES_MAX:
        return
    hashes = collections.Counter(hash(key) for key in keys if not _spreads(key))
    if hashes and max(hashes.values()) > EQUAL_HASHES_MAX:
        raise Refused(f"more than {EQUAL_HASHES_MAX} {what} have the same hash")


def _spreads(key: object) -> bool:
    return type(key) in (str, bytes, float, bool) or (type(key) is int and -(1 << 63) <= key < 1 << 63)


# From values to data


@dataclass(frozen=True)
class Lowering:
    """How values of one leaf are lowered.

    Attributes:
        place: Where the leaf stands, for errors.
        adapters: Of the frameworks in use.
        refer: Called with a tensor inside the value and its trail: the key and name of the tensor leaf that it becomes,
            or ``None`` to keep it as part of the value.
        pickle: Whether values without a form as data are pickled.
    """

    place: str
    adapters: Sequence[Adapter]
    refer: Callable[[Adapter, object, Trail], tuple[str, str] | None] = lambda adapter, tensor, trail: None
    pickle: bool = False


def capture(value: object, how: Lowering) -> native.Value:
    """The encoding of ``value`` as it is now.

    Raises:
        Invalid: Naming the place of what cannot be stored.
    """
    return native.Value(value, _Lower(how).strange, how.place)


class _Lower:
    """Lowers values that Rust does not know; Rust walks plain containers itself and calls this for the rest."""

    def __init__(self, how: Lowering) -> None:
        self._how = how
        self._open: set[int] = set()

    def strange(self, value: object, trail: Trail) -> object:
        """Lowers a value that Rust does not know, or a container that it does not enter."""
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
        _expect_spread(values, "keys of a dict")
        return {self.value(key, (*trail, key)): self.value(value, (*trail, key)) for key, value in values.items()}

    def _compound(self, value: Any, trail: Trail) -> object:
        kind = type(value)
        if kind is list:
            return self._items(value, trail)
        if kind is dict:
            return self._map(value, trail)
        if kind in (PerRank, Sharded):
            raise self._invalid(
                f"a {kind.__name__} can stand as a key's value or directly below it, not deeper: wrap the whole entry",
                trail,
            )
        for adapter in self._how.adapters:
            if adapter.is_tensor(value):
                return self._tensor(adapter, value, trail)
            lowered = adapter.lower_value(value)
            if lowered is not None:
                return Tagged(*lowered)
        if kind in (set, frozenset):
            _expect_spread(value, "items of a set")
        if kind in (tuple, set, frozenset):
            return Tagged(kind.__name__, self._items(value, trail))
        if kind is collections.OrderedDict:
            return self._attributed("ordered_dict", value, trail)
        if kind is collections.Counter:
            return self._attributed("counter", value, trail)
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

    def _attributed(self, tag: str, value: Any, trail: Trail) -> Tagged:
        """A dict that may have attributes, too, such as the versions in PyTorch's state dicts."""
        lowered = Tagged(tag, self._map(value, trail))
        attributes = self._map(vars(value), (*trail, _ATTRIBUTES))
        return Tagged("attributed", [lowered, attributes]) if attributes else lowered

    def _tensor(self, adapter: Adapter, tensor: object, trail: Trail) -> object:
        try:
            if trail:
                adapter.expect_remade(tensor)
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
            return Tagged("range", _expect_short([value.start, value.stop, value.step], "range"))
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
            return Tagged("fraction", _expect_short([value.numerator, value.denominator], "fraction"))
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
        is_tuple = isinstance(value, tuple) and _tuple_fields(type(value)) is not None
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
            _expect_no_more(record, record._fields)
            parts = dict(zip(record._fields, record, strict=True))
            return Tagged("named_tuple", [name, self._map(parts, trail)])
        missing = [field.name for field in fields(record) if not hasattr(record, field.name)]
        if missing:
            raise Refused(f"a {name} cannot be stored while its fields {missing} are not set")
        if not _is_made_of_fields(type(value)):
            raise Refused(f"a {name} cannot be stored: it is built on a class that keeps more than its fields")
        parts = {field.name: getattr(record, field.name) for field in fields(record)}
        _expect_no_more(record, parts)
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
    if frameworks.stands_for(value) is not None:
        return (
            f"a {type(value).__name__} is a data loader: give it as a key's value or directly below a key, as "
            "shardfast.Sharded(it, index, count) (docs: Data loaders)"
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


def _tuple_fields(kind: type) -> tuple[str, ...] | None:
    """The fields of a class of named tuples; ``None`` for any other, such as ``time.struct_time``."""
    if not issubclass(kind, tuple):
        return None
    named = next((vars(base)["_fields"] for base in kind.__mro__ if "_fields" in vars(base)), None)
    is_named = type(named) is tuple and all(type(name) is str for name in named)
    return named if is_named else None


_TPFLAGS_HEAPTYPE = 1 << 9
"""The bit in a type's flags for types that were made by a class statement."""


def _is_made_of_fields(kind: type) -> bool:
    """Whether ``object.__new__`` makes an instance: an exception, for one, has parts of its own in C."""
    is_abstract = bool(getattr(kind, "__abstractmethods__", None))
    return not is_abstract and all(base is object or base.__flags__ & _TPFLAGS_HEAPTYPE for base in kind.__mro__)


def _expect_no_more(record: object, known: Collection[str]) -> None:
    """Refuses attributes that are no fields, which a load would not restore; cached properties are made again."""
    is_cache = functools.cached_property
    kind = type(record)
    attributes = getattr(record, "__dict__", {})
    more = [name for name in attributes if name not in known and not isinstance(getattr(kind, name, None), is_cache)]
    if more:
        raise Refused(
            f"a {_type_name(kind)} cannot be stored while it has attributes that are no fields: {shown(more)}; make "
            "them fields, or store what you need of it as a dict"
        )


def _expect_short(integers: list[int], what: str) -> list[int]:
    if any(integer.bit_length() > INTEGER_BITS_MAX for integer in integers):
        raise Refused(f"a {what} of integers beyond {INTEGER_BITS_MAX} bits is more than a checkpoint may hold")
    return integers


def tensors_in(value: object, adapters: Sequence[Adapter]) -> Iterator[tuple[Trail, Adapter, Any]]:
    """The tensors inside plain containers, with their trails; ignores everything else."""
    pending: list[tuple[Trail, object, tuple[int, ...]]] = [((), value, ())]
    while pending:
        trail, current, around = pending.pop()
        owner = next((adapter for adapter in adapters if adapter.is_tensor(current)), None)
        if owner is not None:
            yield trail, owner, current
        elif len(trail) > DEPTH_MAX or id(current) in around:  # skips a container that contains itself
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


def is_pickle(lowered: object) -> bool:
    """Returns whether a lowered value is a pickle, which only some loads make."""
    return isinstance(lowered, Tagged) and lowered.tag == "pickle"


def raise_value(lowered: object, how: Raising) -> Any:
    """The value that :func:`capture` lowered. May use ``lowered`` up: its lists and dicts become the value's.

    For any stored data it raises only these:

    Raises:
        Unsupported: If it needs a class or a framework that this process has not imported.
        Invalid: If it holds a pickle and the user did not ask for pickles.
        Corrupt: If no value can be made of it.
    """
    try:
        return _Raise(how).value(lowered, ())
    except (Error, MemoryError):
        raise
    except RecursionError as error:
        raise Unsupported(
            f"{how.place}: it nests deeper than the remaining stack allows: call from a shallower stack, "
            "or raise sys.setrecursionlimit()"
        ) from error
    except Exception as error:  # a fallback: the code below raises better errors where it can
        raise Corrupt(f"{how.place}: no value can be made of what is stored: {reason(error)}") from error


class _Raise:
    def __init__(self, how: Raising) -> None:
        self._how = how

    def value(self, lowered: Any, trail: Trail) -> Any:
        kind = type(lowered)
        if kind is list:
            return self._items(lowered, trail)
        if kind is not dict and kind is not Tagged:
            return lowered
        try:
            return self._map(lowered, trail) if kind is dict else self._tagged(lowered.tag, lowered.value, trail)
        except Refused as refused:
            raise Unsupported(f"{where(self._how.place, trail)}: {refused}") from refused
        except (Error, MemoryError, RecursionError):
            raise
        except Exception as error:  # Python's own, and those of the classes' code
            what = "dict" if kind is dict else lowered.tag
            message = f"{where(self._how.place, trail)}: no {what} can be made of what is stored: {reason(error)}"
            raise Corrupt(message) from error

    def _items(self, lowered: list[Any], trail: Trail) -> list[Any]:
        for index, item in enumerate(lowered):
            if type(item) in _COMPOUND:
                lowered[index] = self.value(item, (*trail, index))
        return lowered

    def _map(self, lowered: dict[Any, Any], trail: Trail) -> dict[Any, Any]:
        if not any(type(key) is Tagged for key in lowered):
            for key, item in lowered.items():
                if type(item) in _COMPOUND:
                    lowered[key] = self.value(item, (*trail, key))
            return lowered
        keys = [self.value(key, (*trail, "key")) for key in lowered]
        _expect_spread(keys, "keys of a dict")
        return {key: self.value(item, (*trail, key)) for key, item in zip(keys, lowered.values(), strict=True)}

    def _set(self, kind: type, payload: list[Any], trail: Trail) -> Any:
        items = self._items(payload, trail)
        _expect_spread(items, "items of a set")
        return kind(items)

    def _tagged(self, tag: str, payload: Any, trail: Trail) -> Any:
        if tag == "tuple":
            return tuple(self._items(payload, trail))
        if tag in ("set", "frozenset"):
            return self._set({"set": set, "frozenset": frozenset}[tag], payload, trail)
        if tag == "tensor_ref":
            return self._how.referred(*payload)
        if tag == "ordered_dict":
            return collections.OrderedDict(self._map(payload, trail))
        if tag == "attributed":
            attributed = self.value(payload[0], trail)
            vars(attributed).update(self._map(payload[1], (*trail, _ATTRIBUTES)))
            return attributed
        if tag == "counter":
            counter: collections.Counter[Any] = collections.Counter()
            counter.update(self._map(payload, trail))
            return counter
        if tag == "deque":
            return collections.deque(self._items(payload[1], trail), payload[0])
        if tag == "default_dict":
            factory = None if payload[0] is None else _FACTORIES.get(payload[0])
            if payload[0] is not None and factory is None:
                raise Refused(f"a defaultdict made with {_short(payload[0])}, which is no builtin type")
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
                return self._settled(value, trail) if tag == "array" else value
        raise Refused(_no_framework(tag, payload))

    def _settled(self, tensor: object, trail: Trail) -> object:
        try:
            return self._how.settle(tensor, trail)
        except (Error, MemoryError, Refused):
            raise
        except Exception as error:  # an error of the present tensor, not of the stored data
            message = f"{where(self._how.place, trail)}: the tensor here cannot be written: {reason(error)}"
            raise Invalid(message) from error

    def _record(self, tag: str, payload: Any, trail: Trail) -> Any:
        name = payload[0]
        if tag == "namespace":
            if name not in _NAMESPACES:
                raise Refused(f"a namespace of type {_short(name)}, which is unknown")
            made: Any = types.SimpleNamespace() if name == "types:SimpleNamespace" else argparse.Namespace()
            vars(made).update(self._map(payload[1], trail))
            return made
        kind: Any = _class(name)
        if kind is None or not _FITS[tag](kind):
            module = name.partition(":")[0]
            remedy = "" if module in sys.modules else f"import {_short(module)} before loading, or "
            raise Refused(
                f"a {tag.replace('_', ' ')} {_short(name)} is stored here, and this process has no such class: "
                f"{remedy}leave this leaf out (only=...)"
            )
        if tag == "enum":
            if payload[1] is None:
                return kind(self.value(payload[2], trail))
            if payload[1] not in kind.__members__:
                raise Refused(f"the enum {name} has no member {shown(payload[1])} here")
            return kind.__members__[payload[1]]
        parts = self._map(payload[1], trail)
        names = _tuple_fields(kind) if tag == "named_tuple" else [field.name for field in fields(kind)]
        if sorted(names or ()) != sorted(parts):
            saved, ours = shown(sorted(parts)), shown(sorted(names or ()))
            raise Refused(f"a {name} was saved with the fields {saved}; the class here has {ours}")
        if tag == "named_tuple":
            return tuple.__new__(kind, [parts[field] for field in names or ()])
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
            raise Unsupported(f"{place}: its pickle cannot be loaded: {reason(error)}") from error


_COMPOUND = frozenset({list, dict, Tagged})
"""The types of lowered values that are not the values themselves."""

_FITS: dict[str, Callable[[type], bool]] = {
    "named_tuple": lambda kind: _tuple_fields(kind) is not None,
    "enum": lambda kind: issubclass(kind, enum.Enum),
    "dataclass": lambda kind: is_dataclass(kind) and _is_made_of_fields(kind),
}
"""Whether a class found under a stored name is one of the kind that is stored."""


def _no_framework(tag: str, payload: Any) -> str:
    framework = _short(payload[0]) if tag in ("array", "dtype") else tag.partition("_")[0]
    return f"its {tag} needs {framework}, which this process has not imported: import {framework} before loading"


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
    except Exception as error:  # not found; or a name of a directory, of another file, of no file
        raise Refused(f"this system knows no time zone {shown(payload)}") from error


_SCALARS: dict[str, Callable[[Any], Any]] = {
    "bytearray": bytearray,
    "complex": lambda payload: complex(*payload),
    "surrogate_str": lambda payload: payload.decode("utf-8", "surrogatepass"),
    "range": lambda payload: range(*_expect_short(payload, "range")),
    "slice": lambda payload: slice(*payload),
    "ellipsis": lambda payload: ...,
    "path": _raise_path,
    "datetime": lambda payload: _raise_clock(datetime.datetime(*payload[:7]), payload),
    "date": lambda payload: datetime.date(*payload),
    "time": lambda payload: _raise_clock(datetime.time(*payload[:4]), payload),
    "timedelta": lambda payload: datetime.timedelta(*payload),
    "time_zone": _raise_zone,
    "decimal": decimal.Decimal,
    "fraction": lambda payload: fractions.Fraction(*_expect_short(payload, "fraction")),
    "uuid": lambda payload: uuid.UUID(bytes=payload),
}
