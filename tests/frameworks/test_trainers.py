"""Objects that trainers make, in the state as they are: what was saved is the state at the call, though training goes
on at once; loaded into fresh objects it is equal bit for bit, and so are the losses and the state of further steps."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import lightning
import pytest
import shardfast as sf
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from lightning.fabric import Fabric
from shardfast import _native, session
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

WIDTH = 1536  # 28 MB with the optimizer's state, more than two slots of staging: copied in the background


@pytest.fixture(autouse=True)
def small_staging(monkeypatch):
    solo = _native.Session.solo(staging_bytes=8 << 20)
    monkeypatch.setattr(session, "_solo", lambda process: solo)


@pytest.fixture(autouse=True)
def nothing_compiled():
    yield
    torch._dynamo.reset()  # else code that was compiled for other objects too often is not compiled any more


class Counted(nn.LayerNorm):
    """Has a buffer that is the same on all ranks."""

    def __init__(self):
        super().__init__(WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(32, WIDTH),
        Counted(),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.GELU()),
        nn.Linear(WIDTH, 4),
    )


def batch(number):
    """The data of a step, and the seed of what is random in it."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(100 * number + rank)
    return torch.randn(8, 32)


def loss_of(model, number):
    return model(batch(number)).square().mean()


class Run(NamedTuple):
    """What a user of a trainer has.

    Attributes:
        state: What is saved and loaded.
        step: Does a step with the data of that number; its loss.
        modules: Those that the user made.
        optimizers: The optimizers of PyTorch that really step.
        schedulers: What has the state of schedules.
    """

    state: dict[str, Any]
    step: Callable[[int], float]
    modules: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    schedulers: list[Any]


def copied(value):
    if isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, (list, tuple)):
        return [copied(item) for item in value]
    return {name: copied(item) for name, item in value.items()} if isinstance(value, dict) else value


def held(run):
    """All that the run holds, as copies."""
    groups = [group for optimizer in run.optimizers for group in optimizer.param_groups]
    return {
        "modules": [copied(dict(module.state_dict())) for module in run.modules],
        "state": [copied(o.state.get(p, {})) for o in run.optimizers for g in o.param_groups for p in g["params"]],
        "groups": [copied({name: value for name, value in group.items() if name != "params"}) for group in groups],
        "schedulers": [copied(scheduler.state_dict()) for scheduler in run.schedulers],
    }


def same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, (list, dict)):
        items = one.items() if isinstance(one, dict) else enumerate(one)
        return len(one) == len(other) and all(same(value, other[key]) for key, value in items)
    return one == other


def check(made, url):
    """Saves, trains on at once, loads into what ``made`` makes afresh; twice, since a second save describes anew."""
    run = made(0)
    for number in range(3):
        run.step(number)
    for save in range(2):
        before = held(run)
        assert all(before["state"])
        pending = sf.save_async(f"{url}/{save}", run.state)
        losses = [run.step(number) for number in range(3, 6)]
        after = held(run)
        pending.committed()
        fresh = made(1)
        assert not same(held(fresh)["modules"], before["modules"])
        sf.load(f"{url}/{save}", fresh.state)
        assert same(held(fresh), before)
        assert [fresh.step(number) for number in range(3, 6)] == losses
        assert same(held(fresh), after)
        assert not same(before, after)
    return before


def check_plain(url, saved):
    """What a trainer's objects saved has the names of the user's own module, and loads into plain objects."""
    model = net(7)
    optimizer = torch.optim.AdamW(model.parameters())
    run = Run({"model": model, "optimizer": optimizer}, lambda number: 0.0, [model], [optimizer], [])
    sf.load(url, run.state, only=list(run.state))
    found = held(run)
    assert same(found["modules"], saved["modules"]) and same(found["state"], saved["state"])
    assert [group["lr"] for group in found["groups"]] == [group["lr"] for group in saved["groups"]]


# torchtitan


class Stage(nn.Module):
    """A part of a model, as a pipeline makes them: names are those in the whole."""

    def __init__(self, layers, names):
        super().__init__()
        self.layers = nn.ModuleDict({name: layers[int(name)] for name in names})

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x


def titan(seed, implementation="for-loop", sharded=False, policy=None, parts=("01", "23")):
    whole = net(seed)
    stages = [Stage(whole, names) for names in parts]
    for stage in stages:
        if policy is not None:
            policy.Config().build().apply(stage)
        if sharded:
            for layer in stage.layers.values():
                fully_shard(layer)
            fully_shard(stage)
    adam = {"betas": (0.9, 0.95), "eps": 1e-8}
    groups = [
        ParamGroupConfig(pattern=r"bias$", optimizer_name="Adam", optimizer_kwargs={"lr": 2e-3, **adam}),
        ParamGroupConfig(pattern=r".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-3, **adam}),
    ]
    config = OptimizersContainer.Config(param_groups=groups, implementation=implementation)
    optimizers = config.build(model_parts=stages)
    schedulers = LRSchedulersContainer.Config(warmup_steps=4).build(optimizers=optimizers, training_steps=20)

    def step(number):
        optimizers.zero_grad()
        x = batch(number)
        for stage in stages:
            x = stage(x)
        loss = x.square().mean()
        loss.backward()
        optimizers.step()
        schedulers.step()
        return loss.item()

    state = {"model": stages, "optimizer": optimizers, "lr_scheduler": schedulers}
    return Run(state, step, stages, list(optimizers), [schedulers])


@pytest.mark.smoke
@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
def test_torchtitan(tmp_path, implementation):
    check(functools.partial(titan, implementation=implementation), tmp_path)


@pytest.mark.parametrize("policy", [FullAC, SelectiveAC])
def test_torchtitan_with_activation_checkpointing(tmp_path, policy):
    check(functools.partial(titan, policy=policy), tmp_path)
    sf.load(tmp_path / "1", titan(2).state)  # names do not tell of it


def check_titan(rank, world, url):
    check(functools.partial(titan, sharded=True), url)


def test_torchtitan_sharded(ranks, tmp_path):
    ranks(2)(check_titan, f"{tmp_path}")
    sf.load(tmp_path / "1", titan(1).state)
    whole = titan(1, parts=("0123",))
    sf.load(tmp_path / "1", whole.state)  # one stage, and so other optimizers
    assert {state["step"].item() for optimizer in whole.optimizers for state in optimizer.state.values()} == {6}


# accelerate


def accelerated(seed, accumulated=1):
    for singleton in (AcceleratorState, GradientState, PartialState):
        singleton._shared_state.clear()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulated)
    inner = net(seed)
    plain = torch.optim.AdamW(inner.parameters(), lr=1e-3)
    schedule = LambdaLR(plain, lambda step: 1 / (1 + step))
    model, optimizer, scheduler = accelerator.prepare(inner, plain, schedule)
    assert type(optimizer).__module__ == "accelerate.optimizer" and type(scheduler).__module__ == "accelerate.scheduler"

    def step(number):
        found = []
        for part in range(accumulated):
            with accelerator.accumulate(model):
                loss = loss_of(model, accumulated * number + part)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                found.append(loss.item())
        return found

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    return Run(state, step, [inner], [plain], [scheduler])


@pytest.mark.smoke
@pytest.mark.parametrize("accumulated", [1, 2])
def test_accelerate(tmp_path, accumulated):
    check_plain(tmp_path / "1", check(functools.partial(accelerated, accumulated=accumulated), tmp_path))


def check_accelerate(rank, world, url):
    run = accelerated(0)
    assert isinstance(run.state["model"], nn.parallel.DistributedDataParallel)
    return check(accelerated, url)


def test_accelerate_on_two_processes(ranks, tmp_path):
    saved, _ = ranks(2)(check_accelerate, f"{tmp_path}")
    check_plain(tmp_path / "1", saved)


# Fabric


def fabricated(seed, strategy="auto", devices=1):
    fabric = Fabric(accelerator="cpu", devices=devices, strategy=strategy)
    fabric.launch()
    inner = net(seed)
    plain = torch.optim.AdamW(inner.parameters(), lr=1e-3)
    model, optimizer = fabric.setup(inner, plain)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))

    def step(number):
        optimizer.zero_grad()
        loss = loss_of(model, number)
        fabric.backward(loss)
        optimizer.step()
        scheduler.step()
        return loss.item()

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    return Run(state, step, [inner], [plain], [scheduler])


@pytest.mark.smoke
def test_fabric(tmp_path):
    check_plain(tmp_path / "1", check(fabricated, tmp_path))


def check_fabric(rank, world, url):
    run = fabricated(0, "ddp", 2)
    assert any(isinstance(part, nn.parallel.DistributedDataParallel) for part in run.state["model"].modules())
    return check(functools.partial(fabricated, strategy="ddp", devices=2), url)


def test_fabric_on_two_processes(ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # the ranks are there already
    monkeypatch.setenv("GROUP_RANK", "0")
    saved, _ = ranks(2)(check_fabric, f"{tmp_path}")
    check_plain(tmp_path / "1", saved)


# Lightning


class Lit(lightning.LightningModule):
    """Trains on the numbers of batches."""

    def __init__(self, seed, is_manual):
        super().__init__()
        self.body = net(seed)
        self.automatic_optimization = not is_manual
        self.losses = []

    def training_step(self, numbers, index):
        loss = loss_of(self.body, int(numbers))
        self.losses.append(loss.item())
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.lr_schedulers().step()
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class At(lightning.Callback):
    """Calls a function with the run at the end of a step, and another before the first one."""

    def __init__(self, step, ended, started):
        self.step, self.ended, self.started = step, ended, started

    def run_of(self, trainer, module):
        optimizer, schedule = module.optimizers(), trainer.lr_scheduler_configs[0].scheduler
        assert isinstance(optimizer, lightning.pytorch.core.optimizer.LightningOptimizer)
        state = {"model": module, "optimizer": optimizer, "scheduler": schedule}
        return Run(state, None, [module], [optimizer.optimizer], [schedule])

    def on_train_start(self, trainer, module):
        self.started(self.run_of(trainer, module))

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if module.losses and len(module.losses) == self.step:
            self.ended(self.run_of(trainer, module))


def fit(module, numbers, callback):
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
    )
    trainer.fit(module, torch.utils.data.DataLoader(numbers, batch_size=None))
    return callback.run_of(trainer, module)


@pytest.mark.smoke
@pytest.mark.parametrize("is_manual", [False, True])
def test_lightning(tmp_path, is_manual):
    seen = {}

    def save(run):
        seen["before"] = held(run)
        seen["pending"] = sf.save_async(tmp_path / "one", run.state)

    def load(run):
        sf.load(tmp_path / "one", run.state)
        seen["loaded"] = held(run)

    module, fresh = Lit(0, is_manual), Lit(1, is_manual)
    run = fit(module, list(range(6)), At(3, save, lambda run: None))
    after = held(run)
    seen["pending"].committed()
    other = fit(fresh, [3, 4, 5], At(0, None, load))
    assert same(seen["loaded"], seen["before"]) and all(seen["before"]["state"])
    assert fresh.losses == module.losses[3:]
    assert same(held(other), after) and not same(seen["before"], after)
    plain = nn.ModuleDict({"body": net(7)})
    optimizer = torch.optim.AdamW(plain.parameters())
    sf.load(tmp_path / "one", {"model": plain, "optimizer": optimizer}, only=["model", "optimizer"])
    assert same(copied(dict(plain.state_dict())), seen["before"]["modules"][0])


# Whose class has no hooked step


def lit(seed):
    """The objects of a training that is over."""
    module = Lit(seed, False)
    run = fit(module, [0, 1], At(0, None, lambda run: None))
    return run._replace(modules=[module])


@pytest.mark.smoke
@pytest.mark.parametrize("made", [accelerated, fabricated, lit])
def test_what_steps_past_hooks_is_captured_in_the_call(tmp_path, made):
    """Writes that nothing announces and no version counter shows, as early as possible."""
    run = made(0)
    if run.step is not None:
        run.step(0)
    optimizer = run.state["optimizer"]
    assert not getattr(type(optimizer).step, "hooked", False) and type(optimizer).__module__ != "torch.optim.adamw"
    for save in range(2):
        before = held(run)
        pending = sf.save_async(tmp_path / f"{save}", run.state)
        for tensor in run.modules[0].state_dict().values():
            tensor.data.add_(1)
        for entries in run.optimizers[0].state.values():
            for tensor in entries.values():
                tensor.data.add_(1)
        pending.committed()
        assert not same(held(run)["state"], before["state"])
        sf.load(tmp_path / f"{save}", run.state)
        assert same(held(run), before)


# What PyTorch itself wraps


def stepping(seed, model_of=None, step_of=None, make=torch.optim.AdamW):
    inner = net(seed)
    model = inner if model_of is None else model_of(inner)
    optimizer = make(model.parameters(), lr=1e-3)
    do = optimizer.step if step_of is None else step_of(optimizer)

    def step(number):
        optimizer.zero_grad()
        loss = loss_of(model, number)
        loss.backward()
        do()
        return loss.item()

    return Run({"model": model, "optimizer": optimizer}, step, [inner], [optimizer], [])


def compiled(what):
    return torch.compile(what, backend="aot_eager")


def test_a_compiled_module(tmp_path):
    check_plain(tmp_path / "1", check(functools.partial(stepping, model_of=compiled), tmp_path))


def in_place(model):
    model.compile(backend="aot_eager")
    return model


def test_a_module_compiled_in_place(tmp_path):
    check_plain(tmp_path / "1", check(functools.partial(stepping, model_of=in_place), tmp_path))


STEPS = {
    "the method": lambda optimizer: compiled(optimizer.step),
    "a function": lambda optimizer: compiled(lambda: optimizer.step()),
    "in its place": lambda optimizer: setattr(optimizer, "step", compiled(optimizer.step)) or optimizer.step,
}


@pytest.mark.parametrize("step_of", STEPS.values(), ids=STEPS)
def test_a_compiled_step(tmp_path, step_of):
    check_plain(tmp_path / "1", check(functools.partial(stepping, step_of=step_of), tmp_path))


@pytest.mark.parametrize("impl", CheckpointImpl)
def test_activation_checkpointing(tmp_path, impl):
    def wrapped(model):
        model[2] = checkpoint_wrapper(model[2], checkpoint_impl=impl)
        return checkpoint_wrapper(model, checkpoint_impl=CheckpointImpl.NO_REENTRANT)

    check_plain(tmp_path / "1", check(functools.partial(stepping, model_of=wrapped), tmp_path))


# Optimizers that step in backward


def in_backward(seed, kind="list"):
    model = net(seed)
    every = {parameter: torch.optim.AdamW([parameter], lr=1e-3) for parameter in model.parameters()}

    def step_of(parameter):
        every[parameter].step()
        every[parameter].zero_grad()

    for parameter in every:
        parameter.register_post_accumulate_grad_hook(step_of)

    def step(number):
        loss = loss_of(model, number)
        loss.backward()
        return loss.item()

    named = {name: every[parameter] for name, parameter in model.named_parameters()}
    optimizer = {"list": list(every.values()), "by parameter": every, "by name": named}[kind]
    return Run({"model": model, "optimizer": optimizer}, step, [model], list(every.values()), [])


@pytest.mark.parametrize("kind", ["list", "by parameter", "by name"])
def test_optimizers_that_step_in_backward(tmp_path, kind):
    check(functools.partial(in_backward, kind=kind), tmp_path)


def applied_in_backward(seed):
    model = net(seed)
    _apply_optimizer_in_backward(torch.optim.AdamW, model.parameters(), {"lr": 1e-3})
    optimizers = [optimizer for p in model.parameters() for optimizer in p._in_backward_optimizers]

    def step(number):
        loss = loss_of(model, number)
        loss.backward()
        return loss.item()

    return Run({"model": model, "optimizer": optimizers}, step, [model], optimizers, [])


def test_optimizers_that_pytorch_applies_in_backward(tmp_path):
    check(applied_in_backward, tmp_path)
