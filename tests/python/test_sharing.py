"""Loads in which ranks read for each other, over connections of their own."""

from pathlib import Path

import pytest
import shardfast as sf
import torch
import torch.distributed as dist
from shardfast import _native, verbs
from shardfast.errors import Corrupt, Error
from shardfast.session import current
from shardfast.state.load_plan import Options
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

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


def bytes_read():
    """Bytes that this process asked the system to read."""
    with open("/proc/self/io") as counters:
        return int(next(line for line in counters if line.startswith("rchar")).split()[1])


def check_parts(rank, world, url):
    """A rank that needs 128 pieces of a tensor, then one that needs half of it in one piece."""
    mesh = init_device_mesh("cpu", (world,))
    full = torch.arange(1024 * 256.0).reshape(1024, 256)
    sf.save(url, {"w": {"w": full}})
    seen = []
    for placement in (_StridedShard(0, split_factor=128), Shard(0)):
        tensor = distribute_tensor(torch.zeros_like(full), mesh, [placement], src_data_rank=None)
        sf.load(url, {"w": {"w": tensor}})  # what is imported and opened once is behind us
        tensor.to_local().zero_()
        plan = sf.plan_load(url, {"w": {"w": tensor}})
        assert f"{plan.bytes_wanted:,} bytes wanted" in str(plan)
        assert not bool(tensor.to_local().any()), "a plan reads nothing"
        before = bytes_read()
        loaded = sf.load(url, {"w": {"w": tensor}})
        assert f"  {loaded.bytes_read:,} bytes read" in str(loaded) and "wanted" not in str(loaded)
        seen.append((plan.bytes_wanted, plan.bytes_read, bytes_read() - before))
        assert torch.equal(tensor.to_local(), distribute_tensor(full, mesh, [placement], src_data_rank=None).to_local())
    return len(list(Path(url).glob("w/*.safetensors"))), seen


def test_a_rank_alone_reads_a_byte_once_and_little_more_than_its_part(ranks, tmp_path):
    size = 1024 * 256 * 4
    for files, (pieces, half) in ranks(2)(check_parts, f"{tmp_path}/one"):
        assert files == 2, "each of the two ranks wrote half of what both hold"
        assert pieces[0] == half[0] == size // 2
        assert pieces[1] <= size
        assert half[1] <= size // 2 + 2 * 65536
        assert max(pieces[2], half[2]) <= size + 100_000, "its header and the manifest aside"
