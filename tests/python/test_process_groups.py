"""The ranks of a process group are a job of their own; ranks that belong to no group and to several are refused."""

import os
import re
import subprocess
import sys

import pytest
import shardfast as sf
import torch
import torch.distributed as dist
from shardfast import session
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

TIMEOUT_S = 40.0


def groups_of(world, *members):
    """New groups with these members; every rank makes all of them."""
    return [dist.new_group(list(ranks)) for ranks in members]


def check_halves(rank, world, directory):
    """Two halves of the job save and load at once, each for itself, in different orders and numbers of calls."""
    low, high = groups_of(world, [0, 1], [2, 3])
    group, mine = (low, "low") if rank < 2 else (high, "high")
    found = session.current(TIMEOUT_S, group)
    assert (found.rank, found.world) == (rank % 2, 2)
    assert session.current(TIMEOUT_S, group) is found
    for number in range(3 if mine == "low" else 1):
        state = {"extra": {"who": mine, "n": number}, "mine": {"rank": sf.PerRank(rank)}}
        sf.save(f"{directory}/{mine}-{number}", state, process_group=group, timeout_s=TIMEOUT_S)
        loaded = {"extra": {"who": None, "n": None}, "mine": {"rank": sf.PerRank(None)}}
        sf.load(f"{directory}/{mine}-{number}", loaded, process_group=group, timeout_s=TIMEOUT_S)
        assert loaded["extra"] == state["extra"]
        assert loaded["mine"]["rank"].value == rank
    sf.save_async(
        f"{directory}/{mine}-async", {"extra": {"n": 1}}, process_group=group, timeout_s=TIMEOUT_S
    ).committed()
    assert not sf.plan_load(f"{directory}/{mine}-async", {"extra": {"n": 0}}, process_group=group).problems
    with sf.Checkpointer(f"{directory}/{mine}-run", process_group=group, timeout_s=TIMEOUT_S) as ckpt:
        ckpt.save(1, {"extra": {"n": 5}})
    state = {"extra": {"n": 0}}
    assert sf.Checkpointer(f"{directory}/{mine}-run", process_group=group, timeout_s=TIMEOUT_S).restore(state) == 1
    assert state == {"extra": {"n": 5}}
    # And all of them together.
    dist.barrier()
    sf.save(f"{directory}/all", {"mine": {"rank": sf.PerRank(rank)}}, timeout_s=TIMEOUT_S)


def test_a_group_is_a_job_of_its_own(ranks, tmp_path):
    ranks(4)(check_halves, str(tmp_path))
    loaded = {"extra": {"who": None, "n": None}, "mine": {"rank": sf.PerRank(None)}}
    assert sf.plan_load(tmp_path / "low-0", loaded).problems, "values of two ranks, for one"


def check_holders(rank, world, directory):
    """A mesh of the whole job says who holds what in the numbers of the job: half of it saves."""
    mesh = DeviceMesh("cpu", torch.arange(world).reshape(2, 2))
    full = torch.arange(24.0).reshape(8, 3)
    low, high = groups_of(world, [0, 1], [2, 3])
    group, name = (low, f"{directory}/low") if rank < 2 else (high, f"{directory}/high")
    for number, placements in enumerate(([Replicate(), Replicate()], [Replicate(), Shard(0)])):
        state = {"model": {"w": distribute_tensor(full, mesh, placements)}}
        for again in "ab":
            sf.save(f"{name}-{number}{again}", state, process_group=group, timeout_s=TIMEOUT_S)
            loaded = {"model": {"w": torch.zeros(8, 3)}}
            sf.load(f"{name}-{number}{again}", loaded, process_group=group, timeout_s=TIMEOUT_S)
            assert torch.equal(loaded["model"]["w"], full)


def test_who_holds_what_is_not_taken_in_the_numbers_of_the_job(ranks, tmp_path):
    ranks(4)(check_holders, str(tmp_path))


def check_refused(rank, world, directory):
    one, both = groups_of(world, [0], list(range(world)))
    seen = []
    for group in (one, "dp", DeviceMesh("cpu", torch.arange(world))):
        try:
            sf.save(f"{directory}/{rank}", {"extra": {"x": 1}}, process_group=group, timeout_s=TIMEOUT_S)
            seen.append("saved")
        except sf.Invalid as error:
            seen.append(str(error))
    # A group of all ranks is the job.
    assert session.current(TIMEOUT_S, both) is session.current(TIMEOUT_S)
    return seen


def test_what_is_no_group_of_this_rank_is_refused(ranks, tmp_path):
    first, second = ranks(2)(check_refused, str(tmp_path))
    assert first[0] == "saved"
    assert "process_group: rank 1 is not in it" in second[0]
    for seen in (first, second):
        assert "expected a torch.distributed.ProcessGroup, found a str" in seen[1]
        assert "found a DeviceMesh; a DeviceMesh of one dimension has get_group()" in seen[2]


def test_a_group_needs_torch_distributed(tmp_path):
    with pytest.raises(sf.Invalid, match=r"torch\.distributed is not initialised"):
        sf.save(tmp_path / "one", {"extra": {"x": 1}}, process_group=object())


@pytest.mark.parametrize(
    "on_node", [(((0, 1, 2, 3), 2), 2), (((0, 2, 4), 2), 1), (((1, 2, 3), 2), 1), (((4, 5, 6), 2), 2)]
)
def test_ranks_of_a_group_that_share_a_node(on_node):
    arguments, expected = on_node
    assert session._on_node(*arguments) == expected


@pytest.mark.parametrize("verb", ["save", "save_async", "load", "plan_load", "Checkpointer"])
def test_a_rank_that_does_not_know_the_others_is_refused(monkeypatch, tmp_path, verb):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "2")
    state = {"extra": {"x": 1}}
    with pytest.raises(sf.Invalid) as caught:
        if verb == "Checkpointer":
            sf.Checkpointer(tmp_path / "run").save(1, state)
        else:
            getattr(sf, verb)(tmp_path / "one", state)
    message = str(caught.value)
    assert "WORLD_SIZE=4" in message
    assert "torch.distributed.init_process_group()" in message
    assert re.search("SHARDFAST_ROOT .*SHARDFAST_TOKEN", message)
    assert not (tmp_path / "one").exists()


@pytest.mark.parametrize("world", ["1", "", "many"])
def test_a_process_that_is_alone_is_not_refused(monkeypatch, tmp_path, world):
    monkeypatch.setenv("WORLD_SIZE", world)
    sf.save(tmp_path / "one", {"extra": {"x": 1}})


def test_looking_at_a_checkpoint_needs_no_other_ranks(monkeypatch, tmp_path):
    """What inspects works in any process, also in a child of torchrun that loads data."""
    sf.save(tmp_path / "one", {"model": {"w": torch.ones(3)}})
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "2")
    with sf.mapped(tmp_path / "one") as mapped:
        assert mapped is not None
    command = [os.path.join(os.path.dirname(sys.executable), "shardfast"), "inspect", str(tmp_path / "one")]
    assert subprocess.run(command, capture_output=True).returncode == 0
