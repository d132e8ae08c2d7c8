"""Engines of DeepSpeed in bf16, and plain models in fp32 and bf16: each loads what the other saved, bit for bit."""

import logging

import pytest
import shardfast as sf
import torch
from deepspeed_jobs import WIDTH, Job, Model, build, said, step

MOMENTS = ("exp_avg", "exp_avg_sq")


def plain(dtype, seed, job, buffers):
    torch.manual_seed(seed)
    model = Model(job).to(dtype)
    model.seen = model.seen.to(buffers)  # of which no optimizer keeps a copy
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def trained(dtype, job, buffers):
    model, optimizer = plain(dtype, 0, job, buffers)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, WIDTH, dtype=dtype)).float().square().mean().backward()
        optimizer.step()
    return model, optimizer


def of(engine):
    return {"model": engine, "optimizer": engine.optimizer}


def wrong_of_plain(model, optimizer, expected, suffix):
    """The names of what a plain model has otherwise than an engine had."""
    found = []
    for name, parameter in model.named_parameters():
        if not torch.equal(parameter.float(), torch.from_numpy(expected[name + suffix])):
            found.append(name)
        for moment in MOMENTS if optimizer is not None else ():
            if not torch.equal(optimizer.state[parameter][moment], torch.from_numpy(expected[f"{name}.{moment}"])):
                found.append(f"{name}.{moment}")
    return found


def wrong_of_engine(engine, model, optimizer):
    """The names of what an engine has otherwise than a plain model had."""
    now, found = said(engine), []
    for name, parameter in model.named_parameters():
        exact = parameter.detach().float()
        expected = {name: exact.bfloat16().float(), f"{name}.master": exact}
        expected |= {f"{name}.{moment}": optimizer.state[parameter][moment].float() for moment in MOMENTS}
        found += [key for key, value in expected.items() if not torch.equal(torch.from_numpy(now[key]), value)]
    return found


def both_ways(rank, world, place, job):
    """By row of the table what is wrong after a load; what the plans and the log say."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("shardfast").addHandler(handler)
    wrong, notes = {}, {}
    engine = build(job)
    for number in range(2):
        step(engine, number)
    sf.save(f"{place}/engine", of(engine))
    expected, buffers = said(engine), engine.module.seen.dtype

    model, optimizer = plain(torch.float32, 1, job, buffers)
    notes["full"] = sf.load(f"{place}/engine", {"model": model, "optimizer": optimizer}).masters
    wrong["full"] = wrong_of_plain(model, optimizer, expected, ".master")
    model(torch.randn(4, WIDTH)).square().mean().backward()
    optimizer.step()
    model, _ = plain(torch.float32, 1, job, buffers)
    sf.load(f"{place}/engine", {"model": model}, only="model")
    wrong["full, the model alone"] = wrong_of_plain(model, None, expected, ".master")
    model, optimizer = plain(torch.bfloat16, 1, job, buffers)
    notes["half"] = sf.load(f"{place}/engine", {"model": model, "optimizer": optimizer}).masters
    wrong["half"] = wrong_of_plain(model, optimizer, expected, "")

    for dtype, row in ((torch.float32, "from full"), (torch.bfloat16, "from half")):
        model, optimizer = trained(dtype, job, buffers)
        sf.save(f"{place}/{row}", {"model": model, "optimizer": optimizer})
        engine = build(job, seed=1)
        if dtype is torch.bfloat16:
            with pytest.raises(sf.Invalid) as raised:
                sf.load(f"{place}/{row}", of(engine))
            notes["error"] = str(raised.value)
        plan = sf.load(f"{place}/{row}", of(engine), cast=dtype is torch.bfloat16)
        notes[row], notes[f"{row}, cast"] = plan.masters, plan.cast
        wrong[row] = wrong_of_engine(engine, model, optimizer)
        step(engine, 2)
    return wrong, notes, lines


@pytest.mark.parametrize(
    "job",
    [Job(1), Job(2), pytest.param(Job(3), marks=pytest.mark.smoke), Job(2, tied=True), Job(3, tied=True)],
    ids=lambda job: f"{job.stage}{', tied' if job.tied else ''}",
)
def test_engines_and_plain_models_load_each_other(ranks, tmp_path, job):
    results = ranks(2)(both_ways, str(tmp_path), job)
    for wrong, notes, _ in results:
        assert set(wrong) == {"full", "full, the model alone", "half", "from full", "from half"}
        assert not any(wrong.values()), wrong
        name = "inner.0.weight"
        assert (
            f"model/{name}: BF16 in the checkpoint with a master; it becomes optimizer/state.{name}.master"
            in notes["full"]
        )
        assert notes["half"] == []
        assert any(note.startswith(f"model/{name}: F32 in the checkpoint; the master") for note in notes["from full"])
        assert any(note.startswith(f"model/{name}: BF16 in the checkpoint without") for note in notes["from half"])
        assert len(notes["full"]) == (9 if job.tied else 8)  # by all names
        assert {len(notes[row]) for row in ("from full", "from half")} == {8}
        assert notes["from full, cast"] == {}
        # Moments are no parameters: those in 16 bits are a difference of dtype as any other.
        assert f"dtype: optimizer/state.{name}.exp_avg is BF16 in the checkpoint and F32 here" in notes["error"]
        assert "dtype: model/" not in notes["error"]
        assert all(name.startswith("optimizer/state.") for name in notes["from half, cast"])
    (first, second) = ([line for line in lines if "without a master" in line] for _, _, lines in results)
    assert (len(first), len(second)) == (1, 0)
    assert "and 7 more" in first[0]
