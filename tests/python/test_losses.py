"""Losses after a load: those of the uninterrupted run, or under another layout those of a run whose state PyTorch's own
full state dicts put there. The guide's figure shows the same with a larger model."""

import os

import pytest
import shardfast as sf
import torch
from layouts import PAIRS_ONE_IN, PIPELINES
from older import IS_OLDER
from training import MICROBATCHES, Run, put_by_torch, trained_of, whole_by_torch

STEPS = range(3, 3 + int(os.environ.get("SHARDFAST_LOSS_STEPS", "4")))
"""After the save; a campaign sets more."""

MORE = {
    2: ["ddp", "fsdp", "tp", "fsdp1_shard_grad_op_orig", "fsdp1_no_shard_flat"],
    4: ["hsdp", "fsdp_tp", "fsdp1_hybrid_shard_flat", "fsdp1_hybrid_shard_zero2_orig"],
}
"""Layouts in which each rank has all names, by number of ranks; for FSDP1's FULL_SHARD see test_fsdp.py."""


def resumed_of(world):
    more = [name for name in MORE[world] if not (IS_OLDER and name == "hsdp")]  # see test_reshard.py
    return [*trained_of(world), *more]


def check_resumed(rank, world, url):
    seen = 0
    for layout in resumed_of(world):
        run = Run(layout, 0)
        if "ep" not in layout:  # where ranks compute the same
            torch.manual_seed(rank)
        run.losses(range(3))
        sf.save(f"{url}/{layout}", {**run.state(), "random": sf.random_state()})
        uninterrupted = run.losses(STEPS)
        assert len(set(uninterrupted)) == len(uninterrupted)
        run = Run(layout, 1)
        if layout in ("pp_ddp", "zero1", "ddp"):  # DistributedDataParallel adds in another order in its first step
            run.losses(range(1))
        sf.load(f"{url}/{layout}", {**run.state(), "random": sf.random_state()})
        assert run.losses(STEPS) == uninterrupted, layout
        seen += len(uninterrupted)
    return seen


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.campaign), 4])
def test_losses_after_a_resume_are_those_of_the_uninterrupted_run(ranks, tmp_path, world):
    seen = ranks(world)(check_resumed, f"{tmp_path}")
    pipelines = [name for name in trained_of(world) if name in PIPELINES]
    each = len(STEPS)
    assert seen[-1] == each * (len(resumed_of(world)) - len(pipelines)) + each * MICROBATCHES * len(pipelines)


# Under another layout

EVEN = 12  # PyTorch's state dicts cannot cut unevenly what tensor parallelism has cut


def train_and_save(rank, world, url, layouts):
    for layout in layouts:
        run = Run(layout, 0, EVEN)
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
            run = Run(layout, 1, EVEN)
            if is_ours:
                sf.load(f"{url}/{saved}", run.state())
            else:
                put_by_torch(run, torch.load(f"{url}/{saved}.pt"))
            for optimizer in run.optimizers():
                optimizer.param_groups[0]["fused"] = False  # not for plain parameters beside DTensors
            torch.manual_seed(7)
            losses.append(run.losses(STEPS))
        assert losses[0] == losses[1], (saved, layout)
        assert len(set(losses[0])) == len(losses[0])
        seen += len(losses[0])
    return seen


@pytest.mark.skipif(IS_OLDER, reason=f"the pipeline schedules of torch {torch.__version__} never end on gloo")
def test_losses_after_a_change_to_or_from_a_pipeline(ranks, tmp_path):
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
        ("pp_fsdp", "fsdp1_full_shard_flat"),
    ]
    on_four = [("interleaved", "pp_fsdp"), ("fsdp", "interleaved_fsdp"), ("pp_fsdp", "pp"), ("interleaved", "pp_tp")]
    assert ranks(1)(check_relaid, url, [("pp_fsdp", "plain")])[-1] > 0
    some = 1 if PAIRS_ONE_IN == 1 else 2
    assert ranks(2)(check_relaid, url, on_two[::some])[-1] > 0
    assert ranks(4)(check_relaid, url, on_four[::some])[-1] > 0


@pytest.mark.campaign  # the one before is of more kinds of layouts
def test_losses_after_a_change_between_sharded_layouts(ranks, tmp_path):
    url = f"{tmp_path}"
    ranks(4)(train_and_save, url, ["fsdp1_full_shard_orig", "fsdp_tp"])
    ranks(2)(train_and_save, url, ["fsdp", "tp", "fsdp1_shard_grad_op_flat"])
    on_two = [
        ("fsdp1_full_shard_orig", "fsdp"),
        ("fsdp_tp", "fsdp1_full_shard_flat"),
        ("fsdp_tp", "tp"),
        ("tp", "fsdp"),
        ("fsdp1_shard_grad_op_flat", "ddp"),
    ]
    on_four = [
        ("fsdp1_full_shard_orig", "fsdp_tp"),
        ("fsdp", "fsdp1_hybrid_shard_orig"),
        ("tp", "fsdp_tp"),
        ("fsdp1_shard_grad_op_flat", "fsdp1_full_shard_orig"),
    ]
    assert ranks(1)(check_relaid, url, [("fsdp_tp", "plain"), ("fsdp1_full_shard_orig", "plain")])[-1] > 0
    assert ranks(2)(check_relaid, url, on_two)[-1] > 0
    assert ranks(4)(check_relaid, url, on_four)[-1] > 0
