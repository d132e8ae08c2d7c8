"""What ranks do together: one rank's failure is everyone's, each gets its own values back, a run outlives its world."""

import os
import random
import threading

import numpy as np
import pytest
import shardfast as sf
import torch
import torch.distributed as dist
from layouts import build
from layouts import train as train_on
from older import AVERAGED
from shardfast import session
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def failure_of(call, *args, **kwargs):
    with pytest.raises(Exception) as caught:
        call(*args, **kwargs)
    return type(caught.value).__name__, str(caught.value)


class Troubled:
    """Something whose own code fails on one rank."""

    def __init__(self, saves=True, loads=True):
        self.saves, self.loads = saves, loads

    def state_dict(self):
        if not self.saves:
            raise RuntimeError("no state today")
        return {"a": 1}

    def load_state_dict(self, state):
        if not self.loads:
            raise RuntimeError("not like this")


def fail_one_by_one(rank, world, run):
    is_bad = rank == 1
    found = [
        failure_of(sf.save, f"{run}/1", {"extra": {"x": print if is_bad else 1}}, timeout_s=20),
        failure_of(sf.save, f"{run}/1", {"b": Troubled(saves=not is_bad)}, timeout_s=20),
    ]
    assert not os.path.exists(f"{run}/1/COMMIT")
    sf.save(f"{run}/1", {"b": Troubled(), "model": {"w": torch.ones(3)}}, timeout_s=20)
    wide = {"b": Troubled(), "model": {"w": torch.zeros(4 if is_bad else 3)}}
    found += [
        failure_of(sf.load, f"{run}/1", {"b": Troubled(loads=not is_bad)}, only="b", timeout_s=20),
        failure_of(sf.load, f"{run}/1", wide, timeout_s=20),
        failure_of(sf.load, f"{run}/1", {"b": 0, "c" if is_bad else "model": {"w": torch.zeros(3)}}, timeout_s=20),
    ]
    frozen = torch.zeros(1).expand(3) if is_bad else torch.zeros(3)
    found.append(failure_of(sf.load, f"{run}/1", {"b": Troubled(), "model": {"w": frozen}}, timeout_s=20))
    plan = sf.plan_load(f"{run}/1", wide, timeout_s=20)
    # After all this the ranks still understand each other.
    state = {"b": Troubled(), "model": {"w": torch.zeros(3)}}
    sf.load(f"{run}/1", state, timeout_s=20)
    assert state["model"]["w"].tolist() == [1, 1, 1]
    return found, plan.problems


def test_a_failure_of_one_rank_is_raised_by_all_and_names_it(ranks, tmp_path):
    outcomes = ranks(3)(fail_one_by_one, str(tmp_path))
    shape = "shape: model/w is [3] in the checkpoint and [4] here (rank 1)"
    for rank, (found, problems) in enumerate(outcomes):
        assert problems == [shape]
        kinds, texts = [kind for kind, _ in found], [text for _, text in found]
        own = "RuntimeError" if rank == 1 else "Invalid"  # where it happened, the error itself, with its traceback
        assert kinds == ["Invalid", own, own, "Invalid", "Invalid", "Invalid"]
        assert texts[0].startswith("rank 1: extra.x: a builtin_function_or_method (print) is code")
        assert texts[1] == ("no state today" if rank == 1 else "rank 1: RuntimeError: no state today")
        own, where = "not like this", "in the load_state_dict() of a test_together.Troubled, which stands at b"
        assert texts[2] == (own if rank == 1 else f"rank 1: RuntimeError: {own} ({where})")
        assert texts[3].splitlines()[1:-1] == [f"  {shape}"]
        assert "  missing: c/w is not in the checkpoint (rank 1)" in texts[4].splitlines()
        (line,) = texts[5].splitlines()[1:]
        assert line.startswith("  model/w: an expanded tensor") and line.endswith("(rank 1)")


def generators():
    return {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}


def draw():
    return torch.rand(2).tolist(), random.random(), np.random.rand()


def set_generators(states):
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])


def keep_generators(rank, world, url):
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)
    sf.save(url, {"declared": sf.PerRank(generators()), "extra": {"found out": generators(), "rank": rank, "step": 3}})
    expected = draw()
    state = {"declared": sf.PerRank(None), "extra": {"found out": None, "rank": None, "step": None}}
    sf.load(url, state)
    for states in (state["declared"].value, state["extra"]["found out"]):
        set_generators(states)
        assert draw() == expected
    assert state["extra"] | {"found out": 0} == {"found out": 0, "rank": rank, "step": 3}
    return expected


def choose_generators(rank, world, url):
    state = {"declared": sf.PerRank(None), "extra": {"found out": None, "rank": None, "step": None}}
    refused = failure_of(sf.load, url, state)
    assert state["extra"]["step"] is None
    chosen = []
    for choice in ("rank0", "index"):
        sf.load(url, state, per_rank=choice)
        set_generators(state["declared"].value)
        chosen.append((state["extra"]["rank"], draw()))
    return refused, chosen


def test_random_states_come_back_to_their_ranks(ranks, tmp_path):
    url = str(tmp_path / "one")
    drawn = ranks(3)(keep_generators, url)
    assert len({repr(numbers) for numbers in drawn}) == 3
    for rank, (refused, chosen) in enumerate(ranks(4)(choose_generators, url)):
        assert refused[0] == "Invalid"
        for place in ("declared/value", "extra/found out", "extra/rank"):
            line = f"  per rank: {place} was saved by 3 ranks with 3 different values, and this job has 4 ranks"
            assert line in refused[1].splitlines()
        assert chosen == [(0, drawn[0]), (rank % 3, drawn[rank % 3])]


def train(rank, world, url, steps):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    if world > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)), **AVERAGED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer, "extra": {"losses": []}}
    with sf.Checkpointer(url, every=sf.steps(2), keep=sf.last(2) | sf.every(6)) as ckpt:
        start = ckpt.restore(state)
        for step in range(start, start + steps):
            loss = model(torch.arange(14.0).reshape(2, 7)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            state["extra"]["losses"].append(loss.item())
            assert ckpt.step(step + 1, state) == ((step + 1) % 2 == 0)
    assert ckpt.newest == ckpt.committed
    return ckpt.committed, state["extra"]["losses"]


def test_a_run_goes_on_in_other_worlds(ranks, tmp_path):
    run = str(tmp_path / "run")
    losses = []
    for world, steps in [(4, 7), (2, 6), (1, 6)]:
        # Each world ends on a step or one behind its last checkpoint, which the next one repeats.
        committed, losses = ranks(world)(train, run, steps)[0]
    assert committed == 18
    # The files of step 14 are deleted with the next save.
    committed = [name for name in sorted(os.listdir(run)) if os.path.exists(f"{run}/{name}/COMMIT")]
    assert committed == [f"step-{step:08d}" for step in (6, 12, 16, 18)]
    _, whole = ranks(1)(train, str(tmp_path / "whole"), 18)[0]
    assert losses == pytest.approx(whole, rel=1e-5)


def fall_behind(rank, world, url):
    """A failed save is reported by the next call, and the next save is made all the same."""
    ckpt = sf.Checkpointer(url, every=sf.steps(1), timeout_s=20)
    state = {"extra": {"n": 0}}
    ckpt.step(1, state)
    ckpt.wait()
    if rank == 0:
        os.makedirs(f"{url}/step-00000002")
        with open(f"{url}/step-00000002/COMMIT", "w") as taken:
            taken.write("somebody else's")
    dist.barrier()
    first = failure_of(lambda: (ckpt.step(2, state), ckpt.wait()))
    ckpt.step(3, state)
    ckpt.close()
    return first[0], ckpt.committed


def test_a_failed_save_does_not_end_the_run(ranks, tmp_path):
    assert ranks(2)(fall_behind, str(tmp_path)) == [("Conflict", 3)] * 2


COLLECTIVES = [
    name
    for name in dir(dist)
    if name.startswith(
        ("all_", "broadcast", "gather", "scatter", "reduce", "barrier", "send", "recv", "isend", "irecv")
    )
    or name in ("new_group", "monitored_barrier", "batch_isend_irecv")
]


def check_silence(rank, world, run):
    model, optimizer = build("fsdp_tp")
    train_on(model, optimizer, range(1))
    group = dist.group.WORLD
    start = group._get_sequence_number_for_group()
    kept = {name: getattr(dist, name) for name in COLLECTIVES}

    def refuse(*args, **kwargs):
        raise AssertionError("a collective of the training's group was called")

    for name in COLLECTIVES:
        setattr(dist, name, refuse)
        if hasattr(dist.distributed_c10d, name):
            setattr(dist.distributed_c10d, name, refuse)
    state = {"model": model, "optimizer": optimizer, "extra": {"rank": rank}}
    with sf.Checkpointer(run, every=sf.steps(1), keep=sf.last(1)) as ckpt:
        assert ckpt.restore(state) == 0
        for step in range(1, 4):
            ckpt.step(step, state)
        ckpt.wait()
        assert ckpt.restore(state) == 3
    silent = group._get_sequence_number_for_group() == start
    for name, function in kept.items():
        setattr(dist, name, function)
        if hasattr(dist.distributed_c10d, name):
            setattr(dist.distributed_c10d, name, function)
    dist.barrier()
    counts = group._get_sequence_number_for_group() > start
    return silent, counts


def test_no_collective_of_the_training_is_used(ranks, tmp_path):
    """Neither a function of torch.distributed is called, nor does the group count an operation."""
    assert ranks(4)(check_silence, str(tmp_path)) == [(True, True)] * 4


def check_beside(rank, world, directory):
    """A thread saves and loads all the time while the training's collectives run as they come."""
    model, optimizer = build("fsdp")
    ballast = {"w": torch.full((50_000,), float(rank))}
    session.current()
    failures = []

    def save_all_the_time():
        try:
            for number in range(25):
                sf.save(f"{directory}/{number}", {f"r{rank}": ballast}, timeout_s=30)
                sf.load(f"{directory}/{number}", {f"r{rank}": ballast}, timeout_s=30)
        except Exception as error:
            failures.append(error)

    saving = threading.Thread(target=save_all_the_time)
    saving.start()
    steps, going = 0, torch.ones(())
    while going:
        train_on(model, optimizer, range(steps, steps + 1))
        steps += 1
        going.fill_(saving.is_alive() or steps < 10)
        dist.all_reduce(going)  # ranks train the same number of steps
    saving.join()
    assert failures == []
    return steps


def test_saves_beside_the_collectives_of_the_training_do_not_hang(ranks, tmp_path):
    """On one gloo group, from another thread, at any moment."""
    steps = ranks(2)(check_beside, str(tmp_path))
    assert steps[0] == steps[1]
