"""Nothing of ours holds an object of the program after a call has returned, and no collector is needed for that."""

import contextlib
import gc
import logging
import os
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import shardfast as sf
import torch
from shardfast.adapters import torch as torch_adapter
from torch import nn

SIZE = 40_000
"""Elements: more than what is copied in the call of a save."""


@pytest.fixture(autouse=True)
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Stateful:
    """An object of the program with a state dict."""

    def __init__(self):
        self.tensor = torch.randn(SIZE)

    def state_dict(self):
        return {"tensor": self.tensor, "count": 3}

    def load_state_dict(self, state):
        self.tensor = state["tensor"]


class Refusing(Stateful):
    def load_state_dict(self, state):
        raise ValueError("no")


def everything(other=Stateful, values=True):
    """A state with all that a state can hold."""
    model = nn.Sequential(nn.Linear(200, 200), nn.BatchNorm1d(200), nn.Linear(200, 200))
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), foreach=False)
    model(torch.randn(4, 200)).sum().backward()
    optimizer.step()
    state = {
        "model": model,
        "optimizer": optimizer,
        "ema": {"w": torch.randn(SIZE), "tree": {"v": torch.randn(SIZE)}},
        "arrays": {"a": np.random.rand(SIZE)},
        "loader": other(),
    }
    if values:
        state["extra"] = {
            "step": 1,
            "list": [torch.randn(SIZE), {"small": torch.randn(3)}],
            "big": torch.randn(400_000),
            "rank": sf.PerRank({"t": torch.randn(SIZE), "n": 1}),
        }
    return state


def parts(value, found):
    """All objects of a state that can be referred to weakly."""
    if isinstance(value, dict):
        for item in value.values():
            parts(item, found)
    elif isinstance(value, (list, tuple)):
        for item in value:
            parts(item, found)
    elif isinstance(value, sf.PerRank):
        found.append(value)
        parts(value.value, found)
    elif isinstance(value, nn.Module):
        found.append(value)
        found += value.parameters()
        found += [parameter.grad for parameter in value.parameters()]
        found += value.buffers()
    elif isinstance(value, torch.optim.Optimizer):
        found.append(value)
        parts(list(value.state.values()), found)
        parts([group["lr"] for group in value.param_groups], found)
    elif isinstance(value, Stateful):
        found.append(value)
        found.append(value.tensor)
    elif isinstance(value, (torch.Tensor, np.ndarray)):
        found.append(value)


def kept(use, values=True):
    """What ``use`` keeps of a state that it was called with, and of what it put there, once the state is gone."""
    state, found = everything(values=values), []
    parts(state, found)
    before = [(weakref.ref(one), f"{type(one).__name__} {tuple(getattr(one, 'shape', ()))}") for one in found]
    del found
    use(state)
    found = []
    parts(state, found)
    after = [(weakref.ref(one), f"{type(one).__name__} {tuple(getattr(one, 'shape', ()))}") for one in found]
    del found, state
    return [name for one, name in [*before, *after] if one() is not None]


def failing(call, kind):
    with pytest.raises(kind) as caught:
        call()
    del caught


@contextlib.contextmanager
def refusals(monkeypatch):
    """While memory is bound, after everything was matched."""
    with monkeypatch.context() as patches:

        def refuse(*args):
            raise sf.Invalid("refused")

        patches.setattr(torch_adapter, "ordinary_address", lambda local: None)
        patches.setattr(torch_adapter.TorchAdapter, "target", refuse)
        yield


def saved(name, **state):
    url = f"memory://lifetimes/{name}-{time.monotonic_ns()}"
    sf.save(url, everything(**state))
    return url


def save_twice(state):
    for _ in range(2):  # the second time it is known
        sf.save(f"memory://lifetimes/save-{time.monotonic_ns()}", state)


def save_async(state):
    for _ in range(2):
        sf.save_async(f"memory://lifetimes/async-{time.monotonic_ns()}", state).committed()


def save_async_and_step(state):
    pending = sf.save_async(f"memory://lifetimes/step-{time.monotonic_ns()}", state)
    state["optimizer"].step()
    pending.committed()
    kept_pendings.append(pending)  # what the caller keeps holds nothing of the state


kept_pendings = []


def save_conflict(state):
    url = saved("conflict")
    for call in (lambda: sf.save(url, state), lambda: sf.save_async(url, state).committed()):
        failing(call, sf.Conflict)


def save_refused(state):
    failing(lambda: sf.save("memory://lifetimes/refused", {**state, "more": {"x": object()}}), sf.Invalid)
    failing(lambda: sf.save_async("memory://lifetimes/refused", {**state, "more": {"x": print}}), sf.Invalid)


def save_broken(state):
    """Tensors that are written while they are captured."""
    weight = state["model"][0].weight
    pending = sf.save_async(f"memory://lifetimes/broken-{time.monotonic_ns()}", state)
    with torch.no_grad():
        weight.add_(1)
    del weight
    for call in (pending.staged, pending.committed, pending.committed):
        with contextlib.suppress(sf.Invalid):
            call()
    kept_pendings.append(pending)


def load(state):
    sf.load(saved("load"), state)


def load_part(state):
    sf.load(saved("part"), state, only="model/*", strict=False)


def load_cast(state):
    state["ema"]["w"] = state["ema"]["w"].double()
    sf.load(saved("cast"), state, cast=True)


def load_nothing(state):
    failing(lambda: sf.load("memory://lifetimes/nothing", state), sf.NotFound)


def load_misfit(state):
    url = saved("misfit")
    failing(lambda: sf.load(url, {**state, "more": {"x": torch.zeros(3)}}), sf.Invalid)


def load_that_the_program_fails(state):
    failing(lambda: sf.load(saved("raising"), {**state, "loader": Refusing()}), ValueError)


def plan(state):
    plans.append(sf.plan_load(saved("plan"), state))


plans = []


def run(state):
    url = f"memory://lifetimes/run-{time.monotonic_ns()}"
    ckpt = sf.Checkpointer(url, every=sf.steps(1), keep=sf.last(1))
    for step in range(1, 5):
        ckpt.step(step, state)
        state["optimizer"].step()
    ckpt.wait()
    ckpt.restore(state)
    ckpt.close()
    kept_pendings.append(ckpt)


def run_that_is_open(state):
    ckpt = sf.Checkpointer(f"memory://lifetimes/open-{time.monotonic_ns()}", every=sf.steps(1))
    ckpt.step(1, state)
    ckpt.step(2, state)
    ckpt.wait()
    kept_pendings.append(ckpt)


def run_that_fails(state):
    ckpt = sf.Checkpointer(f"memory://lifetimes/fails-{time.monotonic_ns()}", every=sf.steps(1))
    ckpt.save(1, state)
    ckpt.wait()
    sf.save(f"{ckpt.url}/step-00000002", everything())
    ckpt.save(2, state)
    failing(ckpt.wait, sf.Conflict)
    ckpt.save(2, state)
    time.sleep(0.2)
    failing(lambda: ckpt.save(3, state), sf.Conflict)
    ckpt.close()
    kept_pendings.append(ckpt)


CALLS = [
    save_twice, save_async, save_async_and_step, save_conflict, save_refused, save_broken, load, load_part, load_cast,
    load_nothing, load_misfit, load_that_the_program_fails, plan, run, run_that_is_open, run_that_fails,
]  # fmt: skip


def nothing(state):
    """The state itself needs no collector."""


@pytest.mark.parametrize("call", [nothing, *CALLS], ids=lambda call: call.__name__)
def test_a_call_keeps_nothing_of_the_state(call, caplog):
    caplog.set_level(logging.CRITICAL + 1, logger="shardfast")
    left = kept(call)
    assert left == []


@pytest.mark.parametrize("call", [save_twice, save_async, run_that_is_open], ids=lambda call: call.__name__)
def test_a_call_keeps_nothing_of_a_state_that_is_remembered(call):
    left = kept(call, values=False)
    assert left == []


def test_a_load_that_is_refused_at_the_last_keeps_nothing(monkeypatch):
    def use(state):
        url = saved("bound")
        with refusals(monkeypatch):
            failing(lambda: sf.load(url, state), sf.Invalid)

    left = kept(use)
    assert left == []


def test_tensors_of_a_mapped_checkpoint_go_when_they_are_let_go(tmp_path):
    sf.save(tmp_path / "one", everything())
    with sf.mapped(tmp_path / "one") as found:
        held = [found["ema/w"], found["model/0.weight"]]
        failing(lambda: found["model/none"], KeyError)
        value = found.value("extra/list")
        gone = [weakref.ref(tensor) for tensor in (*held, value[0], found["extra/big"])]
        del held, value
        assert [one for one in gone if one() is not None] == []


def test_memory_that_a_module_let_go_is_given_back_after_a_save():
    """Of a model that was converted in place the old memory is not kept until the next save."""
    state = everything()
    pending = sf.save_async(f"memory://lifetimes/converted-{time.monotonic_ns()}", state)
    pending.committed()
    storage = weakref.ref(state["model"][0].weight.untyped_storage())
    state["model"].double()
    is_gone = storage() is None
    assert is_gone


def usage():
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), children


def check_use(rank, world, directory):
    state = {"w": {f"w{number}": torch.ones(100) for number in range(50)}}
    seen = []
    for number in range(20):
        sf.save(f"{directory}/{number}", state)
        sf.load(f"{directory}/{number}", state)
        seen.append(usage())
    return seen[4], seen[-1]


def test_no_second_process_and_nothing_leaks(ranks, tmp_path):
    """Open files and threads stay as many as they were; no process is started."""
    for early, late in ranks(2)(check_use, str(tmp_path)):
        assert late[0] <= early[0] + 1
        assert late[1] <= early[1] + 4  # what is idle ends in its own time
        assert late[2] == []
