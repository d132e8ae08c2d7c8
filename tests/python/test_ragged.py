"""veScale's ``RaggedShard``: runs of flattened tensors, alone and beside other placements."""

import itertools
import types

import pytest
import shardfast as sf
import torch
import torch.distributed as dist
from layouts import known, same_bits
from ragged import FAMILIES, NeverMade, RaggedShard, _StridedRaggedShard
from shardfast.adapters.torch import TorchAdapter
from shardfast.adapters.torch import placement as torch_placement
from shardfast.adapters.torch.hooks import is_dtensor
from shardfast.state.catalog import Flat, Refused, Region
from shardfast.testing import check_announced, check_tensor, restore
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

ADAPTER = TorchAdapter()
SHAPE = (6, 5, 4)


def gather(mine):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def whole_of(name="w"):
    return known(name, SHAPE)


def layouts_on(world, family):
    """Mesh shapes and placements: runs that end at rows and anywhere, ranks without elements, alone and with others."""
    ragged, strided = family.ragged, family.strided
    lines = {
        1: [((0,), (5,))],
        2: [((0, 1), (7, 23)), ((), (0, 1))],
        3: [((0,), (2, 0, 1)), ((0, 1, 2), (59, 60, 1))],
        4: [((0,), (1, 3, 0, 2)), ((0, 1), (7, 8, 11, 4)), ((0, 1, 2), (31, 29, 1, 59)), ((), (0, 0, 1, 0))],
    }
    found = [((world,), [ragged(*one)]) for one in lines[world]]
    found += [((world,), [strided(*one, 1)]) for one in lines[world][:1]]
    if world == 4:
        found += [
            ((2, 2), [Replicate(), ragged((0, 1), (7, 23))]),
            ((2, 2), [ragged((0, 1), (7, 23)), Replicate()]),
            ((2, 2), [ragged((0, 1), (7, 23)), Shard(2)]),
            ((2, 2), [ragged((0,), (1, 2)), Shard(1)]),  # of three and of two columns
            ((2, 2), [ragged((0,), (1, 2)), Shard(0)]),
            ((2, 2), [strided((0,), (1, 2), 2), Shard(0)]),
            ((2, 2), [Shard(0), ragged((0, 1), (2, 3))]),
            ((1, 2, 2), [Replicate(), strided((0, 1, 2), (11, 49), 2), Shard(0)]),
            ((2, 1, 2), [strided((0,), (1, 2), 2), Replicate(), Shard(0)]),
        ]
    return found


def check_runs(rank, world):
    whole = whole_of()
    expected = whole.numpy().tobytes()
    for name, family in FAMILIES.items():
        for shape, placements in layouts_on(world, family):
            tensor = family.place(whole, init_device_mesh("cpu", shape), placements)
            case = (name, shape, placements)
            assert is_dtensor(tensor)
            assert check_tensor(ADAPTER, tensor, gather) == expected, case
            ADAPTER.fill(tensor, whole + 1)
            assert same_bits(
                tensor._local_tensor, family.place(whole + 1, tensor.device_mesh, placements)._local_tensor
            )
            restore(ADAPTER, tensor, whole.double().numpy().tobytes(), "F64")
            assert check_tensor(ADAPTER, tensor, gather) == expected, case
            # The ranks of one run know each other, and each run is one part: nothing was cut, nothing gathered.
            layout = ADAPTER.layout(tensor)
            assert len(layout.regions) == bool(tensor._local_tensor.numel())
            same = [other for other, theirs in enumerate(gather(layout.regions)) if theirs == layout.regions]
            assert list(layout.holders) == same or not layout.regions, case


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_ranks_hold_runs_of_what_the_other_placements_leave(ranks, world):
    ranks(world)(check_runs)


# One rank of a mesh, without a job


def on(shape, where, *placements, of=SHAPE):
    mesh = types.SimpleNamespace(shape=shape, mesh_dim_names=None, get_coordinate=lambda: where)
    return torch_placement.placed(types.SimpleNamespace(device_mesh=mesh, placements=placements, shape=of))


def test_a_run_lies_in_the_box_that_is_left():
    there = on((2, 2), [1, 1], RaggedShard((0, 1), (7, 23)), Shard(2))
    assert there.regions == (Flat(14, 60, Region((0, 0, 2), (6, 5, 2))),)
    assert there.text == "mesh(2, 2) [RaggedShard((0, 1), (7, 23)), Shard(2)]"
    assert on((2,), [0], RaggedShard((0, 1), (7, 23))).regions == (Flat(0, 28),)
    assert on((2,), [0], RaggedShard((0,), (0, 1))).regions == ()
    assert on((2,), None, RaggedShard((0,), (0, 1))).regions == ()
    assert on((3,), [1], RaggedShard((0,), (1, 1, 1)), of=(0, 4)).regions == ()
    strided = on((2, 2), [1, 1], _StridedRaggedShard((0,), (1, 2), 2), Shard(0))
    assert strided.regions == (Flat(20, 60, Region((3, 0, 0), (3, 5, 4))),)
    assert on((2, 2), [1, 1], _StridedRaggedShard((0,), (1, 2), 2), Shard(-3)).regions == strided.regions
    assert strided.text == "mesh(2, 2) [StridedRaggedShard((0,), (1, 2), split_factor=2), Shard(0)]"
    many = on((20,), [3], RaggedShard((0,), (6,) * 20))
    assert many.text == "mesh(20,) [RaggedShard((0,), 120 for 20 ranks)]"
    assert many.regions == (Flat(18, 24),)


REFUSED = {
    "units for other ranks": (
        (3,),
        [RaggedShard((0,), (1, 1))],
        r"on mesh dimension 0, which has 3 ranks: expected a unit count .*, found 2 with the sum 2",
    ),
    "no units": ((2,), [RaggedShard((0,), (0, 0))], r"found 2 with the sum 0"),
    "units that do not divide": ((2,), [RaggedShard((0,), (3, 4))], r"of 120 elements, which is no multiple of its 7"),
    "units that do not divide a shard": (
        (2, 2),
        [RaggedShard((0,), (4, 4)), Shard(0)],
        r"of 60 elements, which is no multiple of its 8 units",
    ),
    "two of them": ((2, 2), [RaggedShard((0,), (1, 1)), RaggedShard((0,), (1, 1))], "at most one RaggedShard"),
    "dims that are not the first": ((2,), [RaggedShard((1,), (1, 1))], r"expected its dims .*, found \(1,\)"),
    "more dims than there are": ((2,), [RaggedShard((0, 1, 2, 3), (1, 1))], "and 3 dimensions: expected no more"),
    "negative units": ((2,), [RaggedShard((0,), (2, -1))], r"expected dims and local_units .*found .*\(2, -1\)"),
    "units that are no numbers": ((2,), [RaggedShard((0,), "ab")], r"expected dims and local_units .*found .*'ab'"),
    "a factor that is none": ((2,), [_StridedRaggedShard((0,), (1, 1), None)], r"found .*\(1, 1\) and None"),
    "a factor without its shards": (
        (2,),
        [_StridedRaggedShard((0,), (1, 1), 2)],
        r"expected 1 or 1, found 2; which elements it holds is not known: redistribute\(\) it to Shard or Replicate",
    ),
    "a factor of other shards": (
        (2, 2),
        [_StridedRaggedShard((0,), (1, 1), 2), Shard(1)],
        r"expected 1 or 1, found 2; which elements it holds is not known",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_counts_that_do_not_fit_are_refused(case):
    shape, placements, message = REFUSED[case]
    with pytest.raises(Refused, match=message):
        on(shape, [0] * len(shape), *placements)


class Unknown(NeverMade.RaggedShard):
    """A class that may place in another way, though it derives from one that is known."""


class OfAnotherLibrary:
    class RaggedShard:
        local_numel, global_offset = 5, 0


def test_a_placement_is_judged_by_its_class_before_it_is_asked_anything(alone):
    alone(check_classes)


def check_classes():
    """In a process of its own, which a call of a method of a placement that was never made would end."""
    for placement, message in (
        (Unknown((0,), (1, 1)), r"a placement of class test_ragged\.Unknown on mesh dimension 0, of an unknown kind"),
        (OfAnotherLibrary.RaggedShard(), r"expected dims and local_units .* found None, None and 1"),
    ):
        for ask in (lambda: on((2,), [0], placement), lambda: on((2, 1), [0, 0], Replicate(), placement)):  # noqa: B023
            with pytest.raises(Refused, match=message.replace("dimension 0", r"dimension [01]")):
                ask()
    assert on((2,), [0], NeverMade.RaggedShard((0,), (1, 1))).regions == (Flat(0, 60),)


def check_local_tensors(rank, world, url):
    """The number of elements counts, whatever shape a library gives to the local tensor."""
    mesh, whole = init_device_mesh("cpu", (world,)), whole_of()
    for family in FAMILIES.values():
        placement = family.ragged((0,), (1, 2))
        local = (whole[:2] if rank == 0 else whole[2:]).clone()
        tensor = family.dtensor(local, mesh, [placement], SHAPE)
        assert check_tensor(ADAPTER, tensor, gather) == whole.numpy().tobytes()
        tensor = family.dtensor(local.transpose(0, 2), mesh, [placement], SHAPE)
        with pytest.raises(Refused, match="local tensor is not contiguous: make it contiguous"):
            ADAPTER.layout(tensor)
        tensor = family.dtensor(local.view(-1)[1:], mesh, [placement], SHAPE)
        counts = "39 elements.* gives this rank 40 of 120" if rank == 0 else "79 elements.* gives this rank 80 of 120"
        with pytest.raises(Refused, match=counts):
            ADAPTER.layout(tensor)
        with pytest.raises(sf.Invalid, match=rf"rank {rank}: w\.w: .*elements|w\.w: .*elements"):
            sf.save(url, {"w": {"w": tensor}})
        empty = family.dtensor(torch.ones(1), mesh, [family.ragged((0,), (int(rank == 1), int(rank == 0)))], SHAPE)
        with pytest.raises(Refused, match=r"local tensor has shape \(1,\).* give \(0,\)"):
            ADAPTER.layout(empty)
        # Wrong counts on a mesh of part of the ranks: outside of it a rank holds nothing.
        half = family.dtensor(
            torch.ones(120 if rank == 0 else 0), DeviceMesh("cpu", [0]), [family.ragged((0,), (3,))], SHAPE
        )
        assert ADAPTER.layout(half).regions == ((Flat(0, 120),) if rank == 0 else ())


def test_the_local_tensor_has_as_many_elements_as_the_units_give(ranks, tmp_path):
    ranks(2)(check_local_tensors, f"{tmp_path}/refused")


# Models and optimizers

MOMENTS = ("exp_avg", "exp_avg_sq")


def state_of(place, *, filled, has_state=True):
    """A parameter and an AdamW in a layout: with the known numbers, or with zeros."""
    of = {name: known(name, SHAPE) if filled else torch.zeros(SHAPE) for name in ("w", *MOMENTS)}
    weight = place(of["w"])
    optimizer = torch.optim.AdamW([weight], lr=0.5 if filled else 0.1, foreach=False)
    if has_state:
        step = torch.tensor(7.0 if filled else 0.0)
        optimizer.state[weight] = {"step": step, **{name: place(of[name]) for name in MOMENTS}}
    return {"model": {"w": weight}, "optimizer": optimizer}


def layouts_here(world):
    """Ways to place a tensor, by name."""
    line, square = init_device_mesh("cpu", (world,)), init_device_mesh("cpu", (2, world // 2))
    units = tuple(range(1, world + 1)), tuple(range(world, 0, -1))

    def torch_made(placement):
        return lambda whole: distribute_tensor(whole, line, [placement], src_data_rank=None)

    def made_by(family, mesh, *placements):
        return lambda whole: family.place(whole, mesh, placements)

    found = {"plain": torch.Tensor.clone, "shard": torch_made(Shard(0)), "replicate": torch_made(Replicate())}
    for name, family in FAMILIES.items():
        found[f"ragged, {name}"] = made_by(family, line, family.ragged((0, 1), units[0]))
        found[f"other units, {name}"] = made_by(family, line, family.ragged((0, 1, 2), units[1]))
        inside = family.strided((0,), (1, 2), world // 2)
        found[f"in a shard, {name}"] = made_by(family, square, inside, Shard(0))
    return found


def check_every_layout(rank, world, directory, one_in):
    layouts = layouts_here(world)
    for name, place in layouts.items():
        sf.save(f"{directory}/{name}", state_of(place, filled=True))
    pairs = itertools.product(enumerate(layouts), enumerate(layouts))
    for (at, saved), (to, loading) in pairs:
        if (at + to) % one_in:
            continue
        place = layouts[loading]
        for has_state in (True, False):
            case = (saved, loading, has_state)
            state = state_of(place, filled=False, has_state=has_state)
            sf.load(f"{directory}/{saved}", state)
            weight, optimizer = state["model"]["w"], state["optimizer"]
            assert optimizer.param_groups[0]["lr"] == 0.5, case
            assert optimizer.state[weight]["step"] == 7, case
            for part, tensor in {"w": weight, **{one: optimizer.state[weight][one] for one in MOMENTS}}.items():
                wanted = place(known(part, SHAPE))
                assert type(tensor) is type(wanted), case
                local = getattr(tensor, "_local_tensor", tensor)
                assert same_bits(local, getattr(wanted, "_local_tensor", wanted)), (*case, part)
                assert ADAPTER.layout(tensor) == ADAPTER.layout(wanted), (*case, part)


def test_models_and_optimizers_load_into_other_runs_and_layouts(ranks, tmp_path):
    ranks(4)(check_every_layout, str(tmp_path), 5)


@pytest.mark.campaign
@pytest.mark.parametrize("world", [2, 4])
def test_every_layout_loads_into_every_other(ranks, tmp_path, world):
    ranks(world)(check_every_layout, str(tmp_path), 1)


def check_training(rank, world, url):
    """A module that is stepped in place: a second save sees what changed, a step announces what it changes."""
    family = FAMILIES.get("another DTensor") or FAMILIES["vescale"]
    mesh, units = init_device_mesh("cpu", (world,)), (1, 2)

    def build(units):
        model = nn.Module()
        model.register_parameter("w", nn.Parameter(family.place(whole_of(), mesh, [family.ragged((0,), units)])))
        model.other = nn.Parameter(family.place(whole_of("other").bfloat16(), mesh, [family.ragged((0,), units)]))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)

    def step():
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    model, optimizer = build(units)
    step()
    module = ADAPTER.module(model)
    bundle = ADAPTER.optimizer(optimizer, {id(p): [(name, None)] for name, p in module.parameters.items()})
    check_announced(ADAPTER, bundle, step)
    with sf.Checkpointer(url, every=sf.steps(1)) as ckpt:
        for number in (1, 2):
            step()
            ckpt.step(number, {"model": model, "optimizer": optimizer})
    for units in ((1, 2), (2, 1)):
        other, fresh = build(units)
        sf.load(f"{url}/step-00000002", {"model": other, "optimizer": fresh})
        for (name, mine), theirs in zip(other.named_parameters(), model.parameters(), strict=True):
            for ours, saved in ((mine, theirs), *((fresh.state[mine][m], optimizer.state[theirs][m]) for m in MOMENTS)):
                assert (type(ours), ours.dtype, ours.shape) == (type(saved), saved.dtype, saved.shape)
                whole = torch.cat(gather(ours._local_tensor.detach()))
                assert same_bits(whole, torch.cat(gather(saved._local_tensor.detach()))), (units, name)
    for parameter in other.parameters():
        parameter.grad = torch.ones_like(parameter)
    fresh.step()


def test_training_goes_on_with_state_that_a_load_made(ranks, tmp_path):
    ranks(2)(check_training, f"{tmp_path}/run")


def check_what_cannot_be_made(rank, world, url):
    """State of another shape, and of a class that is made otherwise, is asked for, not guessed."""
    mesh = init_device_mesh("cpu", (world,))
    family = next(iter(FAMILIES.values()))
    weight = family.place(whole_of(), mesh, [family.ragged((0,), (1, 1))])
    optimizer = torch.optim.SGD([weight], lr=0.1)
    bundle = ADAPTER.optimizer(optimizer, {id(weight): [("w", None)]})
    with pytest.raises(Refused, match=r"shape \[6\], and its parameter one of .*step the optimizer once before the"):
        bundle.create("state.w.rows", "F32", (6,), dry=False)
    assert bundle.create("state.w.momentum_buffer", "BF16", SHAPE, dry=False).dtype is torch.bfloat16
    assert bundle.create("state.w.momentum_buffer", "F32", SHAPE, dry=True).device.type == "meta"

    class Other(type(weight)):
        @staticmethod
        def __new__(cls, local):
            return type(weight).__new__(cls, local, weight._spec, requires_grad=False)

        __init__ = object.__init__

    weight = Other(weight._local_tensor)
    bundle = ADAPTER.optimizer(torch.optim.SGD([weight], lr=0.1), {id(weight): [("w", None)]})
    with pytest.raises(Refused, match=r"is a test_ragged\..*Other in mesh\(2,\).* step the optimizer once before the"):
        bundle.create("state.w.momentum_buffer", "F32", SHAPE, dry=False)


def test_state_that_a_load_cannot_make_is_refused_by_name(ranks, tmp_path):
    ranks(2)(check_what_cannot_be_made, f"{tmp_path}/x")


def test_what_is_called_dtensor_is_one_if_it_has_all_that_is_read():
    class DTensorLike(torch.Tensor):
        pass

    like = type("DTensor", (torch.Tensor,), {})
    assert not is_dtensor(torch.ones(2).as_subclass(like))
    assert not is_dtensor(torch.ones(2).as_subclass(DTensorLike))
    full = type("DTensor", (torch.Tensor,), dict.fromkeys(("_local_tensor", "_spec", "device_mesh", "placements")))
    assert is_dtensor(torch.ones(2).as_subclass(full))
    assert not is_dtensor(types.SimpleNamespace(_local_tensor=1, _spec=1, device_mesh=1, placements=1))
    assert not is_dtensor(nn.Parameter(torch.ones(2)))
