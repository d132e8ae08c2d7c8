"""DeepSpeed's engines: each stage saved, and loaded into each, in worlds of other sizes, bit for bit."""

import itertools

import pytest
import shardfast as sf
from deepspeed_jobs import Job, build, differences, said, step


def state_of(engine):
    return {"model": engine, "optimizer": engine.optimizer}


def save(rank, world, place, job):
    engine = build(job)
    losses = [step(engine, number) for number in range(2)]
    sf.save(place, state_of(engine), step=2)
    found = said(engine)
    return found, [step(engine, number) for number in range(2, 4)], losses


def load(rank, world, place, job):
    engine = build(job, seed=1)
    sf.load(place, state_of(engine))
    found = said(engine)
    return found, [step(engine, number) for number in range(2, 4)]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(("saved", "loaded"), itertools.product(range(4), range(4)))
def test_each_stage_loads_into_each(ranks, tmp_path, saved, loaded, dtype):
    (expected, losses, _), *_ = ranks(2)(save, str(tmp_path / "a"), Job(saved, dtype))
    results = ranks(2)(load, str(tmp_path / "a"), Job(loaded, dtype))
    for found, later in results:
        assert differences(expected, found) == []
        if saved == loaded:
            assert later == losses
