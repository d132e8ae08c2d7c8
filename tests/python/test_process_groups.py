"""The ranks of a process group are a job of their own; ranks that belong to no group and to several are refused. Models
on some of the ranks, on both halves at once, and on meshes of three dimensions come back."""

import os
import re
import subprocess
import sys

import pytest
import shardfast as sf
import torch
import torch.distributed as dist
from layouts import known, local, mesh_of, same_bits
from older import AVERAGED, IS_OLDER
from shardfast import session
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from units import WIDTH, Net, Unit, adamw, state_of, train, unequal, units_of, whole_of, wrap

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


# Models on some of the ranks


CPU = torch.device("cpu")


class WithExperts(Net):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleDict({str(number): Unit() for number in range(2)})


def with_experts(mesh, seed):
    """FSDP1 in FSDP1: each expert is sharded over two of four ranks, and only these have its names."""
    torch.manual_seed(seed)
    net = WithExperts()
    mine = str(mesh["inner"].get_local_rank())
    inside = FSDP(net.experts[mine], device_mesh=mesh["outer"], use_orig_params=True, device_id=CPU)
    net.experts = nn.ModuleDict({mine: inside})
    model = FSDP(net, use_orig_params=True, device_id=CPU)
    return model, adamw(model)


def check_experts(rank, world, url):
    mesh = mesh_of(2, "outer", "inner")
    model, optimizer = with_experts(mesh, 0)
    for parameter in model.parameters():
        if parameter.numel():
            parameter.grad = known(f"{rank % 2}", tuple(parameter.shape))
    optimizer.step()
    sf.save(url, state_of(model, optimizer))
    into, its_optimizer = with_experts(mesh, 1)
    sf.load(url, state_of(into, its_optimizer))
    for one, other in zip(model.parameters(), into.parameters(), strict=True):
        assert same_bits(one, other)
        mine, its = optimizer.state.get(one, {}), its_optimizer.state.get(other, {})
        assert all(same_bits(value, its[name]) for name, value in mine.items())
    plain = WithExperts()
    its_optimizer = adamw(plain)
    sf.load(url, state_of(plain, its_optimizer))
    sf.save(f"{url}-whole", state_of(plain, its_optimizer))
    into, its_optimizer = with_experts(mesh, 2)
    sf.load(f"{url}-whole", state_of(into, its_optimizer))
    for one, other in zip(model.parameters(), into.parameters(), strict=True):
        assert same_bits(one, other)
        if one.numel():
            assert same_bits(optimizer.state[one]["exp_avg"], its_optimizer.state[other]["exp_avg"])
    return whole_of(plain, adamw(plain))


def test_experts_that_fsdp1_shards_over_some_ranks(ranks, tmp_path):
    wholes = ranks(4)(check_experts, f"{tmp_path}/checkpoint")
    assert all(unequal(wholes[0], whole) == [] for whole in wholes)


def check_some_gathered(rank, world, url):
    """FSDP2 that shards again over fewer ranks after a forward, and trains, saves and loads in that state."""
    torch.manual_seed(0)
    model, everywhere = Net(), init_device_mesh("cpu", (world,))
    for unit in units_of(model):
        fully_shard(unit, mesh=everywhere, reshard_after_forward=2, **AVERAGED)
    fully_shard(model, mesh=everywhere, **AVERAGED)
    optimizer = adamw(model)
    train(model, optimizer, range(2))
    whole, x = whole_of(model, optimizer), known("x", (5, WIDTH))
    loss = model(x).square().mean()
    assert model.first.gain.device_mesh.shape != (4,)
    sf.save(f"{url}/between", state_of(model, optimizer))
    loss.backward()
    optimizer.zero_grad()
    with torch.no_grad():
        expected = model(x)
    pending = sf.save_async(f"{url}/after", state_of(model, optimizer))
    train(model, optimizer, range(2, 4))
    pending.committed()
    for name in ("between", "after"):
        plain = Net()
        its_optimizer = adamw(plain)
        sf.load(f"{url}/{name}", state_of(plain, its_optimizer))
        assert unequal(whole_of(plain, its_optimizer), whole) == [], name
        with torch.no_grad():
            model(x)
        sf.load(f"{url}/{name}", state_of(model, optimizer))
        with torch.no_grad():
            assert same_bits(model(x), expected), "a forward uses what was loaded"
        for unit in units_of(model):
            unit.reshard()
        assert unequal(whole_of(model, optimizer), whole) == [], name
        train(model, optimizer, range(4, 5))


def test_parameters_that_fsdp2_shards_over_fewer_ranks_after_a_forward(ranks, tmp_path):
    ranks(4)(check_some_gathered, f"{tmp_path}")


def check_some_ranks(rank, world, url):
    """What four ranks saved is loaded and saved again by two of them, with a model on these."""
    group = dist.new_group([0, 2])
    for layout in ("fsdp1 orig", "fsdp1 flat", "fsdp2"):
        torch.manual_seed(0)
        model = wrap(layout, Net())
        optimizer = adamw(model)
        train(model, optimizer, range(2))
        sf.save(f"{url}/{layout}", state_of(model, optimizer))
        whole = whole_of(model, optimizer)
        if rank % 2 == 0:
            if layout == "fsdp2":
                into = fully_shard(Net(), mesh=DeviceMesh.from_group(group, "cpu"), **AVERAGED)
            else:
                into = FSDP(Net(), process_group=group, device_id=CPU, use_orig_params="orig" in layout)
            its_optimizer = adamw(into)
            sf.load(f"{url}/{layout}", state_of(into, its_optimizer), process_group=group)
            sf.save(f"{url}/{layout}-two", state_of(into, its_optimizer), process_group=group)
        dist.barrier()
        plain = Net()
        its_optimizer = adamw(plain)
        sf.load(f"{url}/{layout}-two", state_of(plain, its_optimizer))
        assert unequal(whole_of(plain, its_optimizer), whole) == [], layout


def test_models_of_some_of_the_ranks(ranks, tmp_path):
    ranks(4)(check_some_ranks, f"{tmp_path}")


def group_of(rank, *members):
    """The one of these groups that has this rank."""
    made = [(ranks, dist.new_group(ranks)) for ranks in members]
    return next(group for ranks, group in made if rank in ranks)


def check_undeclared(rank, world, url):
    """Two halves of the job that shard the same model, and say so by groups of FSDP1 or not at all."""
    inner, outer = group_of(rank, [0, 1], [2, 3]), group_of(rank, [0, 2], [1, 3])
    mesh = mesh_of(2, "outer", "inner")["inner"]

    def made(kind, seed):
        torch.manual_seed(seed)
        if kind == "fsdp2 half":
            model = fully_shard(Net(), mesh=mesh, **AVERAGED)
        elif kind == "fsdp1 half":
            model = FSDP(Net(), process_group=inner, device_id=CPU, use_orig_params=True)
        else:
            strategy = ShardingStrategy.HYBRID_SHARD
            model = FSDP(Net(), process_group=(inner, outer), sharding_strategy=strategy, device_id=CPU)
        return model, adamw(model)

    for kind in ("fsdp2 half", "fsdp1 half", "fsdp1 hybrid"):
        model, optimizer = made(kind, 0)
        train(model, optimizer, range(2))
        for again in "ab":
            sf.save(f"{url}/{kind}-{again}", state_of(model, optimizer))
        into, its_optimizer = made(kind, 1)
        sf.load(f"{url}/{kind}-b", state_of(into, its_optimizer))
        for one, other in zip(model.parameters(), into.parameters(), strict=True):
            assert same_bits(local(one), local(other)), kind
            state, its = optimizer.state.get(one, {}), its_optimizer.state.get(other, {})
            assert all(same_bits(local(value), local(its[name])) for name, value in state.items()), kind
        plain = Net()
        its_optimizer = adamw(plain)
        sf.load(f"{url}/{kind}-b", state_of(plain, its_optimizer))
        if kind == "fsdp2 half":
            assert unequal(whole_of(plain, its_optimizer), whole_of(model, optimizer)) == []
        everywhere = wrap("fsdp2", Net())
        its = adamw(everywhere)
        sf.load(f"{url}/{kind}-b", state_of(everywhere, its))
        assert unequal(whole_of(everywhere, its), whole_of(plain, its_optimizer)) == [], kind
        # Halves that are not the same any more are told.
        if rank > 1:
            with torch.no_grad():
                for parameter in model.parameters():
                    local(parameter).add_(1)
        with pytest.raises(sf.Invalid, match=r"its replicas of .* differ"):
            sf.save(f"{url}/{kind}-no", state_of(model, optimizer), prove=True)


def test_halves_of_a_job_that_shard_the_same_model(ranks, tmp_path):
    ranks(4)(check_undeclared, f"{tmp_path}")


class Wide(nn.Module):
    """Two linear layers, whose hidden dimension tensor parallelism and FSDP2 cut unevenly."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8 if IS_OLDER else 10), nn.Linear(8 if IS_OLDER else 10, WIDTH)

    def forward(self, x, step=0):
        return self.down(F.gelu(self.up(x)))


def across(parameter):
    """The dimension of a matrix that tensor parallelism does not cut."""
    is_matrix = isinstance(parameter, DTensor) and parameter.ndim == 2
    return Shard(1 - parameter.placements[0].dim) if is_matrix else Shard(0)


def check_three(rank, world, url):
    """Replicas, shards and tensor parallelism on a mesh of three dimensions."""
    torch.manual_seed(0)
    plain = Wide()
    reference = adamw(plain)
    train(plain, reference, range(2))
    sf.save(f"{url}/plain", state_of(plain, reference))
    for number, shape in enumerate(((2, 1, 2), (1, 2, 2), (2, 2, 1), (1, 2, 2))):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards", "tp"))
        options = {**AVERAGED, **({"shard_placement_fn": across} if number == 3 else {})}

        def made(seed, mesh=mesh, options=options):
            torch.manual_seed(seed)
            model = parallelize_module(Wide(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            model = fully_shard(model, mesh=mesh["replicas", "shards"], **options)
            return model, adamw(model)

        model, optimizer = made(1)
        sf.load(f"{url}/plain", state_of(model, optimizer))
        assert unequal(whole_of(model, optimizer), whole_of(plain, reference)) == [], shape
        if not IS_OLDER:  # FSDP2 of PyTorch 2.7 does not train replicas of shards on gloo
            train(model, optimizer, range(2, 4))
        sf.save(f"{url}/{number}", state_of(model, optimizer))
        again, its_optimizer = made(2)
        sf.load(f"{url}/{number}", state_of(again, its_optimizer))
        assert unequal(whole_of(again, its_optimizer), whole_of(model, optimizer)) == [], shape
        other = Wide()
        its_optimizer = adamw(other)
        sf.load(f"{url}/{number}", state_of(other, its_optimizer))
        assert unequal(whole_of(other, its_optimizer), whole_of(model, optimizer)) == [], shape


def test_replicas_shards_and_tensor_parallelism(ranks, tmp_path):
    ranks(4)(check_three, f"{tmp_path}")
