"""Loads in which ranks read for each other, over connections of their own."""

import pytest
import shardfast as sf
import torch
import torch.distributed as dist
from shardfast import _native, verbs
from shardfast.errors import Corrupt, Error
from shardfast.load_plan import Options
from shardfast.session import current
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

ROWS, COLUMNS = 1024, 1024
BYTES = 4 * ROWS * COLUMNS
TIMEOUT_S = 20.0


def load(url, state, peer_reads):
    session = current()
    checkpoint = _native.open(session, url, timeout_s=TIMEOUT_S)
    return verbs.fill(session, checkpoint, state, Options(), TIMEOUT_S, peer_reads=peer_reads)


def whole():
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)


def placed(mesh, placements, full):
    """This rank's part of ``full``, without a message."""
    local = full
    for dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            local = local.chunk(mesh.size(dim), placement.dim)[mesh.get_local_rank(dim)]
    return DTensor.from_local(local.contiguous().clone(), mesh, placements, run_check=False)


def save_rows(rank, world, url):
    mesh = init_device_mesh("cpu", (world,))
    sf.save(url, {"model": {"w": placed(mesh, [Shard(0)], whole())}, "extra": {"text": "x" * 100_000}})


def load_as(rank, world, url, shape, placements, peer_reads):
    mesh = init_device_mesh("cpu", shape)
    mine = placed(mesh, placements, whole())
    state = {"model": {"w": placed(mesh, placements, torch.zeros(ROWS, COLUMNS))}, "extra": {"text": None}}
    plan = load(url, state, peer_reads)
    assert torch.equal(state["model"]["w"].to_local(), mine.to_local())
    assert state["extra"]["text"] == "x" * 100_000
    return plan.bytes_read, plan.bytes_received, plan.bytes_sent, plan.is_shared


@pytest.mark.parametrize(
    ("shape", "placements", "times"),
    [
        ((2,), [Shard(1)], 2),
        ((4,), [Replicate()], 4),
        ((2, 2), [Replicate(), Shard(1)], 4),
    ],
    ids=["columns", "replicas", "columns of replicas"],
)
def test_a_group_reads_each_byte_once(ranks, tmp_path, shape, placements, times):
    url, world = str(tmp_path / "saved"), torch.Size(shape).numel()
    ranks(2)(save_rows, url)
    unique = BYTES + 100_000
    plain = ranks(world)(load_as, url, shape, placements, "never")
    assert sum(read for read, *_ in plain) >= times * BYTES
    assert not any(received or sent or is_shared for _, received, sent, is_shared in plain)
    shared = ranks(world)(load_as, url, shape, placements, "always")
    reads = [read for read, *_ in shared]
    # A block of the values' file and one of the tensor's end are whole where a part is wanted.
    assert unique <= sum(reads) <= 1.02 * unique + 65_536, shared
    assert max(reads) - min(reads) <= 2 << 20, shared
    assert all(is_shared for *_, is_shared in shared)
    assert sum(received for _, received, *_ in shared) == sum(sent for _, _, sent, _ in shared) > 0


def test_a_small_load_is_not_worth_connections(ranks, tmp_path):
    url = str(tmp_path / "saved")
    ranks(2)(save_rows, url)
    assert not any(is_shared for *_, is_shared in ranks(2)(load_as, url, (2,), [Shard(1)], "auto"))


def load_damaged(rank, world, url):
    state = {"model": {"w": torch.zeros(ROWS, COLUMNS)}, "extra": {"text": None}}
    try:
        load(url, state, "always")
    except Error as error:
        kind, said = type(error), str(error)
    # The ranks understand each other afterwards, through the group as well.
    dist.barrier()
    sf.plan_load(url, state)
    return kind is Corrupt, said


def test_damage_is_told_to_all_by_the_one_rank_that_read_it(ranks, tmp_path):
    url = str(tmp_path / "saved")
    ranks(2)(save_rows, url)
    file = sorted((tmp_path / "saved" / "model").glob("*.safetensors"))[1]
    data = bytearray(file.read_bytes())
    data[-9] ^= 1
    file.write_bytes(data)
    found = ranks(3)(load_damaged, url)
    assert len(set(found)) == 1
    is_corrupt, said = found[0]
    assert is_corrupt
    assert said.count("rank ") == 1
    assert "tensor model/w" in said
    assert f"file model/{file.name}" in said
