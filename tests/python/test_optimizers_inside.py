"""Optimizers that hold others, are given by the parameters that they step, or are not understood."""

import copy
import gc
import weakref

import pytest
import shardfast as sf
import torch
from nets import copies_of, net, same, step
from torch import nn


class Container(torch.optim.Optimizer):
    """One optimizer for several, made as torchtitan makes its own."""

    def __init__(self, model):
        self.optimizers = [
            torch.optim.AdamW(model[0].parameters(), lr=1e-2),
            torch.optim.SGD(model[2].parameters(), lr=1e-1, momentum=0.9),
        ]
        super().__init__(list(model.parameters()), {"lr": 123.0})

    def step(self, closure=None):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none=True):
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def state_dict(self):
        return {"flat": [optimizer.state_dict() for optimizer in self.optimizers]}


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another, made as accelerate makes its own: PyTorch's constructor never runs."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    @property
    def state(self):
        return self.optimizer.state

    def step(self, closure=None):
        self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)


class Nested(Container):
    """Has a list of optimizers for each part of the model."""

    @property
    def optimizers(self):
        return [optimizer for of_part in self.parts["all"] for optimizer in of_part]

    @optimizers.setter
    def optimizers(self, optimizers):
        self.parts = {"all": [[optimizer] for optimizer in optimizers]}


WRAPS = [
    Container,
    Nested,
    lambda model: Wrapper(Container(model)),
    lambda model: [Container(model)],
]


@pytest.mark.parametrize("wrap", WRAPS)
def test_optimizers_that_hold_others_are_looked_through(tmp_path, wrap):
    def made(seed):
        model = net(seed)
        return model, wrap(model)

    def held(optimizer):
        optimizer = optimizer[0] if isinstance(optimizer, list) else optimizer
        return getattr(optimizer, "optimizer", optimizer).optimizers

    model, optimizer = made(0)
    stepping = optimizer[0] if isinstance(optimizer, list) else optimizer
    for number in range(3):
        step(model, stepping, seed=number)
        pending = sf.save_async(tmp_path / f"{number}", {"model": model, "optimizer": optimizer})
        saved = copy.deepcopy(dict(model.named_parameters())), copies_of(*held(optimizer))
        step(model, stepping, seed=9)
        pending.committed()
    fresh, other = made(1)
    sf.load(tmp_path / "2", {"model": fresh, "optimizer": other})
    assert same(dict(fresh.named_parameters()), saved[0])
    assert same(copies_of(*held(other)), saved[1]) and all(saved[1])
    assert [group["lr"] for one in held(other) for group in one.param_groups] == [1e-2, 1e-1]


class Passing(Wrapper):
    """Made as Lightning makes its own: what it does not have is that of the optimizer inside."""

    def __init__(self, optimizer, trainer):
        super().__init__(optimizer)
        self.trainer = weakref.proxy(trainer)

    def __getattr__(self, name):
        return getattr(self.optimizer, name)


def test_a_wrapper_outlives_its_trainer_and_has_no_hooks_of_the_one_inside(tmp_path):
    class Trainer:
        pass

    model, trainer, seen = net(), Trainer(), []
    inner = torch.optim.AdamW(model.parameters())
    optimizer = Passing(inner, trainer)
    step(model, optimizer)
    inner.register_load_state_dict_post_hook(seen.append)
    del trainer
    gc.collect()
    with pytest.raises(ReferenceError):
        bool(optimizer.trainer)
    sf.save(tmp_path / "one", {"model": model, "optimizer": optimizer})
    sf.load(tmp_path / "one", {"model": model, "optimizer": optimizer})
    assert len(seen) == 1 and seen[0] is inner


class Facade(nn.Module):
    """Has the state dict of what it wraps, and that twice; made as Lightning's Fabric makes its wrapper."""

    def __init__(self, module):
        super().__init__()
        self.forward_module, self.original = module, module

    def forward(self, *args):
        return self.forward_module(*args)

    def state_dict(self, *args, **kwargs):
        return self.original.state_dict(*args, **kwargs)

    def load_state_dict(self, *args, **kwargs):
        return self.original.load_state_dict(*args, **kwargs)


def test_an_optimizer_has_the_names_that_a_wrapper_gives_its_parameters(tmp_path):
    model = Facade(net())
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    sf.save(tmp_path / "one", {"model": model, "optimizer": optimizer})
    fresh = net(1)
    other = torch.optim.AdamW(fresh.parameters())
    sf.load(tmp_path / "one", {"model": fresh, "optimizer": other})
    assert same(dict(fresh.named_parameters()), dict(model.original.named_parameters()))
    assert same(copies_of(other), copies_of(optimizer)) and all(copies_of(other))


def test_optimizers_by_the_parameters_that_they_step_in_backward(tmp_path):
    def made(seed):
        model = net(seed)
        optimizers = {p: torch.optim.AdamW([p]) for p in model.parameters()}

        def step_of(parameter):
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in optimizers:
            parameter.register_post_accumulate_grad_hook(step_of)
        return model, optimizers

    model, optimizers = made(0)
    for number in range(3):
        step(model, seed=number)
        pending = sf.save_async(tmp_path / f"{number}", {"model": model, "optimizer": optimizers})
        saved = copy.deepcopy(list(model.parameters())), copies_of(*optimizers.values())
        step(model, seed=9)
        pending.committed()
    fresh, others = made(1)
    sf.load(tmp_path / "2", {"model": fresh, "optimizer": others})
    assert same(list(fresh.parameters()), saved[0])
    assert same(copies_of(*others.values()), saved[1]) and all(saved[1])


class Sharpness(torch.optim.Optimizer):
    """Keeps something of its own beside the optimizer inside."""

    def __init__(self, optimizer):
        self.inside = optimizer
        super().__init__(optimizer.param_groups, {})
        self.param_groups = optimizer.param_groups

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["old"] = parameter.detach().clone()
        self.inside.step()


class Foreign:
    """Steps parameters, and tells of one half of what it holds."""

    def __init__(self, model):
        self.param_groups = [{"params": list(model.parameters()), "lr": 1.0}]

    def state_dict(self):
        return {"lr": 1.0}

    def load_state_dict(self, state):
        pass


class Secretive(torch.optim.SGD):
    def state_dict(self):
        return {**super().state_dict(), "shampoo": torch.ones(3)}


def test_whatever_owns_parameters_and_is_not_understood_is_refused(tmp_path):
    model = net()
    more = Container(model)
    more.optimizers.pop()
    sharp = Sharpness(torch.optim.SGD(model.parameters(), lr=0.1))
    step(model, sharp)
    refused = [
        (
            r"a .*Container owns a parameter of shape \(3, 5\) that the optimizers inside it \(.*AdamW\) do not have",
            more,
        ),
        (
            r"a .*Sharpness has state of its own that the optimizers inside .*: put these optimizers into the state",
            sharp,
        ),
        (r"a .*Foreign owns parameters .* no torch.optim.Optimizer.*put the torch optimizers", Foreign(model)),
        (r"a .*Foreign owns parameters .* no torch.optim.Optimizer.*put the torch optimizers", Wrapper(Foreign(model))),
        (
            r"the state_dict\(\) of a .*Secretive has a tensor of shape \(3,\) under shampoo, and",
            Secretive(model.parameters()),
        ),
    ]
    sf.save(tmp_path / "one", {"model": model})
    for reason, optimizer in refused:
        for verb in (sf.save, sf.load):
            with pytest.raises(sf.Invalid, match=f"optimizer: {reason}"):
                verb(tmp_path / "one", {"model": model, "optimizer": optimizer})
            with pytest.raises(sf.Invalid, match=reason):
                verb(tmp_path / "one", {"model": model, "optimizer": [optimizer]})
    # The user's word that it is this rank's own, and whole.
    sf.save(tmp_path / "two", {"model": model, "optimizer": sf.PerRank(Foreign(model))})


def of_library(library, name, **more):
    return type(name, (), {"__module__": f"{library}.inside", **more})


@pytest.mark.parametrize(
    ("library", "name"), [("deepspeed", "DeepSpeedZeroOptimizer"), ("megatron", "DistributedOptimizer")]
)
def test_partitioning_optimizers_are_refused_by_name(tmp_path, library, name):
    model = net()
    groups = [{"params": list(model.parameters())}]
    state_dict = {"state_dict": lambda self: {}, "load_state_dict": lambda self, state: None}
    whole = of_library(library, name, param_groups=groups, **state_dict)
    partition = of_library(library, name, **state_dict)  # on a rank that owns nothing
    for optimizer in (whole(), partition()):
        for shown in (optimizer, Wrapper(optimizer), {next(model.parameters()): optimizer}):
            with pytest.raises(sf.Invalid, match=rf"optimizer: a {library}\.inside\.{name}: .*one rank's partition"):
                sf.save(tmp_path / "one", {"model": model, "optimizer": shown})
    partitioned = net()
    partitioned[0].weight.ds_id = 0
    with pytest.raises(sf.Invalid, match=r"'0\.weight' is partitioned by DeepSpeed ZeRO stage 3"):
        sf.save(tmp_path / "one", {"model": partitioned})
    # A scheduler refers to an optimizer, and owns nothing.
    scheduler = of_library(library, "Warmup", optimizer=object(), **state_dict)
    sf.save(tmp_path / "one", {"model": model, "scheduler": scheduler()})
