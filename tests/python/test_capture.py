"""Lazy capture: what is saved is what was there when the save was called, whatever is done as early as allowed."""

import contextlib
import copy
import gc
import io
import pickle
import random
import re
import signal
import threading
import time
import weakref

import pytest
import shardfast as sf
import torch
from layouts import build, held, local, same_bits, train
from shardfast import _native, session
from shardfast.capture.in_flight import in_flight
from shardfast.state.description import Describer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import optimizer as torch_optimizer
from unwatched import unwatched

WIDTH = 768
TRIES = 50  # of what comes in time in nearly all of them


@pytest.fixture(autouse=True)
def small_staging(monkeypatch):
    """Two slots: a state of some size is still being copied when the call returns."""
    solo = _native.Session.solo(staging_bytes=8 << 20)
    monkeypatch.setattr(session, "_solo", lambda process: solo)


class Net(nn.Module):
    def __init__(self, width=WIDTH, depth=2):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norm = nn.BatchNorm1d(width)
        self.frozen = nn.Parameter(torch.zeros(width, 8), requires_grad=False)
        self.register_buffer("big", torch.zeros(width, width))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "sgd_foreach": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=False),
    "adamw_foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
    "adamw_fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
}


def make(name="adamw_foreach", seed=0, width=WIDTH):
    torch.manual_seed(seed)
    model = Net(width)
    optimizer = OPTIMIZERS[name]([p for p in model.parameters() if p.requires_grad])
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    return model, optimizer


def tensors_of(model, optimizer):
    found = dict(model.state_dict())
    for number, entries in optimizer.state_dict()["state"].items():
        found |= {f"{number}.{name}": value for name, value in entries.items() if isinstance(value, torch.Tensor)}
    return {name: tensor.detach() for name, tensor in found.items()}


def copied(model, optimizer):
    return {name: tensor.clone() for name, tensor in tensors_of(model, optimizer).items()}


def differing(model, optimizer, expected):
    now = tensors_of(model, optimizer)
    return [name for name in expected if not torch.equal(now[name].view(-1), expected[name].view(-1))]


def fuzz(directory, name, seed, saves=2):
    """Writes into everything as early as the API allows; what was saved otherwise than it was at the call."""
    dice = random.Random(seed)
    model, optimizer = make(name, seed)
    bare, values = torch.randn(WIDTH, WIDTH), {"counts": [seed], "text": "a"}
    state = {"model": model, "optimizer": optimizer, "ema": {"w": bare}, "extra": values}
    problems = []
    for number in range(saves):
        url, expected = f"{directory}/{number}", copied(model, optimizer)
        expected_bare, expected_values = bare.clone(), copy.deepcopy(values)
        pending = sf.save_async(url, state)

        def scribble(values=values, number=number):  # what is captured in the call may change at once
            bare.add_(1)
            values["counts"].append(number)
            values["text"] += "b"
            with torch.no_grad():
                model.frozen.add_(1)
                model.big.fill_(number + 1)
                model.norm.running_mean.add_(1)

        thread = threading.Thread(target=scribble)
        thread.start()
        for _ in range(dice.randrange(3)):
            model(torch.randn(4, WIDTH))
        optimizer.step()
        try:
            if dice.random() < 0.5:
                pending.staged()
                for parameter in model.parameters():
                    parameter.data.fill_(dice.random())
            pending.committed()
        except sf.Invalid as error:
            problems.append(str(error))
            continue
        finally:
            thread.join()
        other, others = make(name, seed + 1)
        loaded = {"w": torch.zeros(WIDTH, WIDTH)}
        extra = {"counts": None, "text": None}
        sf.load(url, {"model": other, "optimizer": others, "ema": loaded, "extra": extra})
        problems += [f"{number}: {name}" for name in differing(other, others, expected)]
        problems += [f"{number}: ema"] * (not torch.equal(loaded["w"], expected_bare))
        problems += [f"{number}: extra"] * (extra != expected_values)
    return problems


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nothing_done_after_the_call_is_saved(tmp_path, name, seed):
    assert fuzz(tmp_path, name, seed) == []


@pytest.fixture
def no_step_hooks(tmp_path):
    # The first save of an optimizer in a process adds them for good: not in the test, or they would go with it.
    sf.save(tmp_path / "adds hooks", dict(zip(("model", "optimizer"), make(width=8), strict=True)))
    kept = dict(torch_optimizer._global_optimizer_pre_hooks)
    torch_optimizer._global_optimizer_pre_hooks.clear()
    yield
    torch_optimizer._global_optimizer_pre_hooks.update(kept)


@pytest.mark.parametrize("name", ["sgd_foreach", "adamw", "adamw_fused"])
@unwatched()
def test_the_fuzzer_sees_a_step_that_does_not_wait(tmp_path, name, no_step_hooks):
    """Version counters tell it, but for fused kernels, which do not count: there the bits differ."""
    sf.save(tmp_path / "first", dict(zip(("model", "optimizer"), make(name, width=8), strict=True)))
    torch_optimizer._global_optimizer_pre_hooks.clear()
    problems = next(filter(None, (fuzz(tmp_path / f"{seed}", name, seed, saves=4) for seed in range(TRIES))), [])
    assert problems
    if name != "adamw_fused":
        assert "was written" in problems[0]
        assert "during capture" in problems[0]


def check_fuzz(rank, world, directory):
    model, optimizer = build("fsdp")
    for step in range(4):
        train(model, optimizer, range(step, step + 1))
        expected = {name: local(tensor).clone() for name, tensor in held(model, optimizer).items()}
        pending = sf.save_async(f"{directory}/{step}", {"model": model, "optimizer": optimizer})
        train(model, optimizer, range(step + 9, step + 10))
        pending.committed()
        other, others = build("fsdp", seed=1)
        sf.load(f"{directory}/{step}", {"model": other, "optimizer": others})
        assert [n for n, tensor in held(other, others).items() if not same_bits(local(tensor), expected[n])] == []


def test_nothing_done_after_the_call_is_saved_of_sharded_parameters(ranks, tmp_path):
    ranks(2)(check_fuzz, str(tmp_path))


@unwatched()
def check_large_shards(rank, world, directory):
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        model(torch.randn(4, WIDTH)).sum().backward()
        optimizer.step()
        expected = [parameter.to_local().clone() for parameter in model.parameters()]
        pending = sf.save_async(f"{directory}/{step}", {"model": model, "optimizer": optimizer})
        assert pending.is_watched
        model(torch.randn(4, WIDTH)).sum().backward()
        optimizer.step()
        pending.committed()
        sf.load(f"{directory}/{step}", {"model": model}, strict=False)
        assert all(torch.equal(p.to_local(), e) for p, e in zip(model.parameters(), expected, strict=True))


def test_shards_are_captured_lazily(ranks, tmp_path):
    ranks(2)(check_large_shards, str(tmp_path))


@unwatched()
def check_late(rank, world, directory):
    """Plain modules do not tell who else holds them, and rank 1 is late."""
    sf.save(f"{directory}/met", {"extra": {"x": 1}})
    model, optimizer = make()
    bare = torch.full((WIDTH, 2 * WIDTH), 1.0)
    state = {"model": model, "optimizer": optimizer, "ema": {"w": bare}}
    expected, expected_bare = copied(model, optimizer), bare.clone()
    if rank == 1:
        time.sleep(0.2)
    pending = sf.save_async(f"{directory}/late", state)
    assert pending.is_watched
    bare.add_(1)
    with torch.no_grad():
        model.big.fill_(rank + 1)
    optimizer.step()
    assert not pending.is_watched
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(rank)
    pending.committed()
    other, others = make(seed=1)
    loaded = {"w": torch.zeros_like(bare)}
    sf.load(f"{directory}/late", {"model": other, "optimizer": others, "ema": loaded})
    assert differing(other, others, expected) == []
    assert torch.equal(loaded["w"], expected_bare)


def test_a_first_step_waits_for_a_late_rank_where_nobody_knows_who_holds_what(ranks, tmp_path):
    ranks(2)(check_late, str(tmp_path))


# Who waits


def begin(directory, name="adamw_foreach", **more):
    model, optimizer = make(name)
    state = {"model": model, "optimizer": optimizer, **more}
    sf.save(f"{directory}/first", state)
    expected = copied(model, optimizer)
    return model, optimizer, expected, sf.save_async(f"{directory}/second", state)


def load_again(directory, expected):
    model, optimizer = make(seed=5)
    sf.load(f"{directory}/second", {"model": model, "optimizer": optimizer})
    assert differing(model, optimizer, expected) == []


@unwatched()
def test_a_load_state_dict_waits_by_whichever_module(tmp_path):
    model, _, expected, pending = begin(tmp_path)
    assert pending.is_watched
    layer = model.layers[0]
    layer.load_state_dict({name: torch.zeros_like(value) for name, value in layer.state_dict().items()})
    assert not pending.is_watched
    pending.committed()
    load_again(tmp_path, expected)


def test_an_optimizers_load_state_dict_disturbs_nothing(tmp_path):
    _, optimizer, expected, pending = begin(tmp_path)
    other = make(seed=3)[1]
    optimizer.load_state_dict(other.state_dict())
    pending.committed()
    load_again(tmp_path, expected)


def test_a_load_and_the_next_save_wait(tmp_path):
    model, optimizer, expected, pending = begin(tmp_path)
    sf.load(tmp_path / "first", {"model": model, "optimizer": optimizer})
    assert not pending.is_watched
    again = sf.save_async(tmp_path / "third", {"model": model, "optimizer": optimizer})
    third = sf.save_async(tmp_path / "fourth", {"model": model, "optimizer": optimizer})
    assert not again.is_watched
    for one in (pending, again, third):
        one.committed()
    load_again(tmp_path, expected)


def test_a_foreign_optimizer_of_the_same_parameters_waits(tmp_path):
    model, _, expected, pending = begin(tmp_path)
    foreign = torch.optim.SGD(model.parameters(), lr=1.0)
    foreign.step()
    pending.committed()
    load_again(tmp_path, expected)


def test_a_step_waits_only_while_something_is_copied():
    started = time.perf_counter()
    for _ in range(10_000):
        in_flight.staged()
    assert (time.perf_counter() - started) / 10_000 < 5e-6


class Unhooked(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


def test_what_no_hook_announces_is_captured_in_the_call(tmp_path):
    """Modules without an optimizer, and optimizers of which PyTorch does not know the steps."""
    model, _ = make()
    optimizer = Unhooked(model.parameters(), lr=0.1)
    Unhooked.step = Unhooked.__dict__["step"].__wrapped__
    for number, state in enumerate(({"model": model}, {"model": model, "optimizer": optimizer})):
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        pending = sf.save_async(tmp_path / str(number), state)
        assert not pending.is_watched
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(7)
        pending.committed()
        sf.load(tmp_path / str(number), {"model": model}, strict=False)
        assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_inference_tensors_are_captured_in_the_call(tmp_path):
    """They have no version counter."""
    with torch.inference_mode():
        model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert not sf.save_async(tmp_path / "one", {"model": model, "optimizer": optimizer}).is_watched


class Interrupt(BaseException):
    """What a signal handler raises, such as ``KeyboardInterrupt``."""


def test_parameters_that_stand_in_a_plain_dict(tmp_path):
    """The optimizer announces their changes, but no bundle tells whether the dict still holds them."""
    parameters = {f"w{number}": nn.Parameter(torch.zeros(WIDTH, WIDTH)) for number in range(3)}
    optimizer = torch.optim.SGD(parameters.values(), lr=1.0)
    state = {"model": parameters, "optimizer": optimizer}
    pendings = []
    for number in range(3):
        for name in ("w0", "w1", "w2"):
            parameters[name].grad = torch.full_like(parameters[name], -1.0)
        optimizer.step()  # the save before is still being copied
        if number == 2:
            parameters["more"] = nn.Parameter(torch.full((WIDTH, WIDTH), 7.0))
        pendings.append(sf.save_async(tmp_path / str(number), state))
    optimizer.step()
    for number, pending in enumerate(pendings):
        pending.committed()
        expected = {f"w{of}": [number + 1.0] for of in range(3)} | ({"more": [7.0]} if number == 2 else {})
        found = {name: torch.empty(WIDTH, WIDTH) for name in expected}
        sf.load(tmp_path / str(number), {"model": found}, only="model")
        assert {name: one.unique().tolist() for name, one in found.items()} == expected


@pytest.mark.parametrize("verb", [sf.save, sf.save_async], ids=["save", "save_async"])
def test_a_save_whose_call_is_interrupted_holds_what_was_there(tmp_path, verb):
    """The call copies what nobody announces changes of; after it the program may do with that what it likes."""

    def interrupt(*args):
        raise Interrupt

    tensor = torch.ones(60_000_000)
    sf.save(tmp_path / "before", {"ema": {"w": tensor[:9].clone()}})  # all is imported
    loaded = {"w": torch.zeros_like(tensor)}
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for attempt in range(8):
            tensor.fill_(1)
            with contextlib.suppress(Interrupt):
                signal.setitimer(signal.ITIMER_REAL, 0.03 * 2**attempt)
                verb(tmp_path / f"{attempt}", {"ema": {"w": tensor}})
                signal.setitimer(signal.ITIMER_REAL, 0)
            tensor.fill_(2)
            for pending in in_flight._running:
                ended(pending)
            with contextlib.suppress(sf.NotFound):  # interrupted before the save began
                sf.load(tmp_path / f"{attempt}", {"ema": loaded})
                break
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    is_whole = bool((loaded["w"] == 1).all())
    assert is_whole


# Who breaks in


@unwatched()
def test_a_write_past_the_hooks_fails_the_save_loudly(tmp_path, caplog):
    model, optimizer, _, pending = begin(tmp_path)
    with torch.no_grad():
        model.layers[1].weight.add_(1)
    told = "model/layers.1.weight was written during capture: call staged"
    for wait in (pending.staged, pending.committed):
        with pytest.raises(sf.Invalid, match=told):
            wait()
    del pending
    assert caplog.text == "", "one report is enough"
    with pytest.raises(sf.NotFound):
        sf.load(tmp_path / "second", {"model": model}, strict=False)
    sf.save(tmp_path / "third", {"model": model, "optimizer": optimizer})


def refusal(pending):
    """Why the save was not committed; empty if it was."""
    try:
        pending.committed()
    except sf.Invalid as error:
        return str(error)
    return ""


def test_a_write_that_no_counter_counts_fails_the_save(tmp_path, caplog):
    """Through ``.data`` the version counters stay as they are; the bytes do not. It may come when all is copied."""
    model, optimizer = make(width=2048)
    state = {"model": model, "optimizer": optimizer}
    sf.save(tmp_path / "first", state)
    for number in range(TRIES):
        pending = sf.save_async(tmp_path / f"{number}", state)
        versions = [parameter._version for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.data.add_(1)
        assert versions == [parameter._version for parameter in model.parameters()]
        if told := refusal(pending):
            break
    assert re.search(r"model/layers.*was written during capture, and not by an optimizer step", told)
    with pytest.raises(sf.NotFound):
        sf.load(tmp_path / f"{number}", state)
    # What is written when all is copied does no harm.
    pending = sf.save_async(tmp_path / "third", state)
    pending.staged()
    for parameter in model.parameters():
        parameter.data.add_(1)
    pending.committed()


def check_writes_to_dtensors(rank, world):
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(64, 64), mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    state = optimizer.state[model.weight]
    writes = [
        ("model/weight", lambda: model.weight.mul_(1)),
        ("optimizer/state.weight.exp_avg", lambda: state["exp_avg"].mul_(1)),
        ("optimizer/state.weight.exp_avg_sq", lambda: state["exp_avg_sq"].to_local().mul_(1)),
    ]
    describer = Describer(lambda by: None)
    natives = []
    for name, write in writes:  # from the second time on, the state is described already
        described = describer.describe({"model": model, "optimizer": optimizer}, pickle=False)
        natives.append(described.described)
        model(torch.ones(2, 64)).sum().backward()  # gathers the parameters, and writes none
        assert [change for one in described.watched for change in one.changes()] == []
        with torch.no_grad():
            write()
        assert [change for one in described.watched for change in one.changes()] == [f"{name} was written"]
    assert natives == [natives[0]] * len(writes)


def test_a_write_to_a_dtensor_is_noticed_even_if_its_bytes_stay(ranks):
    """The counter of the tensor that is written rises, not that of its memory."""
    ranks(2)(check_writes_to_dtensors)


def held_up(ckpt):
    """Saves of this checkpointer from now on end only once that event is set."""
    goes_on = threading.Event()
    ckpt._background.submit(goes_on.wait, 60)
    return goes_on


@unwatched()
def test_a_write_is_raised_by_the_next_call_of_a_checkpointer_and_not_by_the_step(tmp_path):
    model, optimizer = make()
    state = {"model": model, "optimizer": optimizer}
    ckpt = sf.Checkpointer(tmp_path)
    goes_on = held_up(ckpt)
    ckpt.save(1, state)
    with torch.no_grad():
        model.layers[0].weight.add_(1)
    optimizer.step()
    goes_on.set()
    with pytest.raises(sf.Invalid, match=r"step-00000001.*model/layers\.0\.weight was written"):
        ckpt.wait()
    ckpt.save(2, state)
    ckpt.close()
    assert ckpt.committed == 2


def test_other_memory_for_a_parameter_does_no_harm(tmp_path):
    """The save holds the storage, not only the parameter."""
    model, _, expected, pending = begin(tmp_path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = torch.full_like(parameter, 3.0)
    gc.collect()
    pending.committed()
    load_again(tmp_path, expected)


# What the hooks leave behind


def test_copies_and_pickles_know_nothing_of_the_hooks(tmp_path):
    model, optimizer, _, pending = begin(tmp_path)
    twin, twins = copy.deepcopy(model), copy.deepcopy(optimizer)
    twins.step()
    twin.load_state_dict(model.state_dict())
    pending.committed()
    for what in (model, optimizer):
        buffer = io.BytesIO()
        torch.save(what, buffer)
        assert b"shardfast" not in buffer.getvalue()
        assert b"shardfast" not in pickle.dumps(what)
    again = pickle.loads(pickle.dumps(model))
    assert again.load_state_dict(model.state_dict()) == nn.modules.module._IncompatibleKeys([], [])
    hooks = len(model._load_state_dict_pre_hooks)
    sf.save(tmp_path / "third", {"model": model})
    assert len(model._load_state_dict_pre_hooks) == hooks == 1


def test_nothing_is_kept_alive_between_saves(tmp_path):
    ckpt = sf.Checkpointer(tmp_path)
    model, optimizer = make()
    ckpt.save(1, {"model": model, "optimizer": optimizer})
    ckpt.wait()
    sf.save(tmp_path / "other", {"model": model, "optimizer": optimizer})
    gone = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(model.layers[0])]
    storages = [weakref.ref(model.layers[0].weight.untyped_storage())]
    del model, optimizer
    gc.collect()
    assert [one() for one in (*gone, *storages)] == [None] * 4
    ckpt.close()


def test_two_saves_are_in_flight(tmp_path):
    """A third one waits for the oldest; each failure is raised once."""
    model = nn.Linear(WIDTH, 4 * WIDTH)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    (tmp_path / "step-00000002").write_text("in the way")
    with sf.Checkpointer(tmp_path) as ckpt:
        goes_on = held_up(ckpt)
        ckpt.save(1, state)
        ckpt.save(2, state)
        assert len(ckpt._running) == 2
        goes_on.set()
        with pytest.raises(sf.Error, match="step-00000002"):
            for step in range(3, 9):
                ckpt.save(step, state)
                assert len(ckpt._running) <= 2
        ckpt.wait()
        ckpt.save(9, state)
    assert ckpt.committed == 9


def test_each_of_two_failures_is_raised_once(tmp_path):
    state = {"extra": {"x": 1}}
    for step in (1, 2):
        (tmp_path / f"step-{step:08}").write_text("in the way")
    ckpt, told = sf.Checkpointer(tmp_path), []
    for call in (lambda: ckpt.save(1, state), lambda: ckpt.save(2, state), ckpt.close, ckpt.close):
        try:
            call()
        except sf.Invalid as error:
            told.append(str(error))
    assert ["\n".join(told).count(f"open {tmp_path}/step-0000000{step}: ") for step in (1, 2)] == [1, 1]


def ended(pending):
    while not pending.done():
        time.sleep(0.01)
    return pending


@pytest.mark.parametrize("is_asked", [True, False])
def test_what_failed_is_in_the_log_once_no_caller_can_get_it(tmp_path, caplog, is_asked):
    (tmp_path / "file").write_text("in the way")
    pending = ended(sf.save_async(tmp_path / "file", {"extra": {"x": 1}}))
    sf.save(tmp_path / "other", {"extra": {"x": 1}})
    assert caplog.text == ""
    if is_asked:
        with pytest.raises(sf.Error):
            pending.committed()
    del pending
    assert caplog.text.count(f"the save of {tmp_path / 'file'} failed") == (not is_asked)


def test_a_save_that_nobody_held_is_in_the_log_at_the_next_one(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    sf.save_async(tmp_path / "file", {"extra": {"x": 1}})
    ended(in_flight._running[-1])
    sf.save(tmp_path / "other", {"extra": {"x": 1}})
    assert caplog.text.count(f"the save of {tmp_path / 'file'} failed") == 1
