"""Who holds the same as this rank, as far as meshes and wrappers tell, and what ranks that know it save."""

import shardfast as sf
import torch
from shardfast.adapters.torch import TorchAdapter
from shardfast.state.description import describe
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


def holders(state):
    """By key and name, those of all tensors that this rank holds something of."""
    leaves = [leaf for leaf in describe(state) if hasattr(leaf, "layout") and leaf.layout.regions]
    return {f"{leaf.key}/{leaf.name}": leaf.layout.holders for leaf in leaves}


def check_meshes(rank, world):
    adapter = TorchAdapter()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    whole = torch.arange(32.0).view(8, 4)

    def of(where, *placements):
        return adapter.layout(distribute_tensor(whole, where, placements)).holders

    column, row = rank % 2, rank // 2
    assert of(mesh, Replicate(), Shard(0)) == (column, column + 2)
    assert of(mesh, Shard(1), Replicate()) == (2 * row, 2 * row + 1)
    assert of(mesh, Shard(0), Shard(1)) == (rank,)
    assert of(mesh, Replicate(), Replicate()) == (0, 1, 2, 3)
    # The other half of the job may hold the same, or not: the mesh does not say.
    assert of(mesh["shard"], Replicate()) is None
    assert of(mesh["shard"], Shard(0)) is None
    assert adapter.layout(whole).holders is None


def test_a_mesh_of_all_ranks_tells_who_holds_the_same(ranks):
    ranks(4)(check_meshes)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


def trained(model):
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 6)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def check_wrappers(rank, world, url):
    ddp = trained(nn.parallel.DistributedDataParallel(net()))
    found = holders(ddp)
    assert len(found) == 7 + 2 + 6 * 3 and set(found.values()) == {(0, 1)}, found
    # What nobody keeps the same is nobody's replica for sure.
    ignoring = net()
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignoring, ["0.weight"])
    found = holders({"model": nn.parallel.DistributedDataParallel(ignoring)})
    assert [name for name, of in found.items() if of is None] == ["model/0.weight"]
    assert set(holders(trained(net())).values()) == {None}

    plain = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    sharded = trained(fully_shard(plain, mesh=init_device_mesh("cpu", (world,))))
    found = holders(sharded)
    for name, of in found.items():
        assert of == ((0, 1) if name.endswith(".step") else (rank,)), (name, of)

    for name, state in (("ddp", ddp), ("fsdp", sharded)):
        before = [tensor.clone() for tensor in state["model"].parameters()]
        for number in range(2):
            sf.save(f"{url}/{name}{number}", state)
        with torch.no_grad():
            for tensor in state["model"].parameters():
                tensor.zero_()
        sf.load(f"{url}/{name}1", state)
        after = state["model"].parameters()
        assert all(bool((one == other).all()) for one, other in zip(before, after, strict=True))


def test_wrappers_tell_of_parameters_buffers_and_what_optimizers_keep_of_them(ranks, tmp_path):
    ranks(2)(check_wrappers, str(tmp_path))


def check_zero(rank, world, url):
    model = nn.parallel.DistributedDataParallel(net())
    from torch.distributed.optim import ZeroRedundancyOptimizer

    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    model(torch.ones(4, 6)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    assert {of for name, of in holders(state).items() if name.startswith("optimizer/")} == {None}
    sf.save(f"{url}/zero", state)


def test_what_each_rank_has_alone_is_no_replica(ranks, tmp_path):
    ranks(2)(check_zero, str(tmp_path))


def check_alone(rank, world, url):
    """A replicated tensor of which one rank alone tells: the mesh promised that all have it."""
    mesh = init_device_mesh("cpu", (world,))
    both = {"w": distribute_tensor(torch.ones(4, 4), mesh, [Replicate()])}
    odd = {**both, "late": distribute_tensor(torch.ones(2, 2), mesh, [Replicate()])}
    told = []
    for number in range(2):
        try:
            sf.save(f"{url}/{number}", {"model": odd if rank == 0 else both})
            told.append(None)
        except sf.Invalid as error:
            told.append(str(error))
    return told


def test_a_mesh_that_promises_too_much_is_told_once_and_then_not_believed(ranks, tmp_path):
    first, second = ranks(2)(check_alone, str(tmp_path))
    assert first == second
    assert "names, dtypes, shapes or parts differ" in first[0] and first[1] is None
    state = {"model": {"w": torch.zeros(4, 4), "late": torch.zeros(2, 2)}}
    sf.load(tmp_path / "1", state)
    assert bool((state["model"]["late"] == 1).all())
