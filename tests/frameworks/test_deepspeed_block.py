"""DeepSpeed's `save_checkpoint` and `load_checkpoint` with the block in its configuration."""

import os
import random
import re
import signal
import time
from pathlib import Path

import deepspeed_jobs
import pytest
import shardfast as sf
import shardfast.integrations.deepspeed  # what is tested
import torch
import torch.distributed as dist
from deepspeed_jobs import Job, build, differences, said, step
from shardfast.integrations.trackers import FileTracker

BLOCK = {"shardfast": {}}


def error_of(call, *args, **named):
    try:
        call(*args, **named)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def train(rank, world, place, job, steps):
    engine = build(job, extra=BLOCK)
    scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer.optimizer, 1, 0.5) if job.stage else None
    engine.lr_scheduler = scheduler
    losses = [step(engine, number) for number in range(steps)]
    assert engine.save_checkpoint(place, client_state={"epoch": 3, "words": ["a", None]}) is True
    found = said(engine)
    drawn = (random.random(), torch.rand(1).item())
    later = [step(engine, number) for number in range(steps, steps + 2)]
    engine.destroy()
    return found, losses, later, drawn


def resume(rank, world, place, job, steps, named=None):
    engine = build(job, seed=5, extra=BLOCK)
    engine.lr_scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer.optimizer, 1, 0.5) if job.stage else None
    path, client = engine.load_checkpoint(place, **(named or {}))
    found = said(engine)
    drawn = (random.random(), torch.rand(1).item())
    counts = engine.global_steps, engine.global_samples, engine.micro_steps
    later = [step(engine, number) for number in range(steps, steps + 2)]
    engine.destroy()
    return path, client, found, later, drawn, counts


@pytest.mark.smoke
def test_zero_2_on_two_ranks_goes_on_as_zero_3_on_three(ranks, tmp_path):
    place = str(tmp_path / "run")
    (expected, _, later, drawn), *_ = ranks(2)(train, place, Job(2), 2)
    assert Path(place, "latest").read_text() == "global_step2"
    same = ranks(2)(resume, place, Job(2), 2)
    for path, client, found, again, _, counts in same:
        assert path == f"{place}/global_step2"
        assert client == {"epoch": 3, "words": ["a", None]}
        assert differences(expected, found) == []
        assert again == later
        assert counts == (2, 2 * 2 * deepspeed_jobs.BATCH, 2)
    assert same[0][4] == drawn
    for _, client, found, *_ in ranks(3)(resume, place, Job(3, persists=True, sub_group_size=900), 2):
        assert client["epoch"] == 3
        assert differences(expected, found) == []


def options(rank, world, place):
    job = Job(2, frozen=True)
    engine = build(job, extra=BLOCK)
    before = said(build(job, seed=9), moments=())
    for number in range(2):
        step(engine, number)
    engine.save_checkpoint(place, tag="whole")
    engine.save_checkpoint(place, tag="trained", exclude_frozen_parameters=True, save_latest=False)
    expected = said(engine)
    engine.destroy()
    found = {"latest": Path(place, "latest").read_text()}
    with sf.mapped(f"{place}/trained") as checkpoint:
        found["names"] = [name for name in checkpoint if name.startswith("model/")]
    other = build(job, seed=9, extra=BLOCK)
    other.load_checkpoint(place, "trained")
    now = said(other)
    found["trained"] = [name for name in differences(expected, now) if name != "inner.0.weight"]
    found["frozen"] = now["inner.0.weight"].tobytes() == before["inner.0.weight"].tobytes()
    module = build(job, seed=9, extra=BLOCK)
    step(module, 7)
    module.load_checkpoint(place, "whole", load_module_only=True)
    now = said(module, moments=())
    found["module only"] = [
        name for name in now if name.endswith(".weight") and now[name].tobytes() != expected[name].tobytes()
    ]
    found["steps"] = module.global_steps
    return found, {name: array for name, array in now.items() if name.endswith(".master")}, now


def test_options_mean_what_they_meant(ranks, tmp_path):
    for found, masters, now in ranks(2)(options, str(tmp_path)):
        assert found["latest"] == "whole"
        assert "model/inner.0.weight" not in found["names"]
        assert found["trained"] == []
        assert found["frozen"]
        assert found["module only"] == []
        assert found["steps"] == 1
        # The copies in fp32 begin at the parameters that were loaded.
        for name, array in masters.items():
            assert array.tobytes() == now[name.removesuffix(".master")].tobytes()


def wrong(rank, world, place):
    found = {}
    for name, extra in {
        "key": {"shardfast": {"stagingbytes": 1}},
        "kind": {"shardfast": True},
        "null": {"shardfast": None},
        "pickle": {"shardfast": {"pickle": 1}},
        "over": {"shardfast": {"over": 4}},
        "over, true": {"shardfast": {"over": True}},
        "keep": {"shardfast": {"keep": "3"}},
        "writer": {**BLOCK, "checkpoint": {"use_node_local_storage": True}},
    }.items():
        engine = build(Job(1), extra=extra)
        found[name] = error_of(engine.save_checkpoint, f"{place}/{name}")
    engine = build(Job(1), extra=BLOCK)
    zero = {"zero_optimization": {"stage": 2, "round_robin_gradients": True}}
    found["round robin"] = error_of(build(Job(2), extra={**BLOCK, **zero}).save_checkpoint, f"{place}/robin")
    keeps = build(Job(1), extra={"shardfast": {"keep": "last(1)"}})
    found["far"] = error_of(keeps.save_checkpoint, "s3://bucket/run")
    found["slash"] = error_of(engine.save_checkpoint, place, tag="a/b")
    found["dot"] = error_of(engine.save_checkpoint, place, tag=".x")
    found["long"] = error_of(engine.save_checkpoint, place, tag="x" * 201)
    found["latest"] = error_of(engine.save_checkpoint, place, tag="latest")
    found["client"] = error_of(engine.save_checkpoint, place, client_state={"f": open})
    engine.save_checkpoint(f"{place}/tags", tag=f"t{rank}")
    found["tags"] = error_of(engine.load_checkpoint, f"{place}/none")
    found["over, 1"] = error_of(build(Job(2), extra={"shardfast": {"over": 1}}).load_checkpoint, f"{place}/none")
    found["none"] = engine.load_checkpoint(f"{place}/none")
    found["tag"] = error_of(engine.load_checkpoint, f"{place}/none", tag="x")
    gathered = build(Job(3), extra=BLOCK)
    with torch.no_grad(), deepspeed_jobs.deepspeed.zero.GatheredParameters(list(gathered.module.parameters())):
        found["gathered"] = error_of(gathered.save_checkpoint, f"{place}/gathered")
    found["module"] = error_of(sf.save, f"{place}/module", {"model": engine.module})
    found["optimizer"] = error_of(sf.save, f"{place}/optimizer", {"optimizer": engine.optimizer})
    return found


def test_bad_input_is_refused_by_name(ranks, tmp_path):
    for found in ranks(2)(wrong, str(tmp_path)):
        assert "has stagingbytes: expected none but staging_bytes" in found["key"]
        assert "expected a block" in found["kind"]
        assert "expected a block" in found["null"]
        assert "expected true or false" in found["pickle"]
        assert '{"over": 4}' in found["over"]
        assert "expected 1" in found["over"]
        assert '{"over": True}' in found["over, true"]
        assert 'expected "last(N)"' in found["keep"]
        assert "round_robin_gradients" in found["round robin"]
        assert "in an object store" in found["far"]
        assert "checkpoint.use_node_local_storage beside the block" in found["writer"]
        assert "without a slash" in found["slash"]
        assert "no dot in front" in found["dot"]
        assert "expected at most 200 bytes, found 201" in found["long"]
        assert "names the newest checkpoint" in found["latest"]
        assert "client" in found["client"]
        assert "ranks must call the same operations" in found["tags"]
        assert "tags/t1" in found["tags"]
        assert found["over, 1"] == ""
        assert found["none"] == (None, None)
        assert "no committed checkpoint" in found["tag"]
        assert "inside of GatheredParameters" in found["gathered"]
        assert "put the engine into the state" in found["module"]
        assert "belongs to no" in found["optimizer"]
    assert not list(tmp_path.glob("*/*/COMMIT"))


def rotating(rank, world, place):
    engine = build(Job(1), extra={"shardfast": {"keep": "last(2)", "async": False}})
    kept = []
    for number in range(4):
        step(engine, number)
        engine.save_checkpoint(place, save_latest=number != 3)
        kept.append(sorted(path.name for path in Path(place).glob("global_step*")))
    engine.destroy()
    again = build(Job(1), extra={"shardfast": {"keep": "last(1)"}})
    again.load_checkpoint(place, "global_step3")
    again.save_checkpoint(place, tag="again", save_latest=False)
    again.destroy()
    return kept


def test_older_checkpoints_go_once_a_newer_one_is_durable(ranks, tmp_path):
    place = tmp_path / "run"
    others = place / "of_others"
    others.mkdir(parents=True)
    sf.save(str(others / "run"), {"a": {"b": 1}})
    sf.save(str(place / "no_engine"), {"a": {"b": 1}})
    (place / ".global_step1.removed").mkdir()  # of a process that was killed
    kept, _ = ranks(2)(rotating, str(place))
    assert kept[:3] == [["global_step1"], ["global_step1", "global_step2"], ["global_step2", "global_step3"]]
    # Of step 4 is later than what was saved last, and latest names that of step 3.
    assert {path.name for path in place.iterdir()} == {
        "of_others",
        "no_engine",
        "again",
        "global_step3",
        "global_step4",
        "latest",
    }
    assert (place / "latest").read_text() == "global_step3"


def evaluated(rank, world, place):
    engine = build(Job(3, persists=True), extra=BLOCK)
    step(engine, 0)
    engine.eval()
    with torch.no_grad():
        engine(torch.ones(2, deepspeed_jobs.WIDTH, dtype=torch.bfloat16))
    engine.train()
    engine.save_checkpoint(place)
    expected = said(engine)
    engine.destroy()
    other = build(Job(3), seed=4, extra=BLOCK)
    other.load_checkpoint(place)
    return differences(expected, said(other))


def test_a_save_after_an_evaluation(ranks, tmp_path):
    assert ranks(2)(evaluated, str(tmp_path)) == [[], []]


def killed(rank, world, place):
    engine = build(Job(1), extra=BLOCK)
    step(engine, 0)
    engine.save_checkpoint(place)
    step(engine, 1)
    while not Path(place, "latest").exists():
        time.sleep(0.01)
    dist.barrier()
    engine.save_checkpoint(place)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(3)


def goes_on(rank, world, place):
    engine = build(Job(2), seed=3, extra=BLOCK)
    path, _ = engine.load_checkpoint(place)
    return Path(path).name, Path(place, "latest").read_text(), engine.global_steps


def test_latest_names_what_is_committed_when_a_rank_is_killed_in_a_save(ranks, tmp_path):
    with pytest.raises(AssertionError):
        ranks(2)(killed, str(tmp_path))
    ((tag, latest, steps),) = ranks(1)(goes_on, str(tmp_path))
    assert tag == latest == f"global_step{steps}"
    assert re.fullmatch("global_step[12]", tag)
    assert (tmp_path / tag / "COMMIT").exists()


def scales_of(engine):
    one = engine.optimizer
    names = ("loss_scaler", "loss_scale_config")
    owner = next((found for name in names if (found := getattr(one, name, None))), one)  # itself up to 0.17
    return owner.cur_scale, owner.cur_iter, owner.last_overflow_iter


def with_exact_buffer(job, seed, extra):
    """An engine whose buffer is in fp32: up to 0.17 DeepSpeed makes it of the model's type, and keeps no copy of it."""
    engine = build(job, seed, extra)
    engine.module.seen = engine.module.seen.float()
    return engine


def rescaled(rank, world, place, source, target):
    """By dtype of the source the scale at the save and after the load, and the losses after both."""
    window = {"fp16": {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 2}}
    found = {}
    for dtype in ("fp16", "bf16"):
        engine = with_exact_buffer(Job(source, dtype), 0, BLOCK | (window if dtype == "fp16" else {}))
        for number in range(5):
            step(engine, number)
        engine.save_checkpoint(f"{place}/{dtype}")
        before, expected = scales_of(engine) if dtype == "fp16" else None, said(engine)
        losses = [step(engine, number) for number in range(5, 8)]
        engine.destroy()
        other = with_exact_buffer(Job(target, "fp16"), 3, BLOCK | window)
        fresh = scales_of(other)
        other.load_checkpoint(f"{place}/{dtype}")
        after, now = scales_of(other), said(other)
        for name in expected:
            if f"{name}.master" in expected:  # of bf16, too, from the copy and not from what is rounded already
                expected[name] = torch.from_numpy(expected[f"{name}.master"]).half().float().numpy()
        wrong = differences(expected, now)
        found[dtype] = before, fresh, after, losses, [step(other, number) for number in range(5, 8)], wrong
    # What does not train in fp16 needs no scale.
    for job in (Job(2), Job(1, "fp32")):
        with_exact_buffer(job, 4, BLOCK).load_checkpoint(f"{place}/fp16")
    model = deepspeed_jobs.Model(Job(0))
    sf.load(
        f"{place}/fp16/global_step5",
        {"model": model, "optimizer": torch.optim.AdamW(model.parameters())},
        only=["model", "optimizer"],
    )
    return found


@pytest.mark.parametrize(("source", "target"), [(0, 0), (0, 2), (2, 0), (3, 1)])
def test_loss_scales_come_along(ranks, tmp_path, source, target):
    for found in ranks(2)(rescaled, str(tmp_path), source, target):
        before, fresh, after, losses, later, wrong = found["fp16"]
        assert before == after != fresh
        assert wrong == []
        if source == target:
            assert losses == later
        _, fresh, after, _, _, wrong = found["bf16"]
        assert after == fresh
        assert wrong == []


def failing_on_one(rank, world, place):
    """What each call of the engine raised, on a rank that fails to save once and on one that does not."""
    os.chdir(place)
    engine = build(Job(1), extra=BLOCK)
    raised = []
    for number in range(4):
        step(engine, number)
        value = open if rank == 1 and number == 1 else rank
        raised.append(error_of(engine.save_checkpoint, "run", client_state={"value": value}))
    os.chdir("/")  # latest is written where the save was made
    raised.append(error_of(engine.destroy))
    dist.barrier()  # rank 0 writes latest
    committed = sorted(path.parent.name for path in Path(place, "run").glob("*/COMMIT"))
    return raised, Path(place, "run", "latest").read_text(), committed


def test_a_save_that_fails_on_one_rank_leaves_all_in_step(ranks, tmp_path):
    results = ranks(2)(failing_on_one, str(tmp_path))
    for raised, latest, committed in results:
        failures = [error for error in raised if error]
        assert len(failures) == 1, raised
        assert "client" in failures[0]
        assert latest == "global_step4"
        assert committed == [f"global_step{number}" for number in (1, 3, 4)]


def accumulating(rank, world, place):
    engine = build(Job(2), extra=BLOCK | {"gradient_accumulation_steps": 2})
    step(engine, 0)
    found = error_of(engine.save_checkpoint, place)
    step(engine, 1)
    engine.save_checkpoint(place)
    engine.destroy()
    return found


def test_a_save_between_micro_batches_is_refused(ranks, tmp_path):
    for found in ranks(2)(accumulating, str(tmp_path)):
        assert "after 1 of the 2 micro-batches of a step" in found


def saving_again(rank, world, place):
    """To tags of an earlier engine, with ranks that come late."""
    engine = build(Job(1), extra=BLOCK)
    for number in range(4):
        step(engine, number)
        if rank == 1:
            time.sleep(0.3)
        engine.save_checkpoint(place)
    engine.destroy()


def test_the_tags_of_an_earlier_training_are_saved_again(ranks, tmp_path):
    for _ in range(2):
        ranks(2)(saving_again, str(tmp_path))
    assert (tmp_path / "latest").read_text() == "global_step4"
    assert not list(tmp_path.glob(".*.replaced"))


def killed_again(rank, world, place):
    """Saves a tag twice; a rank is killed when the first one has been moved away."""
    engine = build(Job(1), extra=BLOCK)
    step(engine, 0)
    engine.save_checkpoint(place, tag="one")
    step(engine, 1)
    sf.save_async = lambda *args, **named: os.kill(os.getpid(), signal.SIGKILL) if rank else time.sleep(2)
    engine.save_checkpoint(place, tag="one")


def test_a_tag_that_is_saved_again_is_there_until_the_new_one_is_durable(ranks, tmp_path):
    with pytest.raises(AssertionError):
        ranks(2)(killed_again, str(tmp_path))
    assert not (tmp_path / "one" / "COMMIT").exists()
    ((_, latest, steps),) = ranks(1)(goes_on, str(tmp_path))
    assert (latest, steps) == ("one", 1)


def test_a_latest_that_cannot_be_read_is_named(tmp_path):
    tracker = FileTracker(str(tmp_path), "latest")
    assert tracker.read() is None
    (tmp_path / "latest").write_bytes(b"\xff\xfe")
    with pytest.raises(sf.Invalid, match="latest: expected a text file that names the newest checkpoint"):
        tracker.read()
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    with pytest.raises(sf.Invalid, match=r"Is a directory.*: move it away"):
        tracker.read()
