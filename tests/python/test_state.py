"""States as leaves and back, without an engine: the checkpoint here is a dict of bytes, its ranks are simulated."""

import argparse
import ctypes
import math
import random

import numpy as np
import pytest
import shardfast as sf
import torch
from shardfast.state.catalog import (
    AliasLeaf,
    ObjectLeaf,
    SavedAlias,
    SavedObject,
    SavedTensor,
    TensorLeaf,
    item_bytes,
)
from shardfast.state.description import describe
from shardfast.state.entries import KEPT_BYTES_MAX, walk
from shardfast.state.load_plan import LoadPlan, Options
from shardfast.state.match import Match
from shardfast.state.sharded import Pieces
from torch import nn


def block(lengths, pointer, strides_bytes, item) -> np.ndarray:
    """The memory of a block, its elements as bytes in a last dimension."""
    extent = sum((length - 1) * stride for length, stride in zip(lengths, strides_bytes, strict=True)) + item
    memory = (ctypes.c_char * extent).from_address(pointer)
    return np.ndarray((*lengths, item), np.uint8, memory, strides=(*strides_bytes, 1))


def peek(leaf: TensorLeaf) -> bytes:
    """The bytes of a whole tensor."""
    item = item_bytes(leaf.layout.dtype)
    blocks = zip(leaf.layout.regions, leaf.source.memory, strict=True)
    return b"".join(block(region.lengths, m.pointer, m.strides_bytes, item).tobytes() for region, m in blocks)


class Stored:
    """What a save of these states, one for each rank, would leave behind."""

    def __init__(self, *states: object, pickle: bool = False) -> None:
        self.world = len(states)
        self.described = [describe(state, pickle=pickle) for state in states]
        merged: dict = {}
        for rank, leaves in enumerate(self.described):
            for leaf in leaves:
                merged.setdefault((leaf.key, leaf.name), []).append((rank, leaf))
        self.leaves: list = []
        self.hidden: set[str] = set()  # leaves that a damaged checkpoint lost
        self.bytes: dict[tuple[int, int], bytes] = {}
        for index, ((key, name), held) in enumerate(sorted(merged.items())):
            self.leaves.append(self._saved(index, key, name, held))

    def _saved(self, index, key, name, held):
        leaf = held[0][1]
        assert all(type(other) is type(leaf) for _, other in held), f"ranks disagree about {key}/{name}"
        if isinstance(leaf, TensorLeaf):
            self.bytes[index, 0] = data = peek(leaf)
            return SavedTensor(index, key, name, leaf.layout.text, leaf.layout.dtype, leaf.layout.shape, len(data))
        if isinstance(leaf, AliasLeaf):
            return SavedAlias(index, key, name, "", leaf.of_key, leaf.of_name)
        assert isinstance(leaf, ObjectLeaf)
        copies: dict[bytes, list] = {}
        for rank, other in held:
            copies.setdefault(other.value.encoded(), []).append((rank, rank + 1))
        for number, encoded in enumerate(copies):
            self.bytes[index, number] = encoded
        return SavedObject(index, key, name, "", tuple((tuple(r), len(e)) for e, r in copies.items()))

    def names(self) -> dict[str, str]:
        kinds = {SavedTensor: "tensor", SavedObject: "object", SavedAlias: "alias"}
        return {f"{leaf.key}/{leaf.name}": kinds[type(leaf)] for leaf in self.leaves}

    def match(self, state, rank=0, world=1, **options) -> Match:
        only = options.pop("only", ())
        chosen = Options(only=(only,) if isinstance(only, str) else tuple(only), **options)
        leaves = [leaf for leaf in self.leaves if leaf.name not in self.hidden]
        ranks = {"rank": rank, "world": world, "saved_world": self.world}
        return Match(Pieces(walk(state), chosen), leaves, url="memory://here", step=7, **ranks)

    def load(self, state, rank=0, world=1, **options) -> LoadPlan:
        """What one rank's load does; the other ranks' opinions are taken to be the same."""
        match = self.match(state, rank, world, **options)
        touched, problems = match.findings()
        untouched = [leaf.index for leaf in self.leaves if leaf.index not in touched]
        match.conclude(untouched, [(range(world), problem) for problem in problems])
        match.plan.expect_no_problems()
        bound = match.installation.bind()
        for want in bound.wants:
            self._fill(*want)
        match.installation.make([self.bytes[wanted] for wanted in bound.values])
        match.installation.install()
        return match.plan

    def _fill(self, index, offsets, lengths, pointer, strides_bytes) -> None:
        leaf = self.leaves[index]
        assert (tuple(lengths), set(offsets) <= {0}) == (leaf.shape, True), "plain tensors are whole"
        there = block(lengths, pointer, strides_bytes, item_bytes(leaf.dtype))
        there[...] = np.frombuffer(self.bytes[index, 0], np.uint8).reshape(there.shape)


def big(fill: float = 1.0) -> torch.Tensor:
    """A tensor that is never kept as part of a value."""
    return torch.full((KEPT_BYTES_MAX // 4 // 512 + 1, 512), fill)


# Names


class Tied(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        if tied:
            self.head.weight = self.emb.weight


def test_each_kind_of_entry_has_its_names():
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = {
        "model": model,
        "optimizer": optimizer,
        "ema": {"emb.weight": torch.ones(5, 3), "deep": {"er": {"w": torch.ones(2)}}},
        "tensor": torch.ones(2),
        "list": [1, "a"],
        "extra": {
            "step": 3,
            "args": argparse.Namespace(lr=0.1),
            "nets": nn.Linear(1, 1, bias=False),
            "big": {"t": big()},
        },
        "empty": {},
    }
    assert Stored(state).names() == {
        "ema/deep.er.w": "tensor",
        "ema/emb.weight": "tensor",
        "extra/args": "object",
        "extra/big.t": "tensor",
        "extra/nets.weight": "tensor",
        "extra/step": "object",
        "list/value": "object",
        "model/emb.weight": "tensor",
        "model/head.weight": "alias",
        "optimizer/param_groups": "object",
        "optimizer/state.emb.weight.momentum_buffer": "tensor",
        "tensor/value": "tensor",
    }


def test_leaves_are_sorted():
    leaves = describe({"b": {"y": 1, "x": 2}, "a": torch.ones(1)})
    assert [(leaf.key, leaf.name) for leaf in leaves] == [("a", "value"), ("b", "x"), ("b", "y")]
    assert describe({}) == []


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ([1], "the state is a list: expected a dict"),
        ({1: 2}, "the state's key 1: expected a name"),
        ({"": 2}, "the state's key ''"),
        ({"a": {"c": {"d": torch.ones(1)}, "c.d": torch.ones(1)}}, "two leaves are called a/c.d: a.c.d and a['c.d'];"),
        ({"extra": {"args": {"callback": print}}}, "extra.args.callback: a builtin_function_or_method (print) is code"),
        ({"extra": {"a": {"model": nn.Linear(1, 1)}}}, "extra.a.model: a Linear keeps its state in state_dict()"),
        ({"extra": {"a": [sf.PerRank(1)]}}, "extra.a[0]: a PerRank can stand"),
        ({"extra": {"rng": sf.PerRank(nn.Linear)}}, "extra.rng: a type (Linear) is code"),
        ({"a": {"w": torch.eye(2).to_sparse()}}, "a.w: a tensor of layout torch.sparse_coo"),
        ({"m": nn.Linear(2, 2, device="meta")}, "m.weight: a tensor on the meta device"),
        ({"m": nn.LazyLinear(2)}, "m.weight: a UninitializedParameter has no shape yet"),
        ({"m": nn.Linear(2, 2, dtype=torch.complex128)}, "m.weight: a tensor of torch.complex128 cannot be stored"),
        ({"o": torch.optim.SGD([nn.Parameter(torch.ones(2))])}, "o: a parameter of shape (2,) in param_groups[0] bel"),
        ({"m": [nn.Linear(1, 1), nn.Linear(1, 1)]}, "m: its stages [0] and [1] both have 'weight', and"),
        ({"a": [(lambda: [x := [], x.append(x), x])()[2]]}, "a[0][0]: a list that contains itself"),
    ],
)  # fmt: skip
def test_what_cannot_be_stored_is_named(state, message):
    with pytest.raises(sf.Invalid) as caught:
        describe(state)
    assert str(caught.value).startswith(message)


def test_pipeline_stages_and_their_optimizers_are_one():
    first, last = nn.ModuleDict({"0": nn.Linear(1, 1)}), nn.ModuleDict({"1": nn.Linear(1, 1)})
    optimizers = [torch.optim.Adam(stage.parameters(), lr=0.1 * n) for n, stage in enumerate([first, last], 1)]
    for stage, optimizer in zip([first, last], optimizers, strict=True):
        for parameter in stage.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    whole = Stored({"model": [first, last], "optimizer": optimizers})
    parts = Stored(*({"model": [s], "optimizer": [o]} for s, o in zip([first, last], optimizers, strict=True)))
    assert whole.names() == parts.names()
    # What two ranks saved, with different rates, is loaded by one with everything.
    model = nn.ModuleDict({"0": nn.Linear(1, 1), "1": nn.Linear(1, 1)})
    groups = [{"params": model["1"].parameters()}, {"params": model["0"].parameters()}]
    optimizer = torch.optim.Adam(groups, lr=0.5)
    parts.load({"model": model, "optimizer": optimizer})
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.1]
    assert torch.equal(model["1"].weight, last["1"].weight)
    assert torch.equal(optimizer.state[model["0"].bias]["exp_avg"], optimizers[0].state[first["0"].bias]["exp_avg"])


# Ties


def test_tied_weights_are_stored_once_and_restored():
    model = Tied()
    stored = Stored({"model": model})
    assert stored.names() == {"model/emb.weight": "tensor", "model/head.weight": "alias"}
    other = Tied()
    plan = stored.load({"model": other})
    assert other.head.weight is other.emb.weight
    assert torch.equal(other.emb.weight, model.emb.weight)
    assert plan.tensors == ["model/emb.weight", "model/head.weight"]
    untied = Tied(tied=False)
    stored.load({"model": untied})
    assert torch.equal(untied.head.weight, model.emb.weight)
    assert torch.equal(untied.emb.weight, model.emb.weight)


def test_two_saved_tensors_do_not_silently_become_one():
    model, other = Tied(tied=False), Tied()
    stored = Stored({"model": model})
    with pytest.raises(sf.Invalid, match=r"tied: model/head\.weight and model/emb\.weight are one tensor here and two"):
        stored.load({"model": other})
    plan = stored.load({"model": other}, strict=False)
    assert plan.unexpected == ["model/head.weight"], "what is left is listed"
    assert torch.equal(other.head.weight, model.emb.weight)


def test_state_dicts_are_tied_by_memory():
    model = Tied()
    detached = model.state_dict()
    assert detached["emb.weight"] is not detached["head.weight"]
    assert Stored({"model": detached}).names()["model/head.weight"] == "alias"
    part = {"a": model.emb.weight, "b": model.emb.weight[:2], "c": model.emb.weight.t()}
    assert set(Stored({"model": part}).names().values()) == {"tensor"}


# Values


class Averaging:
    """What keeps its state in a state dict, as schedulers, averages and data loaders do."""

    def __init__(self, weight, count=0):
        self.weight, self.count, self.given = weight, count, None

    def state_dict(self):
        return {"shadow": {"w": self.weight, "b": torch.ones(3)}, "count": self.count, "seen": torch.arange(4)}

    def load_state_dict(self, state):
        self.given, self.count = state, state["count"]


def test_values_replace_entries_and_tensors_are_filled():
    saved = {
        "extra": {
            "step": 3,
            "args": argparse.Namespace(lr=0.1),
            "pair": (1, [2]),
            "weights": big(3.0),
            "rate": torch.tensor(2.5),
        },
        "best": 0.25,
    }
    stored = Stored(saved)
    weights, rate = torch.zeros_like(big()), torch.zeros(())
    extra = {"step": None, "args": None, "pair": None, "weights": weights, "rate": rate}
    state = {"extra": extra, "best": None}
    plan = stored.load(state)
    assert extra["args"] == argparse.Namespace(lr=0.1)
    assert (extra["step"], extra["pair"], state["best"]) == (3, (1, [2]), 0.25)
    assert extra["weights"] is weights
    assert torch.equal(weights, big(3.0))
    assert extra["rate"] is rate
    assert rate.item() == 2.5
    assert sorted(plan.values) == ["best/value", "extra/args", "extra/pair", "extra/rate", "extra/step"]
    assert plan.tensors == ["extra/weights"]


def test_a_tensor_where_nothing_stands_is_made():
    state = {"extra": {"weights": None, "step": 0}}
    Stored({"extra": {"weights": big(3.0), "step": 5}}).load(state)
    assert torch.equal(state["extra"]["weights"], big(3.0))


def test_things_with_a_state_dict_are_given_it_whole():
    source = Averaging(big(2.0), 5)
    stored = Stored({"ema": source, "extra": {"other": Averaging(big(4.0), 6)}})
    assert stored.names() == {
        "ema/value": "object",
        "ema/value.shadow.b": "tensor",  # floats were learned: openly stored however small
        "ema/value.shadow.w": "tensor",
        "extra/other": "object",
        "extra/other.shadow.b": "tensor",
        "extra/other.shadow.w": "tensor",
    }
    one, other = Averaging(torch.zeros_like(big())), Averaging(torch.zeros(1))
    shadow = one.weight
    stored.load({"ema": one, "extra": {"other": other}})
    assert one.given["shadow"]["w"] is shadow, "tensors of the present state dict are filled in place"
    assert torch.equal(shadow, big(2.0))
    assert (one.count, other.count) == (5, 6)
    assert torch.equal(other.given["shadow"]["w"], big(4.0)), "others are made"
    assert torch.equal(one.given["seen"], torch.arange(4))


def test_schedulers_go_on():
    def scheduled():
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        return {
            "model": model,
            "optimizer": optimizer,
            "extra": {"sched": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)},
        }

    source, goal = scheduled(), scheduled()
    for _ in range(3):
        source["optimizer"].step()
        source["extra"]["sched"].step()
    Stored(source).load(goal)
    for state in (source, goal):
        state["optimizer"].step()
        state["extra"]["sched"].step()
    assert goal["extra"]["sched"].state_dict() == source["extra"]["sched"].state_dict()
    assert goal["optimizer"].param_groups[0]["lr"] == source["optimizer"].param_groups[0]["lr"] == pytest.approx(0.01)


def test_arrays_are_filled_in_place_and_stay_arrays():
    saved = {
        "a": {"x": np.arange(6.0).reshape(2, 3).T, "y": np.arange(3, dtype=">i4")},
        "b": {"z": [np.ones(2)], "n": 1},
    }
    stored = Stored(saved)
    assert stored.names() == {"a/x": "tensor", "a/y": "tensor", "b/z": "object", "b/n": "object"}
    x, y = np.zeros((3, 2)), np.zeros(3, dtype=">i4")
    state = {"a": {"x": x, "y": y}, "b": {"z": None, "n": None}}
    stored.load(state)
    assert state["a"]["x"] is x
    assert (x.tolist(), y.tolist()) == (saved["a"]["x"].tolist(), [0, 1, 2])
    assert state["b"]["z"][0].tolist() == [1.0, 1.0]
    with pytest.raises(sf.Invalid, match=r"a/x: a read-only array|a\.x: a read-only array|read-only"):
        x.flags.writeable = False
        stored.load({"a": {"x": x, "y": y}}, only="a")


def test_nothing_is_installed_when_a_value_cannot_be_made():
    stored = Stored({"extra": {"a": 1, "b": 2, "sched": Averaging(torch.ones(1), 7)}})
    (broken,) = [leaf.index for leaf in stored.leaves if leaf.name == "b"]
    stored.bytes[broken, 0] = b"\xff"
    averaging = Averaging(torch.zeros(1))
    state = {"extra": {"a": 0, "b": 0, "sched": averaging}}
    with pytest.raises(sf.Corrupt, match=r"extra\.b: "):
        stored.load(state)
    assert state == {"extra": {"a": 0, "b": 0, "sched": averaging}}
    assert averaging.given is None


def test_pickles_need_the_word_on_both_sides():
    with pytest.raises(sf.Invalid, match="pickle=True"):
        describe({"extra": [object()]})
    stored = Stored({"extra": {"x": complex}}, pickle=True)
    state = {"extra": {"x": None}}
    with pytest.raises(sf.Invalid, match=r"extra\.x: stored as a pickle"):
        stored.load(state)
    stored.load(state, pickle=True)
    assert state["extra"]["x"] is complex


# What ranks may hold differently

RANDOM_STATE = torch.Generator().get_state()


@pytest.mark.parametrize(
    ("container", "kept"),
    [
        ({"w": torch.ones(3), "n": torch.arange(3)}, set()),
        ({"w": torch.ones(3), "rng": RANDOM_STATE}, {"rng"}),
        ({"w": torch.ones(3), "mask": torch.ones(3, 3, dtype=torch.uint8)}, set()),
        ({"w": torch.ones(3), "n": torch.arange(3), "step": 1}, {"w", "n", "step"}),
        ({"w": big(), "step": 1}, {"step"}),
        ({"tree": {"a": torch.ones(3), "b": RANDOM_STATE}}, {"tree.b"}),
    ],
    ids=["state dict", "random state", "bytes of a model", "beside values", "large", "tree"],
)
def test_small_tensors_that_may_differ_by_rank_are_values(container, kept):
    names = Stored({"k": container}).names()
    assert {name.removeprefix("k/") for name, kind in names.items() if kind == "object"} == kept


def test_a_random_state_comes_back_to_its_own_rank_though_nobody_declared_it():
    states = [torch.Generator().manual_seed(seed).get_state() for seed in (1, 2)]
    python = [random.Random(seed).getstate() for seed in (1, 2)]
    arrays = [np.random.RandomState(seed).get_state() for seed in (1, 2)]
    for wrap in (
        lambda rank: {"torch": states[rank]},
        lambda rank: {"torch": states[rank], "step": 5},
        lambda rank: {"all": {"torch": states[rank], "python": python[rank], "numpy": arrays[rank]}},
        lambda rank: sf.PerRank([states[rank], python[rank], arrays[rank]]),
    ):
        stored = Stored({"rng": wrap(0)}, {"rng": wrap(1)})
        for rank in (0, 1):
            state = {"rng": wrap(0)}
            stored.load(state, rank=rank, world=2)
            assert repr(state["rng"]) == repr(wrap(rank))


class Loader:
    """A data loader, whose position is its rank's own."""

    def __init__(self, position):
        self.position = position

    def state_dict(self):
        return {"position": self.position, "buffer": torch.full((4, 4), self.position)}

    def load_state_dict(self, state):
        assert state["buffer"].unique().tolist() == [state["position"]]
        self.position = state["position"]


@pytest.mark.parametrize("wrap", [sf.PerRank, lambda loader: loader], ids=["declared", "found out"])
def test_another_number_of_ranks_asks_for_a_choice(wrap):
    stored = Stored(*({"loader": wrap(Loader(10 + rank))} for rank in range(3)))
    assert stored.names() == {"loader/value": "object"}

    def loaded(rank, world, **options):
        loader = Loader(0)
        stored.load({"loader": wrap(loader)}, rank=rank, world=world, **options)
        return loader.position

    assert [loaded(rank, 3) for rank in range(3)] == [10, 11, 12]
    with pytest.raises(
        sf.Invalid,
        match=r'saved by 3 ranks with 3 different values, and this job has 2 ranks\nper rank: per_rank="rank0"',
    ):
        loaded(1, 2)
    assert [loaded(rank, 5, per_rank="rank0") for rank in range(5)] == [10] * 5
    assert [loaded(rank, 5, per_rank="index") for rank in range(5)] == [10, 11, 12, 10, 11]
    with pytest.raises(sf.Invalid, match='expected "error", "rank0" or "index"'):
        loaded(0, 2, per_rank="rank1")


def test_values_that_all_ranks_share_need_no_choice():
    stored = Stored({"extra": {"step": 3}}, {"extra": {"step": 3}})
    state = {"extra": {"step": 0}}
    stored.load(state, rank=4, world=5)
    assert state["extra"]["step"] == 3


def test_per_rank_keeps_its_place():
    stored = Stored({"extra": {"rng": sf.PerRank((1, 2))}})
    wrapper = sf.PerRank(None)
    state = {"extra": {"rng": wrapper}}
    stored.load(state)
    assert state["extra"]["rng"] is wrapper
    assert wrapper.value == (1, 2)


# What does not fit


def test_every_offender_is_in_one_error():
    saved = {"model": {"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(4), "d": torch.ones(5)}, "old": {"x": 1}}
    state = {"model": {"a": torch.ones(2), "b": torch.ones(4), "c": torch.ones(4).half(), "e": torch.ones(1)}}
    with pytest.raises(sf.Invalid) as caught:
        Stored(saved).load(state)
    assert str(caught.value).splitlines() == [
        "memory://here does not fit the state (5 problems):",
        "  missing: model/e is not in the checkpoint",
        "  shape: model/b is [3] in the checkpoint and [4] here",
        "  dtype: model/c is F32 in the checkpoint and F16 here",
        "  unexpected: model/d is in the checkpoint only",
        "  unexpected: old, all of it (one leaf), is in the checkpoint only",
        "missing: rename= maps saved names to those here, only= loads a part, strict=False allows it",
        "unexpected: only= loads a part, strict=False allows it",
        "dtype: cast=True converts",
        "shape: make it here with the shape it was saved with, or load the rest with only=",
    ]
    with pytest.raises(sf.Invalid, match=r"\(2 problems\)"):
        Stored(saved).load(state, strict=False)
    state = {"model": {"a": torch.zeros(2), "e": torch.zeros(1)}}
    plan = Stored(saved).load(state, strict=False)
    assert (plan.missing, sorted(plan.unexpected)) == (["model/e"], ["model/b", "model/c", "model/d", "old/x"])
    assert state["model"]["a"].tolist() == [1, 1]


def test_problems_tell_which_ranks_have_them():
    stored = Stored({"model": {"a": torch.ones(2)}})
    match = stored.match({"model": {"a": torch.ones(2)}}, rank=0, world=3)
    match.conclude([], [([1], "missing: model/b is not in the checkpoint"), ([0, 1, 2], "shape: all")])
    with pytest.raises(sf.Invalid, match=r"model/b is not in the checkpoint \(rank 1\)\n  shape: all\n"):
        match.plan.expect_no_problems()


def test_names_can_be_mapped():
    saved = {"net": {"old.w": torch.ones(2), "b": torch.full((1,), 2.0)}, "extra": {"step": 3}}
    stored = Stored(saved)
    for rename in (
        {"net/old.w": "model/new.w", "net/b": "model/b"},
        lambda name: name.replace("net/", "model/").replace("old.", "new."),
    ):
        state = {"model": {"new.w": torch.zeros(2), "b": torch.zeros(1)}, "extra": {"step": 0}}
        plan = stored.load(state, rename=rename)
        assert (state["model"]["new.w"].tolist(), state["model"]["b"].tolist(), state["extra"]["step"]) == (
            [1, 1],
            [2],
            3,
        )
        assert plan.renamed == {"net/old.w": "model/new.w", "net/b": "model/b"}
    state = {"model": {"b": torch.zeros(1)}}
    with pytest.raises(sf.Invalid, match=r"rename: the checkpoint has no leaf net/odl\.w"):
        stored.load(state, rename={"net/odl.w": "model/w"}, strict=False)
    with pytest.raises(sf.Invalid, match=r"rename: net/b and net/old\.w both become model/b"):
        stored.load(state, rename=lambda name: "model/b" if "net/" in name else name, strict=False)
    with pytest.raises(sf.Invalid, match=r"becomes 'b': expected a name of the form key/name"):
        stored.load(state, rename={"net/b": "b"})
    with pytest.raises(sf.Invalid, match="expected a dict from saved names"):
        stored.load(state, rename=[("a", "b")])


def test_a_renamed_parameter_takes_its_optimizer_state_along():
    source = nn.ModuleDict({"old": nn.Linear(2, 2), "same": nn.Linear(2, 2)})
    optimizer = torch.optim.Adam(
        [{"params": source["old"].parameters(), "lr": 0.5}, {"params": source["same"].parameters()}]
    )
    for parameter in source.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    stored = Stored({"model": source, "optimizer": optimizer})
    goal = nn.ModuleDict({"new": nn.Linear(2, 2), "same": nn.Linear(2, 2)})
    again = torch.optim.Adam([{"params": goal["same"].parameters()}, {"params": goal["new"].parameters()}])
    rename = {"model/old.weight": "model/new.weight", "model/old.bias": "model/new.bias"}
    stored.load({"model": goal, "optimizer": again}, rename=rename)
    assert [group["lr"] for group in again.param_groups] == [1e-3, 0.5]
    for name in ("step", "exp_avg", "exp_avg_sq"):
        assert torch.equal(again.state[goal["new"].bias][name], optimizer.state[source["old"].bias][name])


def test_dtypes_can_be_converted():
    state = {"model": {"a": torch.zeros(2, dtype=torch.bfloat16), "n": torch.zeros(1, dtype=torch.int64)}}
    saved = {"model": {"a": torch.tensor([1.5, 2.5]), "n": torch.tensor([3])}}
    plan = Stored(saved).load(state, cast=True)
    assert state["model"]["a"].tolist() == [1.5, 2.5]
    assert plan.cast == {"model/a": ("F32", "BF16")}


def test_a_part_can_be_loaded():
    saved = {"model": {"a.w": torch.ones(1), "a.b": torch.ones(1), "c.w": torch.ones(1)}, "extra": {"step": 3, "x": 1}}
    state = {"model": {"a.w": torch.zeros(1), "a.b": torch.zeros(1), "new": torch.zeros(1)}, "extra": {"step": 0}}
    plan = Stored(saved).load(state, only=["model/a.*", "extra/step"])
    assert [tensor.item() for tensor in state["model"].values()] == [1, 1, 0]
    assert (plan.tensors, plan.values, plan.missing, plan.unexpected) == (
        ["model/a.w", "model/a.b"],
        ["extra/step"],
        [],
        [],
    )
    Stored(saved).load({"extra": {"step": 0, "x": 0}}, only="extra")
    with pytest.raises(sf.Invalid, match=r"only: 'modle' selects nothing that is in the checkpoint"):
        Stored(saved).load(state, only="modle")


@pytest.mark.parametrize("odd", [1, None, [b"model"], [["model"]]])
def test_what_is_no_pattern_is_refused(tmp_path, odd):
    sf.save(tmp_path / "a", {"n": 1})
    said = r"expected a key, a name or a pattern of leaves, or several"
    with pytest.raises(sf.Invalid, match=said):
        sf.load(tmp_path / "a", {"n": None}, only=odd)
    with pytest.raises(sf.Invalid, match=said):
        sf.save(tmp_path / "b", {"n": 1}, prove_except=odd)


def test_a_value_and_a_dict_of_tensors_do_not_mix_up():
    tensors, mixed = {"x": {"t": {"a": big(1.0), "b": big(2.0)}}}, {"x": {"t": {"a": big(1.0), "b": big(2.0), "n": 3}}}
    a, b = torch.zeros_like(big()), torch.zeros_like(big())
    state = {"x": {"t": {"a": a, "b": b}}}
    Stored(mixed).load(state)  # the checkpoint decides: one value with references
    assert state["x"]["t"]["n"] == 3
    assert state["x"]["t"]["a"] is a
    assert torch.equal(a, big(1.0))
    assert torch.equal(b, big(2.0))
    with pytest.raises(
        sf.Invalid, match=r"x/t is a dict of 2 tensors in the checkpoint: put a dict of such tensors there"
    ):
        Stored(tensors).load({"x": {"t": None}})


def test_small_plain_tensors_are_filled_from_values_and_checked():
    stored = Stored({"extra": {"w": torch.ones(3), "step": 1}})
    state = {"extra": {"w": torch.zeros(4), "step": 0}}
    with pytest.raises(
        sf.Invalid, match=r"extra/w: the checkpoint holds a tensor of torch.float32 \[3\] where the state has .*\[4\]"
    ):
        stored.load(state)
    assert state["extra"]["step"] == 0
    # A module takes it as well: names and numbers count, not how they were held.
    stored = Stored({"model": {"weight": torch.full((1, 2), 2.0), "note": "from elsewhere"}})
    model = nn.Linear(2, 1, bias=False)
    stored.load({"model": model}, strict=False)
    assert model.weight.tolist() == [[2.0, 2.0]]


def test_a_reference_to_nothing_is_corrupt():
    stored = Stored({"ema": Averaging(big(), 1)})
    stored.hidden = {"value.shadow.b"}
    with pytest.raises(sf.Corrupt, match=r"refers to the tensor ema/value\.shadow\.b, which the checkpoint lacks"):
        stored.load({"ema": Averaging(big())}, strict=False)


def test_a_plan_says_what_would_happen():
    saved = {"model": {"a": torch.ones(2), "b": torch.ones(3)}, "extra": {"step": 1}}
    state = {"model": {"a": torch.zeros(2).half(), "c": torch.zeros(1)}, "extra": {"step": 0}}
    stored = Stored(saved)
    match = stored.match(state, cast=True)
    match.conclude([leaf.index for leaf in stored.leaves if leaf.name == "b"], [([0], p) for p in match.findings()[1]])
    text = str(match.plan)
    for line in (
        "memory://here (step 7): 1 tensors, 1 values",
        "    model/a: F32 -> F16",
        "  missing in the checkpoint (1):",
        "  unexpected in the checkpoint (1):",
        "    missing: model/c is not in the checkpoint",
        "    extra/step",
    ):
        assert line in text.splitlines()
    wants = match.installation.forecast().wants
    assert [(want[1:3], want[4]) for want in wants] == [(((0,), (2,)), (4,))]
    assert math.prod(state["model"]["a"].shape) == 2


def containing_itself(kind):
    value = kind()
    for name in "ab":
        value.append(value) if kind is list else value.update({name: value})
    return value


@pytest.mark.parametrize("kind", [list, dict])
@pytest.mark.parametrize("make", [lambda value: {"x": value}, lambda value: {"x": {"y": value}}])
def test_what_contains_itself_is_refused_by_name_and_looked_at_once(kind, make):
    """Twice, so that looking for its end would double at each of the levels that a value may have."""
    with pytest.raises(sf.Invalid, match=r"x.*(contains itself|nested deeper)"):
        sf.save("memory://state/itself", make(containing_itself(kind)))
    sf.save(f"memory://state/{kind.__name__}-{id(make)}", make({"n": 1}) if kind is dict else make([1]))
    state = make(containing_itself(kind))
    if kind is list:
        sf.load(f"memory://state/{kind.__name__}-{id(make)}", state)
        assert state == make([1])


@pytest.mark.parametrize("module", [torch, np])
def test_a_plan_says_what_a_load_says_of_tensors_beside_values(tmp_path, module):
    """A small one is a part of what is saved as values: its shape and type are not in the manifest."""
    sf.save(tmp_path / "one", {"ema": {"decay": 0.5, "mean": module.ones(4, dtype=module.float32)}})
    for there, options, found, cast in (
        (module.zeros(4, dtype=module.float64), {}, "dtype: ema/mean is F32 in the checkpoint and F64 here", {}),
        (module.zeros(4, dtype=module.float64), {"cast": True}, "", {"ema/mean": ("F32", "F64")}),
        (module.zeros(5, dtype=module.float32), {"cast": True}, "shape: ema/mean is [4] in the checkpoint and [5]", {}),
        (module.zeros(4, dtype=module.float32), {}, "", {}),
    ):
        state = {"ema": {"decay": 0.0, "mean": there}}
        plan = sf.plan_load(tmp_path / "one", state, **options)
        assert [problem.startswith(found) for problem in plan.problems] == [True] * bool(found)
        assert plan.cast == cast
        assert state["ema"]["mean"] is there
        assert there.tolist() == [0.0] * len(there)
        if found:
            with pytest.raises(sf.Invalid, match="ema/mean: the checkpoint holds "):
                sf.load(tmp_path / "one", state, **options)
        else:
            assert sf.load(tmp_path / "one", state, **options).cast == cast
            assert there.tolist() == [1.0] * 4
    plan = sf.plan_load(tmp_path / "one", {"ema": {"decay": there, "mean": there}})
    assert [problem.partition(":")[0] for problem in plan.problems] == ["ema/decay"]


def test_an_array_for_a_type_that_numpy_has_not_is_a_problem_of_the_plan(tmp_path):
    sf.save(tmp_path / "one", {"w": torch.zeros(4, dtype=torch.bfloat16)})
    plan = sf.plan_load(tmp_path / "one", {"w": np.zeros(4, "f4")}, cast=True)
    assert (plan.problems, plan.cast) == (["w/value: NumPy has no type for BF16"], {})
