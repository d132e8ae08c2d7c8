"""Values of ranks where a rank's number means another place: the load asks, as under another number of ranks."""

import pytest
import shardfast as sf
import torch
from shardfast.state.catalog import SavedTensor
from shardfast.state.load_plan import moved
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

MESHES = {
    "dp=4": ((4,), ("dp",), [Shard(0)]),
    "fsdp=4": ((4,), None, [Shard(0)]),
    "tp=4": ((4,), ("tp",), [Shard(0)]),
    "dp=2, tp=2": ((2, 2), ("dp", "tp"), [Replicate(), Shard(0)]),
    "none": None,
}


def state_of(kind, value):
    weight = torch.arange(8.0)
    if MESHES[kind] is not None:
        sizes, names, placements = MESHES[kind]
        weight = distribute_tensor(weight, init_device_mesh("cpu", sizes, mesh_dim_names=names), placements)
    return {"model": {"weight": weight}, "extra": {"loader": sf.PerRank(value)}}


def saves(rank, world, place):
    for kind in MESHES:
        sf.save(f"{place}/{kind}", state_of(kind, rank))


CASES = (
    ("dp=4", "dp=2, tp=2", True),
    ("dp=2, tp=2", "none", True),
    ("dp=4", "tp=4", True),
    ("dp=4", "fsdp=4", False),
    ("none", "dp=4", False),
    ("dp=2, tp=2", "dp=2, tp=2", False),
)


def loads(rank, world, place):
    """By case the error, the value by rank number and that of rank 0."""
    found = []
    for saved, here, _ in CASES:
        for per_rank in ("error", "index", "rank0"):
            state = state_of(here, None)
            try:
                sf.load(f"{place}/{saved}", state, per_rank=per_rank)
                found.append(state["extra"]["loader"].value)
            except sf.Invalid as error:
                found.append(str(error))
    return found


def test_a_load_asks_where_ranks_moved(ranks, tmp_path):
    ranks(4)(saves, str(tmp_path))
    for rank, found in enumerate(ranks(4)(loads, str(tmp_path))):
        for number, (saved, here, asks) in enumerate(CASES):
            silent, by_index, of_rank_0 = found[3 * number :][:3]
            assert by_index == rank
            assert of_rank_0 == (0 if asks else rank)
            if asks:
                assert "per rank: extra/loader has 4 different values, and the ranks moved: a mesh of " in silent
                assert 'per_rank="rank0"' in silent
            else:
                assert silent == rank, (saved, here)


@pytest.mark.parametrize(
    ("saved", "here", "said"),
    [
        (
            "mesh(dp=4) [Shard(0)]",
            "mesh(dp=2, tp=2) [Shard(0), Shard(1)]",
            "a mesh of dp=4 in the checkpoint, of dp=2, tp=2 here",
        ),
        ("mesh(dp=4, tp=1) [Shard(0), Shard(1)]", "mesh(dp=4) [Shard(0)]", ""),
        ("mesh(2, 2) [Shard(0), Shard(1)]", "", "a mesh of 2, 2 in the checkpoint, of no axes here"),
        ("mesh(4) [Shard(0)]", "mesh(tp=4) [Shard(0)]", ""),
        ("another layout", "mesh(tp=4) [Shard(0)]", ""),
    ],
)
def test_how_meshes_differ(saved, here, said):
    leaves = [SavedTensor(0, "model", "weight", layout, "F32", (8,), 32) for layout in (saved, "")]
    assert moved(leaves, [here]) == said
