"""Any layout into any other, bit for bit, with real processes and torch's own layouts."""

import itertools
import random
import types

import pytest
import shardfast as sf
import torch
import torch.distributed as dist
from layouts import (
    PARALLEL,
    Net,
    build,
    differing,
    expected,
    fill,
    held,
    known,
    local,
    memory,
    mine,
    plain_names,
    same_bits,
    train,
)
from older import IS_OLDER
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard


def save_known(rank, world, layout, url):
    model, optimizer = build(layout)
    fill(model, optimizer)
    sf.save(url, {"model": model, "optimizer": optimizer})


def expect_known(rank, world, layouts, url):
    """Loads into models of other numbers, whose optimizers have no state yet, and into ones that have some."""
    for layout in layouts:
        model, optimizer = build(layout, seed=1)
        sf.load(url, {"model": model, "optimizer": optimizer})
        assert differing(model, optimizer) == [], layout
        model, optimizer = build(layout, seed=2)
        fill(model, optimizer)
        for tensor in memory(model, optimizer):
            tensor.zero_()
        before = [tensor.data_ptr() for tensor in memory(model, optimizer)]
        plan = sf.load(url, {"model": model, "optimizer": optimizer})
        assert differing(model, optimizer) == [], layout
        assert before == [tensor.data_ptr() for tensor in memory(model, optimizer)], "tensors are filled in place"
        assert sorted(plan.tensors) == sorted(expected()), "every tensor once"


@pytest.mark.parametrize("layout", PARALLEL)
def test_what_four_ranks_saved_loads_under_every_layout(ranks, tmp_path, layout):
    url = f"{tmp_path}/checkpoint"
    ranks(4)(save_known, layout, url)
    expect_known(0, 1, ["plain"], url)
    ranks(2)(expect_known, PARALLEL, url)


@pytest.mark.parametrize("layout", PARALLEL)
def test_four_ranks_load_what_four_saved_under_another_layout(ranks, tmp_path, layout):
    url = f"{tmp_path}/checkpoint"
    ranks(4)(save_known, layout, url)
    ranks(4)(expect_known, [other for other in PARALLEL if other != layout], url)


SAVED_BY_FEWER = [
    *[("plain", 1), ("fsdp_tp", 2), ("fsdp", 3)],
    *(pytest.param(layout, 2, marks=pytest.mark.campaign) for layout in ("fsdp", "tp")),
]


@pytest.mark.parametrize(("layout", "world"), SAVED_BY_FEWER)
def test_what_fewer_ranks_saved_loads_on_four(ranks, tmp_path, layout, world):
    url = f"{tmp_path}/checkpoint"
    if world == 1:
        save_known(0, 1, layout, url)
    else:
        ranks(world)(save_known, layout, url)
    ranks(4)(expect_known, PARALLEL, url)


@pytest.mark.parametrize(("saving", "loading"), [(4, 3), (3, 4), (2, 3)])
def test_worlds_that_differ_by_one(ranks, tmp_path, saving, loading):
    url = f"{tmp_path}/checkpoint"
    ranks(saving)(save_known, "fsdp", url)
    ranks(loading)(expect_known, ["ddp", "fsdp", "tp"], url)


# DTensors in general

KINDS = [Replicate(), Shard(0), Shard(1), _StridedShard(0, split_factor=2), _StridedShard(1, split_factor=3)]
SHAPES = [(48, 36), (0, 36)] if IS_OLDER else [(16, 6), (7, 5), (1, 2), (0, 3)]  # PyTorch 2.7 cuts strided ones evenly
MESHES = {1: [(1,)], 2: [(2,), (1, 2), (2, 1, 1)], 3: [(3,), (1, 3)], 4: [(4,), (2, 2), (2, 1, 2)]}


def names():
    """Names of tensors, each with its shape: enough of them for every choice of placements on two mesh dimensions."""
    return {f"{number}_{shape[0]}x{shape[1]}": shape for number in range(len(KINDS) ** 2) for shape in SHAPES}


def dtensors(mesh_shape, shift, wholes):
    """Each tensor under other placements, which ``shift`` moves on in the list of all of them."""
    mesh = init_device_mesh("cpu", mesh_shape)
    choices = list(itertools.product(KINDS, repeat=len(mesh_shape)))
    out = {}
    for number, (name, whole) in enumerate(wholes.items()):
        placements = choices[(number // len(SHAPES) * 11 + shift) % len(choices)]
        # Cut on every rank alone: scattering an uneven _StridedShard fails in torch itself.
        out[name] = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    return out


def save_dtensors(rank, world, mesh_shape, url):
    sf.save(url, {"w": dtensors(mesh_shape, 0, {name: known(name, shape) for name, shape in names().items()})})


def expect_dtensors(rank, world, url, shift):
    wholes = {name: known(name, shape) for name, shape in names().items()}
    for mesh_shape in MESHES[world]:
        zeros = {name: torch.zeros_like(whole) for name, whole in wholes.items()}
        loaded = dtensors(mesh_shape, shift, zeros)
        sf.load(url, {"w": loaded})
        for name, tensor in dtensors(mesh_shape, shift, wholes).items():
            assert same_bits(local(loaded[name]), local(tensor)), (mesh_shape, loaded[name].placements, name)


@pytest.mark.parametrize("mesh_shape", MESHES[4], ids=str)
def test_dtensors_on_meshes_of_one_to_three_dimensions(ranks, tmp_path, mesh_shape):
    url = f"{tmp_path}/checkpoint"
    ranks(4)(save_dtensors, mesh_shape, url)
    plain = {name: torch.zeros(shape) for name, shape in names().items()}
    sf.load(url, {"w": plain})
    assert [name for name, shape in names().items() if not same_bits(plain[name], known(name, shape))] == []
    ranks(2)(expect_dtensors, url, 1)
    ranks(3)(expect_dtensors, url, 2)
    ranks(4)(expect_dtensors, url, 3)


def check_strided_memory(rank, world, url):
    """Local tensors that are not contiguous are saved from where they lie and loaded to where they lie."""
    mesh = init_device_mesh("cpu", (world,))
    whole = known("w", (6, 4 * world))

    def transposed(source):
        block = source[:, 4 * rank : 4 * rank + 4].t().contiguous().t()
        assert not block.is_contiguous()
        return DTensor.from_local(block, mesh, [Shard(1)], run_check=False)

    sf.save(url, {"w": {"w": transposed(whole)}})
    loaded = transposed(torch.zeros_like(whole))
    address = loaded.to_local().data_ptr()
    sf.load(url, {"w": {"w": loaded}})
    assert same_bits(loaded.to_local(), whole[:, 4 * rank : 4 * rank + 4])
    assert (loaded.to_local().data_ptr(), loaded.to_local().is_contiguous()) == (address, False)


def test_dtensors_that_are_not_contiguous(ranks, tmp_path):
    ranks(2)(check_strided_memory, f"{tmp_path}/checkpoint")


# Training goes on


def check_resume(rank, world, layout, url):
    straight, resumed = build(layout), build(layout, seed=1)
    train(*straight, range(2))
    sf.save(url, {"model": straight[0], "optimizer": straight[1]})
    sf.load(url, {"model": resumed[0], "optimizer": resumed[1]})
    losses = [train(*each, range(2, 3)) for each in (straight, resumed)]
    assert losses[0] == losses[1]
    one, other = held(*straight), held(*resumed)
    assert sorted(one) == sorted(other)
    assert [name for name in one if not same_bits(local(one[name]), local(other[name]))] == []


@pytest.mark.parametrize("layout", PARALLEL)
def test_a_step_after_a_resume_is_the_step_without_one(ranks, tmp_path, layout):
    if IS_OLDER and layout == "hsdp":
        pytest.skip(f"FSDP2 of torch {torch.__version__} makes no backward pass under HSDP on a CPU")
    ranks(2)(check_resume, layout, f"{tmp_path}/checkpoint")


def test_a_step_after_a_resume_is_the_step_without_one_in_one_process(tmp_path):
    check_resume(0, 1, "plain", f"{tmp_path}/checkpoint")


def train_and_save(rank, world, layout, url):
    model, optimizer = build(layout)
    train(model, optimizer, range(2))
    sf.save(url, {"model": model, "optimizer": optimizer})


def load_and_train(rank, world, layout, url):
    model, optimizer = build(layout, seed=1)
    sf.load(url, {"model": model, "optimizer": optimizer})
    return train(model, optimizer, range(2, 6))


def test_training_goes_on_under_another_layout(ranks, tmp_path):
    url = f"{tmp_path}/checkpoint"
    ranks(4)(train_and_save, "fsdp", url)
    uninterrupted = train(*build("plain"), range(6))
    losses = [load_and_train(0, 1, "plain", url), *ranks(4)(load_and_train, "fsdp_tp", url)]
    losses += ranks(2)(load_and_train, "tp", url)
    # Equal up to the order of summation, which layouts differ in.
    assert losses == pytest.approx([uninterrupted] * len(losses), rel=1e-5)


def check_async(rank, world, layout, url):
    model, optimizer = build(layout)
    train(model, optimizer, range(2))
    # Large enough that copying it takes a while.
    ballast = torch.full((4 << 20,), float(rank))
    seen = {"step": 2, "order": [3, 1, 2]}
    state = {"model": model, "optimizer": optimizer, "extra": seen, "ballast": sf.PerRank(ballast)}
    snapshot = {name: local(tensor).clone() for name, tensor in held(model, optimizer).items()}
    pending = sf.save_async(url, state)
    seen["step"], seen["order"][0] = 3, -1  # Python values are captured before the call returns
    pending.staged()
    ballast.fill_(-1)
    train(model, optimizer, range(2, 6))
    pending.committed()
    other, its_optimizer = build(layout, seed=1)
    loaded = {"step": None, "order": None}
    mine = sf.PerRank(None)
    sf.load(url, {"model": other, "optimizer": its_optimizer, "extra": loaded, "ballast": mine})
    tensors = held(other, its_optimizer)
    assert sorted(tensors) == sorted(snapshot)
    assert [name for name, tensor in tensors.items() if not same_bits(local(tensor), snapshot[name])] == []
    assert loaded == {"step": 2, "order": [3, 1, 2]}
    assert bool((mine.value == rank).all())
    return float(dist.get_rank())


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "fsdp_tp"])
def test_a_save_holds_what_was_there_when_it_was_called(ranks, tmp_path, layout):
    assert ranks(2)(check_async, layout, f"{tmp_path}/checkpoint") == [0.0, 1.0]


# Shards that no placement tells


SHAPE = (12, 3)
PLANS = {
    # Rows of each rank, as runs in the order in which the rank keeps them.
    "even": [[(0, 3)], [(3, 6)], [(6, 9)], [(9, 12)]],
    "uneven": [[(0, 5)], [(5, 6)], [], [(6, 12)]],
    "several": [[(0, 1), (6, 8)], [(1, 4)], [(8, 9), (4, 5), (11, 12)], [(5, 6), (9, 11)]],
    "other ranks": [[(9, 12)], [(0, 3)], [(6, 9)], [(3, 6)]],
}


def sharded(plan, rank, source):
    """A tensor whose shards no placement tells: they are said by the chunk list that libraries attach."""
    runs = PLANS[plan][rank]
    block = torch.cat([source[start:stop] for start, stop in runs] or [source[:0]])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensor = DTensor.from_local(block, mesh, [Shard(0)], run_check=False, shape=torch.Size(SHAPE), stride=(3, 1))
    chunks = [types.SimpleNamespace(offsets=(start, 0), sizes=(stop - start, 3)) for start, stop in runs]
    tensor._local_tensor.__create_chunk_list__ = lambda: chunks
    return tensor


def check_plans(rank, world, directory):
    whole, zeros = known("w", SHAPE), torch.zeros(SHAPE)
    wanted = {plan: local(sharded(plan, rank, whole)) for plan in PLANS}
    for saving in PLANS:
        sf.save(f"{directory}/{saving}", {"w": {"w": sharded(saving, rank, whole)}})
    for saving, loading in itertools.product(PLANS, PLANS):
        tensor = sharded(loading, rank, zeros)
        sf.load(f"{directory}/{saving}", {"w": {"w": tensor}})
        assert same_bits(local(tensor), wanted[loading]), (saving, loading)
    # Sharded to whole and back.
    plain = {"w": zeros.clone()}
    sf.load(f"{directory}/several", {"w": plain})
    assert same_bits(plain["w"], whole)
    sf.save(f"{directory}/whole", {"w": plain})
    tensor = sharded("several", rank, zeros)
    sf.load(f"{directory}/whole", {"w": {"w": tensor}})
    assert same_bits(local(tensor), wanted["several"])


def test_every_plan_loads_under_every_other(ranks, tmp_path):
    ranks(4)(check_plans, str(tmp_path))


def check_bad_plans(rank, world, directory):
    whole = known("w", SHAPE)
    PLANS["overlapping"] = [[(0, 3)], [(2, 6)], [(6, 9)], [(9, 12)]]
    PLANS["with a hole"] = [[(0, 3)], [(3, 6)], [(6, 9)], [(9, 11)]]
    for plan, message in {
        "overlapping": r"w/w: .*\[2:6, 0:3\].*",
        "with a hole": r"w/w: .*11.*",
    }.items():
        with pytest.raises(sf.Invalid, match=message):
            sf.save(f"{directory}/{plan}", {"w": {"w": sharded(plan, rank, whole)}})


def test_plans_that_overlap_or_leave_a_hole_are_refused(ranks, tmp_path):
    ranks(4)(check_bad_plans, str(tmp_path))


def check_part_of_the_ranks(rank, world, url):
    """Tensors that live on some of the ranks only, and one whose ranks are in another order, which nothing tells."""
    some, turned = DeviceMesh("cpu", [1, 3]), DeviceMesh("cpu", [2, 0, 3, 1])
    wholes = {"some": known("some", (5, 2)), "all": known("all", (6, 2))}

    def tensors(sources):
        on_some = {"some": distribute_tensor(sources["some"], some, [Shard(0)], src_data_rank=None)}
        on_all = {"all": distribute_tensor(sources["all"], turned, [Replicate()], src_data_rank=None)}
        return {**(on_some if rank in (1, 3) else {}), **on_all}

    sf.save(url, {"w": tensors(wholes)})
    loaded = tensors({name: torch.zeros_like(whole) for name, whole in wholes.items()})
    sf.load(url, {"w": loaded})
    for name, tensor in loaded.items():
        assert same_bits(local(tensor), mine(wholes[name], tensor)), name
    for source in (0, None):
        shards = distribute_tensor(wholes["all"], turned, [Shard(0)], src_data_rank=source)
        with pytest.raises(sf.Invalid, match=r"w\.all: .* lists ranks \[2, 0, 3, 1\]"):
            sf.save(f"{url}-{source}", {"w": {"all": shards}})
    return sorted(loaded)


def test_ranks_without_a_shard(ranks, tmp_path):
    url = f"{tmp_path}/checkpoint"
    names = ranks(4)(check_part_of_the_ranks, url)
    assert names == [["all"], ["all", "some"], ["all"], ["all", "some"]]
    plain = {"some": torch.zeros(5, 2), "all": torch.zeros(6, 2)}
    sf.load(url, {"w": plain})
    assert all(same_bits(tensor, known(name, tuple(tensor.shape))) for name, tensor in plain.items())


# Ranks that do not say the same, and saves in flight


def check_orders(rank, world, url):
    """Nothing depends on the order of keys, which Python's sets and conditions make differ."""
    mesh = init_device_mesh("cpu", (world,))
    names = [f"w{number}" for number in range(12)]
    random.Random(rank).shuffle(names)
    wholes = {name: known(name, (5, 2)) for name in names}
    tensors = {name: distribute_tensor(wholes[name], mesh, [Shard(0)], src_data_rank=None) for name in sorted(names)}
    keys = ["a", "b"] if rank % 2 else ["b", "a"]
    sf.save(url, {key: {name: tensors[name] for name in names} for key in keys}, timeout_s=20)
    zeros = {name: distribute_tensor(torch.zeros(5, 2), mesh, [Shard(0)], src_data_rank=None) for name in sorted(names)}
    names.reverse()
    sf.load(url, {"a": {name: zeros[name] for name in names}}, only="a", timeout_s=20)
    assert all(same_bits(local(zeros[name]), mine(wholes[name], zeros[name])) for name in names)


def test_keys_in_another_order_on_every_rank(ranks, tmp_path):
    ranks(4)(check_orders, f"{tmp_path}/checkpoint")


def check_several_in_flight(rank, world, directory):
    """Six saves of one shape of state, two at a time, then another shape: what is remembered is never taken for new."""
    model, optimizer = build("fsdp")
    train(model, optimizer, range(1))
    pending, snapshots = [], []
    for number in range(6):
        train(model, optimizer, range(number, number + 1))
        state = {"model": model, "extra": {"number": number, **({"more": torch.full((2,), 9.0)} if number > 4 else {})}}
        snapshots.append({name: local(tensor).clone() for name, tensor in plain_names(model).items()})
        pending.append(sf.save_async(f"{directory}/{number}", state))
        if number % 2:
            for one in pending[-2:]:
                one.committed()
    for number, snapshot in enumerate(snapshots):
        other, _ = build("fsdp", seed=1)
        extra = {"number": None, **({"more": None} if number > 4 else {})}
        sf.load(f"{directory}/{number}", {"model": other, "extra": extra})
        assert extra["number"] == number
        assert [name for name, t in plain_names(other).items() if not same_bits(local(t), snapshot[name])] == []


def test_several_saves_in_flight(ranks, tmp_path):
    ranks(2)(check_several_in_flight, str(tmp_path))


# Parts of a checkpoint


def check_partial(rank, world, url):
    model, optimizer = build("fsdp")
    train(model, optimizer, range(1))
    sf.save(url, {"model": model, "optimizer": optimizer, "extra": {"seen": 3, "other": 4}})
    saved = {name: local(tensor).clone() for name, tensor in plain_names(model).items()}

    def loaded(state, target, **options):
        plan = sf.load(url, state, **options)
        return plan, [name for name, t in plain_names(target).items() if same_bits(local(t), saved[name])]

    everything, blocks = list(saved), [name for name in saved if name.startswith("blocks.1.")]
    fresh, _ = build("fsdp", seed=1)
    alike = [name for name, t in plain_names(fresh).items() if same_bits(local(t), saved[name])]  # such as the buffer
    extra = {"seen": None}
    # A part by keys, by leaves of a key, by one value.
    plan, same = loaded({"model": fresh, "extra": extra}, fresh, only="model/blocks.1.*")
    assert same == [name for name in saved if name in (*alike, *blocks)]
    assert (sorted(plan.tensors), plan.values, extra) == ([f"model/{n}" for n in sorted(blocks)], [], {"seen": None})
    plan, same = loaded({"model": fresh, "extra": extra}, fresh, only=["model", "extra/seen"])
    assert (same, plan.values, extra) == (everything, ["extra/seen"], {"seen": 3})
    # What is asked for and not there is still an error, what is not asked for is not.
    with pytest.raises(sf.Invalid, match="missing: extra/nothing"):
        sf.load(url, {"extra": {"nothing": None, "other": None}}, only="extra/*")
    extra = {"nothing": None, "other": None}
    plan, _ = loaded({"extra": extra}, fresh, strict=False)
    assert (extra, plan.missing) == ({"nothing": None, "other": 4}, ["extra/nothing"])
    assert "extra/seen" in plan.unexpected
    # A submodule alone, under a name of its own.
    block = fully_shard(Net().blocks[0], mesh=init_device_mesh("cpu", (world,)))
    plan = sf.load(url, {"block": block}, only="block", rename=lambda name: name.replace("model/blocks.1.", "block/"))
    for name, tensor in block.named_parameters():
        assert same_bits(local(tensor), saved[f"blocks.1.{name}"]), name
    assert plan.renamed["model/blocks.1.up.weight"] == "block/up.weight"


def test_a_part_of_a_checkpoint(ranks, tmp_path):
    ranks(2)(check_partial, f"{tmp_path}/checkpoint")
