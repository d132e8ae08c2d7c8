"""Optimizers that are made at random: all that one says of itself comes back bit for bit, or it is refused by name."""

import itertools
import os
import struct
from collections import Counter
from dataclasses import dataclass, field

import shardfast as sf
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

CASES = int(os.environ.get("SHARDFAST_GENERATED_OPTIMIZERS", "500"))
"""Optimizers of a usual run; a campaign sets more."""

# Recipes


@dataclass(frozen=True)
class Numbers:
    """A tensor to be made; without a shape it has that of its parameter."""

    dtype: torch.dtype
    shape: tuple[int, ...] | None
    seed: int


@dataclass(frozen=True)
class Own:
    """What a class says of itself beside PyTorch's own words, where, and whether its load takes it back."""

    values: dict = field(default_factory=dict)
    place: str = "top"
    load: str = "takes"


@dataclass(frozen=True)
class Wrapper:
    own: Own
    holds: str
    shares: bool


@dataclass(frozen=True)
class Recipe:
    shapes: list
    base: str
    entries: list
    of_none: dict
    of_group: dict
    own: Own
    wrappers: list
    hooked: bool
    is_fresh: bool


DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool)
SHAPES = ((), (1,), (3,), (2, 3), (0,))
PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.binary(max_size=3), st.just(-0.0)
)
NUMBERS = st.builds(
    Numbers, st.sampled_from(DTYPES), st.one_of(st.none(), st.none(), st.sampled_from(SHAPES)), st.integers(0, 99)
)
USUAL = (
    "step",
    "exp_avg",
    "momentum_buffer",
    "a.b",
    "",
    "%",
    "a%2Eb",
    "params",
    "state",
    "0",
    "0.weight",
    "é",
    "a/b",
    "..",
)
TEXTS = st.one_of(st.sampled_from(USUAL), st.sampled_from(USUAL), st.text(max_size=3))
ODD = st.sampled_from([0, 7, True, None, b"m", 1.5, ("m", 1)])
KEYS = st.one_of(TEXTS, TEXTS, TEXTS, TEXTS, TEXTS, TEXTS, ODD)


def nested(leaves, keys):
    def around(inner):
        some = st.lists(inner, max_size=3)
        return st.one_of(some, some.map(tuple), st.dictionaries(keys, inner, max_size=3))

    return st.one_of(leaves, leaves, leaves, st.recursive(leaves, around, max_leaves=4))


VALUES = nested(st.one_of(PLAIN, NUMBERS, NUMBERS), KEYS)
OWN = st.builds(
    Own,
    st.dictionaries(
        TEXTS.filter(lambda key: key not in ("state", "param_groups", "params")),
        nested(st.one_of(PLAIN, PLAIN, PLAIN, NUMBERS), KEYS),
        max_size=2,
    ),
    st.sampled_from(["top", "top", "nested", "state", "group"]),
    st.sampled_from(["takes", "takes", "takes", "ignores", "inherits"]),
)
NOTHING = st.just(Own())
RECIPES = st.builds(
    Recipe,
    shapes=st.lists(st.sampled_from([(1,), (3,), (2, 3), ()]), min_size=1, max_size=3),
    base=st.sampled_from(["made", "made", "sgd", "adamw"]),
    entries=st.lists(st.dictionaries(KEYS, VALUES, max_size=3), max_size=3),
    of_none=st.one_of(st.just({}), st.dictionaries(KEYS, VALUES, max_size=2)),
    of_group=st.one_of(st.just({}), st.dictionaries(TEXTS, nested(st.one_of(PLAIN, PLAIN, NUMBERS), KEYS), max_size=2)),
    own=st.one_of(NOTHING, NOTHING, OWN),
    wrappers=st.lists(
        st.builds(
            Wrapper, st.one_of(NOTHING, OWN), st.sampled_from(["attribute", "list", "dict", "object"]), st.booleans()
        ),
        max_size=3,
    ),
    hooked=st.sampled_from([False, False, False, True]),
    is_fresh=st.booleans(),
)


# What a recipe makes


def made(value, parameter, is_blank):
    """A value of a recipe; a blank one is what a class begins with."""
    if isinstance(value, Numbers):
        shape = tuple(parameter.shape) if value.shape is None else value.shape
        numbers = torch.rand(shape, generator=torch.Generator().manual_seed(value.seed)) * (0 if is_blank else 50)
        return numbers.to(value.dtype)
    if isinstance(value, (list, tuple)):
        return type(value)(made(one, parameter, is_blank) for one in value)
    if isinstance(value, dict):
        return {key: made(one, parameter, is_blank) for key, one in value.items()}
    return type(value)() if is_blank and value is not None else value


def add(said, own, values):
    """Says the values of a class where its recipe wants it."""
    if own.place == "nested":
        return {**said, "of its own": values}
    if own.place == "state":
        return {**said, "state": {**said.get("state", {}), **values}}
    if own.place == "group":
        return {**said, "param_groups": [{**group, **values} for group in said.get("param_groups", [])]}
    return {**said, **values}


def taken(said, own):
    """What was said of a class's own values, and the rest."""
    if own.place == "nested":
        return said["of its own"], {key: one for key, one in said.items() if key != "of its own"}
    if own.place == "state":
        rest = {key: one for key, one in said["state"].items() if key not in own.values}
        return {key: said["state"][key] for key in own.values}, {**said, "state": rest}
    if own.place == "group":
        groups = said["param_groups"]
        rest = [{key: one for key, one in group.items() if key not in own.values} for group in groups]
        return {key: groups[0][key] for key in own.values}, {**said, "param_groups": rest}
    return {key: said[key] for key in own.values}, {key: one for key, one in said.items() if key not in own.values}


def with_own(base, own):
    """A class that says its own values, and loads them as its recipe has it."""
    if not own.values:
        return base

    class Telling(base):
        def state_dict(self):
            return add(super().state_dict(), own, self.own)

    class Loading(Telling):
        def load_state_dict(self, said):
            values, rest = taken(said, own)
            super().load_state_dict(rest)
            if own.load == "takes":
                self.own = values

    return Telling if own.load == "inherits" else Loading


class Made(Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure=None):
        pass


class Box:
    pass


class Around(Optimizer):
    def __init__(self, inside, wrapper):
        self.defaults, self.param_groups = inside.defaults, inside.param_groups
        self.state = inside.state if wrapper.shares else {}
        box = Box()
        box.optimizer = inside
        self.held = {"attribute": inside, "list": [inside], "dict": {"one": inside}, "object": box}[wrapper.holds]
        self.inside = lambda: inside

    def state_dict(self):
        return self.inside().state_dict()

    def load_state_dict(self, said):
        self.inside().load_state_dict(said)


BASES = {"made": Made, "sgd": SGD, "adamw": AdamW}


def realised(recipe, is_blank):
    """A module and an optimizer; blank ones are those of a program that begins anew."""
    torch.manual_seed(0)
    module = nn.ParameterDict({f"p{i}": torch.randn(shape) for i, shape in enumerate(recipe.shapes)})
    options = {"momentum": 0.9, "lr": 0.1} if recipe.base == "sgd" else {}
    optimizer = with_own(BASES[recipe.base], recipe.own)(module.parameters(), **options)
    parameters = list(module.values())
    if not (is_blank and recipe.is_fresh):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 0.0 if is_blank else 0.5)
        optimizer.step()
        for parameter, entries in zip(parameters, recipe.entries, strict=False):
            if entries:  # a parameter with a state of nothing is one without a state
                optimizer.state[parameter].update(made(entries, parameter, is_blank))
        optimizer.state.update(made(recipe.of_none, parameters[0], is_blank))
    optimizer.param_groups[0].update(
        {key: one for key, one in made(recipe.of_group, parameters[0], is_blank).items() if key != "params"}
    )
    if recipe.hooked:
        optimizer.register_state_dict_post_hook(lambda _, said: {**said, "hooked": 3})
    for own, wrapper in [(recipe.own, None), *((one.own, one) for one in recipe.wrappers)]:
        if wrapper is not None:
            optimizer = with_own(Around, own)(optimizer, wrapper)
        optimizer.own = made(own.values, parameters[0], is_blank)
    return module, optimizer


# The verdict


def difference(one, other, place="state_dict()"):
    """Where two state dicts differ in any type or bit, or nothing."""
    if type(one) is not type(other):
        return f"{place}: {one!r} and {other!r}"
    if isinstance(one, torch.Tensor):
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return f"{place}: {one} and {other}"
        same = torch.equal(one.detach().reshape(-1).view(torch.uint8), other.detach().reshape(-1).view(torch.uint8))
        return "" if same else f"{place}: {one} and {other}"
    if isinstance(one, dict):
        ours, theirs = ({(type(key), key): value for key, value in said.items()} for said in (one, other))
        if ours.keys() != theirs.keys():
            return f"{place}: {list(one)} and {list(other)}"
        found = (difference(value, theirs[key], f"{place}[{key[1]!r}]") for key, value in ours.items())
        return next(filter(None, found), "")
    if isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return f"{place}: {one} and {other}"
        found = (difference(*pair, f"{place}[{i}]") for i, pair in enumerate(zip(one, other, strict=True)))
        return next(filter(None, found), "")
    is_same = struct.pack("d", one) == struct.pack("d", other) if isinstance(one, float) else one == other
    return "" if is_same else f"{place}: {one!r} and {other!r}"


def expect_named(error):
    """That a refusal names the optimizer's leaf, or the place in the state."""
    assert "optimizer" in str(error), error


def test_all_that_a_generated_optimizer_says_comes_back_or_is_refused_by_name():
    numbers, verdicts = itertools.count(), Counter()

    def verdict(recipe):
        url = f"memory://generated-{os.getpid()}/{next(numbers)}"
        module, optimizer = realised(recipe, is_blank=False)
        said = optimizer.state_dict()
        try:
            sf.save(url, {"model": module, "optimizer": optimizer})
        except sf.Error as error:
            expect_named(error)
            return "refused by the save"
        into, other = realised(recipe, is_blank=True)
        try:
            sf.load(url, {"model": into, "optimizer": other})
        except sf.Error as error:
            expect_named(error)
            return "refused by the load"
        found = difference(said, other.state_dict()) or difference(said, optimizer.state_dict())
        assert not found, found
        return "came back"

    @settings(
        max_examples=CASES,
        deadline=None,
        database=None,
        derandomize=CASES == 500,
        suppress_health_check=list(HealthCheck),
    )
    @given(RECIPES)
    def check(recipe):
        verdicts[verdict(recipe)] += 1

    check()
    assert verdicts["came back"] > 0.2 * verdicts.total(), verdicts
