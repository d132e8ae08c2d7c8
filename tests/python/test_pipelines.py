"""State of which no rank has all names: stages of pipelines, experts, ZeRO-1. Each is saved as one model and loaded
under any layout, and the other way round."""

import pytest
import shardfast as sf
import torch
import torch.distributed as dist
from layouts import (
    APART,
    PARALLEL,
    build,
    differing,
    expected,
    fill,
    is_drawn,
    known_here,
    local,
    parameters_of,
    same_bits,
    spoil,
    steppers,
)
from shardfast.description import Describer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from training import Run, apart_of, trained_of


def others_of(world):
    if world == 1:
        return ["plain"]
    names = [name for name in PARALLEL if world % 2 == 0 or name not in ("hsdp", "fsdp_tp")]
    return [*names, "fsdp1_full_shard_orig", "fsdp1_shard_grad_op_flat"]


def state_of(model, optimizer):
    return {"model": model, "optimizer": optimizer}


# Any layout into any other


def save_all(rank, world, url):
    """The names that the rank has, by layout."""
    names = {}
    for layout in (*apart_of(world), *others_of(world)):
        model, optimizer = build(layout)
        fill(model, optimizer)
        names[layout] = set(known_here(model, optimizer))
        sf.save(f"{url}/{layout}", state_of(model, optimizer))
    return names


def load_all(rank, world, url, saved):
    """Pairs of which one is such; into optimizers that have no state yet, and into ones that have some."""
    layouts = [] if world == 1 else apart_of(world)
    for number, layout in enumerate([*layouts, *others_of(world)]):
        fresh, filled = build(layout, seed=1), build(layout, seed=2)
        fill(*filled)
        for other, one in enumerate(saved):
            if (layout not in APART and one not in APART) or not is_drawn(number, other):
                continue
            target = filled if (number + other) % 2 else fresh
            spoil(*target, keeps_state=target is filled)
            sf.load(f"{url}/{one}", state_of(*target))
            assert differing(*target) == [], (one, layout)


@pytest.mark.parametrize("world", [*(pytest.param(world, marks=pytest.mark.campaign) for world in (2, 3)), 4])
def test_every_layout_into_every_other(ranks, tmp_path, world):
    names = ranks(world)(save_all, f"{tmp_path}")
    for layout in apart_of(world):
        of_ranks = [by_layout[layout] for by_layout in names]
        assert set().union(*of_ranks) == set(expected()), layout
        assert ("ep" in layout) == (of_ranks[0] == set(expected())), f"{layout}: no rank has all names"
    saved = [*apart_of(world), *others_of(world)]
    load_all(0, 1, f"{tmp_path}", saved)
    for loading in (2, 3, 4):
        ranks(loading)(load_all, f"{tmp_path}", saved)


# What is read without a collective, again and again


def collectives(groups):
    """How many each group has run."""
    return [group._get_sequence_number_for_group() for group in groups]


def check_quiet(rank, world, url):
    for layout in trained_of(world):
        run = Run(layout, 0)
        run.losses(range(2))
        for number in range(2):  # the second one finds the state described
            before = collectives(run.groups)
            sf.save(f"{url}/{layout}-{number}", run.state())
            assert collectives(run.groups) == before, f"{layout}: a save ran a collective"
            pending = sf.save_async(f"{url}/{layout}-{number}-later", run.state())
            assert collectives(run.groups) == before, f"{layout}: a save ran a collective"
            pending.committed()
            assert collectives(run.groups) == before, f"{layout}: a save ran a collective"
            run.losses(range(2, 3))
        for group in run.groups:
            before = collectives([group])
            dist.all_reduce(torch.zeros(1), group=group)
            assert collectives([group]) != before, "collectives are counted"


def test_a_save_runs_no_collective(ranks, tmp_path):
    ranks(4)(check_quiet, f"{tmp_path}")


class Stage(nn.Module):
    """Layers of which most tensors are too large to be copied in the call, by their numbers in the whole model."""

    def __init__(self, *numbers):
        super().__init__()
        for number in numbers:
            self.add_module(f"layers_{number}", nn.Linear(60, 40))

    def forward(self, x):
        return sum(layer(x).square().mean() for layer in self.children())


def wide(kind, rank, seed=0):
    """Stages, of which a rank has two, and what steps them."""
    torch.manual_seed(seed)
    shared = [Stage(0, 1), Stage(2)]
    if kind == "alone":
        stages = [Stage(rank), Stage(rank + 2)]
    elif kind == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        stages = [fully_shard(stage, mesh=mesh) for stage in shared]
    else:
        stages = shared
    parameters = [parameter for stage in stages for parameter in stage.parameters()]
    if kind == "zero1":
        return stages, ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.AdamW, lr=1e-2, foreach=False)
    if kind == "one optimizer":
        return stages, torch.optim.AdamW(parameters, lr=1e-2, foreach=False)
    return stages, [torch.optim.AdamW(stage.parameters(), lr=1e-2, foreach=False) for stage in stages]


WIDE = ("alone", "fsdp", "one optimizer", "zero1")


def step_wide(stages, optimizer):
    for stage in stages:
        stage(torch.ones(2, 60)).backward()
    for one in optimizer if isinstance(optimizer, list) else [optimizer]:
        one.step()
        one.zero_grad()


def tensors_of(stages, optimizer):
    """Copies of every parameter of the stages and of the state of what steps them, by place."""
    parameters = list(parameters_of(stages))
    found = {(number, ""): parameter for number, parameter in enumerate(parameters)}
    for number, parameter in enumerate(parameters):
        for one in steppers(optimizer):
            found |= {(number, name): value for name, value in one.state.get(parameter, {}).items()}
    return {place: local(tensor).clone() for place, tensor in found.items()}


def check_described_once(rank, world):
    for kind in WIDE:
        stages, optimizer = wide(kind, rank)
        step_wide(stages, optimizer)
        describer = Describer(lambda by: None)
        first = describer.describe(state_of(stages, optimizer), pickle=False)
        for _ in range(2):
            step_wide(stages, optimizer)
            # The lists are made anew for each save, as a program may do.
            state = state_of([*stages], [*optimizer] if isinstance(optimizer, list) else optimizer)
            again = describer.describe(state, pickle=False)
            assert again.native is first.native, kind
            assert sum(len(one.places) for one in again.watched) >= 5, "what the optimizers step is captured lazily"
            assert [one.changes() for one in again.watched] == [[] for _ in again.watched]
        step_wide(stages, optimizer)
        if kind != "zero1":  # what ZeRO-1 broadcasts after a step is written past the counters
            assert all(len(one.changes()) == len(one.places) for one in again.watched), "a step shows in all of them"
        fewer = describer.describe({"model": stages}, pickle=False)
        assert fewer.native is not first.native, kind


def test_later_saves_do_not_describe_the_stages_again(ranks):
    ranks(2)(check_described_once)


def check_captured(rank, world, url):
    """What was saved is the state of the step at which it was saved, though the training goes on at once."""
    for kind in WIDE:
        stages, optimizer = wide(kind, rank)
        step_wide(stages, optimizer)
        for step in range(3):
            before = tensors_of(stages, optimizer)
            pending = sf.save_async(f"{url}/{kind}-{step}", state_of(stages, optimizer))
            step_wide(stages, optimizer)
            pending.committed()
            into = wide(kind, rank, seed=5)
            sf.load(f"{url}/{kind}-{step}", state_of(*into))
            loaded = tensors_of(*into)
            assert loaded.keys() == before.keys()
            assert [place for place in before if not same_bits(loaded[place], before[place])] == [], (kind, step)


def test_what_is_saved_is_the_state_of_that_step(ranks, tmp_path):
    ranks(2)(check_captured, f"{tmp_path}")


# Stages of one name


def test_two_stages_with_one_name_are_refused(tmp_path):
    layers = nn.ModuleList(nn.Linear(3, 2) for _ in range(4))
    sliced = [nn.ModuleDict({"layers": layers[:2]}), nn.ModuleDict({"layers": layers[2:]})]
    expected = (
        "model: its stages [0] and [1] both have 'layers.0.weight', and these are not the same tensor: in every stage, "
        "call a layer what the whole model calls it, for example by its number there as a key of an nn.ModuleDict (a "
        "slice of an nn.ModuleList counts from 0 again)"
    )
    for refused in (
        lambda: sf.save(tmp_path / "no", {"model": sliced}),
        lambda: sf.save_async(tmp_path / "no", {"model": sliced}).committed(),
    ):
        with pytest.raises(sf.Invalid) as caught:
            refused()
        assert str(caught.value) == expected
    assert not (tmp_path / "no").exists()
    numbered = [
        nn.ModuleDict({"layers": nn.ModuleDict({str(number): layers[number] for number in numbers})})
        for numbers in ((0, 1), (2, 3))
    ]
    sf.save(tmp_path / "yes", {"model": numbered})
    whole = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(3, 2) for _ in range(4))})
    sf.load(tmp_path / "yes", {"model": whole})
    assert all(map(same_bits, whole.parameters(), layers.parameters()))
    with pytest.raises(sf.Invalid, match=r"model: its stages \[0\] and \[1\] both have 'layers\.0\.weight'"):
        sf.load(tmp_path / "yes", {"model": sliced})


def test_two_parts_of_one_module_with_one_name_are_refused(tmp_path):
    model = nn.Linear(2, 3)
    model._orig_mod = nn.Linear(2, 3)
    with pytest.raises(sf.Invalid, match="model: two parts of it have 'weight' once names of wrappers are left out"):
        sf.save(tmp_path / "no", {"model": [nn.ModuleDict({"a": nn.Linear(1, 1)}), model]})


def check_one_name(rank, world, url):
    """Stages of two ranks, of which each calls its only layer ``layers.0``, as slices of a list do."""
    torch.manual_seed(rank)
    stages = [nn.ModuleDict({"layers": nn.ModuleDict({str(number): nn.Linear(3, 2)})}) for number in (0, rank + 1)]
    with pytest.raises(sf.Invalid, match=r"model/layers\.0\.weight: its replicas of \[0:2, 0:3\] differ"):
        sf.save(url, {"model": stages})


def test_stages_of_two_ranks_with_one_name_are_refused(ranks, tmp_path):
    ranks(2)(check_one_name, f"{tmp_path}/no")
    assert not (tmp_path / "no" / "COMMIT").exists()
