"""State of which no rank has all names: stages of pipelines, experts, ZeRO-1. Each is saved as one model and loaded
under any layout, and the other way round."""

import pytest
import shardfast as sf
import torch
import torch.distributed as dist
from layouts import (
    APART,
    PARALLEL,
    PIPELINES,
    batch,
    build,
    differing,
    expected,
    fill,
    known_here,
    local,
    memory,
    parameters_of,
    pipeline_mesh,
    same_bits,
    steppers,
)
from older import IS_OLDER
from shardfast.description import Describer
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.nn import functional as F


def apart_of(world):
    """The layouts of this page that a job of so many ranks can have."""
    return [name for name in APART if world == 4 or name in ("pp", "interleaved", "ep", "zero1")]


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
    """Every pair of which one is such; into optimizers that have no state yet, and into ones that have some."""
    layouts = [] if world == 1 else apart_of(world)
    for number, layout in enumerate([*layouts, *others_of(world)]):
        fresh, filled = build(layout, seed=1), build(layout, seed=2)
        fill(*filled)
        for other, one in enumerate(saved):
            if layout not in APART and one not in APART:
                continue
            target = filled if (number + other) % 2 else fresh
            for tensor in memory(*target):
                tensor.add_(1)
            if target is fresh:
                for stepper in steppers(fresh[1]):
                    stepper.state.clear()
            sf.load(f"{url}/{one}", state_of(*target))
            assert differing(*target) == [], (one, layout)


@pytest.mark.parametrize("world", [2, 3, 4])
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


# Training: real schedules, dropout

MICROBATCHES = 4


def trained_of(world):
    """Those that PyTorch trains: FSDP1 frees parameters behind one micro-batch that the next one's backward needs.

    The schedules of PyTorch 2.7 never end on gloo.
    """
    return [name for name in apart_of(world) if "fsdp1" not in name and not (IS_OLDER and name in PIPELINES)]


def loss_of(logits, tokens):
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Run:
    """A model that is trained with dropout.

    Attributes:
        groups: The process groups that its layout uses.
    """

    def __init__(self, layout, seed):
        self.model, self.optimizer = build(layout, seed, dropout=0.3)
        self.layout, self.groups = layout, [dist.group.WORLD]
        self.schedule, self.share = None, dist.get_rank()
        if layout in PIPELINES:
            mesh = pipeline_mesh(layout == "pp")
            self.groups += mesh.get_all_groups()
            self.schedule = self._scheduled(mesh)
            self.share = mesh["inside"].get_local_rank()
        if layout.endswith(("tp", "ep", "ep_fsdp")):
            self.share = 0  # these ranks compute with the same tokens

    def _scheduled(self, mesh):
        depth, here, group = mesh.shape[0], mesh["pp"].get_local_rank(), mesh.get_group("pp")
        self.is_first, self.is_last = here == 0, here == depth - 1
        count, device = depth * len(self.model), torch.device("cpu")
        stages = [
            PipelineStage(part, here + number * depth, count, device, group=group)
            for number, part in enumerate(self.model)
        ]
        if len(stages) == 1:
            return Schedule1F1B(stages[0], MICROBATCHES, loss_fn=loss_of)
        return ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=loss_of)

    def losses(self, steps):
        """Those that this rank sees: of a pipeline only the last ranks see any."""
        found = []
        for step in steps:
            tokens = batch(step * 10 + self.share)
            if self.schedule is None:
                loss = loss_of(self.model(tokens), tokens)
                loss.backward()
                seen = [loss]
            else:
                seen = []
                inputs = (tokens,) if self.is_first else ()
                targets = {"target": tokens, "losses": seen} if self.is_last else {}
                self.schedule.step(*inputs, **targets)
            if self.layout == "interleaved":  # whose replicas nothing keeps the same
                for parameter in parameters_of(self.model):
                    dist.all_reduce(parameter.grad, group=self.groups[-1])
            found += [loss.item() for loss in seen]
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()
        return found

    def optimizers(self):
        return self.optimizer if isinstance(self.optimizer, list) else [self.optimizer]

    def pairs(self):
        """Each stage, or the whole model, with its optimizer."""
        return zip(self.model if isinstance(self.model, list) else [self.model], self.optimizers(), strict=True)

    def state(self):
        return state_of(self.model, self.optimizer)


def check_resumed(rank, world, url):
    seen = 0
    for layout in trained_of(world):
        run = Run(layout, 0)
        if "ep" not in layout:  # where ranks compute the same
            torch.manual_seed(rank)
        run.losses(range(3))
        sf.save(f"{url}/{layout}", {**run.state(), "random": sf.random_state()})
        uninterrupted = run.losses(range(3, 23))
        assert len(set(uninterrupted)) == len(uninterrupted)
        run = Run(layout, 1)
        if layout in ("pp_ddp", "zero1"):  # DistributedDataParallel adds in another order in its first step
            run.losses(range(1))
        sf.load(f"{url}/{layout}", {**run.state(), "random": sf.random_state()})
        assert run.losses(range(3, 23)) == uninterrupted, layout
        seen += len(uninterrupted)
    return seen


@pytest.mark.parametrize("world", [2, 4])
def test_losses_after_a_resume_are_those_of_the_uninterrupted_run(ranks, tmp_path, world):
    seen = ranks(world)(check_resumed, f"{tmp_path}")
    pipelines = [name for name in trained_of(world) if name in PIPELINES]
    assert seen[-1] == 20 * (len(trained_of(world)) - len(pipelines)) + 20 * MICROBATCHES * len(pipelines)


# The same training under another layout


def whole_by_torch(run):
    """The state of a run, gathered by PyTorch's own full state dicts; those of stages are put together."""
    options, whole = StateDictOptions(full_state_dict=True), {"model": {}, "state": {}}
    for part, optimizer in run.pairs():
        whole["model"] |= get_model_state_dict(part, options=options)
        found = get_optimizer_state_dict(part, optimizer, options=options)
        whole["state"] |= found["state"]
        whole["group"] = found["param_groups"][0]
    stages = [None] * dist.get_world_size()
    dist.all_gather_object(stages, whole)
    for kind in ("model", "state"):
        whole[kind] = {name: value for of_rank in stages for name, value in of_rank[kind].items()}
    return whole


def put_by_torch(run, whole):
    options = StateDictOptions(full_state_dict=True)
    for part, optimizer in run.pairs():
        mine = get_model_state_dict(part)
        set_model_state_dict(part, {name: whole["model"][name] for name in mine}, options=options)
        state = {name: parts for name, parts in whole["state"].items() if name in mine}
        groups = [{**whole["group"], "params": list(state)}]
        set_optimizer_state_dict(part, optimizer, {"state": state, "param_groups": groups}, options=options)


def train_and_save(rank, world, url, layouts):
    for layout in layouts:
        run = Run(layout, 0)
        run.losses(range(3))
        sf.save(f"{url}/{layout}", run.state())
        whole = whole_by_torch(run)
        if rank == 0:
            torch.save(whole, f"{url}/{layout}.pt")


def check_relaid(rank, world, url, pairs):
    seen = 0
    for saved, layout in pairs:
        losses = []
        for is_ours in (True, False):
            run = Run(layout, 1)
            if is_ours:
                sf.load(f"{url}/{saved}", run.state())
            else:
                put_by_torch(run, torch.load(f"{url}/{saved}.pt"))
            for optimizer in run.optimizers():
                optimizer.param_groups[0]["fused"] = False  # not for plain parameters beside DTensors
            torch.manual_seed(7)
            losses.append(run.losses(range(3, 13)))
        assert losses[0] == losses[1], (saved, layout)
        seen += len(losses[0])
    return seen


@pytest.mark.skipif(IS_OLDER, reason=f"the pipeline schedules of torch {torch.__version__} never end on gloo")
def test_losses_under_another_layout_are_those_after_full_state_dicts(ranks, tmp_path):
    url = f"{tmp_path}"
    ranks(4)(train_and_save, url, ["pp_fsdp", "interleaved_fsdp"])
    ranks(2)(train_and_save, url, ["interleaved", "fsdp"])
    on_two = [
        ("pp_fsdp", "interleaved"),
        ("interleaved_fsdp", "pp"),
        ("interleaved", "fsdp"),
        ("fsdp", "pp"),
        ("pp_fsdp", "ep"),
        ("interleaved", "ddp"),
    ]
    on_four = [("interleaved", "pp_fsdp"), ("fsdp", "interleaved_fsdp"), ("pp_fsdp", "pp"), ("interleaved", "pp_tp")]
    assert ranks(2)(check_relaid, url, on_two)[-1] > 0
    assert ranks(4)(check_relaid, url, on_four)[-1] > 0


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
        describer = Describer(lambda: None)
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
