"""``FullyShardedDataParallel`` (FSDP1): flat parameters saved where they lie and loaded under any layout, and the
other way round. PyTorch's own full state dicts say what is right."""

import copy
import math
import random

import pytest
import shardfast as sf
import torch
import torch.distributed as dist
from layouts import (
    FSDP1,
    LAYOUTS,
    Block,
    Net,
    batch,
    build,
    differing,
    fill,
    is_drawn,
    known,
    same_bits,
    spoil,
    train,
    whole_of_fsdp1,
)
from nets import net
from nets import step as step_plain
from shardfast.adapters.torch import TorchAdapter
from shardfast.state.catalog import Flat, Part, Region
from shardfast.state.description import Describer
from shardfast.state.parts import adapter_of
from shardfast.testing import check_tensor
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional as F
from unwatched import unwatched

FLAT = [name for name in FSDP1 if "hybrid" not in name]


def layouts_of(world):
    """Those that a job of so many ranks can have."""
    if world == 1:
        return ["plain"]
    return [
        name for name in LAYOUTS if world == 4 or (name not in ("hsdp", "fsdp_tp") and name not in {*FSDP1} - {*FLAT})
    ]


def state_of(model, optimizer):
    return {"model": model, "optimizer": optimizer}


# Any layout into any other


def save_all(rank, world, url):
    for layout in layouts_of(world):
        if layout != "plain":
            model, optimizer = build(layout)
            fill(model, optimizer)
            sf.save(f"{url}/{layout}", state_of(model, optimizer))


def load_all(rank, world, url, saved):
    """Pairs of which one is FSDP1; into optimizers that have no state yet, and into ones that have some."""
    for number, layout in enumerate(layouts_of(world)):
        fresh, filled = build(layout, seed=1), build(layout, seed=2)
        fill(*filled)
        for other, one in enumerate(saved):
            if (layout not in FSDP1 and one not in FSDP1) or (layout == "plain" and world > 1):
                continue
            if not is_drawn(number, other):
                continue
            target = filled if (number + other) % 2 else fresh
            spoil(*target, keeps_state=target is filled)
            sf.load(f"{url}/{one}", state_of(*target))
            assert differing(*target) == [], (one, layout)


@pytest.mark.parametrize("world", [*(pytest.param(world, marks=pytest.mark.campaign) for world in (2, 3)), 4])
def test_every_layout_into_every_other(ranks, tmp_path, world):
    ranks(world)(save_all, f"{tmp_path}")
    saved = [layout for layout in layouts_of(world) if layout != "plain"]
    load_all(0, 1, f"{tmp_path}", saved)
    for loading in (2, 3, 4):
        ranks(loading)(load_all, f"{tmp_path}", saved)


# The same run goes on


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.block, self.last = (
            nn.Linear(9, 8),
            nn.Sequential(nn.Linear(8, 7), nn.Dropout(0.3)),
            nn.Linear(7, 3),
        )

    def forward(self, x):
        return self.last(self.block(F.gelu(self.first(x))))


def losses(model, optimizer, steps):
    found = []
    for step in steps:
        x = known(f"x{step}.{dist.get_rank()}", (6, 9))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=False),
    "fused adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
}


def check_resumed(rank, world, url):
    for kind, make in OPTIMIZERS.items():
        for use_orig_params in (True, False):

            def made(seed, make=make, use_orig_params=use_orig_params):
                torch.manual_seed(seed)
                policy = ModuleWrapPolicy({nn.Sequential})
                device = torch.device("cpu")
                model = FSDP(Dropping(), use_orig_params=use_orig_params, auto_wrap_policy=policy, device_id=device)
                return model, make(model.parameters())

            model, optimizer = made(0)
            losses(model, optimizer, range(5))
            path = f"{url}/{kind} {use_orig_params}"
            sf.save(path, {**state_of(model, optimizer), "random": sf.random_state()})
            uninterrupted = losses(model, optimizer, range(5, 25))
            model, optimizer = made(1)
            sf.load(path, {**state_of(model, optimizer), "random": sf.random_state()})
            assert losses(model, optimizer, range(5, 25)) == uninterrupted, (kind, use_orig_params)


def test_losses_after_a_resume_are_those_of_the_uninterrupted_run(ranks, tmp_path):
    ranks(2)(check_resumed, f"{tmp_path}")


# What is read without a collective, again and again


def collectives(groups):
    """How many each group has run."""
    return [group._get_sequence_number_for_group() for group in groups]


def check_quiet(rank, world, url, layouts):
    for layout in layouts:
        model, optimizer = build(layout)
        train(model, optimizer, range(2))
        groups = [model.process_group, dist.group.WORLD]
        groups += [model._inter_node_pg] if "hybrid" in layout else []
        before = collectives(groups)
        first = sf.save_async(f"{url}/{layout}-1", state_of(model, optimizer))
        first.committed()
        assert collectives(groups) == before, f"{layout}: a save ran a collective"
        dist.all_reduce(torch.zeros(1), group=model.process_group)
        assert collectives(groups) != before, "collectives are counted"
        train(model, optimizer, range(2, 3))
        second = sf.save_async(f"{url}/{layout}-2", state_of(model, optimizer))
        train(model, optimizer, range(3, 4))
        second.committed()


def test_a_save_runs_no_collective(ranks, tmp_path):
    ranks(4)(check_quiet, f"{tmp_path}", list(FSDP1))


def wide(strategy, use_orig_params, seed=0):
    """A model of which most tensors are too large to be copied in the call."""
    torch.manual_seed(seed)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 40)) for _ in range(3)))
    policy = ModuleWrapPolicy({nn.Sequential})
    device = torch.device("cpu")
    options = {"use_orig_params": use_orig_params, "sharding_strategy": strategy, "device_id": device}
    model = FSDP(net, auto_wrap_policy=policy, **options)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def step_wide(model, optimizer):
    model(torch.ones(2, 40)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


STRATEGIES = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)
WIDE = [(strategy, use_orig_params) for strategy in STRATEGIES for use_orig_params in (True, False)]


def check_described_once(rank, world):
    for kind in WIDE:
        model, optimizer = wide(*kind)
        step_wide(model, optimizer)
        describer = Describer(lambda by: None)
        first = describer.describe(state_of(model, optimizer), pickle=False)
        for _ in range(2):
            step_wide(model, optimizer)
            again = describer.describe(state_of(model, optimizer), pickle=False)
            assert again.described is first.described, kind
            assert sum(len(one.places) for one in again.watched) >= 9, "what the optimizer steps is captured lazily"
            assert [one.changes() for one in again.watched] == [[] for _ in again.watched]
        step_wide(model, optimizer)
        assert all(len(one.changes()) == len(one.places) for one in again.watched), "a step shows in all of them"
        optimizer.state.clear()
        step_wide(model, optimizer)
        assert describer.describe(state_of(model, optimizer), pickle=False).described is not first.described, kind


def test_later_saves_do_not_describe_the_state_again(ranks):
    ranks(2)(check_described_once)


def check_captured(rank, world, url):
    """What was saved is the state of the step at which it was saved, though the training goes on at once."""
    for number, kind in enumerate(WIDE):
        model, optimizer = wide(*kind)
        step_wide(model, optimizer)
        for step in range(3):
            whole = {name: tensor.clone() for name, tensor in whole_of_fsdp1(model, optimizer).items()}
            pending = sf.save_async(f"{url}/{number}-{step}", state_of(model, optimizer))
            step_wide(model, optimizer)
            pending.committed()
            into = wide(*kind, seed=5)
            sf.load(f"{url}/{number}-{step}", state_of(*into))
            loaded = whole_of_fsdp1(*into)
            assert [name for name in whole | loaded if not same_bits(whole[name], loaded[name])] == [], (kind, step)


def test_what_is_saved_is_the_state_of_that_step(ranks, tmp_path):
    ranks(2)(check_captured, f"{tmp_path}")


def saved_and_written(url, model, optimizer):
    """A save, and a write to a parameter as soon as it was called."""
    pending = sf.save_async(url, state_of(model, optimizer))
    written = max(model.parameters(), key=torch.numel)
    with torch.no_grad():
        written.add_(1)
    return pending


@unwatched()
def check_noticed(rank, world, url):
    """The watching thread does not check before the write."""
    for number, kind in enumerate(WIDE):
        model, optimizer = wide(*kind)
        for step in range(2):  # the second save finds the state described
            step_wide(model, optimizer)
            pending = saved_and_written(f"{url}/{number}-{step}", model, optimizer)
            with pytest.raises(sf.Invalid, match="was written"):
                pending.committed()


def test_a_write_past_the_optimizer_is_noticed(ranks, tmp_path):
    ranks(2)(check_noticed, f"{tmp_path}")


def check_written(rank, world, url):
    """A save that was copied before the write holds the state of its call; one that was not is not there."""
    for number, kind in enumerate(WIDE):
        model, optimizer = wide(*kind)
        step_wide(model, optimizer)
        whole = {name: tensor.clone() for name, tensor in whole_of_fsdp1(model, optimizer).items()}
        pending = saved_and_written(f"{url}/{number}", model, optimizer)
        into = wide(*kind, seed=5)
        try:
            pending.committed()
        except sf.Invalid as error:
            assert "was written" in str(error)
            with pytest.raises(sf.NotFound):
                sf.load(f"{url}/{number}", state_of(*into))
            continue
        sf.load(f"{url}/{number}", state_of(*into))
        loaded = whole_of_fsdp1(*into)
        assert [name for name in whole | loaded if not same_bits(whole[name], loaded[name])] == [], kind


def test_a_write_past_the_optimizer_is_not_saved(ranks, tmp_path):
    ranks(2)(check_written, f"{tmp_path}")


def check_precisions(rank, world, url):
    """Parameters that are computed with in bf16 are saved in fp32, which the optimizer steps."""
    for use_orig_params in (True, False):

        def made(seed, use_orig_params=use_orig_params):
            torch.manual_seed(seed)
            model = FSDP(
                Net(),
                use_orig_params=use_orig_params,
                auto_wrap_policy=ModuleWrapPolicy({Block}),
                device_id=torch.device("cpu"),
                mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            )
            return model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)

        model, optimizer = made(0)
        train(model, optimizer, range(3))
        sf.save(f"{url}/{use_orig_params}", state_of(model, optimizer))
        into = made(1)
        sf.load(f"{url}/{use_orig_params}", state_of(*into))
        whole, loaded = whole_of_fsdp1(model, optimizer), whole_of_fsdp1(*into)
        assert {tensor.dtype for tensor in loaded.values()} == {torch.float32}
        assert [name for name in whole if not same_bits(whole[name], loaded[name])] == []
        assert train(model, optimizer, range(3, 6)) == train(*into, range(3, 6))


def test_mixed_precision(ranks, tmp_path):
    ranks(2)(check_precisions, f"{tmp_path}")


# When parameters are not sharded


def check_evaluated(rank, world, url):
    for layout in FLAT:
        model, optimizer = build(layout)
        fill(model, optimizer)
        sf.save(f"{url}/{layout}", state_of(model, optimizer))
        other, other_optimizer = build(layout, seed=1)
        train(other, other_optimizer, range(1))
        with torch.no_grad():
            other(batch(0))
        handle = other._handle
        assert not handle.needs_unshard(), "the root's parameters stay gathered"
        sf.save(f"{url}/{layout}-gathered", state_of(other, other_optimizer))
        before = {name: tensor.clone() for name, tensor in whole_of_fsdp1(other, other_optimizer).items()}
        with torch.no_grad():
            other(batch(0))
        sf.load(f"{url}/{layout}", state_of(other, other_optimizer))
        with torch.no_grad():
            assert same_bits(other(batch(0)), model(batch(0))), f"{layout}: a forward uses what was loaded"
        assert differing(other, other_optimizer) == []
        sf.load(f"{url}/{layout}-gathered", state_of(other, other_optimizer))
        after = whole_of_fsdp1(other, other_optimizer)
        assert [name for name in before if not same_bits(before[name], after[name])] == []


def test_parameters_that_an_evaluation_left_gathered(ranks, tmp_path):
    ranks(2)(check_evaluated, f"{tmp_path}")


def expect_refused(url, model, optimizer):
    within = r"model: it is inside summon_full_params\(\): save and load outside"
    with pytest.raises(sf.Invalid, match=within):
        sf.save(f"{url}-no", state_of(model, optimizer))
    with pytest.raises(sf.Invalid, match=within):
        sf.load(url, state_of(model, optimizer))


def check_refusals(rank, world, url):
    for layout in FLAT:
        model, optimizer = build(layout)
        train(model, optimizer, range(1))
        sf.save(f"{url}/{layout}", state_of(model, optimizer))
        if "no_shard" not in layout:
            with FSDP.summon_full_params(model):
                expect_refused(f"{url}/{layout}", model, optimizer)
        loss = model(batch(0)).sum()
        with pytest.raises(sf.Invalid, match=r"model/gain: it is between forward and backward"):
            sf.load(f"{url}/{layout}", state_of(model, optimizer))
        sf.save(f"{url}/{layout}-between", state_of(model, optimizer))
        loss.backward()
        optimizer.zero_grad()
        sf.load(f"{url}/{layout}-between", state_of(model, optimizer))


def test_loads_in_the_middle_of_a_step_are_refused(ranks, tmp_path):
    ranks(2)(check_refusals, f"{tmp_path}")


def check_unknown_records(rank, world, url):
    model, optimizer = build("fsdp1_full_shard_flat")
    train(model, optimizer, range(1))
    records = model._handle.flat_param._shard_param_infos
    del model._handle.flat_param._shard_param_infos
    with pytest.raises(sf.Invalid, match=r"model: it is wrapped in .*, and PyTorch 2\.\S+ keeps other"):
        sf.save(url, state_of(model, optimizer))
    model._handle.flat_param._shard_param_infos = records
    channels = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
    model = FSDP(nn.Sequential(channels), device_id=torch.device("cpu"))
    with pytest.raises(sf.Invalid, match=r"its parameter 'weight' was not contiguous then"):
        sf.save(url, {"model": model})


def test_records_that_are_not_known_are_refused(ranks, tmp_path):
    ranks(2)(check_unknown_records, f"{tmp_path}/none")


def check_factored(rank, world, url):
    for layout in ("fsdp1_full_shard_flat", "fsdp1_full_shard_orig"):
        model, optimizer = build(layout)
        train(model, optimizer, range(1))
        state = next(state for state in optimizer.state.values() if state["exp_avg"].numel() > 3)
        state["row"] = torch.ones(3)
        with pytest.raises(sf.Invalid, match=r"optimizer: state\.\S+\.row has shape \(3,\).*a number for each element"):
            sf.save(url, state_of(model, optimizer))


def test_state_of_another_shape_than_a_flat_parameter_is_refused(ranks, tmp_path):
    ranks(2)(check_factored, f"{tmp_path}/none")


def check_wrapped_again(rank, world, url):
    """Parameters that moved to other flat parameters, which the optimizer does not step."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = FSDP(net, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters())
    with FSDP.summon_full_params(model):
        moved = FSDP(copy.deepcopy(net), device_id=torch.device("cpu"))
    with pytest.raises(sf.Invalid, match=r"optimizer: a parameter of shape .* belongs to no module of the state"):
        sf.save(url, state_of(moved, optimizer))


def test_an_optimizer_of_other_flat_parameters_is_refused(ranks, tmp_path):
    ranks(2)(check_wrapped_again, f"{tmp_path}/none")


def test_counters_that_differ_do_not_fit_into_one_flat_parameter(ranks, tmp_path):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for parameters in (model.parameters(), model.out.parameters()):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    sf.save(tmp_path / "uneven", state_of(model, optimizer))
    ranks(2)(expect_uneven, f"{tmp_path}/uneven")


def expect_uneven(rank, world, url):
    model, optimizer = build("fsdp1_full_shard_flat")
    for _ in range(2):
        with pytest.raises(sf.Invalid, match=r"optimizer/state\.\S+\.step: it differs from state\.\S+\.step in"):
            sf.load(url, state_of(model, optimizer))
        train(model, optimizer, range(1))
    model, optimizer = build("fsdp1_full_shard_orig")
    sf.load(url, state_of(model, optimizer))
    steps = {float(state["step"]) for state in optimizer.state.values()}
    assert steps <= {1.0, 2.0}


# Flat runs in general


def check_runs(rank, world):
    """Generated tensors, each flattened in a box of it and cut anywhere, as parts of plain tensors."""
    dice = random.Random(7)
    adapter = TorchAdapter()

    def gather(mine):
        found = [None] * world
        dist.all_gather_object(found, mine)
        return found

    for number in range(40):
        shape = tuple(dice.randint(1, 5) for _ in range(dice.randint(1, 4)))
        axis = dice.randrange(len(shape))
        cut = dice.randint(0, shape[axis])
        whole = known(f"runs{number}", shape)
        boxes = []
        for start, stop in ((0, cut), (cut, shape[axis])):
            if start < stop:
                offsets, lengths = [0] * len(shape), list(shape)
                offsets[axis], lengths[axis] = start, stop - start
                boxes.append(Region(tuple(offsets), tuple(lengths)))
        regions, pieces = [], []
        for box in boxes:
            numel = math.prod(box.lengths)
            ends = [0, *sorted(dice.randint(0, numel) for _ in range(world - 1)), numel]
            first, last = ends[rank], ends[rank + 1]
            index = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))
            if first < last:
                regions.append(Flat(first, last, box))
                pieces.append(whole[index].reshape(-1)[first:last])
        mine = torch.cat([torch.zeros(3), *pieces])[3:]
        part = Part(mine, shape, tuple(regions))
        found = check_tensor(adapter_of(part, [adapter]), part, gather)
        assert found == whole.numpy().tobytes(), (shape, boxes)


@pytest.mark.parametrize("world", [2, 3])
def test_runs_in_boxes_are_said_truly(ranks, world):
    ranks(world)(check_runs)


def check_flat_shards(rank, world, url):
    """Past the wrapper, or as plain tensors, nothing says which elements this rank has."""
    for strategy, use_orig_params in WIDE:
        options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
        model = FSDP(net(), device_id=torch.device("cpu"), **options)
        step_plain(model, torch.optim.AdamW(model.parameters()))
        for past in (dict(model.named_parameters()), model.module):
            with pytest.raises(sf.Invalid, match="FullyShardedDataParallel has flattened"):
                sf.save(f"{url}/none", {"model": past})


def test_flat_shards_past_their_wrapper_are_refused(ranks, tmp_path):
    sf.save(tmp_path / "none", {"model": {"w": torch.zeros(2)}})
    ranks(2)(check_flat_shards, f"{tmp_path}")


def check_sharded_tensor(rank, world, url):
    spec = ChunkShardingSpec(dim=0, placements=[f"rank:{n}/cpu" for n in range(world)])
    tensor = sharded_tensor.rand(spec, 4, 2)
    refused = r"w[./]w.*a ShardedTensor cannot be stored: use DTensor"
    for verb in (sf.save, sf.load):
        with pytest.raises(sf.Invalid, match=refused):
            verb(f"{url}/none", {"w": {"w": tensor}})
    with pytest.raises(sf.Invalid, match=refused):
        sf.save(f"{url}/none", {"w": {"w": {"deeper": [tensor]}}})


def test_a_sharded_tensor_is_refused_by_name(ranks, tmp_path):
    sf.save(tmp_path / "none", {"w": {"w": torch.zeros(4, 2)}})
    ranks(2)(check_sharded_tensor, f"{tmp_path}")
