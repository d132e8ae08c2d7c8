"""Stored values that no writer wrote: whatever is in a file, a load raises Corrupt or Unsupported, and takes no longer.

``fuzz/values.py`` runs the same attacks for as long as one likes.
"""

import contextlib
import dataclasses
import enum
import inspect
import random
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import shardfast as sf
import torch
from shardfast import adapters
from shardfast._native import VALUE_BYTES_MAX, VALUE_CONTAINERS_MAX, VALUE_ITEMS_MAX, Tagged, Value
from shardfast.state.values import EQUAL_HASHES_MAX, Lowering, Raising, capture, decode, raise_value
from test_values import ARRAYS, PLAIN, Words

P = (1 << 61) - 1
"""Python's integers that are equal modulo this have one hash."""


def referred(key, name):
    raise KeyError(f"{key}/{name}")


def attempt(data):
    """The value of an encoding, or the kind of error that a load raises; any other exception fails."""
    try:
        return raise_value(decode(data, "extra.x"), Raising("extra.x", adapters.active(), referred))
    except (sf.Corrupt, sf.Unsupported, sf.Invalid) as error:
        assert not isinstance(error, sf.Invalid) or "stored as a pickle" in str(error)
        assert str(error).startswith("extra.x")
        assert len(str(error)) < 4000
        str(error).encode()  # it is sent to other ranks
        return type(error)


def encoded(lowered):
    return Value(lowered).encoded()


# What was found by looking

MANY = dict.fromkeys(map(str, range(9999)))

STORED = {
    "a zone that is a directory": (Tagged("time_zone", "America"), sf.Unsupported),
    "a zone that is another file": (Tagged("time_zone", "tzdata.zi"), sf.Unsupported),
    "a zone without end": (Tagged("time_zone", "A" * 5000), sf.Unsupported),
    "a zone with a NUL": (Tagged("time_zone", "Europe/\0"), sf.Unsupported),
    "a zone without a name": (Tagged("time_zone", ""), sf.Unsupported),
    "an offset of days": (Tagged("time_zone", 1 << 62), sf.Corrupt),
    "a tuple as a named one": (Tagged("named_tuple", ["builtins:tuple", {}]), sf.Unsupported),
    "a time as a named tuple": (Tagged("named_tuple", ["time:struct_time", {}]), sf.Unsupported),
    "a size as a named tuple": (Tagged("named_tuple", ["torch:Size", {}]), sf.Unsupported),
    "a module as a dataclass": (Tagged("dataclass", ["torch.nn:Module", {}]), sf.Unsupported),
    "an exception as a dataclass": (Tagged("dataclass", ["test_values_hostile:Failure", {"code": 1}]), sf.Unsupported),
    "an enum without members": (Tagged("enum", ["enum:Enum", None, 5]), sf.Corrupt),
    "an enum whose code fails": (Tagged("enum", ["test_values_hostile:Failing", None, 5]), sf.Corrupt),
    "a dataclass whose code fails": (Tagged("dataclass", ["test_values_hostile:Closed", {"a": 1}]), sf.Corrupt),
    "a tensor of a shape beyond all": (Tagged("array", ["torch", "float32", [0, 1 << 62, 1 << 62], b""]), sf.Corrupt),
    "an array of a shape beyond all": (Tagged("array", ["numpy", "<f4", [0, 1 << 62, 1 << 62], b""]), sf.Corrupt),
    "an array of nothings": (Tagged("array", ["numpy", "|S0", [1 << 62], b""]), sf.Unsupported),
    "an array of too many dimensions": (Tagged("array", ["numpy", "<f4", [1] * 1000, b"1234"]), sf.Corrupt),
    "a type in other digits": (Tagged("dtype", ["numpy", "<f\u0664"]), sf.Unsupported),
    "an attribute that is imported": (Tagged("dtype", ["torch", "_inductor"]), sf.Unsupported),
    "a device beyond all": (Tagged("torch_device", "cuda:" + "9" * 50), sf.Unsupported),
    "a year beyond all": (Tagged("date", [10**30, 1, 1]), sf.Corrupt),
    "a decimal of no number": (Tagged("decimal", "one"), sf.Corrupt),
    "a fraction that takes an hour": (Tagged("fraction", [(1 << 40_000) + 1, 3]), sf.Unsupported),
    "a range that takes an hour": (Tagged("range", [0, 1 << 40_000, 3]), sf.Unsupported),
    "a key that is a set": ({Tagged("set", []): 1}, sf.Corrupt),
    "an item that is a list": (Tagged("set", [[]]), sf.Corrupt),
    "a key that signals": ({Tagged("decimal", "sNaN"): 1}, sf.Corrupt),
    "a moment as a key, out of range in its zone": (
        {Tagged("datetime", [1, 1, 1, 0, 0, 0, 0, 0, Tagged("time_zone", 3_600_000_000)]): 1, "a": 2},
        None,
    ),
    "a tensor that is nowhere": (Tagged("tensor_ref", ["extra", "gone"]), sf.Corrupt),
    "below a key of 5,000 digits": ({10**5000: Tagged("date", [1, 99, 1])}, sf.Corrupt),
    "below a tuple of such keys": ({Tagged("tuple", [10**5000]): Tagged("date", [1, 99, 1])}, sf.Corrupt),
    "below a key of a million letters": ({"k" * 1_000_000: Tagged("date", [1, 99, 1])}, sf.Corrupt),
    "a class of a million letters": (Tagged("enum", ["a:" + "b" * 1_000_000, None, 1]), sf.Unsupported),
    "fields without end": (Tagged("named_tuple", ["test_values:Point", MANY]), sf.Unsupported),
    "a pickle": (Tagged("pickle", b""), sf.Invalid),
}  # fmt: skip


@dataclasses.dataclass
class Failure(Exception):
    """Cannot be made of its fields alone."""

    code: int = 1


class Failing(enum.Enum):
    """Runs code of its own, which fails."""

    ONE = 1

    @classmethod
    def _missing_(cls, value):
        raise RuntimeError("no such thing")


@dataclasses.dataclass
class Closed:
    a: int = 1


Closed.a = property(lambda self: 1)  # cannot be given its field


@pytest.mark.parametrize("name", STORED)
def test_what_no_writer_wrote_is_corrupt_or_unsupported(name):
    lowered, expected = STORED[name]
    outcome = attempt(encoded(lowered))
    assert outcome is expected if expected is not None else isinstance(outcome, dict)


def test_a_foreign_exception_is_corrupt_whatever_it_is(monkeypatch):
    """The last line, for what no other check foresees."""

    def fail(self, lowered, trail):
        raise SystemError("unforeseen \ud800")

    monkeypatch.setattr("shardfast.state.values._Raise.value", fail)
    assert attempt(encoded(1)) is sf.Corrupt


def test_the_error_names_where_in_the_value_it_stands():
    bad = Tagged("array", ["torch", "float32", [0, 1 << 62, 1 << 62], b""])
    for value, place in [
        ({"a": [0, bad]}, "extra.x.a[1]: no array"),
        ({10**5000: Tagged("tuple", [bad])}, "extra.x[<int of 16610 bits>][0]: no array"),
        ([{Tagged("tuple", [[]]): 1}], "extra.x[0]: no dict"),
    ]:
        with pytest.raises(sf.Corrupt) as caught:
            raise_value(decode(encoded(value), "extra.x"), Raising("extra.x", adapters.active(), referred))
        assert str(caught.value).startswith(f"{place} can be made of what is stored: ")


def test_numbers_that_a_tensor_cannot_hold_are_refused(tmp_path):
    for number, (value, kind) in enumerate([(1 << 70, torch.int64), (10**5000, torch.float32), (10**5000, torch.bool)]):
        sf.save(tmp_path / str(number), {"extra": {"n": value}})
        with contextlib.suppress(sf.Invalid):
            sf.load(tmp_path / str(number), {"extra": {"n": torch.zeros((), dtype=kind)}})


def test_a_run_goes_back_past_a_value_of_which_nothing_can_be_made(tmp_path):
    with sf.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"extra": {"when": 1}})
        ckpt.save(2, {"extra": {"when": Tagged("set", [[]])}})
    state = {"extra": {"when": None}}
    with pytest.raises(sf.Corrupt, match=r"extra\.when: no set can be made"):
        sf.Checkpointer(tmp_path).restore(state)
    assert sf.Checkpointer(tmp_path).restore(state, older=True) == 1
    assert state == {"extra": {"when": 1}}


def test_a_value_too_deep_for_the_stack_is_unsupported():
    deep = Tagged("tuple", [])
    for _ in range(60):
        deep = Tagged("tuple", [deep])

    data, limit, here = encoded(deep), sys.getrecursionlimit(), len(inspect.stack())
    assert isinstance(attempt(data), tuple)
    sys.setrecursionlimit(here + 100)
    try:
        outcome = attempt(data)
    finally:
        sys.setrecursionlimit(limit)
    assert outcome is sf.Unsupported


def own_value(rank, world, url):
    value = sf.PerRank(Tagged("time_zone", "America") if rank == 1 else 7)
    sf.save(url, {"extra": {"zone": value, "n": 3}}, timeout_s=20)
    state = {"extra": {"zone": sf.PerRank("as before"), "n": "as before"}}
    outcomes = []
    for load in (sf.load, lambda url, state, timeout_s: sf.Checkpointer(url).restore(state)):
        try:
            load(url, state, timeout_s=20)
        except Exception as error:
            outcomes.append((type(error).__name__, str(error)))
    return outcomes[:1], state["extra"]["zone"].value, state["extra"]["n"]


def test_a_value_that_one_rank_cannot_make_fails_all_ranks_alike_and_changes_nothing(ranks, tmp_path):
    one, other = ranks(2)(own_value, str(tmp_path / "one"))
    assert one == other
    ((kind, message),), *before = one
    assert kind == "Unsupported"
    assert "extra.zone: this system knows no time zone 'America'" in message
    assert before == ["as before", "as before"]


# Sizes


def test_a_value_beyond_the_limits_is_saved_and_loaded_by_none(tmp_path):
    many = [None] * (1 << 20)
    empty = [[]] * (1 << 20)
    for value, what in [
        ([many] * 16, f"items or more: expected at most {VALUE_ITEMS_MAX}"),
        ([empty, empty], f"containers or more: expected at most {VALUE_CONTAINERS_MAX}"),
        ([empty, [(1,)] * (1 << 19), 3], f"containers or more: expected at most {VALUE_CONTAINERS_MAX}"),
        ([{(): many}] * 16, f"items or more: expected at most {VALUE_ITEMS_MAX}"),
    ]:
        with pytest.raises(sf.Invalid, match=rf"^extra\.x: .*{what}: store what is large as tensors"):
            capture(value, Lowering("extra.x", adapters.active()))
    for item, count in ((b"\xf6", (1 << 24) + 1), (b"\x80", 10_000_000)):  # nulls, empty lists
        assert attempt(b"\x9a" + count.to_bytes(4, "big") + item * count) is sf.Unsupported


def test_large_values_come_back():
    value = [list(range(1 << 20)), [[]] * (1 << 18), {"a": ()}]
    data = capture(value, Lowering("extra.x", adapters.active())).encoded()
    assert attempt(data) == value


def test_an_array_too_large_for_a_value_is_refused_before_it_is_copied(tmp_path):
    large = np.broadcast_to(np.float32(1), (1 << 28) + 1)  # no memory behind it
    with pytest.raises(sf.Invalid, match=r"^extra\.x\[0\]: an array of float32 .* make it an entry of its own"):
        sf.save(tmp_path / "one", {"extra": {"x": [large]}})
    wide = np.broadcast_to(np.complex128(1), (1 << 26) + 1)
    with pytest.raises(sf.Invalid, match=r"^extra\.x: an array of complex128 .* view\(\)"):
        sf.save(tmp_path / "two", {"extra": {"x": wide}})
    tensor = torch.ones(1).expand((1 << 28) + 1)
    with pytest.raises(sf.Invalid, match=r"^extra\.x\[0\]: it has \d+ bytes, and a value at most"):
        sf.save(tmp_path / "three", {"extra": {"x": sf.PerRank([tensor])}})
    assert large.nbytes > VALUE_BYTES_MAX
    assert list(tmp_path.iterdir()) == []


class Blunt(int):
    """Hashes as badly as a class may."""

    def __hash__(self):
        return 7


def test_keys_that_collide_are_refused_before_they_cost_quadratic_time():
    """One more than may be, and 26,000 of them, which took seconds."""
    for count in (EQUAL_HASHES_MAX, EQUAL_HASHES_MAX + 1, 26_000):
        expected = sf.Unsupported if count > EQUAL_HASHES_MAX else None
        keys = [P * (9 + n) for n in range(count)]
        for data in (
            dict_of([encoded(key) for key in keys]),
            encoded(Tagged("set", keys)),
            dict_of([encoded(Tagged("tuple", [key])) for key in keys]),
            dict_of([encoded(Tagged("fraction", [key, 1])) for key in keys]),
        ):
            outcome = attempt(data)
            assert outcome is expected or (expected is None and len(outcome) == count)
        for value in (dict.fromkeys(keys), {"in": {(key,): 1 for key in keys}}, [set(keys)]) if count < 1000 else ():
            save = (
                contextlib.nullcontext() if expected is None else pytest.raises(sf.Invalid, match="have the same hash")
            )
            with save:
                capture(value, Lowering("extra.x", adapters.active()))


def test_large_dicts_of_all_honest_keys_pass():
    dice = random.Random(0)
    for value in (
        {dice.randrange(-(1 << 63), 1 << 63): 1 for _ in range(20_000)},
        {dice.randrange(1 << 200): 1 for _ in range(20_000)},
        {(n % 100, n // 100): n for n in range(20_000)},
        {n / 7: n for n in range(20_000)},
        {2.0**n: n for n in range(-1000, 1000)},
        {(n, str(n), 2.5 * n): None for n in range(20_000)},
        {(n,) for n in range(20_000)},
        {frozenset({n}): n for n in range(20_000)},
    ):
        assert attempt(capture(value, Lowering("extra.x", adapters.active())).encoded()) == value


def dict_of(keys):
    return b"\xba" + len(keys).to_bytes(4, "big") + b"".join(key + b"\xf6" for key in keys)


# What chance finds


EDGES = [0, 1, -1, 5, 60, 255, 1 << 31, 1 << 62, (1 << 63) - 1, -(1 << 63), 1 << 64, P, 10**5000, -(10**40)]
SHORT_EDGES = [edge for edge in EDGES if -(1 << 63) <= edge < 1 << 63]
TEXTS = [
    "",
    "a",
    "x" * 300,
    "\0",
    "é",
    "America",
    "UTC",
    "Europe/Berlin",
    "../x",
    "NaN",
    "1e999999999",
    "one",
    "<f4",
    "|S0",
]
TEXTS += [
    "<U3",
    "<M8[s]",
    "float32",
    "float4_e2m1fn_x2",
    "bool",
    "cuda:1",
    "meta",
    "torch",
    "numpy",
    "extra",
    "PosixPath",
]
TEXTS += ["PureWindowsPath", "|O8", "|V7", "complex128", "builtins:list", "types:SimpleNamespace"]
CLASSES = [
    "builtins:tuple",
    "builtins:type",
    "builtins:object",
    "time:struct_time",
    "torch:Size",
    "enum:Enum",
    "enum:Flag",
]
CLASSES += [
    "test_values:Colour",
    "test_values:Access",
    "test_values:Point",
    "test_values:Arguments",
    "test_values:Frozen",
]
CLASSES += ["test_values_hostile:Failing", "nowhere:Thing", "datetime:datetime", "torch:Tensor", "collections:Counter"]
FORMS = {
    "tuple": "L", "set": "L", "frozenset": "L", "bytearray": "B", "complex": "FF", "surrogate_str": "B",
    "range": "III", "slice": "AAA", "ellipsis": "N", "ordered_dict": "D", "default_dict": "CD", "counter": "D",
    "deque": "SL", "named_tuple": "CM", "namespace": "CM", "dataclass": "CM", "enum": "CTA", "path": "TT",
    "datetime": "IIIIIIIIZ", "date": "III", "time": "IIIIIZ", "timedelta": "III", "time_zone": "Z", "decimal": "T",
    "fraction": "II", "uuid": "U", "tensor_ref": "TT", "array": "TTHB", "numpy_scalar": "TB", "dtype": "TT",
    "torch_size": "H", "torch_device": "T", "pickle": "B", "attributed": "OM",
}  # fmt: skip
"""Each tag's payload, loosely: what is of another form is refused when it is encoded."""

SINGLE = {"tuple", "set", "frozenset", "bytearray", "surrogate_str", "ellipsis", "ordered_dict", "counter", "time_zone"}
SINGLE |= {"decimal", "uuid", "torch_size", "torch_device", "pickle"}


def part(dice, form, depth):
    """A piece of a payload."""
    if form in "ADLM" and depth == 0:
        form = {"A": "I"}.get(form, "0" + form)
    below = dice.randrange(4)
    made = {
        "I": lambda: dice.choice(EDGES) if dice.random() < 0.4 else dice.randrange(60),
        "F": lambda: dice.choice([0.0, -0.0, 1e308, float("nan"), float("inf"), 0.1]),
        "T": lambda: dice.choice(TEXTS),
        "B": lambda: dice.choice([b"", b"\xed\xa0\x80", *map(dice.randbytes, (4, 16, dice.randrange(64)))]),
        "N": lambda: None,
        "C": lambda: dice.choice(CLASSES) if dice.random() < 0.8 else a_class(dice),
        "S": lambda: dice.choice([None, 0, 3, (1 << 63) - 1]),
        "U": lambda: dice.randbytes(16),
        "Z": lambda: dice.choice([None, Tagged("time_zone", dice.choice([*TEXTS, *SHORT_EDGES]))]),
        "H": lambda: [dice.choice([0, 1, 2, 4, 1 << 40, 1 << 62]) for _ in range(below)],
        "A": lambda: lowered(dice, depth - 1),
        "L": lambda: [lowered(dice, depth - 1) for _ in range(below)],
        "D": lambda: {a_key(dice, depth): lowered(dice, depth - 1) for _ in range(below)},
        "O": lambda: Tagged(dice.choice(["ordered_dict", "counter"]), part(dice, "D", depth)),
        "M": lambda: {dice.choice([*TEXTS, "x", "y", "lr"]): lowered(dice, depth - 1) for _ in range(below)},
        "0L": list, "0D": dict, "0M": dict,
    }  # fmt: skip
    return made[form]()


def a_key(dice, depth):
    return lowered(dice, dice.randrange(depth) if depth else 0, True)


def a_class(dice):
    """The name of any class that there is."""
    module = sys.modules[dice.choice(sorted(sys.modules))]
    classes = [kind for kind in vars(module).values() if type(kind) is type] if module is not None else []
    if not classes:
        return "builtins:object"
    kind = dice.choice(classes)
    return f"{kind.__module__}:{kind.__qualname__}"


def lowered(dice, depth, is_key=False):
    """A lowered value: of a form that decoding takes, mostly, and of a content that no writer wrote."""
    if dice.random() < (0.3 if depth else 0.7):
        return part(dice, dice.choice("IFTBN"), depth)
    if not is_key and depth and dice.random() < 0.2:
        return part(dice, dice.choice("LD"), depth)
    tag = dice.choice(sorted(FORMS))
    forms = FORMS[tag]
    if tag == "time_zone":
        return part(dice, "Z", depth)
    payload = part(dice, forms, depth) if tag in SINGLE else [part(dice, form, depth) for form in forms]
    if tag == "array" and dice.random() < 0.7:
        payload[0], payload[1] = dice.choice(
            [("torch", "float32"), ("numpy", "<f4"), ("numpy", "|S0"), ("numpy", "<U1"), ("torch", "bool")]
        )
    if tag == "dtype":
        payload[0] = dice.choice(["torch", "numpy"])
    return Tagged(tag, payload)


def made_by_grammar(dice):
    """The encoding of a lowered value; ``None`` for one that cannot be encoded."""
    try:
        return encoded({"a": [lowered(dice, 3)], "b": lowered(dice, 2)})
    except (sf.Invalid, TypeError):
        return None


def mutated(dice, seeds):
    """An honest encoding with one to four wounds, as Rust's tests give them."""
    data, other = bytearray(dice.choice(seeds)), dice.choice(seeds)
    for _ in range(1 + dice.randrange(4)):
        if not data:
            break
        at = dice.randrange(len(data))
        end = at + 1 + dice.randrange(16)
        wound = dice.randrange(6)
        if wound == 0:
            data[at] ^= 1 << dice.randrange(8)
        elif wound == 1:
            data[at] = dice.randrange(256)
        elif wound == 2:
            del data[at:end]
        elif wound == 3:
            data[at:at] = data[at:end] * (1 + dice.randrange(4))
        elif wound == 4:
            data[at : at + 8] = dice.choice(SHORT_EDGES).to_bytes(8, "big", signed=True)
        else:
            start = dice.randrange(len(other)) if other else 0
            data[at:at] = other[start : start + 1 + dice.randrange(64)]
    return bytes(data)


def table_of_tags():
    """The rows of the table of tags in the specification."""
    text = (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line.startswith("| 57")]


def honest_seeds():
    """Encodings of one value of every tag and of every framework."""
    values = [*PLAIN, *ARRAYS, Words(a=1)]
    return [capture(value, Lowering("extra.x", adapters.active(), pickle=True)).encoded() for value in values]


def attack(seed, seeds):
    """One attempt; what came of it."""
    dice = random.Random(seed)
    data = made_by_grammar(dice) if seed % 2 else mutated(dice, seeds)
    if data is None:
        return "not encoded"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy's, of odd types
        outcome = attempt(data)
    is_error = any(outcome is kind for kind in (sf.Corrupt, sf.Unsupported, sf.Invalid))
    return outcome.__name__ if is_error else "taken"


@pytest.mark.parametrize("start", range(0, 12_000, 3_000))
def test_nothing_but_our_errors_comes_of_damaged_values(start):
    seeds = honest_seeds()
    outcomes = {}
    for seed in range(start, start + 3_000):
        try:
            outcome = attack(seed, seeds)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error!r:.500}") from error
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    assert all(outcomes.get(kind, 0) > 20 for kind in ("Corrupt", "Unsupported", "taken")), outcomes


def test_the_attacks_know_every_tag():
    names = {line.split("`")[1] for line in table_of_tags()}
    assert set(FORMS) == names
    tags = {int(line.split("|")[1]) for line in table_of_tags()}
    found = {tag for tag in tags for seed in honest_seeds() if b"\xd9" + tag.to_bytes(2, "big") in seed}
    assert tags - found == {57626}  # a reference needs a tensor leaf beside the value
