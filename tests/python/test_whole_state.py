"""The whole state comes back, or an error names what does not: modules and optimizers that were once saved as less."""

import copy
import gc
import weakref

import pytest
import shardfast as sf
import torch
import torch.distributed as dist
from older import AVERAGED
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def step(model, *optimizers, seed=0):
    torch.manual_seed(seed)
    for optimizer in optimizers:
        optimizer.zero_grad()
    model(torch.randn(4, 6)).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()


def state_of(*optimizers):
    """All state by parameter and name, as copies."""
    return [
        {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in entries.items()}
        for optimizer in optimizers
        for entries in (optimizer.state.get(p, {}) for group in optimizer.param_groups for p in group["params"])
    ]


def same(one, other):
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, (list, dict)):
        items = one.items() if isinstance(one, dict) else enumerate(one)
        return len(one) == len(other) and all(same(value, other[key]) for key, value in items)
    return one == other


# FullyShardedDataParallel


def flat(strategy, use_orig_params, seed=0):
    kind = ShardingStrategy[strategy]
    group = init_device_mesh("cpu", (2, dist.get_world_size() // 2)) if "HYBRID" in strategy else None
    model = FullyShardedDataParallel(
        net(seed),
        sharding_strategy=kind,
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
        device_mesh=group,
    )
    return model, torch.optim.AdamW(model.parameters())


def check_flat_shards(rank, world, url):
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        for use_orig_params in (False, True):
            model, optimizer = flat(strategy, use_orig_params)
            step(model, optimizer)
            # Past the wrapper, or as plain tensors, nothing says which elements this rank has.
            with pytest.raises(sf.Invalid, match="FullyShardedDataParallel has flattened"):
                sf.save(f"{url}/none", {"model": dict(model.named_parameters())})
            with pytest.raises(sf.Invalid, match="FullyShardedDataParallel has flattened"):
                sf.save(f"{url}/none", {"model": model.module})


def test_flat_shards_past_their_wrapper_are_refused(ranks, tmp_path):
    sf.save(tmp_path / "none", {"model": {"w": torch.zeros(2)}})
    ranks(2)(check_flat_shards, f"{tmp_path}")


def check_unsharded(rank, world, url):
    for use_orig_params in (False, True):
        model, optimizer = flat("NO_SHARD", use_orig_params)
        step(model, optimizer)
        before = copy.deepcopy([p.detach() for p in model.parameters()]), state_of(optimizer)
        sf.save(f"{url}/{use_orig_params}", {"model": model, "optimizer": optimizer})
        model, optimizer = flat("NO_SHARD", use_orig_params, seed=1)
        sf.load(f"{url}/{use_orig_params}", {"model": model, "optimizer": optimizer})
        assert same([p.detach() for p in model.parameters()], before[0])
        assert same(state_of(optimizer), before[1]) and before[1][0]


def test_unsharded_flat_parameters_come_back(ranks, tmp_path):
    ranks(2)(check_unsharded, f"{tmp_path}")


def check_sharded_tensor(rank, world, url):
    spec = ChunkShardingSpec(dim=0, placements=[f"rank:{n}/cpu" for n in range(world)])
    tensor = sharded_tensor.rand(spec, 4, 2)
    refused = r"w[./]w.*a ShardedTensor cannot be stored: use DTensor"
    for verb in (sf.save, sf.load):
        with pytest.raises(sf.Invalid, match=refused):
            verb(f"{url}/none", {"w": {"w": tensor}})
    with pytest.raises(sf.Invalid, match=refused):
        sf.save(f"{url}/none", {"w": {"w": {"deeper": [tensor]}}})


def test_a_sharded_tensor_is_refused_by_name(ranks, tmp_path):
    sf.save(tmp_path / "none", {"w": {"w": torch.zeros(4, 2)}})
    ranks(2)(check_sharded_tensor, f"{tmp_path}")


# Optimizers that hold others


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
        saved = copy.deepcopy(dict(model.named_parameters())), state_of(*held(optimizer))
        step(model, stepping, seed=9)
        pending.committed()
    fresh, other = made(1)
    sf.load(tmp_path / "2", {"model": fresh, "optimizer": other})
    assert same(dict(fresh.named_parameters()), saved[0])
    assert same(state_of(*held(other)), saved[1]) and all(saved[1])
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
    assert same(state_of(other), state_of(optimizer)) and all(state_of(other))


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
        saved = copy.deepcopy(list(model.parameters())), state_of(*optimizers.values())
        step(model, seed=9)
        pending.committed()
    fresh, others = made(1)
    sf.load(tmp_path / "2", {"model": fresh, "optimizer": others})
    assert same(list(fresh.parameters()), saved[0])
    assert same(state_of(*others.values()), saved[1]) and all(saved[1])


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


# State of another shape than its parameter


class RowWise(torch.optim.Optimizer):
    """Factored second moments, one number for each row and one for each column, as CAME and Adafactor have."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.ndim < 2:
                    continue
                state, square = self.state[parameter], parameter.grad.square() + 1e-3
                row, column = square.mean(dim=-1), square.sum(dim=0) / len(square)  # gloo has no averages
                if isinstance(column, DTensor):
                    column = column.redistribute(placements=[Replicate()])
                if not state:
                    state["row"], state["column"] = torch.zeros_like(row), torch.zeros_like(column)
                state["row"].mul_(0.9).add_(row, alpha=0.1)
                state["column"].mul_(0.9).add_(column, alpha=0.1)
                state["pair"] = state.get("pair", torch.zeros(2)) + 1
                scale = state["row"].unsqueeze(-1) * state["column"]
                parameter.add_(parameter.grad / scale.sqrt(), alpha=-group["lr"])


def sharded(seed):
    model = net(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, **AVERAGED)
    return fully_shard(model, mesh=mesh, **AVERAGED), mesh


def check_factored(rank, world, url, saved_whole):
    model, _ = sharded(0)
    if saved_whole:
        model = net(0)
    optimizer = RowWise(model.parameters())
    step(model, optimizer)
    if saved_whole:
        del model, optimizer  # saved by the test, in one process
    else:
        sf.save(url, {"model": model, "optimizer": optimizer})
    fresh, mesh = sharded(1)
    other = RowWise(fresh.parameters())
    sf.load(url, {"model": fresh, "optimizer": other})
    state = other.state[fresh[0].weight]
    assert state["row"].placements == (Shard(0),) and state["row"].device_mesh == mesh
    assert state["column"].placements == (Replicate(),)
    assert saved_whole or type(state["pair"]) is torch.Tensor
    step(fresh, other, seed=1)
    return [p.full_tensor().tolist() for p in fresh.parameters()]


@pytest.mark.parametrize("saved_whole", [False, True])
def test_factored_moments_are_sharded_again(ranks, tmp_path, saved_whole):
    model = net(0)
    optimizer = RowWise(model.parameters())
    step(model, optimizer)
    if saved_whole:
        for entries in optimizer.state.values():
            del entries["pair"]
        sf.save(tmp_path / "one", {"model": model, "optimizer": optimizer})
    step(model, optimizer, seed=1)
    expected = [p.detach() for p in model.parameters()]
    for found in ranks(2)(check_factored, f"{tmp_path}/one", saved_whole):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.tensor(one), other)


# Going back


@pytest.mark.parametrize("strict", [True, False])
def test_going_back_to_less_optimizer_state_leaves_nothing_newer(tmp_path, strict):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    state = {"model": model, "optimizer": optimizer}
    sf.save(tmp_path / "0", state)
    step(model, optimizer)
    del optimizer.state[model[0].weight]["max_exp_avg_sq"]
    del optimizer.state[model[2].bias]
    before = state_of(optimizer)
    sf.save(tmp_path / "1", state)
    for group in optimizer.param_groups:
        optimizer.state = type(optimizer.state)(dict)
        group["amsgrad"] = True
    step(model, optimizer, seed=1)
    forecast = sf.plan_load(tmp_path / "1", state, strict=strict)
    plan = sf.load(tmp_path / "1", state, strict=strict)
    dropped = {"optimizer/state.0.weight.max_exp_avg_sq"}
    dropped |= {f"optimizer/state.2.bias.{name}" for name in ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")}
    assert set(plan.dropped) == set(forecast.dropped) == dropped and not plan.missing and not forecast.problems
    assert same(state_of(optimizer), before)
    assert model[2].bias not in optimizer.state
    sf.load(tmp_path / "0", state, strict=strict)
    assert not optimizer.state
    step(model, optimizer)  # makes it anew


def test_a_load_of_something_else_drops_nothing(tmp_path):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    sf.save(tmp_path / "0", state)
    sf.save(tmp_path / "part", {"model": model, "optimizer": torch.optim.AdamW(model[0].parameters())})
    step(model, optimizer)
    sf.load(tmp_path / "0", state, only="model")
    assert len(optimizer.state) == 4
    # Of the parameters that it does not speak of, the checkpoint does not say that they had no state.
    with pytest.raises(sf.Invalid, match=r"no saved parameter group has '2\.weight'"):
        sf.load(tmp_path / "part", state)
    plan = sf.load(tmp_path / "part", state, strict=False)
    assert set(optimizer.state) == {model[2].weight, model[2].bias}
    assert {name.rpartition(".")[0] for name in plan.missing} == {"optimizer/state.2.weight", "optimizer/state.2.bias"}
    assert {name.rpartition(".")[0] for name in plan.dropped} == {"optimizer/state.0.weight", "optimizer/state.0.bias"}


# Renaming


def pair(seed):
    g, d = net(seed), net(seed + 1)
    return {
        "G": g,
        "D": d,
        "optimizer_G": torch.optim.AdamW(g.parameters()),
        "optimizer_D": torch.optim.SGD(d.parameters(), lr=0.1, momentum=0.9),
    }


@pytest.mark.parametrize("as_function", [False, True])
def test_an_optimizer_follows_the_module_whose_parameters_it_owns(tmp_path, as_function):
    state = pair(0)
    step(state["G"], state["optimizer_G"])
    step(state["D"], state["optimizer_D"])
    sf.save(tmp_path / "one", state)
    fresh = pair(5)
    fresh["G"] = nn.Sequential(nn.Identity(), *fresh["G"])  # every layer of G has moved by one
    moved = {f"G/{n}.{part}": f"G/{n + 1}.{part}" for n in (0, 2) for part in ("weight", "bias")}
    sf.load(tmp_path / "one", fresh, rename=(lambda name: moved.get(name, name)) if as_function else moved)
    for name in ("G", "D"):
        assert same([p.detach() for p in fresh[name].parameters()], [p.detach() for p in state[name].parameters()])
        ours, theirs = fresh[f"optimizer_{name}"], state[f"optimizer_{name}"]
        assert same(state_of(ours), state_of(theirs)) and state_of(theirs)[0]


def test_an_optimizer_follows_its_module_to_another_key(tmp_path):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    sf.save(tmp_path / "one", {"old": model, "optimizer": optimizer})
    fresh = nn.ModuleDict({"body": net(1)})
    other = torch.optim.AdamW(fresh.parameters())
    sf.load(tmp_path / "one", {"new": fresh, "optimizer": other}, rename=lambda name: name.replace("old/", "new/body."))
    assert same(state_of(other), state_of(optimizer)) and state_of(other)[0]


# Habits


def test_a_dict_of_parameters_names_them_for_an_optimizer(tmp_path):
    """Only what is trained is saved: adapters beside a frozen model."""
    model, fresh = net(), net(1)
    for one in (model, fresh):
        one[0].requires_grad_(False)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values())
    for number in range(3):
        step(model, optimizer, seed=number)
        sf.save_async(tmp_path / f"{number}", {"model": trained, "optimizer": optimizer}).committed()
    others = {name: p for name, p in fresh.named_parameters() if p.requires_grad}
    other = torch.optim.AdamW(others.values())
    sf.load(tmp_path / "2", {"model": others, "optimizer": other})
    assert same(state_of(other), state_of(optimizer)) and state_of(other)[0]
    assert torch.equal(fresh[2].weight, model[2].weight) and not torch.equal(fresh[0].weight, model[0].weight)


@pytest.mark.parametrize("has_state", [False, True])
def test_another_class_of_optimizer_is_unexpected(tmp_path, has_state):
    model = net()
    adam = torch.optim.Adam(model.parameters())
    step(model, adam)
    sf.save(tmp_path / "adam", {"model": model, "optimizer": adam})
    sgd = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    if has_state:
        step(model, sgd)
    before = state_of(sgd)
    state = {"model": model, "optimizer": sgd}
    with pytest.raises(sf.Invalid, match=r"unexpected: the state of '0.weight' was saved by .*Adam, and here .*SGD"):
        sf.load(tmp_path / "adam", state)
    plan = sf.load(tmp_path / "adam", state, strict=False)
    assert "optimizer/state.0.weight.exp_avg" in plan.unexpected
    assert same(state_of(sgd), before) and sgd.param_groups[0]["lr"] == 0.5
    step(model, sgd)
    # One algorithm under two names.
    sf.load(tmp_path / "adam", {"model": model, "optimizer": torch.optim.AdamW(model.parameters())})


def test_a_fresh_optimizer_loaded_in_inference_mode_can_be_trained_with(tmp_path):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    sf.save(tmp_path / "one", {"model": model, "optimizer": optimizer})
    other = torch.optim.AdamW(model.parameters())
    with torch.inference_mode():
        sf.load(tmp_path / "one", {"model": model, "optimizer": other})
    assert not any(value.is_inference() for entries in state_of(other) for value in entries.values())
    step(model, other)
