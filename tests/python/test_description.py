"""A remembered description is that of the state as it is, whatever was done to the state in between."""

import contextlib
import gc
import random

import pytest
import shardfast as sf
import torch
from layouts import build, train
from older import TABLE
from shardfast.adapters import torch as torch_adapter
from shardfast.adapters.torch import memory as torch_memory
from shardfast.state.catalog import Memory
from shardfast.state.description import Describer, describe
from shardfast.state.parts import native_leaf
from torch import nn


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(24, 24)
        self.second = nn.Linear(24, 24, bias=False)
        self.third = nn.Sequential(nn.Linear(24, 16), nn.BatchNorm1d(16))
        self.third.register_buffer("scratch", torch.zeros(300), persistent=False)
        self.fourth = nn.Linear(16, 16, bias=False)
        self.fifth = nn.Linear(16, 16, bias=False)

    def forward(self, x):
        return self.fourth(self.third(self.second(self.first(x))))


class State:
    """A state and what one can do to it."""

    def __init__(self, seed):
        self.dice = random.Random(seed)
        torch.manual_seed(seed)
        self.model = Tied()
        self.other = nn.Linear(20, 20)
        self.optimizer = torch.optim.AdamW([*self.model.parameters()], lr=0.1)
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "ema": {"w": torch.randn(40, 40), "small": torch.ones(3)},
            "extra": {"args": {"lr": 0.1}, "list": [torch.zeros(5)]},
        }

    def modules(self):
        return [module for module in self.model.modules() if list(module.parameters(recurse=False))]

    def slot(self):
        module = self.dice.choice(self.modules())
        return module, self.dice.choice([name for name, _ in module.named_parameters(recurse=False)])

    def step(self):
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    def values(self):
        self.state["extra"]["args"]["lr"] += 1
        self.optimizer.param_groups[0]["lr"] *= 0.5

    def other_memory(self):
        module, name = self.slot()
        getattr(module, name).data = torch.randn_like(getattr(module, name))

    def transposed(self):
        module, name = self.slot()
        getattr(module, name).data = getattr(module, name).data.t()

    def other_dtype(self):
        self.dice.choice(self.modules()).to(self.dice.choice([torch.float64, torch.bfloat16, torch.float32]))

    def other_parameter(self):
        """Without its optimizer's knowledge."""
        module, name = self.slot()
        setattr(module, name, nn.Parameter(torch.randn_like(getattr(module, name))))
        if self.dice.random() < 0.8:
            self.state["optimizer"] = self.optimizer = torch.optim.AdamW([*self.model.parameters()], lr=0.1)

    def tied(self):
        self.model.second.weight = self.model.first.weight
        self.state["optimizer"] = self.optimizer = torch.optim.AdamW([*self.model.parameters()], lr=0.1)

    def tied_by_memory(self):
        self.model.second.weight.data = self.model.first.weight.data

    def untied(self):
        self.model.second.weight = nn.Parameter(torch.randn(24, 24))

    def bias_comes_or_goes(self):
        has = self.model.fourth.bias is not None
        self.model.fourth.bias = None if has else nn.Parameter(torch.ones(16))

    def another_module(self):
        self.model.third.append(nn.Linear(16, 16))

    def exchanged_module(self):
        self.model.third[0] = nn.Linear(24, 16)

    def swapped_modules(self):
        self.model.fourth, self.model.fifth = self.model.fifth, self.model.fourth

    def same_memory(self):
        """Another parameter, which the optimizer does not know, at the same place."""
        module, name = self.slot()
        setattr(module, name, nn.Parameter(getattr(module, name).data))

    def buffer(self):
        self.model.third.register_buffer("scratch", torch.zeros(300), persistent=self.dice.random() < 0.5)

    def renamed(self):
        weight = self.model.fourth._parameters
        name = next(iter(weight))
        weight[name + "_"] = weight.pop(name)

    def load(self):
        self.model.load_state_dict(self.model.state_dict())
        self.optimizer.load_state_dict(self.optimizer.state_dict())

    def assigned(self):
        other = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.model.load_state_dict(other, assign=True)

    def key_of_optimizer_state(self):
        parameter = self.optimizer.param_groups[0]["params"][0]
        kind = self.dice.choice([1, torch.ones(400), torch.ones(2)])
        self.optimizer.state[parameter][self.dice.choice("ab")] = kind

    def no_optimizer_state(self):
        self.optimizer.state.clear()

    def another_group(self):
        known = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        new = [p for p in self.model.parameters() if id(p) not in known]
        if new:
            self.optimizer.add_param_group({"params": new})

    def key_of_state(self):
        self.state[self.dice.choice(["ema2", "extra2"])] = self.dice.choice([{"x": 1}, torch.ones(500), self.other])

    def no_key(self):
        self.state.pop(self.dice.choice(list(self.state)))

    def order(self):
        self.state = dict(reversed(self.state.items()))

    def bare(self):
        self.state["ema"] = {"w": torch.randn(40, 40), self.dice.choice("abc"): self.model.first.weight}

    def hook(self):
        def rename(module, state, prefix, metadata):
            state[prefix + "more"] = torch.ones(7)

        self.model.fourth.register_state_dict_post_hook(rename)

    def list_of_modules(self):
        self.state["model"] = [self.model] if self.dice.random() < 0.5 else self.model

    def state_of_no_parameter(self):
        self.optimizer.state[self.dice.choice(["note", "other"])] = self.dice.choice([1, "x", 2, torch.ones(400)])

    def buffer_comes_or_goes(self):
        norm = self.model.third[1]
        norm.running_mean = torch.zeros(16) if norm.running_mean is None else None

    def no_module(self):
        self.model.register_module("sixth", None)

    def other_slots(self):
        """With what stood in those before."""
        module, _ = self.slot()
        module._parameters = dict(module._parameters)

    def parameters_in_another_order(self):
        self.optimizer.param_groups[0]["params"].reverse()

    def no_parameter_of_the_optimizer(self):
        params = self.optimizer.param_groups[0]["params"]
        self.optimizer.state.pop(params.pop(), None)

    def freed(self):
        storage = self.model.first.weight.untyped_storage()
        size = storage.nbytes()
        storage.resize_(0)
        storage.resize_(size)


ACTIONS = [name for name in vars(State) if not name.startswith("_") and name not in ("modules", "slot")]


def fresh(state):
    """A description without memory of an earlier one, and the values."""
    leaves = describe(state, notice=lambda by: None)
    values = {(leaf.key, leaf.name): leaf.value.encoded() for leaf in leaves if hasattr(leaf, "value")}
    return [native_leaf(leaf) for leaf in leaves], values


@pytest.mark.parametrize("seed", range(12))
def test_a_remembered_description_is_a_fresh_one(table, seed):
    made, reused = State(seed), 0
    describer, last, leaves = Describer(lambda by: None), None, None
    for _ in range(60):
        for _ in range(made.dice.randrange(2)):
            # What torch refuses after what was done before is not done.
            with contextlib.suppress(RuntimeError, KeyError, IndexError, ValueError):
                getattr(made, made.dice.choice(ACTIONS))()
        try:
            expected, values = fresh(made.state)
        except sf.Invalid as error:
            with pytest.raises(sf.Invalid) as caught:
                describer.describe(made.state, pickle=False)
            assert str(caught.value) == str(error)
            made, last = State(made.dice.randrange(1000)), None
            continue
        now = describer.describe(made.state, pickle=False)
        if now.described is last:
            reused += 1
            assert leaves == expected
        last, leaves = now.described, expected
        assert sorted(value.encoded() for value in now.values) == sorted(values.values())
        for watched in now.watched:
            assert watched.changes() == []
    assert reused >= 5


def test_unchanged_states_are_not_described_again(table):
    made = State(0)
    made.step()
    describer = Describer(lambda by: None)
    first = describer.describe(made.state, pickle=False)
    for _ in range(5):
        made.step()
        made.values()
        assert describer.describe(made.state, pickle=False).described is first.described
    made.state["optimizer"].state.clear()
    assert describer.describe(made.state, pickle=False).described is not first.described


def test_states_that_are_saved_in_turn_are_each_described_once(table):
    """As an actor and a critic are, and a model with and without its optimizer."""
    actor, critic, plain = State(0), State(1), {"weights": torch.ones(9)}
    states = [actor.state, critic.state, {"model": actor.state["model"]}, plain]
    for made in (actor, critic):
        made.step()
    describer = Describer(lambda by: None)
    before = None
    for turn in range(4):
        natives = [describer.describe(state, pickle=False).described for state in states]
        if turn > 1:
            assert [now is then for now, then in zip(natives, before, strict=True)][:3] == [True] * 3
        before = natives
        for made in (actor, critic):
            made.step()
    critic.state["optimizer"].state.clear()
    natives = [describer.describe(state, pickle=False).described for state in states]
    assert [now is then for now, then in zip(natives, before, strict=True)][:3] == [True, False, True]
    assert len(describer._known) == 4
    del critic, states, made
    gc.collect()
    assert len(describer._known) < 4, "what has gone is forgotten"


VIEWS = {
    "conjugate": (torch.Tensor.conj, lambda p: p),
    "negative": (torch.Tensor.conj, lambda p: p.imag),
    "transposed": (lambda p: p, torch.Tensor.t),
}


@pytest.mark.parametrize("kind", VIEWS)
def test_views_that_change_how_memory_is_read_are_described_again(table, tmp_path, kind):
    """The memory of a conjugate or negative view is that of the tensor, and holds other numbers than it."""
    change, part = VIEWS[kind]
    whole = torch.randn(20, 30, dtype=torch.complex64)
    model = nn.Module()
    model.w = nn.Parameter(part(whole))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(3):
        if number == 2:
            model.w.data = part(change(whole))
        sf.save(tmp_path / str(number), {"model": model, "optimizer": optimizer})
        found = torch.zeros_like(model.w).resolve_conj().resolve_neg()
        sf.load(tmp_path / str(number), {"model": {"w": found}}, strict=False)
        assert torch.equal(found, model.w.detach()), number


def test_a_state_is_asked_once_for_each_state_dict():
    class Loader:
        asked = 0

        def state_dict(self):
            self.asked += 1
            return {"position": self.asked, "tensor": torch.ones(300_000)}

        def load_state_dict(self, state):
            pass

    made, loader = State(0), Loader()
    describer = Describer(lambda by: None)
    for number in range(1, 5):
        describer.describe({**made.state, "loader": loader}, pickle=False)
        assert loader.asked == number


def check_layouts(rank, world, table):
    """Whether sharded states are described once: by layout."""
    if table == "without the table" and hasattr(torch.Tensor, TABLE):
        delattr(torch.Tensor, TABLE)
    reused = {}
    for layout in ("ddp", "fsdp", "fsdp_tp"):
        model, optimizer = build(layout)
        describer, natives = Describer(lambda by: None), []
        for step in range(3):
            train(model, optimizer, range(step, step + 1))
            state = {"model": model, "optimizer": optimizer, "extra": {"step": step}}
            natives.append(describer.describe(state, pickle=False).described)
        reused[layout] = natives[1] is natives[0] and natives[2] is natives[0]
    return reused


def test_sharded_states_are_described_once(table, ranks):
    for reused in ranks(4)(check_layouts, table):
        assert reused == {"ddp": True, "fsdp": True, "fsdp_tp": True}


def test_a_call_waits_for_no_device_whose_tensors_announce_their_changes(monkeypatch):
    """However small they are: the device may have a whole step to do first."""
    made = State(0)
    made.step()
    small = {"optimizer": "step", "model": "bias", "ema": "small"}

    def captures():
        leaves = [leaf for leaf in describe(made.state, notice=lambda by: None) if hasattr(leaf, "capture")]
        return {
            key: {leaf.capture for leaf in leaves if leaf.key == key and leaf.name.endswith(name)}
            for key, name in small.items()
        }

    assert captures() == {"optimizer": {"inline"}, "model": {"inline"}, "ema": {"inline"}}

    def on_device(pointer, strides, _):
        return Memory(pointer, strides, 0)

    monkeypatch.setattr(torch_adapter, "Memory", on_device)
    monkeypatch.setattr(torch_memory, "Memory", on_device)
    assert captures() == {"optimizer": {"lazy"}, "model": {"lazy"}, "ema": {"eager"}}
