"""Where a rank stands in the meshes of its job: what states show of it, and what records say."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import shardfast as sf
import torch
from nets import net
from shardfast import adapters
from shardfast.adapters.torch.placement import coordinates_in
from shardfast.state import description
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

COMMAND = Path(sys.executable).with_name("shardfast")


def reported(run, *options):
    text = subprocess.run([COMMAND, "report", run, "--json", *options], check=True, capture_output=True, text=True)
    return json.loads(text.stdout)


class Mesh:
    """The face of a mesh, without process groups."""

    def __init__(self, shape, names, coordinate, root=None):
        self.shape, self.mesh_dim_names, self._coordinate, self._root = shape, names, coordinate, root
        self.ndim = len(shape)

    def get_coordinate(self):
        if isinstance(self._coordinate, Exception):
            raise self._coordinate
        return self._coordinate

    def _get_root_mesh(self):
        return self._root or self


def test_coordinates_are_those_of_dimensions_with_several_ranks():
    assert coordinates_in([Mesh((2, 1, 4), ("dp", "cp", "tp"), (1, 0, 3))]) == {"dp": 1, "tp": 3}
    assert coordinates_in([Mesh((2, 4), ("dp", "tp"), None)]) == {}, "a rank outside of the mesh"
    assert coordinates_in([Mesh((2, 4), None, (1, 2))]) == {"mesh0": 1, "mesh1": 2}
    assert coordinates_in([Mesh((8,), None, (5,))]) == {}, "the rank once more"


def test_meshes_are_merged_by_name_and_the_first_one_counts():
    meshes = [Mesh((2,), ("tp",), (1,)), Mesh((2, 4), ("dp", "tp"), (0, 3)), Mesh((2,), ("x",), ValueError())]
    assert list(coordinates_in([meshes[2], *meshes]).items()) == [("tp", 1), ("dp", 0)]


def test_a_slice_of_a_mesh_shows_the_mesh():
    pipelines = Mesh((2, 2, 2), ("pp", "dp", "tp"), (1, 0, 1))
    assert coordinates_in([Mesh((2,), ("tp",), (1,), pipelines)]) == {"tp": 1, "pp": 1, "dp": 0}
    assert coordinates_in([Mesh((4,), ("dp_cp",), (3,), Mesh((8,), ("world",), (7,)))]) == {"dp_cp": 3}


def sharded(names):
    """A model under tensor parallelism and FSDP2, on two by two ranks."""
    torch.manual_seed(3)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8))
    if names is None:
        return nn.ParameterList([distribute_tensor(torch.ones(8, 8), mesh, [Shard(0), Replicate()])])
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return model


def flat():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return FullyShardedDataParallel(
        nn.Linear(8, 8),
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_id=torch.device("cpu"),
    )


def saves_and_loads(rank, world, place):
    """Saves of a job with one state after the other, each in a run of its own, and loads of them by another job."""
    outside = {"w": distribute_tensor(torch.ones(8), init_device_mesh("cpu", (4,), mesh_dim_names=("ep",)), [Shard(0)])}
    states = {"named": sharded(("dp", "tp")), "numbered": sharded(None), "flat": flat(), "outside": outside}
    for name, state in states.items():
        with sf.Checkpointer(f"{place}/{name}", every=sf.steps(1)) as ckpt:
            for step in (1, 2):
                ckpt.step(step, {"model": state})
                ckpt.wait()
        with sf.Checkpointer(f"{place}/{name}") as ckpt:
            assert ckpt.restore({"model": state}) == 2
    until = time.monotonic() + 60
    while len(list(Path(place).glob("*/.telemetry/*-load-*"))) < len(states) and time.monotonic() < until:
        time.sleep(0.01)  # they are stored by a thread that nobody waits for


def test_records_of_saves_and_loads_say_where_ranks_stand(ranks, tmp_path):
    ranks(4)(saves_and_loads, str(tmp_path))
    high, low = [0, 0, 1, 1], [0, 1, 0, 1]
    expected = {
        "named": {"dp": high, "tp": low},
        "numbered": {"mesh0": high, "mesh1": low},
        "flat": {"replicate": high, "shard": low},
        "outside": {"ep": [0, 1, 2, 3]},
    }
    for name, coordinates in expected.items():
        report = reported(tmp_path / name)
        assert [len(report["saves"]), len(report["loads"])] == [2, 1]
        for operation in (*report["saves"], *report["loads"]):
            assert operation["coordinates"] == coordinates, name
            assert len(set(operation["machines"])) == 1 and len(operation["machines"]) == 4


def loads_first(rank, world, place):
    """A job that loads before it has saved anything."""
    with sf.Checkpointer(f"{place}/named") as ckpt:
        assert ckpt.restore({"model": sharded(("dp", "tp"))}) == 2
    until = time.monotonic() + 60
    while len(list(Path(place, "named/.telemetry").glob("*-load-*"))) < 2 and time.monotonic() < until:
        time.sleep(0.01)


def test_a_load_says_what_its_own_state_shows(ranks, tmp_path):
    ranks(4)(saves_and_loads, str(tmp_path))
    ranks(4)(loads_first, str(tmp_path))
    loads = reported(tmp_path / "named")["loads"]
    assert [load["coordinates"] for load in loads] == [{"dp": [0, 0, 1, 1], "tp": [0, 1, 0, 1]}] * 2


class Failing:
    """An adapter of a framework that cannot tell where a rank stands."""

    def __init__(self, error):
        self.error = error

    def coordinates(self, things):
        raise self.error


@pytest.mark.parametrize("error", [ValueError("no mesh"), AssertionError(), sf.Invalid("no")])
def test_a_state_that_does_not_tell_fails_nothing(tmp_path, monkeypatch, error):
    others = adapters.built_on_others()
    monkeypatch.setattr(adapters, "built_on_others", lambda: [*others, Failing(error)])
    from shardfast.state import coordinates

    assert coordinates.coordinates_of([], []) == []
    monkeypatch.setattr(Failing, "coordinates", lambda self, things: {"tp": -1, "\udcff": 3, "x": "no"})
    assert coordinates.coordinates_of([], []) == [("?", 3)]
    monkeypatch.undo()
    monkeypatch.setattr("shardfast.adapters.torch.coordinates_in", Failing(error).coordinates)
    with sf.Checkpointer(tmp_path / "run", every=sf.steps(1)) as ckpt:
        ckpt.step(1, {"model": net()})
    assert sf.Checkpointer(tmp_path / "run").restore({"model": net(1)}) == 1
    assert reported(tmp_path / "run")["saves"][0]["coordinates"] == {}


def test_a_state_that_is_described_is_not_asked_again(tmp_path, monkeypatch):
    calls = []
    real = description.coordinates_of
    monkeypatch.setattr(description, "coordinates_of", lambda *given: calls.append(1) or real(*given))
    model = net()
    with sf.Checkpointer(tmp_path / "run", every=sf.steps(1)) as ckpt:
        for step in range(1, 5):
            ckpt.step(step, {"model": model, "step": step})
            ckpt.wait()
    assert len(calls) == 1
