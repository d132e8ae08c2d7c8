"""Any Python value comes back as it was, as data; what is no data is refused with its place."""

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import gc
import math
import pathlib
import pickle
import random
import struct
import sys
import time
import types
import typing
import uuid
import zoneinfo

import numpy as np
import pytest
import shardfast as sf
import torch
from shardfast import adapters
from shardfast._native import Tagged, Value
from shardfast.state.stateful import PerRank
from shardfast.state.values import DEPTH_MAX, Lowering, Raising, capture, decode, raise_value, tensors_in


def there_and_back(value, *, pickle=False, loads_pickle=None):
    encoded = capture(value, Lowering("extra.x", adapters.active(), pickle=pickle)).encoded()
    assert isinstance(encoded, bytes)
    how = Raising("extra.x", adapters.active(), no_reference, pickle=pickle if loads_pickle is None else loads_pickle)
    return raise_value(decode(encoded, "extra.x"), how)


def no_reference(key, name):
    raise AssertionError("nothing is referred to here")


@dataclasses.dataclass
class Arguments:
    lr: float
    layers: list[int]
    nested: "Arguments | None" = None

    def __post_init__(self):
        assert self.lr >= 0, "constructors are not run by a load"


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    a: int
    b: tuple[int, ...] = ()


class Point(typing.NamedTuple):
    x: float
    y: float


Pair = collections.namedtuple("Pair", ["left", "right"])


class Colour(enum.Enum):
    RED = "red"
    BLUE = (0, 0, 255)


class Level(enum.IntEnum):
    LOW = 1


class Access(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()


def with_attributes(value, **attributes):
    vars(value).update(attributes)
    return value


PLAIN = [
    None,
    True,
    False,
    0,
    -1,
    2**63 - 1,
    -(2**63),
    2**64,
    -(2**200) + 1,
    10**400,
    0.0,
    -0.0,
    1e-320,
    math.inf,
    -math.inf,
    1 + 2j,
    complex(-0.0, math.inf),
    "",
    "ünïcode 🦀 \x00",
    "lone \ud800 surrogate \udcff",
    b"",
    bytes(range(256)),
    bytearray(b"abc"),
    [],
    [1, [2, [3]]],
    (),
    (1, ("a", b"b")),
    {},
    {"a": 1, 2: "b", 3.5: None, (1, "x"): [1], None: True, b"k": "v", frozenset({1}): 1, "\udc80": 2},
    set(),
    {1, "a", (2, 3), None},
    frozenset({1, frozenset({2})}),
    range(3, -7, -2),
    slice(1, None, 2),
    ...,
    collections.OrderedDict([("b", 1), ("a", 2)]),
    collections.defaultdict(list, {"a": [1]}),
    collections.defaultdict(None, {1: 2}),
    collections.Counter("abracadabra"),
    collections.deque([1, 2, 3], maxlen=5),
    collections.deque("ab"),
    Point(1.0, -2.5),
    Pair({"a": 1}, [2]),
    types.SimpleNamespace(a=1, b=[2]),
    argparse.Namespace(lr=0.1, layers=[1, 2]),
    Arguments(0.1, [1], Arguments(0.2, [])),
    Frozen(1, (2, 3)),
    Colour.RED,
    Colour.BLUE,
    Level.LOW,
    Access.READ,
    Access.READ | Access.WRITE,
    Access(0),
    pathlib.Path("/tmp/a b"),
    pathlib.PurePosixPath("a/b"),
    pathlib.PureWindowsPath("c:\\a"),
    pathlib.Path("lone-\udcff"),
    datetime.datetime(2026, 2, 28, 23, 59, 59, 999_999),
    datetime.datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
    datetime.datetime(1, 1, 1, tzinfo=datetime.UTC),
    datetime.date(9999, 12, 31),
    datetime.time(1, 2, 3, 4, fold=1, tzinfo=datetime.timezone(datetime.timedelta(hours=-3, microseconds=7))),
    datetime.timedelta(-1, 3, 5),
    datetime.timezone(datetime.timedelta(minutes=330)),
    zoneinfo.ZoneInfo("America/New_York"),
    decimal.Decimal("1.10"),
    decimal.Decimal("-Infinity"),
    fractions.Fraction(-3, 7),
    uuid.UUID(int=5),
    random.Random(3).getstate(),
    np.random.RandomState(3).get_state(),
    np.random.default_rng(3).bit_generator.state,
    with_attributes(collections.OrderedDict(b=1), _metadata=collections.OrderedDict({"": {"version": 2}}), b=[1]),
    with_attributes(collections.Counter("abba"), why=(None, "x")),
    [with_attributes(collections.OrderedDict(), of=with_attributes(collections.OrderedDict(), x=np.arange(3)))],
]


def same(one, other) -> bool:
    """Equal, of the same types all the way down, and in the same order."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        attributes = [getattr(each, "__dict__", None) for each in (one, other)]
        return same(list(one.items()), list(other.items())) and same(*attributes)
    if isinstance(one, (list, tuple, collections.deque)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, (types.SimpleNamespace, argparse.Namespace)):
        return same(vars(one), vars(other))
    if isinstance(one, (float, complex)):
        return struct.pack("dd", one.real, one.imag) == struct.pack("dd", other.real, other.imag)
    return bool(one == other)


def named(value) -> str:
    """The test's name, the same in each process: in what order a set has its items differs."""
    shown = sorted(map(repr, value)) if isinstance(value, (set, frozenset)) else value
    return f"{type(value).__name__}: {shown!r:.30}"


@pytest.mark.parametrize("value", PLAIN, ids=named)
def test_values_come_back_as_they_were(value):
    assert same(there_and_back(value), value)


def test_details_that_equality_does_not_see():
    payload = struct.unpack("<d", struct.pack("<Q", 0x7FF8_0000_DEAD_BEEF))[0]
    assert struct.pack("<d", there_and_back(payload)) == struct.pack("<d", payload)
    assert there_and_back(collections.deque([1], maxlen=4)).maxlen == 4
    back = there_and_back(collections.defaultdict(dict))
    assert back["new"] == {}
    moment = datetime.datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin"))
    assert there_and_back(moment).fold == 1
    assert there_and_back(moment).utcoffset() == datetime.timedelta(hours=1)


def test_what_an_object_caches_is_made_again():
    cached = Cached(2)
    assert cached.twice == 4
    back = there_and_back(cached)
    assert vars(back) == {"once": 2}
    assert back.twice == 4
    assert there_and_back(Derived(2), pickle=True).twice == 4


def test_random_states_set_their_generators_back():
    states = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}
    expected = (torch.rand(3).tolist(), random.random(), np.random.rand())
    back = there_and_back(states)
    torch.set_rng_state(back["torch"])
    random.setstate(back["python"])
    np.random.set_state(back["numpy"])
    assert (torch.rand(3).tolist(), random.random(), np.random.rand()) == expected


ARRAYS = [
    *(
        np.arange(6).astype(kind).reshape(2, 3)
        for kind in ["?", "i1", "u2", "<i4", ">i4", "u8", "f2", ">f8", "c8", "c16"]
    ),
    np.array(3.5),
    np.zeros((2, 0)),
    np.arange(12).reshape(3, 4)[::-1, ::2],
    np.asfortranarray(np.arange(6).reshape(2, 3)),
    np.array(["ab", "ü"]),
    np.array([b"ab", b"c"]),
    np.array(["2026-01-02", "NaT"], dtype="M8[D]"),
    np.array([5], dtype="m8[25us]"),
    np.float64(1.5),
    np.float32("nan"),
    np.int64(-3),
    np.bool_(True),
    np.str_("a"),
    np.str_(""),
    np.bytes_(b""),
    np.datetime64("2026-01-02T03", "h"),
    np.dtype("float32"),
    np.dtype(">i8"),
    torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t(),
    torch.tensor(True),
    torch.zeros(0, 3),
    torch.ones(2, dtype=torch.complex128) * 1j,
    torch.arange(4, dtype=torch.uint8).view(torch.float8_e4m3fn),
    torch.arange(4).float().mul(1j).conj(),
    torch.bfloat16,
    torch.Size([2, 3]),
    torch.device("cuda", 1),
]


@pytest.mark.parametrize("value", ARRAYS, ids=lambda value: f"{type(value).__name__} {getattr(value, 'dtype', value)}")
def test_arrays_and_scalars_come_back_as_they_were(value):
    back = there_and_back([value])[0]
    if isinstance(value, torch.Tensor):
        assert (
            torch.equal(back.view(torch.uint8), value.resolve_conj().contiguous().view(torch.uint8))
            if value.ndim
            else back
        )
        assert (back.dtype, back.shape) == (value.dtype, value.shape)
    elif isinstance(value, (np.ndarray, np.generic)):
        assert type(back) is type(value)
        assert (back.dtype, back.shape, back.tobytes()) == (value.dtype, value.shape, value.tobytes())
    else:
        assert same(back, value)


def test_equal_sets_have_equal_bytes():
    """Ranks compare encoded values: the order of a set, which differs by process, must not show."""
    words = [f"w{i}" for i in range(50)]
    one, other = set(words), set()
    for word in reversed(words):
        other.add(word)
    how = Lowering("x", [])
    assert capture(one, how).encoded() == capture(other, how).encoded()


# Refusals


class Custom:
    pass


class Stateful:
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Scaled(torch.Tensor):
    """A tensor that means more than its elements."""

    scale = 1.0


class Words(dict):
    pass


@dataclasses.dataclass
class Failure(Exception):
    text: str


@dataclasses.dataclass
class Derived:
    """Keeps more than its fields."""

    once: int

    def __post_init__(self):
        self.twice = 2 * self.once


class Marked(Point):
    """Can keep more than its fields."""


def marked(point):
    point.mark = 1
    return point


@dataclasses.dataclass
class Cached:
    once: int

    @functools.cached_property
    def twice(self):
        return 2 * self.once


@dataclasses.dataclass
class Named(dict):
    name: str = "x"


def local_dataclass():
    @dataclasses.dataclass
    class Local:
        a: int = 1

    return Local()


REFUSED = {
    "extra.x.args.callback: a function (test_what_is_no_data_is_refused) is code": {
        "args": {"callback": lambda: test_what_is_no_data_is_refused}
    },
    "extra.x.f: a builtin_function_or_method (len) is code": {"f": len},
    "extra.x[2]: a type (Custom) is code": [1, 2, Custom],
    "extra.x['a b'].c: a test_values.Custom cannot be stored": {"a b": {"c": Custom()}},
    "extra.x[(1, 2)][0]: a test_values.Custom cannot be stored": {(1, 2): (Custom(),)},
    "extra.x[0]: a Stateful keeps its state in state_dict()": [Stateful()],
    "extra.x.model: a Linear keeps its state in state_dict()": {"model": torch.nn.Linear(1, 1)},
    "extra.x.w: a test_values.Words cannot be stored": {"w": Words()},
    "extra.x.w: a test_values.Named cannot be stored": {"w": Named()},
    "extra.x.rank: a PerRank can stand as a key's value or directly below it": {"rank": PerRank(1)},
    "extra.x[0]: a defaultdict whose factory is no builtin type": [collections.defaultdict(lambda: 1)],
    "extra.x[0]: a test_values:local_dataclass.<locals>.Local cannot be stored": [local_dataclass()],
    "extra.x.r: a numpy.random.RandomState cannot be stored: store its get_state()": {"r": np.random.RandomState(1)},
    "extra.x.r: a NumPy random generator cannot be stored": {"r": np.random.default_rng(1)},
    "extra.x.r: a torch.Generator cannot be stored: store its get_state()": {"r": torch.Generator()},
    "extra.x[0]: an array of object cannot be stored": [np.array([{}], dtype=object)],
    "extra.x[0]: an array of [('a', '<i4')] cannot be stored": [np.zeros(1, dtype=[("a", "i4")])],
    "extra.x[0]: an array of |S0 [2] cannot be stored": [np.zeros(2, dtype=[("a", "S0")])["a"]],
    "extra.x[0]: a range of integers beyond 32768 bits": [range(1 << 40_000)],
    "extra.x[0]: a fraction of integers beyond 32768 bits": [fractions.Fraction(1, 1 << 40_000)],
    "extra.x[0]: a test_values:Failure cannot be stored: it is built on": [Failure("x")],
    "extra.x.args: a test_values:Derived cannot be stored while it has attributes that are no fields: ['twice']": {
        "args": Derived(2)
    },
    "extra.x.p: a test_values:Marked cannot be stored while it has attributes that are no fields: ['mark']": {
        "p": marked(Marked(1.0, 2.0))
    },
    "extra.x[0]: a time.struct_time cannot be stored": [time.gmtime(0)],
    "extra.x[0]: a MaskedArray is more than an array": [np.ma.array([1], mask=[True])],
    "extra.x[0]: a tensor of layout torch.sparse_coo": [torch.eye(2).to_sparse()],
    "extra.x[0]: a Scaled inside a value would come back as a plain tensor": [torch.ones(2).as_subclass(Scaled)],
    "extra.x.a[1]: a Scaled inside a value would come back": {"a": (1, torch.ones(9999).as_subclass(Scaled))},
    "extra.x[0]: a tensor on the meta device": [torch.empty(2, device="meta")],
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_no_data_is_refused(message):
    value = REFUSED[message]
    if "callback" in message:
        value["args"]["callback"] = test_what_is_no_data_is_refused
    with pytest.raises(sf.Invalid) as caught:
        there_and_back(value)
    assert str(caught.value).startswith(message)


def test_cycles_and_depth_are_errors():
    ring = [1]
    ring.append({"ring": (ring,)})
    with pytest.raises(sf.Invalid, match=r"^extra\.x\[1\]\.ring\[0\]: a list that contains itself"):
        there_and_back(ring)
    shared = [1]
    assert there_and_back([shared, shared]) == [[1], [1]]
    deep = []
    for _ in range(DEPTH_MAX - 1):
        deep = [deep]
    assert there_and_back(deep) == deep
    with pytest.raises(sf.Invalid, match="nested deeper"):
        there_and_back([deep])
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(sf.Invalid, match="nested deeper"):
        there_and_back(deep)


class Stranger:
    """What only `lower` knows how to say."""


def nested(dice, depth, strange):
    """A random value, and the same with another thing in place of each stranger."""
    kind = dice.choice(["atom", "stranger"] if depth == 0 else ["atom", "stranger", "list", "tuple", "dict", "dict"])
    if kind == "stranger":
        return strange(), "said otherwise"
    if kind == "atom":
        big = dice.randrange(-(1 << 70), 1 << 70)
        atoms = [None, True, 7, -1, big, 1 << 63, -(1 << 63), 0.5, "", "é", b"", dice.randbytes(5000), b"x" * 4096]
        return (dice.choice(atoms),) * 2
    pairs = [nested(dice, depth - 1, strange) for _ in range(dice.randrange(6))]
    if kind == "dict":
        keys = [
            dice.choice([str, float, lambda n: (n, str(n)), lambda n: (strange(), n)])(n) for n, _ in enumerate(pairs)
        ]
        said = [("said otherwise", n) if isinstance(key, tuple) and isinstance(key[0], Stranger) else key
                for n, key in enumerate(keys)]  # fmt: skip
        return tuple({key: pair[one] for key, pair in zip(names, pairs, strict=True)}
                     for one, names in enumerate((keys, said)))  # fmt: skip
    of = list if kind == "list" else tuple
    return of(pair[0] for pair in pairs), of(pair[1] for pair in pairs)


def strangers(value, trail=()):
    """The trails of all strangers, in order; a key's is that of its value."""
    if isinstance(value, Stranger):
        yield trail
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for step, item in pairs:
        if isinstance(value, dict):
            yield from strangers(step, (*trail, step))
        yield from strangers(item, (*trail, step))


@pytest.mark.parametrize("seed", range(40))
def test_what_stands_beside_a_stranger_is_encoded_as_without_it(seed):
    value, said = nested(random.Random(seed), 5, Stranger)
    trails = []

    def lower(stranger, trail):
        assert type(stranger) is Stranger
        trails.append(trail)
        return "said otherwise"

    encoded = Value(value, lower).encoded()
    assert encoded == Value(said).encoded()
    assert Value(Tagged("tuple", [said])).encoded()[4:] == encoded
    assert trails == list(strangers(value))


def test_what_changes_while_it_is_said_is_encoded_as_it_was():
    """The program's own code runs in between, and may do anything."""
    first, inner, below = [1, Stranger(), 2], {"a": 1, "b": Stranger(), "c": 2}, {}
    below.update({Stranger(): 1, "x": [3]})

    def lower(stranger, trail):
        first.clear()
        inner.update(c=[], d=4)
        inner.pop("a", None)
        below.clear()
        return "said"

    assert decode(Value(first, lower).encoded(), "x") == [1, "said", 2]
    inner.clear()
    inner.update({"a": 1, "b": Stranger(), "c": 2})
    assert decode(Value(inner, lower).encoded(), "x") == {"a": 1, "b": "said", "c": 2}
    below.update({Stranger(): 1, "x": [3]})
    assert decode(Value(below, lower).encoded(), "x") == {"said": 1, "x": [3]}


def test_no_garbage_is_collected_while_a_container_is_walked():
    """Python may collect garbage when an object is made, and a finalizer may change what is walked."""

    class Garbage:
        def __init__(self, target):
            self.target, self.cycle = target, self

        def __del__(self):
            self.target.clear()

    for value in [{(n,): n for n in range(200)}, {(n, "text"): [n] for n in range(200)}]:
        whole = [value, *map(str, range(40))]
        items = list(whole)
        thresholds = gc.get_threshold()
        Garbage(items)
        gc.set_threshold(1, 1, 1)
        try:
            encoded = Value(items).encoded()
        finally:
            gc.set_threshold(*thresholds)
        before, after = Value(whole).encoded(), Value([]).encoded()
        assert encoded in (before, after), "what it held before the finalizer ran, or after"
        gc.collect()
        assert items == []


def test_a_key_is_not_taken_for_another_that_stood_at_its_address():
    """The program's own code runs in between, and what it frees may come to stand where keys were that are known."""

    def key(letter):
        return "".join(["key-", letter])  # a new object each time

    reused = 0
    for number in range(200):
        items = [{key("a"): 1}, Stranger(), {}]
        (at,) = map(id, items[0])

        def lower(stranger, trail, items=items):
            items[0].clear()
            items[2][key("b")] = 2
            return "said"

        encoded = Value(items if number % 2 else [items], lower).encoded()
        expected = [{"key-a": 1}, "said", {"key-b": 2}]
        assert decode(encoded, "x") == (expected if number % 2 else [expected])
        reused += at in map(id, items[2])
    assert reused > 0, "no key came to stand where another had been"


def test_an_encoding_is_a_snapshot():
    inner = [1]
    value = {"a": inner, "b": bytearray(b"12"), "c": b"x" * 5000}
    captured = capture(value, Lowering("extra.x", adapters.active()))
    inner.append(2)
    value["b"][0] = 0
    value["c"] = value["d"] = None
    expected = {"a": [1], "b": bytearray(b"12"), "c": b"x" * 5000}
    assert captured.encoded() == capture(expected, Lowering("extra.x", adapters.active())).encoded()


# What comes back, and what does not


def raised(lowered, **how):
    return raise_value(lowered, Raising("extra.x", adapters.active(), no_reference, **how))


def test_nothing_is_imported_or_called_for_a_checkpoint(monkeypatch):
    dataclass = Tagged("dataclass", ["antigravity:Anything", {}])
    with pytest.raises(
        sf.Unsupported, match=r"extra\.x: a dataclass antigravity:Anything is stored.*import antigravity"
    ):
        raised(dataclass)
    assert "antigravity" not in sys.modules
    for name in [
        "subprocess:Popen",
        "builtins:eval",
        "test_values:Custom",
        "test_values:Colour",
        "os:path.join",
        "test_values:",
    ]:
        with pytest.raises(sf.Unsupported, match="this process has no such class"):
            raised(Tagged("dataclass", [name, {}]))
    lazy, asked = types.ModuleType("lazy_package"), []
    lazy.__getattr__ = asked.append
    monkeypatch.setitem(sys.modules, "lazy_package", lazy)
    with pytest.raises(sf.Unsupported, match="this process has no such class"):
        raised(Tagged("dataclass", ["lazy_package:Thing", {}]))
    assert asked == []
    with pytest.raises(sf.Unsupported, match="no builtin type"):
        raised(Tagged("default_dict", ["subprocess:Popen", {}]))
    with pytest.raises(sf.Unsupported, match="of type subprocess:Popen, which is unknown"):
        raised(Tagged("namespace", ["subprocess:Popen", {}]))
    made = raised(Tagged("dataclass", ["test_values:Arguments", {"lr": -1, "layers": [], "nested": None}]))
    assert made.lr == -1, "__post_init__ was not run"


def test_classes_that_changed_are_unsupported():
    with pytest.raises(sf.Unsupported, match=r"Arguments was saved with the fields \['lr'\]; the class here has"):
        raised(Tagged("dataclass", ["test_values:Arguments", {"lr": 1}]))
    with pytest.raises(sf.Unsupported, match=r"Point was saved with the fields \['x', 'z'\]"):
        raised(Tagged("named_tuple", ["test_values:Point", {"x": 1, "z": 2}]))
    with pytest.raises(sf.Unsupported, match="has no member 'GREEN'"):
        raised(Tagged("enum", ["test_values:Colour", "GREEN", 1]))


@pytest.mark.parametrize(
    ("tag", "payload"),
    [
        ("array", ["torch", "float32", [2], b"123"]),
        ("array", ["torch", "no_such_type", [1], b"1234"]),
        ("array", ["torch", "Tensor", [1], b"1234"]),
        ("array", ["numpy", "O", [1], b"12345678"]),
        ("array", ["numpy", "i4,i4", [1], b"12345678"]),
        ("array", ["numpy", "<f4", [2**62, 0, 2**62], b""]),
        ("array", ["elsewhere", "f4", [1], b"1234"]),
        ("numpy_scalar", ["<f8", b"123"]),
        ("dtype", ["torch", "nn"]),
        ("torch_device", "nowhere:7"),
        ("date", [2026, 13, 1]),
        ("timedelta", [10**30, 0, 0]),
        ("decimal", "one"),
        ("fraction", [1, 0]),
        ("surrogate_str", b"\xff\xff"),
        ("time_zone", "../../etc/passwd"),
        ("time_zone", "Nowhere/At_All"),
        ("path", ["WindowsPath", "c:"]),
        ("set", [[1]]),
    ],
)
def test_payloads_of_which_no_value_can_be_made_are_errors(tag, payload):
    with pytest.raises((sf.Corrupt, sf.Unsupported), match=r"^extra\.x\.a: "):
        raised({"a": Tagged(tag, payload)})


def test_pickle_only_by_name_on_both_sides():
    value = {"a": Words(b=1), "n": 2}
    assert there_and_back(value, pickle=True) == value
    assert type(there_and_back(value, pickle=True)["a"]) is Words
    with pytest.raises(sf.Invalid, match=r"extra\.x\.a: stored as a pickle.*pickle=True"):
        there_and_back(value, pickle=True, loads_pickle=False)
    with pytest.raises(sf.Invalid, match=r"extra\.x\.f: it cannot be pickled either"):
        there_and_back({"f": lambda: 1}, pickle=True)
    with pytest.raises(sf.Invalid, match="sparse_coo"):
        there_and_back([torch.eye(2).to_sparse()], pickle=True)
    with pytest.raises(sf.Unsupported, match="its pickle cannot be loaded"):
        raised(Tagged("pickle", pickle.dumps(Words)[:-4]), pickle=True)


def test_tensors_in_containers_are_found_with_their_trails():
    inner, outer = torch.ones(1), np.ones(2)
    value = {"a": [1, (inner,)], "b": Point(outer, 3), "c": {4: inner}, "d": {inner.dtype}}
    found = {trail: tensor for trail, _, tensor in tensors_in(value, adapters.active())}
    assert found == {("a", 1, 0): inner, ("b", "x"): outer, ("c", 4): inner}


def test_references_and_settling():
    lowering = Lowering(
        "x", adapters.active(), lambda adapter, tensor, trail: ("x", "big") if tensor.numel() > 9 else None
    )
    lowered = decode(capture({"big": torch.ones(10), "small": torch.zeros(2)}, lowering).encoded(), "x")
    assert (lowered["big"].tag, lowered["big"].value) == ("tensor_ref", ["x", "big"])
    big, small = torch.ones(10), torch.full((2,), 9.0)
    settled = []

    def settle(tensor, trail):
        settled.append(trail)
        return small.copy_(tensor)

    back = raise_value(
        lowered, Raising("x", adapters.active(), lambda key, name: {("x", "big"): big}[key, name], settle)
    )
    assert back["big"] is big
    assert back["small"] is small
    assert small.tolist() == [0.0, 0.0]
    assert settled == [("small",)]
