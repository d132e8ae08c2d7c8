"""Megatron-Core and DeepSpeed with models of the same names, both in bf16: each loads what the other saved."""

import os
import sys
from pathlib import Path

import pytest
import shardfast as sf
from jobs import Layout, begin, build, step, truth
from test_across import KIND, MOMENTS, of_name, plain

pytest.importorskip("deepspeed", reason="scripts/megatron.sh without an argument installs it")
sys.path.append(str(Path(__file__).parents[1] / "frameworks"))

from deepspeed_jobs import Job, deepspeed, said

# DeepSpeed sets it, and PyTorch then asks the stand-in for CUDA whether there is a device.
os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)


def engine_like(url, seed, stage):
    """An engine around a model with the parameters that a checkpoint has."""
    model, optimizer = plain(url, seed, "plain")
    config = {**Job(stage).config, "gradient_clipping": 0.0}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def trained(engine, seed):
    engine.backward(engine(seed))
    engine.step()


def wrong_in(engine, whole):
    """Which tensors of an engine are not those of a Megatron job."""
    now, wrong = said(engine), []
    for name, _ in engine.module.named_parameters():
        of_megatron = {"": of_name(whole, "", name).float(), ".master": of_name(whole, "optimizer.state.param.", name)}
        of_megatron |= {f".{moment}": of_name(whole, f"optimizer.state.{moment}.", name) for moment in MOMENTS}
        wrong += [name + what for what, of in of_megatron.items() if now[name + what].tobytes() != of.numpy().tobytes()]
    return wrong


def both_ways(rank, world, place, layout, stage):
    """What is wrong after a load in each direction, and how many parameters there are."""
    begin(layout)
    chunks, optimizer = build(layout, KIND)
    for number in range(2):
        step(chunks, optimizer, number)
    sf.save(f"{place}/megatron", {"model": chunks, "optimizer": optimizer})
    before = truth(chunks, optimizer)
    engine = engine_like(f"{place}/megatron", 3, stage)
    sf.load(f"{place}/megatron", {"model": engine, "optimizer": engine.optimizer}, strict=False)
    lost = wrong_in(engine, before)
    trained(engine, 7)
    assert wrong_in(engine, before), "a step changes them"
    sf.save(f"{place}/deepspeed", {"model": engine, "optimizer": engine.optimizer})
    chunks, optimizer = build(layout, KIND, seed=5)
    sf.load(f"{place}/deepspeed", {"model": chunks, "optimizer": optimizer}, strict=False)
    back = wrong_in(engine, truth(chunks, optimizer))
    step(chunks, optimizer, 3)
    return lost, back, len(list(engine.module.parameters()))


@pytest.mark.campaign
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("layout", [Layout(tp=2, pp=2), Layout(), Layout(tp=2, distributed=False)], ids=str)
def test_megatron_and_zero_load_each_other(ranks, tmp_path, layout, stage):
    for lost, back, parameters in ranks(4)(both_ways, str(tmp_path), layout, stage):
        assert (lost, back, parameters) == ([], [], 36)
