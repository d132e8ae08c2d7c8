"""State of which no rank has all names: stages of pipelines, experts, ZeRO-1. Each is saved as one model and loaded
under any layout, and the other way round."""

import copy

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
    known,
    known_here,
    local,
    mine,
    parameters_of,
    same_bits,
    spoil,
    steppers,
)
from older import AVERAGED
from shardfast.state.description import Describer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import pipe_split, pipeline
from torch.nn import functional as F
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
            assert again.described is first.described, kind
            assert sum(len(one.places) for one in again.watched) >= 5, "what the optimizers step is captured lazily"
            assert [one.changes() for one in again.watched] == [[] for _ in again.watched]
        step_wide(stages, optimizer)
        if kind != "zero1":  # what ZeRO-1 broadcasts after a step is written past the counters
            assert all(len(one.changes()) == len(one.places) for one in again.watched), "a step shows in all of them"
        fewer = describer.describe({"model": stages}, pickle=False)
        assert fewer.described is not first.described, kind


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


WIDTH = 6


class Block(nn.Module):
    """Two layers, a buffer, and one that is not saved."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.randn(WIDTH))
        self.register_buffer("table", torch.randn(WIDTH), persistent=False)

    def forward(self, x):
        x = F.gelu(self.one(x))
        pipe_split()
        return self.two(x) + self.shift


class Whole(nn.Module):
    """Split within its blocks and between them."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        x = self.blocks[0](x)
        pipe_split()
        x = self.blocks[1](x)
        return self.head(self.norm(x))


def grouped(modules, rate=0.1):
    """Matrices are decayed, the rest is not and has a rate of its own."""
    parameters = list({id(p): p for module in modules for p in module.parameters()}.values())
    groups = [
        {"params": [p for p in parameters if p.ndim == 2], "weight_decay": 0.25},
        {"params": [p for p in parameters if p.ndim != 2], "weight_decay": 0.0, "lr": rate / 2},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=rate, foreach=False)


def stepped(modules, optimizers):
    """A step with gradients that belong to names, so that stages and the whole model compute the same."""
    for module in modules:
        for name, parameter in module.named_parameters():
            grad = torch.zeros_like(parameter)
            local(grad).copy_(mine(known(name, tuple(parameter.shape)), parameter))
            parameter.grad = grad
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def unlike(modules, optimizers, whole, reference):
    """Names of what a rank holds that is not as in the whole model and in the state of its optimizer."""
    tensors = whole.state_dict(keep_vars=True)
    parameters = dict(whole.named_parameters(remove_duplicate=False))
    wrong, seen = [], 0
    for module in modules:
        for name, tensor in module.state_dict(keep_vars=True).items():
            seen += 1
            wrong += [] if same_bits(local(tensor), mine(tensors[name].detach(), tensor)) else [name]
        for name, parameter in module.named_parameters():
            found = next((one.state[parameter] for one in optimizers if parameter in one.state), {})
            expected = reference.state.get(parameters[name], {})
            seen += len(expected)
            wrong += [f"{name}.{part}" for part in found.keys() ^ expected.keys()]
            wrong += [
                f"{name}.{part}"
                for part in found.keys() & expected.keys()
                if not same_bits(local(found[part]), mine(expected[part], found[part]))
            ]
    assert seen
    return wrong


# Stages that PyTorch traces


def whole_of(seed, steps=2):
    torch.manual_seed(seed)
    whole = Whole()
    reference = grouped([whole])
    for _ in range(steps):
        stepped([whole], [reference])
    return whole, reference


def traced(seed, owns):
    """The stages with the numbers in ``owns``; a block lies in two of them."""
    torch.manual_seed(seed)
    pipe = pipeline(Whole(), (torch.ones(2, WIDTH),))
    assert pipe.num_stages == 4
    stages = [pipe.get_stage_module(number) for number in range(4) if owns(number)]
    return stages, [grouped([stage], rate=0.1) for stage in stages]


def check_traced(rank, world, url):
    stages, optimizers = traced(0, lambda number: number % 2 == rank)
    for _ in range(2):
        stepped(stages, optimizers)
    sf.save(f"{url}/traced", state_of(stages, optimizers))
    whole, reference = whole_of(0)
    assert unlike(stages, optimizers, whole, reference) == []
    plain, its_optimizer = whole_of(1, steps=0)
    sf.load(f"{url}/traced", state_of(plain, its_optimizer))
    assert unlike([plain], [its_optimizer], whole, reference) == []
    sf.save(f"{url}/whole", state_of(whole, reference))
    for name in ("traced", "whole"):
        for owns in (lambda number: number // 2 != rank, lambda number: number in ((0, 3), (1, 2))[rank]):
            stages, optimizers = traced(2, owns)
            sf.load(f"{url}/{name}", state_of(stages, optimizers))
            assert unlike(stages, optimizers, whole, reference) == [], name
        torch.manual_seed(3)
        sharded = fully_shard(Whole(), mesh=init_device_mesh("cpu", (world,)), **AVERAGED)
        its_optimizer = grouped([sharded])
        sf.load(f"{url}/{name}", state_of(sharded, its_optimizer))
        assert unlike([sharded], [its_optimizer], whole, reference) == [], name


def test_stages_that_pytorch_traces(ranks, tmp_path):
    ranks(2)(check_traced, f"{tmp_path}")


# Ends that share a weight


class Ends(nn.Module):
    """The first layer's weight is the last one's, too."""

    def __init__(self):
        super().__init__()
        self.tokens, self.body = nn.Embedding(7, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, 7, bias=False)
        self.out.weight = self.tokens.weight


def tied(seed, steps=1):
    torch.manual_seed(seed)
    whole = Ends()
    reference = torch.optim.AdamW(whole.parameters(), lr=0.1, foreach=False)
    for _ in range(steps):
        stepped([whole], [reference])
    return whole, reference


def stage_of(whole, *names):
    """A stage with some of the layers, and not the others."""
    stage = copy.deepcopy(whole)
    for name in [name for name, _ in whole.named_children() if name not in names]:
        delattr(stage, name)
    return stage


def check_tied_on_one_rank(rank, world, url):
    """The first and the last stage are on one rank, as in schedules in the shape of a V: one weight for both."""
    whole, reference = tied(0)

    def made(seed):
        torch.manual_seed(seed)
        net = Ends()
        if rank:
            stages = [stage_of(net, "body")]
        else:
            stages = [stage_of(net, "tokens"), stage_of(net, "out")]
            stages[1].out.weight = stages[0].tokens.weight
        parameters = {id(p): p for stage in stages for p in stage.parameters()}.values()
        return stages, [torch.optim.AdamW(parameters, lr=0.1, foreach=False)]

    stages, optimizers = made(0)
    stepped(stages[:1], optimizers)
    sf.save(f"{url}/stages", state_of(stages, optimizers))
    sf.save(f"{url}/whole", state_of(whole, reference))
    for name in ("stages", "whole"):
        into, its_optimizers = made(1)
        sf.load(f"{url}/{name}", state_of(into, its_optimizers))
        assert unlike(into[:1], its_optimizers, whole, reference) == []
        assert rank or into[1].out.weight is into[0].tokens.weight
        plain, its_optimizer = tied(2, steps=0)
        sf.load(f"{url}/{name}", state_of(plain, its_optimizer))
        assert unlike([plain], [its_optimizer], whole, reference) == []
        assert plain.out.weight is plain.tokens.weight


def test_ends_that_share_a_weight_on_one_rank(ranks, tmp_path):
    ranks(2)(check_tied_on_one_rank, f"{tmp_path}")


def check_tied_on_two_ranks(rank, world, url):
    """Each end has a copy, which the training keeps the same: two tensors, of which one model has one."""
    whole, reference = tied(0)

    def made(seed, steps=0):
        torch.manual_seed(seed)
        stages = [stage_of(Ends(), *(("out",) if rank else ("tokens", "body")))]
        optimizers = [torch.optim.AdamW(stages[0].parameters(), lr=0.1, foreach=False)]
        if steps:
            numbers = tied(0, steps=0)[0].state_dict()
            stages[0].load_state_dict({name: numbers[name] for name in stages[0].state_dict()})
            for name, parameter in stages[0].named_parameters():
                parameter.grad = known(name.replace("out.", "tokens."), tuple(parameter.shape))
            optimizers[0].step()
        return stages, optimizers

    stages, optimizers = made(0, steps=1)
    sf.save(f"{url}/stages", state_of(stages, optimizers))
    again = made(1)
    sf.load(f"{url}/stages", state_of(*again))
    assert unlike(*again, *untied(whole, reference)) == []
    plain, its_optimizer = tied(2, steps=0)
    before = copy.deepcopy(plain.state_dict())
    with pytest.raises(sf.Invalid) as caught:
        sf.load(f"{url}/stages", state_of(plain, its_optimizer))
    for told in (
        "tied: model/out.weight and model/tokens.weight are one tensor here and two in the checkpoint",
        "unexpected: optimizer/state.out.weight.exp_avg is in the checkpoint only",
        "tied: strict=False takes the one that is named second",
    ):
        assert told in str(caught.value)
    assert all(same_bits(tensor, before[name]) for name, tensor in plain.state_dict().items())
    sf.load(f"{url}/stages", state_of(plain, its_optimizer), strict=False)
    assert unlike([plain], [its_optimizer], whole, reference) == []
    assert plain.out.weight is plain.tokens.weight
    # One model saves the state of a weight under the first of its names.
    sf.save(f"{url}/whole", state_of(whole, reference))
    again = made(3)
    with pytest.raises(sf.Invalid, match=r"no saved parameter group has 'out\.weight'.* names only the first of them"):
        sf.load(f"{url}/whole", state_of(*again))
    sf.load(f"{url}/whole", state_of(*again), strict=False)
    net, optimizer = untied(whole, reference)
    optimizer.state.pop(net.out.weight)
    assert unlike(*again, net, optimizer) == []


def untied(whole, reference):
    """The same numbers, with the shared weight under both of its names."""
    net = Ends()
    net.out.weight = nn.Parameter(torch.empty_like(whole.tokens.weight))
    net.load_state_dict(whole.state_dict())
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, foreach=False)
    names = dict(whole.named_parameters(remove_duplicate=False))
    for name, parameter in net.named_parameters():
        optimizer.state[parameter] = reference.state[names[name]]
    return net, optimizer


def test_ends_that_share_a_weight_on_two_ranks(ranks, tmp_path):
    ranks(2)(check_tied_on_two_ranks, f"{tmp_path}")


# Schedules, groups, and ranks with less


def check_schedules(rank, world, url):
    """Groups and learning rates of each stage; a list of schedules is refused with what to do instead."""

    def made(seed):
        whole, _ = whole_of(seed, steps=0)
        layers = [nn.ModuleDict({"blocks": nn.ModuleDict({str(n): block})}) for n, block in enumerate(whole.blocks)]
        layers += [nn.ModuleDict({"norm": whole.norm}), nn.ModuleDict({"head": whole.head})]
        stages = [layers[rank], layers[rank + 2]]
        optimizers = [grouped([stage]) for stage in stages]
        make = torch.optim.lr_scheduler.StepLR
        return stages, optimizers, [make(optimizer, 2, 0.5) for optimizer in optimizers]

    stages, optimizers, schedules = made(0)
    for _ in range(3):
        stepped(stages, optimizers)
        for schedule in schedules:
            schedule.step()
    state = state_of(stages, optimizers)
    told = (
        r"schedules\[0\]: a StepLR keeps its state in state_dict\(\): give it as a key's value or directly below a key"
    )
    with pytest.raises(sf.Invalid, match=told):
        sf.save(f"{url}/no", {**state, "schedules": schedules})
    named = {str(rank + number * world): schedule for number, schedule in enumerate(schedules)}
    sf.save(f"{url}/yes", {**state, "schedules": named})
    again, its_optimizers, its_schedules = made(1)
    named = {str(rank + number * world): schedule for number, schedule in enumerate(its_schedules)}
    sf.load(f"{url}/yes", {**state_of(again, its_optimizers), "schedules": named})
    for _ in range(2):
        for modules, stepping, followed in ((stages, optimizers, schedules), (again, its_optimizers, its_schedules)):
            stepped(modules, stepping)
            for schedule in followed:
                schedule.step()
    for one, other in zip(optimizers, its_optimizers, strict=True):
        for mine_of, its in zip(one.param_groups, other.param_groups, strict=True):
            assert (mine_of["lr"], mine_of["weight_decay"]) == (its["lr"], its["weight_decay"])
            for parameter, twin in zip(mine_of["params"], its["params"], strict=True):
                assert same_bits(parameter, twin)
                assert all(same_bits(value, other.state[twin][name]) for name, value in one.state[parameter].items())
    # One model has the rates and decays of the stages' groups.
    whole, reference = whole_of(2, steps=0)
    for group in reference.param_groups:
        group.update(lr=7.0, weight_decay=7.0)
    sf.load(f"{url}/yes", state_of(whole, reference), only=["model", "optimizer"])
    assert [(group["lr"], group["weight_decay"]) for group in reference.param_groups] == [(0.05, 0.25), (0.025, 0.0)]
    assert all(group["initial_lr"] == 2 * group["lr"] for group in reference.param_groups)


def test_groups_and_schedules_of_stages(ranks, tmp_path):
    ranks(2)(check_schedules, f"{tmp_path}")


def check_less(rank, world, url):
    """A rank whose stage has no parameters, or none that is trained, has no optimizer: it leaves the key out."""
    for number, last in enumerate((nn.ModuleDict({"loss": nn.Sigmoid()}), nn.ModuleDict({"head": nn.Linear(3, 2)}))):
        last.requires_grad_(False)
        stage = last if rank else nn.ModuleDict({"first": nn.Linear(3, 3)})
        optimizers = [] if rank else [grouped([stage])]
        if not rank:
            stepped([stage], optimizers)
        state = {"model": [stage], **({} if rank else {"optimizer": optimizers})}
        sf.save(f"{url}/{number}", state)
        expected = copy.deepcopy(stage.state_dict())
        for parameter in stage.parameters():
            parameter.data.zero_()
        sf.load(f"{url}/{number}", state)
        assert all(same_bits(tensor, expected[name]) for name, tensor in stage.state_dict().items())
        whole = nn.ModuleDict({"first": nn.Linear(3, 3), **{name: copy.deepcopy(part) for name, part in last.items()}})
        its_optimizer = grouped([whole["first"]])
        sf.load(f"{url}/{number}", state_of(whole, its_optimizer))
        assert len(its_optimizer.state) == 2
        assert all(same_bits(whole.state_dict()[name], tensor) for name, tensor in expected.items())


def test_ranks_without_anything_to_train(ranks, tmp_path):
    ranks(2)(check_less, f"{tmp_path}")


def check_meta(rank, world, url):
    """The whole model without memory, of which a rank has given some to its stage: that stage is the state."""
    with torch.device("meta"):
        whole = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    whole[rank].to_empty(device="cpu")
    torch.manual_seed(rank)
    whole[rank].reset_parameters()
    other = 1 - rank
    with pytest.raises(sf.Invalid, match=rf"model\.{other}\.weight: a tensor on the meta device has no memory"):
        sf.save(f"{url}-no", {"model": whole})
    sf.save(url, {"model": [nn.ModuleDict({str(rank): whole[rank]})]})
    plain = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    sf.load(url, {"model": plain})
    assert all(map(same_bits, plain[rank].parameters(), whole[rank].parameters()))
    return [parameter.detach() for parameter in plain[other].parameters()]


def test_stages_of_models_without_memory(ranks, tmp_path):
    of_first, of_last = ranks(2)(check_meta, f"{tmp_path}/checkpoint")
    assert [tuple(tensor.shape) for tensor in of_first] == [(2, 3), (2,)]
    assert [tuple(tensor.shape) for tensor in of_last] == [(3, 3), (3,)]
    plain = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    sf.load(tmp_path / "checkpoint", {"model": plain})
    assert all(map(same_bits, plain.parameters(), [*of_last, *of_first]))
