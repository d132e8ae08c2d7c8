"""DeepSpeed's pipelines and its experts, saved and loaded under another number of stages, ranks and experts a rank."""

import deepspeed_jobs
import pytest
import shardfast as sf
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed_jobs import BATCH, WIDTH, Job, differences
from shardfast.state.coordinates import coordinates_of, shown_by
from shardfast.state.entries import walk

deepspeed = deepspeed_jobs.deepspeed
LAYERS = 3


def first(layer, x):
    return layer(x)


def last(layer, x):
    return x @ layer.weight


def pipeline(stages, job, tied, seed=0):
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(seed)
    ends = [
        TiedLayerSpec("ends", torch.nn.Linear, WIDTH, 30, bias=False, forward_fn=forward) for forward in (first, last)
    ]
    layers = [LayerSpec(torch.nn.Linear, 30, 30) for _ in range(LAYERS)]
    if not tied:
        ends = [LayerSpec(torch.nn.Linear, WIDTH, 30), LayerSpec(torch.nn.Linear, 30, WIDTH)]
    model = PipelineModule(
        [ends[0], *layers, ends[1]],
        num_stages=stages,
        loss_fn=lambda out, target: (out.float() - target.float()).square().mean(),
        partition_method="uniform",
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = {**job.config, "gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": BATCH}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def pipe_step(engine, number):
    """A step on data that depends on its number and the place in data parallelism alone."""
    generator = torch.Generator().manual_seed(100 * number + engine.grid.get_data_parallel_rank())
    kind = next(engine.module.parameters()).dtype

    def batches():
        while True:
            x = torch.randn(BATCH, WIDTH, generator=generator)
            yield x.to(kind), x.flip(1).to(kind)

    return float(engine.train_batch(batches()))


def pipe_said(engine):
    """By name what all ranks have, whole."""
    mine = deepspeed_jobs.said(engine)
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    found = {}
    for one in every:
        for name, array in one.items():
            assert name not in found or found[name].tobytes() == array.tobytes(), name
            found[name] = array
    return found


def state_of(engine):
    return {"model": engine, "optimizer": engine.optimizer}


def save_pipe(rank, world, place, stages, job, tied):
    engine = pipeline(stages, job, tied)
    for number in range(2):
        pipe_step(engine, number)
    sf.save(place, state_of(engine))
    found = pipe_said(engine)
    return found, [pipe_step(engine, number) for number in range(2, 4)]


def load_pipe(rank, world, place, stages, job, tied):
    engine = pipeline(stages, job, tied, seed=3)
    sf.load(place, state_of(engine))
    found = pipe_said(engine)
    return found, [pipe_step(engine, number) for number in range(2, 4)]


@pytest.mark.parametrize(
    ("saved", "loaded", "tied"),
    [
        pytest.param((2, 2, 1), (2, 1, 1), False, marks=pytest.mark.smoke),
        ((2, 2, 1), (2, 2, 1), True),
        ((4, 2, 1), (1, 1, 1), True),
        ((2, 1, 1), (4, 4, 1), False),
        ((2, 2, 0), (4, 2, 1), False),
    ],
)
def test_pipelines_load_into_other_stages(ranks, tmp_path, saved, loaded, tied):
    job = Job(saved[2])
    (expected, losses), *_ = ranks(saved[0])(save_pipe, str(tmp_path / "a"), saved[1], job, tied)
    results = ranks(loaded[0])(load_pipe, str(tmp_path / "a"), loaded[1], Job(loaded[2]), tied)
    for found, later in results:
        assert differences(expected, found) == []
        if saved == loaded:
            assert later == losses


class Experts(torch.nn.Module):
    def __init__(self, ranks_of_experts):
        super().__init__()
        self.before = torch.nn.Linear(WIDTH, 20)
        expert = torch.nn.Sequential(torch.nn.Linear(20, 10), torch.nn.GELU(), torch.nn.Linear(10, 20))
        self.moe = MoE(20, expert, num_experts=4, ep_size=ranks_of_experts, k=1, use_rts=False, drop_tokens=False)
        for number, part in enumerate(self.moe.deepspeed_moe.experts.deepspeed_experts):
            first_one = self.moe.num_local_experts * (dist.get_rank() % ranks_of_experts)
            torch.manual_seed(50 + first_one + number)
            for parameter in part.parameters():
                torch.nn.init.normal_(parameter, std=0.2)
        self.after = torch.nn.Linear(20, WIDTH)

    def forward(self, x):
        hidden, auxiliary, _ = self.moe(self.before(x))
        return self.after(hidden), auxiliary


def experts(ranks_of_experts, stage, seed=0):
    torch.manual_seed(seed)
    model = Experts(ranks_of_experts)
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=Job(stage).config)
    return engine


def experts_step(engine, number):
    torch.manual_seed(1000 * number + dist.get_rank())
    x = torch.randn(32, WIDTH, dtype=torch.bfloat16)  # so many that each expert has some
    out, auxiliary = engine(x)
    engine.backward((out.float() - x.float()).square().mean() + 0.01 * auxiliary.float())
    engine.step()


def experts_said(engine):
    """By name what all ranks have, experts by their numbers in the whole model."""
    moe = engine.module.moe
    own = dist.get_rank() % moe.ep_size * moe.num_local_experts
    found = {}
    for name, array in deepspeed_jobs.said(engine).items():
        head, mark, tail = name.partition("deepspeed_experts.")
        if mark:
            number, _, rest = tail.partition(".")
            name = f"{head}{mark}{int(number) + own}.{rest}"
        found[name] = array
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    whole = {}
    for one in every:
        for name, array in one.items():
            assert name not in whole or whole[name].tobytes() == array.tobytes(), name
            whole[name] = array
    return whole


def save_experts(rank, world, place, ranks_of_experts, stage):
    engine = experts(ranks_of_experts, stage)
    for number in range(2):
        experts_step(engine, number)
    sf.save(place, state_of(engine))
    return experts_said(engine)


def load_experts(rank, world, place, ranks_of_experts, stage):
    engine = experts(ranks_of_experts, stage, seed=4)
    sf.load(place, state_of(engine))
    return experts_said(engine)


@pytest.mark.parametrize(("saved", "loaded"), [((4, 2, 1), (2, 1, 2)), ((2, 2, 2), (4, 4, 1)), ((2, 1, 1), (1, 1, 0))])
def test_experts_load_into_other_ranks(ranks, tmp_path, saved, loaded):
    expected, *_ = ranks(saved[0])(save_experts, str(tmp_path / "a"), *saved[1:])
    assert sum("deepspeed_experts.3" in name for name in expected) == 4 * 4
    for found in ranks(loaded[0])(load_experts, str(tmp_path / "a"), *loaded[1:]):
        assert differences(expected, found) == []


def stands(rank, world, stages, ranks_of_experts):
    """What is said of this rank for a state with an engine, and its places by DeepSpeed's own words."""
    engine = pipeline(stages, Job(1), False) if stages else experts(ranks_of_experts, 1)
    walked = walk(state_of(engine))
    said = coordinates_of(shown_by(walked.entries), walked.adapters)
    if stages:
        return said, [("pp", engine.grid.get_stage_id()), ("dp", engine.grid.get_data_parallel_id())]
    return said, [("dp", rank), ("ep", rank % ranks_of_experts)]


@pytest.mark.parametrize(("stages", "ranks_of_experts"), [(2, 0), (0, 2)])
def test_coordinates_are_those_of_the_engines_groups(ranks, stages, ranks_of_experts):
    for said, own in ranks(4)(stands, stages, ranks_of_experts):
        assert said == own
