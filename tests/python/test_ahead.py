"""Saves that are captured over several steps hold the same bytes as those of an identical run that are not."""

import contextlib
import copy
import gc
import json
import logging
import shutil
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import shardfast as sf
import torch
from older import IS_OLDER
from shardfast.adapters.torch.steps import TorchSteps
from shardfast.capture.in_flight import in_flight
from shardfast.capture.multistep import Ahead, Phase
from test_replay import Lion
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim.optimizer import _global_optimizer_post_hooks, register_optimizer_step_post_hook

pytestmark = pytest.mark.skipif(IS_OLDER, reason="variants are those of the newest PyTorch's kernels")

COMMAND = str(Path(sys.executable).with_name("shardfast"))

EVERY, STEPS = 7, 21
"""The first save is the rehearsal."""


def net(dtype: torch.dtype = torch.float32, widths: tuple[int, int, int] = (302, 333, 14)) -> nn.Sequential:
    """Tensors of more than the bytes that are copied in the call; vectors with tails, and without."""
    torch.manual_seed(3)
    one, two, out = widths
    layers = (nn.Linear(40, one), nn.Tanh(), nn.Linear(one, two), nn.Tanh(), nn.Linear(two, out))
    return nn.Sequential(*layers).to(dtype)


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 40, generator=torch.Generator().manual_seed(step))


def train(
    place: Path,
    over: int | None,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    each: Callable[[int], None] = lambda step: None,
    *,
    step_all: Callable[[], None] | None = None,
    state: dict | None = None,
) -> sf.Checkpointer:
    """Trains and saves as due; ``each`` runs behind the steps of the optimizers, before the gradients are dropped."""
    dtype = next(model.parameters()).dtype
    state = state or {"model": model, **{f"optimizer{i}": one for i, one in enumerate(optimizers)}}
    with sf.Checkpointer(place, every=sf.steps(EVERY), over=over) as ckpt:
        for step in range(ckpt.restore(state), STEPS):
            model(batch(step).to(dtype)).square().mean().backward()
            if step_all is None:
                for optimizer in optimizers:
                    optimizer.step()
            else:
                step_all()
            each(step + 1)
            for optimizer in optimizers:
                optimizer.zero_grad()
            step_and_copy(ckpt, step + 1, state)
        ckpt.wait()
    return ckpt


def step_and_copy(ckpt: sf.Checkpointer, step: int, state: dict) -> None:
    """Saves as due, and leaves time for that and for what is copied ahead: steps here are shorter than any real one.

    What a save writes is planned behind the training, and the next window opens over what was planned.
    """
    ckpt.step(step, state)
    until = time.monotonic() + 60
    while not all(pending.done() for pending, _ in ckpt._running) and time.monotonic() < until:
        time.sleep(0.001)
    while (window := ckpt.capture._window) is not None and time.monotonic() < until:
        if json.loads(window.figures())["left_bytes"] == 0:
            return
        time.sleep(0.001)


def expect_same(tmp_path: Path, one: str, other: str, steps: tuple[int, ...] = (14, 21)) -> None:
    for step in steps:
        places = [f"{tmp_path}/{name}/step-{step:08}" for name in (one, other)]
        done = subprocess.run([COMMAND, "diff", *places], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def replayed(place: Path, step: int = 21) -> int:
    """Bytes that a checkpoint says were replayed."""
    command = [COMMAND, "inspect", "--json", f"{place}/step-{step:08}"]
    told = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    note = told["user"].get("shardfast.replayed", "")
    assert not note or note.endswith(", all proven")
    return sum(int(part.split(" bytes by ")[0]) for part in note.removesuffix(", all proven").split(", ") if part)


def of_class(kind: type, **settings: object) -> Callable:
    return lambda parameters: [kind(list(parameters), **{"lr": 1e-2, **settings})]


OPTIMIZERS = {
    "adamw": of_class(torch.optim.AdamW, fused=True),
    "adamw, a rate that is a tensor": of_class(torch.optim.AdamW, fused=True, lr=torch.tensor(1e-2)),
    "adam, l2, amsgrad, maximize": of_class(
        torch.optim.Adam, fused=True, weight_decay=0.1, amsgrad=True, maximize=True
    ),
    "sgd": of_class(torch.optim.SGD, fused=True),
    "sgd for-loop, momentum, nesterov": of_class(torch.optim.SGD, momentum=0.9, nesterov=True),
    "sgd, dampening": of_class(torch.optim.SGD, fused=True, momentum=0.9, dampening=0.3, weight_decay=0.1),
    "adagrad": of_class(torch.optim.Adagrad, fused=True, lr_decay=0.01),
    "lion": lambda parameters: [Lion(list(parameters), added=True)],
}


BY_OPERATIONS = ("sgd for-loop, momentum, nesterov", "lion")
"""Their steps in bf16 depend on the number of threads on a CPU, and are refused."""


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in OPTIMIZERS),
        *((name, torch.bfloat16) for name in OPTIMIZERS if name not in BY_OPERATIONS),
    ],
    ids=str,
)
def test_each_optimizer(tmp_path, name, dtype):
    for over in (1, 2, 3, 6):
        model = net(dtype)
        ckpt = train(tmp_path / str(over), over, model, OPTIMIZERS[name](model.parameters()))
        if over > 1:
            assert str(ckpt.capture).startswith(f"over {over} steps"), str(ckpt.capture)
            assert replayed(tmp_path / str(over)) > 0
            expect_same(tmp_path, "1", str(over))


def test_the_report_and_the_text_tell_what_was_done(tmp_path):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    state = {"model": model, "optimizer": optimizer}
    with sf.Checkpointer(tmp_path, every=sf.steps(4), over=3) as ckpt:
        assert "nothing was rehearsed" in str(ckpt.capture)
        for step in range(1, 9):
            model(batch(step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            step_and_copy(ckpt, step, state)
        pending, _ = ckpt._running[-1]
        ckpt.wait()
        found = pending.report["ahead"]
        assert found["held_bytes"] > 100_000 and found["left_bytes"] == found["let_go_bytes"] == 0
        assert found["gradient_bytes"] * 3 == found["held_bytes"] * 2
        assert found["steps"] == 3
        assert "replayed and proven in each of 1 save" in str(ckpt.capture)


def schedules(optimizers: list[torch.optim.Optimizer]) -> Callable[[int], None]:
    made = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30) for optimizer in optimizers]
    return lambda step: [one.step() for one in made]


@pytest.mark.parametrize("over", [2, 3, 6])
def test_numbers_of_steps_and_accumulated_gradients(tmp_path, over):
    for steps in (1, over):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

        def step_all(model=model, optimizer=optimizer) -> None:
            model(batch(99)).square().mean().backward()  # on top of the gradients that are there
            optimizer.step()

        ckpt = train(tmp_path / str(steps), steps, model, [optimizer], step_all=step_all)
    assert ckpt.report["ahead"]["steps"] == over and ckpt.capture._figures[0]["steps"] == over
    assert replayed(tmp_path / str(over), 14) > 0
    expect_same(tmp_path, "1", str(over))


def test_more_steps_than_the_schedule_leaves_between_saves_are_as_many_as_there_are(tmp_path):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    state = {"model": model, "optimizer": optimizer}
    with sf.Checkpointer(tmp_path, every=sf.optimal(mtbf="6h"), over=6) as ckpt:
        # As if three steps were best, whatever is measured; another schedule has none to tell.
        ckpt._schedule._first = 3
        ckpt._schedule._due = 3
        ckpt._schedule.notes = dict
        for step in range(1, 13):
            model(batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            step_and_copy(ckpt, step, state)
    assert [one["steps"] for one in ckpt.capture._figures] == [3] * 3, "the first one was the rehearsal"
    assert str(ckpt.capture).startswith("over 3 steps: ")


def test_groups_optimizers_schedules_clipping_and_what_is_frozen_or_unused(tmp_path):
    for over in (1, 4):
        model = net()
        model[2].bias.requires_grad_(False)
        model.unused = nn.Parameter(torch.ones(500))
        decayed = [{"params": [model[0].weight], "weight_decay": 0.3}, {"params": [model[0].bias], "lr": 1e-3}]
        adamw = torch.optim.AdamW([*decayed, {"params": [model.unused]}], fused=True)
        sgd = torch.optim.SGD([*model[2].parameters(), *model[4].parameters()], 1e-2, momentum=0.9, fused=True)
        rates = schedules([adamw, sgd])

        def step_all(model=model, adamw=adamw, sgd=sgd):
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            adamw.step()
            sgd.step()

        train(tmp_path / str(over), over, model, [adamw, sgd], rates, step_all=step_all)
    assert replayed(tmp_path / "4") > 0
    expect_same(tmp_path, "1", "4")


@pytest.mark.parametrize("of_all", [False, True])
def test_gradients_that_a_users_hook_drops_behind_the_step(tmp_path, of_all):
    for over in (1, 3):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        register = register_optimizer_step_post_hook if of_all else optimizer.register_step_post_hook
        hook = register(lambda one, args, kwargs: one.zero_grad())
        if of_all:  # in front of ours, as one that was registered before
            _global_optimizer_post_hooks.move_to_end(hook.id, last=False)
        train(tmp_path / str(over), over, model, [optimizer])
        hook.remove()
    assert replayed(tmp_path / "3") > 0
    expect_same(tmp_path, "1", "3")


@pytest.mark.parametrize("fused", [True, False])
def test_scaled_gradients_and_steps_that_are_skipped(tmp_path, fused):
    """A scaler unscales within a fused step, or before another one, and skips steps with infinite gradients."""
    for over in (1, 5):
        model = net()
        make = torch.optim.AdamW if fused else torch.optim.SGD
        optimizer = make(model.parameters(), lr=1e-2, **({"fused": True} if fused else {}))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        state = {"model": model, "optimizer": optimizer}
        with sf.Checkpointer(tmp_path / str(over), every=sf.steps(EVERY), over=over) as ckpt:
            for step in range(1, STEPS + 1):
                scaler.scale(model(batch(step)).square().mean()).backward()
                if step in (12, 19):
                    model[0].weight.grad[0, 0] = float("inf")
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                step_and_copy(ckpt, step, state)
    assert replayed(tmp_path / "5") > 0
    expect_same(tmp_path, "1", "5")


def test_a_run_that_resumes_from_replayed_bytes_goes_on_as_the_one_that_did_not_stop(tmp_path):
    for place in ("whole", "resumed"):
        model = net()
        if place == "resumed":
            shutil.copytree(tmp_path / "whole", tmp_path / place)
            shutil.rmtree(tmp_path / place / "step-00000021")
            nn.init.zeros_(model[0].weight)
        train(tmp_path / place, 4, model, [torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)])
        assert replayed(tmp_path / "whole", 14) > 0
    expect_same(tmp_path, "whole", "resumed", (21,))


def test_a_window_that_is_open_is_let_go_when_an_earlier_save_finds_other_bits(tmp_path):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    state = {"model": model, "optimizer": optimizer}
    with sf.Checkpointer(tmp_path, every=sf.steps(EVERY), over=4) as ckpt:
        for step in range(1, STEPS + 1):
            model(batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            step_and_copy(ckpt, step, state)
            if step == 19:
                assert ckpt.capture.is_open
                ckpt.capture._enter(Phase.REFUTED)  # as the thread that concludes saves tells
        assert not ckpt.capture.is_open
    assert replayed(tmp_path, 14) > 0 and replayed(tmp_path, 21) == 0
    assert "changed by something else" in ckpt.report["ahead"]["reason"]


def test_a_save_that_was_not_due_uses_what_is_there(tmp_path):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    state = {"model": model, "optimizer": optimizer}
    with sf.Checkpointer(tmp_path, every=sf.steps(EVERY), over=5) as ckpt:
        for step in range(1, 14):
            model(batch(step)).sum().backward()
            optimizer.step()
            step_and_copy(ckpt, step, state)
            if step == 12:
                ckpt.save(step, state)
    assert replayed(tmp_path, 12) > 0
    again = net()
    sf.load(tmp_path / "step-00000012", {"model": again}, only="model")
    before = net()
    optimizer = torch.optim.AdamW(before.parameters(), fused=True)
    for step in range(1, 13):
        before(batch(step)).sum().backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), before.parameters(), strict=True))


# The proof


def spoilers() -> dict[str, Callable[[pytest.MonkeyPatch, nn.Sequential], Callable[[int], None]]]:
    """What makes a replay wrong; each acts at step 12, within the window of step 14, or on what a step says."""

    def at_twelve(spoil: Callable[[nn.Sequential], None]) -> Callable:
        return lambda patch, model: lambda step: spoil(model) if step == 12 else None

    def ulp(model: nn.Sequential) -> None:
        model[2].weight.data.view(torch.int32)[7, 7] += 1

    def two_that_cancel(model: nn.Sequential) -> None:
        bits = model[2].weight.data.view(torch.int32)
        bits[3, 3] += 1
        bits[4, 4] -= 1

    def swapped(model: nn.Sequential) -> None:
        model[0].weight.data[[0, 1]] = model[0].weight.data[[1, 0]]

    def clamped(model: nn.Sequential) -> None:
        with torch.no_grad():
            model[0].weight.clamp_(-0.01, 0.01)

    def taken(change: Callable) -> Callable:
        def spoil(patch: pytest.MonkeyPatch, model: nn.Sequential) -> Callable[[int], None]:
            known, steps = TorchSteps.taken, [0]

            def wrong(self: TorchSteps, optimizer: object) -> object:
                steps[0] += 1
                return change(known(self, optimizer), model) if steps[0] >= 4 else known(self, optimizer)

            patch.setattr(TorchSteps, "taken", wrong)
            return lambda step: None

        return spoil

    def lost(found, model):
        return found._replace(applied=found.applied[1:])

    def of_another(found, model):
        # Two tensors of one shape: one gets the other's gradient.
        stale = torch.zeros(333, 302)
        return found._replace(applied=[(unit, stale if unit == 2 else at, of) for unit, at, of in found.applied])

    def doubled(found, model):
        return found._replace(applied=[(unit, at * 2 if unit == 2 else at, of) for unit, at, of in found.applied])

    def of_another_step() -> Callable:
        kept: list[object] = []

        def stale(found, model):
            kept.append([(unit, at.clone(), of) for unit, at, of in found.applied])
            return found._replace(applied=kept[-2]) if len(kept) > 1 else found

        return stale

    def rate(found, model):
        return found._replace(scalars=[(kind, [one[0] * 1.0001, *one[1:]], None) for kind, one, _ in found.scalars])

    return {
        "an ulp": at_twelve(ulp),
        "two ulps that cancel": at_twelve(two_that_cancel),
        "rows swapped": at_twelve(swapped),
        "clamped": at_twelve(clamped),
        "a gradient lost": taken(lost),
        "a gradient of another tensor": taken(of_another),
        "a gradient doubled": taken(doubled),
        "gradients of another step": taken(of_another_step()),
        "another learning rate": taken(rate),
    }


def failures_of(
    ckpt: sf.Checkpointer, model: nn.Module, optimizer: torch.optim.Optimizer, each: Callable[[int], None]
) -> list[str]:
    """Trains for four saves, ``each`` behind the steps of the optimizer: what the saves raised."""
    state, failures = {"model": model, "optimizer": optimizer}, []
    for step in range(1 + ckpt.restore(state), STEPS + 8):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        each(step)
        optimizer.zero_grad()
        try:
            step_and_copy(ckpt, step, state)
            if step % EVERY == 0:
                ckpt.wait()
        except sf.Invalid as error:
            failures.append(str(error))
    return failures


@pytest.mark.parametrize("name", spoilers())
def test_what_was_not_stepped_alike_fails_the_save(tmp_path, monkeypatch, name):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    each = spoilers()[name](monkeypatch, model)
    ckpt = sf.Checkpointer(tmp_path, every=sf.steps(EVERY), over=4)
    failures = failures_of(ckpt, model, optimizer, each)
    with contextlib.suppress(sf.Invalid):
        ckpt.close()
    assert failures and all("has other bits than the tensor had" in one for one in failures), failures
    assert "elements 0.." in failures[0] and "over=1" in failures[0]
    assert not (tmp_path / "step-00000014" / "COMMIT").exists()
    # Later saves are whole, in one step, and tell why.
    assert (tmp_path / "step-00000028" / "COMMIT").exists() and replayed(tmp_path, 28) == 0
    assert "changed by something else" in str(ckpt.capture)


def train_with_another_number(rank: int, world: int, place: Path) -> tuple[list[str], str]:
    """Rank 1 changes a number of its own shard in the window of the second save; what each save raised, by rank."""
    model = net()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    def each(step: int) -> None:
        if (rank, step) == (1, 12):
            model[2].weight.to_local().data[7, 7] += 0.01

    ckpt = sf.Checkpointer(place, every=sf.steps(EVERY), over=4)
    failures = failures_of(ckpt, model, optimizer, each)
    ckpt.close()
    return failures, str(ckpt.capture)


@pytest.mark.parametrize("world", [2, 4])
def test_other_bits_on_one_rank_fail_the_save_on_all(ranks, tmp_path, world):
    found = ranks(world)(train_with_another_number, tmp_path)
    said = {tuple(failures) for failures, _ in found}
    assert len(said) == 1 and len(found[0][0]) == 1, said
    assert "has other bits than the tensor had" in found[0][0][0] and "2.weight" in found[0][0][0]
    steps = sorted(int(one.parent.name[-8:]) for one in tmp_path.glob("step-*/COMMIT"))
    assert steps == [7, 21, 28]
    # The others go on ahead.
    assert ["changed by something else" in text for _, text in found] == [rank == 1 for rank in range(world)]
    assert 0 < replayed(tmp_path, 28) < sum(file.stat().st_size for file in (tmp_path / "step-00000028").rglob("*"))


# One step, and why


class Unhooked(torch.optim.SGD):
    """Its class is not registered with PyTorch, so that its steps run no hooks."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(parameter.grad, alpha=-0.01)
            self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter)).copy_(parameter.grad)


def unhooked(parameters: Iterator[nn.Parameter]) -> list[torch.optim.Optimizer]:
    optimizer = Unhooked(list(parameters), lr=1e-2, momentum=0.9)
    Unhooked.step = Unhooked.__dict__["step"].__wrapped__
    return [optimizer]


REFUSED = {
    "a root that is not IEEE": (of_class(torch.optim.AdamW), "none of the 2 known implementations of Adam"),
    "no hooks": (unhooked, "announces no steps"),
    "another optimizer": (of_class(torch.optim.RMSprop), "RMSprop is not replayed"),
    "betas that are tensors": (
        of_class(torch.optim.AdamW, fused=True, betas=(torch.tensor(0.9), torch.tensor(0.999))),
        "betas that are",
    ),
    "fp64": (of_class(torch.optim.AdamW, fused=True), "only fp32 and bf16 are replayed"),
    "bf16 by operations": (of_class(torch.optim.SGD, momentum=0.9), "implementations of SGD has this training's bits"),
    "gradients that the step changes": (
        of_class(torch.optim.SGD, momentum=0.9, nesterov=True, foreach=True),
        "implementations of SGD has this training's bits",
    ),
}
DTYPES = {"fp64": torch.float64, "bf16 by operations": torch.bfloat16}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_replayed_is_captured_in_one_step_and_said(tmp_path, name):
    make, why = REFUSED[name]
    model = net(DTYPES.get(name, torch.float32))
    ckpt = train(tmp_path, 3, model, make(model.parameters()))
    assert str(ckpt.capture).startswith("in one step, because ") and why in str(ckpt.capture), str(ckpt.capture)
    assert ckpt.committed == 21 and replayed(tmp_path) == 0


def test_small_tensors_are_copied_in_the_call_and_said(tmp_path):
    model = nn.Linear(40, 3)
    ckpt = train(tmp_path, 3, model, [torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)])
    why = "every tensor that Adam steps is copied in the call, as small ones are"
    assert str(ckpt.capture).startswith(f"in one step, because {why}"), str(ckpt.capture)


def test_an_optimizer_of_small_tensors_does_not_keep_another_one_from_several_steps(tmp_path):
    for over in (1, 3):
        model = nn.Sequential(net(), nn.Linear(14, 3))
        adam = torch.optim.AdamW(model[0].parameters(), lr=1e-2, fused=True)
        sgd = torch.optim.SGD(model[1].parameters(), lr=1e-2, momentum=0.9, fused=True)
        train(tmp_path / str(over), over, model, [adam, sgd])
    assert replayed(tmp_path / "3") > 0
    expect_same(tmp_path, "1", "3")


@pytest.mark.parametrize(("name", "value"), [("maximize", True), ("dampening", 0.5), ("weight_decay", 0.1)])
def test_settings_that_change_the_arithmetic_are_rehearsed_again(tmp_path, name, value):
    for over in (1, 3):
        model = net()
        (optimizer,) = of_class(torch.optim.SGD, momentum=0.9)(model.parameters())

        def change(step, optimizer=optimizer):
            if step == 15:  # between the window of step 14 and that of step 21
                optimizer.param_groups[0][name] = value

        ckpt = train(tmp_path / str(over), over, model, [optimizer], change)
    assert replayed(tmp_path / "3", 14) > 0 and replayed(tmp_path / "3", 21) == 0, str(ckpt.capture)
    assert len(ckpt.capture._variants) == 2, "one for each arithmetic"
    expect_same(tmp_path, "1", "3")


def test_few_last_elements_of_vectors_are_not_taken_for_those_of_another_implementation(tmp_path):
    # SGD that is fused and SGD that is not differ in these alone: in each of so many runs by chance, or not.
    for seed in range(16):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 8))
        (optimizer,) = of_class(torch.optim.SGD, momentum=0.9)(model.parameters())
        with sf.Checkpointer(tmp_path / str(seed), every=sf.steps(4), over=3, keep=sf.last(1)) as ckpt:
            for step in range(1, 17):
                model(torch.randn(8, 64)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                ckpt.step(step, {"model": model, "optimizer": optimizer})
        assert [name for name, _ in ckpt.capture._variants.values()] == ["sgd.for-loop.cpu.f32"]


def test_a_gradient_of_another_kind_lets_go(tmp_path):
    model = nn.Sequential(nn.Embedding(500, 40, sparse=True), nn.Linear(40, 100))
    sparse = torch.optim.SGD(model[0].parameters(), lr=0.1)
    optimizer = torch.optim.AdamW(model[1].parameters(), fused=True)
    state = {"model": model, "sparse": sparse, "optimizer": optimizer}
    with sf.Checkpointer(tmp_path, every=sf.steps(4), over=3) as ckpt:
        for step in range(1, 9):
            model(torch.arange(8) + step).sum().backward()
            sparse.step()
            optimizer.step()
            sparse.zero_grad()
            optimizer.zero_grad()
            step_and_copy(ckpt, step, state)
    assert ckpt.committed == 8 and "sparse" in str(ckpt.capture)


def test_what_is_loaded_in_a_window_is_let_go(tmp_path):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    state = {"model": model, "optimizer": optimizer}
    with sf.Checkpointer(tmp_path, every=sf.steps(EVERY), over=5) as ckpt:
        for step in range(1, 15):
            model(batch(step)).sum().backward()
            optimizer.step()
            step_and_copy(ckpt, step, state)
            if step == 12:
                ckpt.wait()
                sf.load(tmp_path / "step-00000007", state)
    assert ckpt.committed == 14 and replayed(tmp_path, 14) == 0
    assert "a checkpoint was loaded" in str(ckpt.capture)


def reload(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model.load_state_dict({name: one * 0.5 for name, one in model.state_dict().items()})


def reload_optimizer(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def forget_moments(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


def move(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model[2].weight.data = model[2].weight.data * 0.5


def widen(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    more = nn.Linear(7, 7)
    model[2].register_module("more", more)
    optimizer.add_param_group({"params": list(more.parameters())})


@pytest.mark.parametrize("change", [reload, reload_optimizer, forget_moments, move, widen])
def test_what_changes_otherwise_than_by_steps_in_a_window_is_captured_in_one_step(tmp_path, change):
    for over in (1, 5):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def each(step: int, model=model, optimizer=optimizer) -> None:
            if step == 12:  # the window of step 14 is open
                change(model, optimizer)

        ckpt = train(tmp_path / str(over), over, model, [optimizer], each)
    assert ckpt.committed == 21 and replayed(tmp_path / "5", 14) == 0 < replayed(tmp_path / "5", 21)
    expect_same(tmp_path, "1", "5")


@pytest.mark.parametrize("over", [0, -1, 1.5, True, "4", None])
def test_steps_that_are_no_number(tmp_path, over):
    with pytest.raises(sf.Invalid, match="expected a number of steps"):
        sf.Checkpointer(tmp_path, every=sf.steps(5), over=over)


def test_a_schedule_that_does_not_tell_when_a_save_is_due(tmp_path):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    state = {"model": model, "optimizer": optimizer}
    with sf.Checkpointer(tmp_path, over=4) as ckpt:
        model(batch(1)).sum().backward()
        optimizer.step()
        ckpt.step(1, state)
        ckpt.save(1, state)
        ckpt.wait()
        why = "its schedule does not tell when the next save is due"
        assert str(ckpt.capture) == f"in one step, because {why}"
        assert ckpt.report["ahead"] == {"steps": 1, "reason": why}
        assert ckpt.report["bytes_written"] > 0


def test_more_steps_than_there_are_between_saves(tmp_path):
    for every in (sf.steps(5), sf.optimal(mtbf="6h", at_most=5)):
        with pytest.raises(
            sf.Invalid, match="over=6: expected no more steps than there are between saves, and every= "
        ):
            sf.Checkpointer(tmp_path, every=every, over=6)


def test_gradients_in_bf16_that_are_multiplied_by_a_factor(tmp_path, monkeypatch):
    halves: dict[torch.Tensor, torch.Tensor] = {}

    def run(over: int) -> sf.Checkpointer:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def step_all() -> None:
            halves.clear()
            for parameter in model.parameters():
                half = parameter.grad.bfloat16()
                parameter.grad = half.float() * 0.3
                halves[parameter.grad] = half
            optimizer.step()

        return train(tmp_path / str(over), over, model, [optimizer], step_all=step_all)

    run(1)
    known = TorchSteps.taken

    def taken(self: TorchSteps, optimizer: object) -> object:
        found = known(self, optimizer)
        applied = [(unit, halves[gradient], number) for unit, gradient, number in found.applied]
        return found._replace(applied=applied, scalars=[(kind, numbers, 0.3) for kind, numbers, _ in found.scalars])

    monkeypatch.setattr(TorchSteps, "taken", taken)
    ckpt = run(3)
    assert replayed(tmp_path / "3") > 0, str(ckpt.capture)
    expect_same(tmp_path, "1", "3")
    figures = ckpt.capture.figures()
    assert figures["gradient_bytes"] * 3 == figures["held_bytes"], "two steps of gradients half as wide as weights"


def test_gradients_of_a_pytorch_without_dlpacks_table(tmp_path, monkeypatch):
    monkeypatch.delattr(torch.Tensor, "__dlpack_c_exchange_api__")
    asked = []
    known = TorchSteps.place
    monkeypatch.setattr(TorchSteps, "place", lambda self, gradient: asked.append(1) or known(self, gradient))
    for over in (1, 3):
        model = net()
        ckpt = train(tmp_path / str(over), over, model, [torch.optim.AdamW(model.parameters(), fused=True)])
    assert asked and replayed(tmp_path / "3") > 0, str(ckpt.capture)
    expect_same(tmp_path, "1", "3")


def test_steps_are_timed_while_the_training_goes_on():
    # The text is made on any thread, while steps are added.
    ahead, is_over = Ahead(2), threading.Event()
    ahead._stamps.extend(step / 10 for step in range(10))

    def train() -> None:
        while not is_over.is_set():
            ahead._stamps.append(time.monotonic())

    training = threading.Thread(target=train)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    training.start()
    try:
        for _ in range(3000):
            ahead._step_ms()
    finally:
        is_over.set()
        training.join()
        sys.setswitchinterval(interval)


def test_optimizers_run_no_hook_of_ours_before_a_capture_ahead_is_tried(tmp_path, monkeypatch):
    followed = []
    monkeypatch.setattr(in_flight, "follow", followed.append)
    for over, expected in ((1, 0), (2, 1)):
        with sf.Checkpointer(tmp_path / str(over), every=sf.steps(5), over=over):
            assert len(followed) == expected


def test_nothing_keeps_the_memory_of_tensors_after_the_save(tmp_path):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    state = {"model": model, "optimizer": optimizer}
    with sf.Checkpointer(tmp_path, every=sf.steps(4), over=3) as ckpt:
        for step in range(1, 9):
            model(batch(step)).sum().backward()
            optimizer.step()
            step_and_copy(ckpt, step, state)
        pending, _ = ckpt._running[-1]
        ckpt.wait()
        assert pending.window is None and pending.report["ahead"].get("held_bytes", 0) > 0, pending.report["ahead"]
        memory = weakref.ref(model[2].weight.untyped_storage())
        del model, optimizer, state
        gc.collect()
        assert memory() is None


def test_a_checkpointer_that_is_closed_holds_nothing(tmp_path, caplog):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    state = {"model": model, "optimizer": optimizer}
    ckpt = sf.Checkpointer(tmp_path, every=sf.steps(4), over=3)
    for step in range(1, 8):
        model(batch(step)).sum().backward()
        optimizer.step()
        step_and_copy(ckpt, step, state)
    assert ckpt.capture._window is not None
    ckpt.close()
    assert ckpt.capture._window is None
    with caplog.at_level(logging.WARNING):
        optimizer.step()
    assert not caplog.records and any(one() is ckpt.capture for one in in_flight._aheads)


# Layouts


def wrapped(layout: str, world: int) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    # PyTorch's tensor parallelism over four wants widths that four divides.
    model: nn.Module = net(widths=(308, 332, 20)) if layout == "tp" else net()
    if layout == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif layout == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    elif layout == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")))
    elif layout == "tp":
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": ColwiseParallel(output_layouts=Replicate())}
        parallelize_module(model, init_device_mesh("cpu", (world,)), plan)
    elif layout == "zero1":
        ddp = nn.parallel.DistributedDataParallel(model)
        return ddp, [ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-2, fused=True)]
    return model, [torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)]


def check_replicas(rank: int, world: int, place: Path, over: int) -> list[float]:
    torch.manual_seed(3)
    layers = [layer for _ in range(4 * world) for layer in (nn.Linear(120, 120), nn.Tanh())]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(40, 120), *layers))
    ckpt = train(place, over, model, [torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)])
    return [one["held_bytes"] for one in ckpt.capture._figures]


@pytest.mark.parametrize("world", [2, 4])
def test_replicas_hold_what_they_write_whole_parameters(ranks, tmp_path, world):
    """The plan gives a parameter and its moments to one rank, so each holds its share of nearly all."""
    for over in (1, 3):
        found = ranks(world)(check_replicas, tmp_path / str(over), over)
    whole = sum(file.stat().st_size for file in (tmp_path / "3" / "step-00000021").rglob("*.safetensors"))
    held = [of_rank[-1] for of_rank in found]
    assert replayed(tmp_path / "3") == sum(held) > 0.9 * whole, (found, whole)
    assert max(held) < 1.15 * sum(held) / world, held
    expect_same(tmp_path, "1", "3")


def check_cut(rank: int, world: int, place: Path, layout: str, over: int) -> list[float]:
    torch.manual_seed(3)
    model: nn.Module = nn.Sequential(nn.Linear(40, 6000, bias=False))
    if layout == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")))
    else:
        model = nn.parallel.DistributedDataParallel(model)
    ckpt = train(place, over, model, [torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)])
    return [one["held_bytes"] for one in ckpt.capture._figures]


@pytest.mark.parametrize(("layout", "world", "is_held"), [("hsdp", 4, True), ("ddp", 4, True), ("ddp", 2, False)])
def test_a_parameter_that_must_be_cut_is_cut_with_its_moments(ranks, tmp_path, layout, world, is_held):
    """At the same rows, so replicas hold theirs of it; on two ranks the moments are cut, and the weights stay whole."""
    for over in (1, 3):
        found = ranks(world)(check_cut, tmp_path / str(over), layout, over)
    held = [of_rank[-1] if of_rank else 0 for of_rank in found]
    total = 3 * 4 * 40 * 6000 if is_held else 0
    assert replayed(tmp_path / "3") == sum(held) == total, found
    assert max(held) == total / world, held
    expect_same(tmp_path, "1", "3")


def check_layout(rank: int, world: int, place: Path, layout: str, over: int) -> tuple[int, str]:
    model, optimizers = wrapped(layout, world)
    ckpt = train(place, over, model, optimizers)
    figures = ckpt.capture._figures
    return int(figures[-1]["held_bytes"]) if figures else 0, str(ckpt.capture)


@pytest.mark.parametrize(
    ("layout", "world"),
    [
        *(("hsdp", world) for world in (2, 4)),
        *((layout, world) for layout in ("ddp", "fsdp2", "tp", "zero1") for world in (1, 2, 4)),
    ],
)
def test_layouts(ranks, tmp_path, layout, world):
    for over in (1, 4):
        found = ranks(world)(check_layout, tmp_path / str(over), layout, over)
    total = sum(held for held, _ in found)
    assert replayed(tmp_path / "4") == total > 0, found
    expect_same(tmp_path, "1", "4")
