"""accelerate's ``save_state()`` and ``load_state()``, attached: what was saved goes on bit for bit."""

import os
import time
from pathlib import Path

import accelerate
import pytest
import shardfast as sf
import torch
import torch.distributed as dist
from accelerate.utils import DistributedType
from accelerate_jobs import FULL, Job, die, jobs_alone, kept, same
from shardfast.integrations import accelerate as ours
from shardfast.integrations import accelerate_places, accelerate_state, directories
from shardfast.integrations.accelerate import attach
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

job = pytest.fixture(jobs_alone)


def whole(rank, world, root, steps, options):
    job = Job(root, **options)
    losses = job.train(steps)
    return losses, job.seen, job.said()


def killed(rank, world, root, kept, options):
    """Saves after ``kept`` steps, is killed in the next save; the state of the first one is there twice."""
    job = Job(root, **options)
    job.train(kept, save_at=[kept])
    if rank == 0:
        torch.save(job.said(), f"{root}/said.pt")
    else:
        job.said()
    job.train(2)
    while not Path(root, "checkpoints", "checkpoint_0", "shardfast", "COMMIT").exists():
        time.sleep(0.01)
    job.counter.fail = die
    job.accelerator.save_state()


def resumed(rank, world, root, steps, options, place=None):
    job = Job(root, **options)
    job.accelerator.load_state(place)
    found, iteration = job.said(), job.accelerator.project_configuration.iteration
    found["random"] = torch.rand(4).tolist() if world > 2 else None
    job.data.read.clear()
    losses = job.train(steps)
    return losses, job.seen, found, job.said(), iteration, job.data.read


def check_killed(ranks, tmp_path, options, kept=5, steps=30, worlds=(1, 4), other=None):
    """30 steps are two epochs of 12 on two ranks, and a half."""
    root = str(tmp_path / "run")
    expected = ranks(2)(whole, str(tmp_path / "whole"), steps, options)
    with pytest.raises(AssertionError, match="died without a word"):
        ranks(2)(killed, root, kept, options)
    assert (tmp_path / "run/checkpoints/checkpoint_1/shardfast").is_dir()
    again = ranks(2)(resumed, root, steps - kept, {**options, "seed": 7})
    saved = torch.load(f"{root}/said.pt")
    for (losses, seen, said), (more, rest, found, ended, iteration, read) in zip(expected, again, strict=True):
        found.pop("random")
        assert same(found, saved)
        assert more == losses[kept:] and rest == seen[len(seen) - len(rest) :] and same(ended, said)
        assert iteration == 1
        is_reader = not options.get("workers") and not options.get("dispatch_batches")
        assert not is_reader or read[: len(rest)] == rest  # no old sample is read
    for world in worlds:
        there = ranks(world)(resumed, root, 3, {**options, "seed": 7, **(other or {})})
        drawn = [found.pop("random") for _, _, found, *_ in there]
        assert world < 4 or all(drawn[0] != other for other in drawn[1:])  # dropout differs
        for more, _, found, *_ in there:
            assert same(found, saved)
            assert all(map(torch.isfinite, map(torch.tensor, more)))


@pytest.mark.smoke
def test_a_training_that_is_killed_in_a_save_goes_on(ranks, tmp_path):
    check_killed(ranks, tmp_path, {}, worlds=())


@pytest.mark.parametrize(
    ("kept", "options"),
    [
        (5, {}),
        (12, {}),  # in the last round of an epoch
        (18, {"accumulated": 2}),
        (14, {"workers": 2}),
        (5, {"kind": "fsdp"}),
        (17, {"kind": "fsdp", "split_batches": True, "batch": 4}),
        (12, {"dispatch_batches": True}),
        (17, {"dispatch_batches": True}),
    ],
    ids=str,
)
def test_it_goes_on_in_any_number_of_processes(ranks, tmp_path, kept, options):
    check_killed(ranks, tmp_path, options, kept)


def carries_on(rank, world, root, options):
    job = Job(root, **options)
    job.model.eval()  # nothing random
    if options["attached"]:
        job.accelerator.load_state()
        return job.train(6), None
    said = torch.load(f"{root}/said.pt")
    set_model_state_dict(job.model, said["model"], options=FULL)
    set_optimizer_state_dict(job.model, job.optimizer.optimizer, said["torch"], options=FULL)
    job.schedule.load_state_dict(said["scheduler"])
    rest = job.accelerator.skip_first_batches(job.loader, 5)
    return job.train(6, first=rest), None


def gives_full(rank, world, root, options):
    job = Job(root, **options)
    job.train(5)
    job.accelerator.save_state()
    state = get_optimizer_state_dict(job.model, job.optimizer.optimizer, options=FULL)
    said = {**job.said(), "torch": state, "scheduler": job.schedule.state_dict()}
    if rank == 0:
        torch.save(said, f"{root}/said.pt")
    job.wait()


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_losses_elsewhere_are_those_of_full_state_dicts(ranks, tmp_path, kind):
    """On one process with the batches of both: the same samples in each step."""
    root, options = str(tmp_path), {"data_seed": 3, "kind": kind}
    ranks(2)(gives_full, root, options)
    one = {"data_seed": 3, "batch": 4, "seed": 7}
    ((found, _),) = ranks(1)(carries_on, root, {**one, "attached": True})
    ((expected, _),) = ranks(1)(carries_on, root, {**one, "attached": False, "stateful": False})
    assert found == expected


# One process


def test_one_process_goes_on(job, tmp_path):
    first = job()
    losses = first.train(60, save_at=[5, 24, 50])
    first.wait()
    for place, at in (("checkpoint_0", 5), ("checkpoint_1", 24), ("checkpoint_2", 50)):
        again = job(seed=7)
        again.accelerator.load_state(tmp_path / "checkpoints" / place)
        assert again.train(60 - at) == losses[at:] and again.seen == first.seen[2 * at :]
        assert again.accelerator.project_configuration.iteration == int(place[-1]) + 1


def test_a_place_that_cannot_be_made_is_named(job, tmp_path):
    (tmp_path / "file").write_text("")
    one = job(automatic=False)
    one.accelerator.save_state(tmp_path / "file" / "one")
    with pytest.raises(sf.Error, match="file: expected a directory"):
        one.wait()


# Directories


def test_a_limit_removes_after_the_newer_one_is_durable(job, tmp_path, monkeypatch):
    one, seen = job(limit=2), []
    remove = directories.remove

    def noting(these):
        these = list(these)
        newest = max(tmp_path.glob("checkpoints/*"), key=lambda path: int(path.name[11:]))
        seen.append(([path.name for path in these], directories.is_committed(newest)))
        remove(these)

    monkeypatch.setattr(directories, "remove", noting)
    for _ in range(4):
        one.accelerator.save_state()
        one.accelerator.load_state()  # waits
    assert kept(tmp_path) == ["checkpoint_2", "checkpoint_3"]
    assert [names for names, _ in seen] == [[], [], ["checkpoint_0"], ["checkpoint_1"]]
    assert all(is_durable for _, is_durable in seen)


def test_a_limit_leaves_the_last_good_one_where_a_save_fails(job, tmp_path):
    one = job(limit=1)
    one.accelerator.save_state()
    one.accelerator.load_state()
    one.counter.fail = lambda: 1 / 0
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            one.accelerator.save_state()
    assert kept(tmp_path) == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]
    one.counter.fail = None
    again = job(limit=1)
    again.accelerator.load_state()
    assert again.accelerator.project_configuration.iteration == 1
    again.accelerator.save_state()  # over what was cut off
    again.accelerator.project_configuration.iteration = 3
    again.accelerator.save_state()
    again.wait()
    assert kept(tmp_path) == ["checkpoint_3"]


def test_a_limit_leaves_what_is_no_checkpoint(job, tmp_path):
    (tmp_path / "checkpoints" / "notes_1").mkdir(parents=True)
    (tmp_path / "checkpoints" / "checkpoint_9" / "shardfast").mkdir(parents=True)  # another job's
    one = job(limit=0)
    for _ in range(3):
        one.accelerator.save_state()
    one.wait()
    assert kept(tmp_path) == ["checkpoint_2", "checkpoint_9", "notes_1"]


def test_a_saved_number_is_not_saved_again(job, tmp_path):
    one = job()
    one.accelerator.save_state()
    one.accelerator.project_configuration.iteration = 0
    with pytest.raises(
        ValueError, match=r"checkpoint_0 already exists. Please manually override `self.save_iteration`"
    ):
        one.accelerator.save_state()


def test_half_written_directories_are_passed_over(job, tmp_path, caplog):
    one = job()
    one.train(2, save_at=[1, 2])
    one.wait()
    (tmp_path / "checkpoints/checkpoint_1/shardfast/COMMIT").unlink()
    again = job(seed=7)
    again.accelerator.load_state()
    assert again.counter.steps == 1
    assert "checkpoint_1 was not saved to its end: it is passed over" in caplog.text
    with pytest.raises(sf.NotFound, match="checkpoint_1 was not saved to its end: load another directory"):
        again.accelerator.load_state(tmp_path / "checkpoints/checkpoint_1")
    again.train(1)
    again.accelerator.save_state()  # takes its place
    again.wait()
    assert directories.is_committed(tmp_path / "checkpoints/checkpoint_1")
    (tmp_path / "checkpoints/checkpoint_1/shardfast/COMMIT").unlink()
    (tmp_path / "checkpoints/checkpoint_0/shardfast/COMMIT").unlink()
    with pytest.raises(sf.NotFound, match="no checkpoint that was saved to its end, of 2"):
        job().accelerator.load_state()


def test_nothing_to_load_is_named(job, tmp_path):
    one = job()
    with pytest.raises(sf.NotFound, match="no checkpoint that was saved to its end, of 0"):
        one.accelerator.load_state()
    with pytest.raises(ValueError, match="folder does not exist"):
        one.accelerator.load_state(tmp_path / "none")
    one = job(automatic=False)
    with pytest.raises(ValueError, match="automatic checkpoint naming is disabled"):
        one.accelerator.load_state()
    for wrong in (None, ""):
        with pytest.raises(sf.Invalid, match="save_state: expected a directory"):
            one.accelerator.save_state(wrong)
    with pytest.raises(sf.Unsupported, match="use a Checkpointer to save to an object store"):
        one.accelerator.save_state("s3://bucket/one")
    one.accelerator.project_configuration.automatic_checkpoint_naming = True
    one.accelerator.project_configuration.project_dir = None
    with pytest.raises(sf.Invalid, match="without a project_dir"):
        one.accelerator.save_state()


def saves_again(rank, world, place, is_killed):
    job = Job(place, automatic=False)
    ours.replace = lambda directory: (time.sleep(rank == 0), accelerate_places.replace(directory))
    for number in range(3):
        job.train(1)
        if is_killed and number == 2:
            job.accelerator.load_state(place)  # waits
            sf.save_async = lambda *args, **named: die() if rank else time.sleep(2)
        assert job.accelerator.save_state(place) == Path(place)
    job.wait()


def test_one_directory_again_and_again(ranks, tmp_path, job):
    place = str(tmp_path / "one")
    ranks(2)(saves_again, place, False)
    assert sorted(os.listdir(place)) == ["shardfast"]
    with pytest.raises(AssertionError):
        ranks(2)(saves_again, place, True)
    assert sorted(os.listdir(place)) == [".shardfast.replaced", "shardfast"]
    one = job(automatic=False)
    one.accelerator.load_state(place)
    assert one.counter.steps == 2
    one.accelerator.save_state(place)
    one.wait()
    assert sorted(os.listdir(place)) == ["shardfast"]


def test_directories_that_accelerate_wrote(job, tmp_path):
    theirs = job(attached=False)
    theirs.train(3)
    theirs.accelerator.save_state()
    one = job(seed=7, limit=2)
    one.accelerator.load_state(load_kwargs={"weights_only": False})
    assert same(one.said(), theirs.said())
    one.accelerator.project_configuration.iteration = 1
    one.train(1)
    for _ in range(2):
        one.accelerator.save_state()
    again = job(seed=8)
    one.wait()
    again.accelerator.load_state()
    assert same(again.said(), one.said())
    assert kept(tmp_path) == ["checkpoint_1", "checkpoint_2"]


# Hooks and options


def test_hooks_are_called(job, tmp_path):
    one, seen = job(), []

    def saving(models, weights, place):
        assert models == one.accelerator._models and len(weights) == 1
        assert same(weights.pop(), dict(models[0].state_dict()))
        Path(place, "config.json").write_text("{}")
        seen.append((place, directories.is_committed(Path(place))))

    handle = one.accelerator.register_save_state_pre_hook(saving)
    one.train(2, save_at=[1])
    handle.remove()
    one.accelerator.save_state()
    place = str(tmp_path / "checkpoints/checkpoint_0")
    assert seen == [(place, False)]

    again, seen = job(seed=7), []
    fresh = {name: value.clone() for name, value in again.model.state_dict().items()}

    def loading(models, place):
        seen.append((list(models), place, again.counter.steps))
        models.clear()

    handle = again.accelerator.register_load_state_pre_hook(loading)
    one.wait()
    again.accelerator.load_state(place)
    assert seen == [([again.model], place, 0)] and again.counter.steps == 1
    assert same(fresh, dict(again.model.state_dict()))  # the hook's to load
    handle.remove()
    again.accelerator.load_state(place)
    assert not same(fresh, dict(again.model.state_dict()))


def hooked(rank, world, root):
    job, seen = Job(root, kind="fsdp"), []
    job.accelerator.register_save_state_pre_hook(
        lambda models, weights, place: seen.append((len(models), weights, place))
    )
    job.accelerator.register_load_state_pre_hook(lambda models, place: seen.append((models, job.counter.steps)))
    job.train(2, save_at=[1])
    job.accelerator.load_state()
    job.wait()
    return seen


def test_hooks_of_fsdp_get_what_accelerate_gives_them(ranks, tmp_path):
    place = f"{tmp_path}/checkpoints/checkpoint_0"
    assert ranks(2)(hooked, str(tmp_path)) == [[(1, [], place), ([], 1)]] * 2  # models are loaded then


class Modes(torch.optim.AdamW):
    def eval(self):
        pass


def test_an_optimizer_whose_modes_write_parameters_is_copied_in_the_call(job):
    one = job(attached=False)
    plain = one.optimizer.optimizer
    assert accelerate_state._stepping(one.optimizer) is plain
    other = one.accelerator.prepare(Modes(one.model.parameters()))
    assert accelerate_state._stepping(other) is other


def test_options(job, tmp_path, caplog):
    one = job()
    one.train(1)
    with pytest.raises(sf.Unsupported, match=r"save_state\(tag=…\): only DeepSpeed has options"):
        one.accelerator.save_state(tag="x")
    assert not (tmp_path / "checkpoints").exists()
    one.accelerator.save_state(safe_serialization=False)
    one.wait()
    again = job(seed=7)
    with pytest.raises(sf.Invalid, match=r"load_state\(encoding, prefix, map_location=…\)"):
        again.accelerator.load_state(load_kwargs={"encoding": 1}, prefix=2, map_location="cuda:1")
    assert again.counter.steps == 0
    again.accelerator.load_state(load_kwargs={"weights_only": True}, map_location="on_device")
    assert same(again.said(), one.said())


def test_strict_is_for_models(job):
    one = job()
    one.train(1, save_at=[1])
    one.wait()
    again = job(seed=7)
    again.model.register_buffer("more", torch.ones(1))
    with pytest.raises(sf.Invalid, match="model/more"):
        again.accelerator.load_state()
    again.accelerator.load_state(strict=False)
    assert again.counter.steps == 1 and again.model.more == 1
    other = job(seed=7)
    other.accelerator._schedulers.append(other.schedule)
    with pytest.raises(sf.Invalid, match=r"strict=False is for models, .* scheduler_1/value"):
        other.accelerator.load_state(strict=False)


def test_registered_objects_are_as_many(job):
    one = job()
    more = torch.nn.Linear(2, 2)
    one.accelerator.register_for_checkpointing(more)
    one.accelerator.save_state()
    one.wait()
    again = job()
    with pytest.raises(sf.Invalid, match="has 2 registered objects, here are 1"):
        again.accelerator.load_state()
    other = torch.nn.Linear(2, 2)
    again.accelerator.register_for_checkpointing(other)
    again.accelerator.load_state()
    assert torch.equal(more.weight, other.weight)


class Odd:
    def state_dict(self):
        return {"kind": Odd()}

    def load_state_dict(self, state):
        self.state = state


def test_values_without_a_form_as_data_need_pickle(job):
    one = job()
    one.accelerator.register_for_checkpointing(Odd())
    with pytest.raises(sf.Invalid, match="custom"):
        one.accelerator.save_state()
    one, other = job(attached=False), job(attached=False)
    for each in (one, other):
        attach(each.accelerator, pickle=True)
        each.accelerator.register_for_checkpointing(Odd())
    one.accelerator.project_configuration.iteration = 1
    one.accelerator.save_state()
    one.wait()
    other.accelerator.load_state()
    assert isinstance(other.accelerator._custom_objects[1].state["kind"], Odd)


def test_a_job_that_only_evaluates_loads_its_model(job, caplog):
    one = job()
    one.train(1, save_at=[1])
    one.wait()
    other = job(seed=7)
    other.accelerator._optimizers, other.accelerator._schedulers = [], []
    other.accelerator._dataloaders = []
    other.accelerator.load_state()
    assert same(dict(other.model.state_dict()), dict(one.model.state_dict()))
    assert "nothing of that name is prepared here: dataloader, optimizer, scheduler" in caplog.text


def test_a_gradient_scaler(job):
    one = job()
    one.accelerator.save_state()
    one.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    one.accelerator.scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    one.accelerator.save_state()
    one.wait()
    again = job()
    again.accelerator.load_state()  # bf16 now
    again.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    again.accelerator.load_state()
    assert again.accelerator.scaler.get_scale() == 8.0
    with pytest.raises(sf.Invalid, match="no state of a gradient scaler"):
        again.accelerator.load_state(again.accelerator.project_dir + "/checkpoints/checkpoint_0")


def test_the_step_of_accumulation_and_gradients_that_are_lost(job, caplog):
    one = job(accumulated=4)
    one.train(6, save_at=[4, 6])
    assert caplog.text.count("their gradients are not saved") == 1
    one.wait()
    again = job(accumulated=4)
    again.accelerator.load_state()
    assert again.accelerator.step == 6


# Failures


class Full:
    """A save whose disk is full."""

    def committed(self):
        raise sf.Exhausted("no space left")


@pytest.mark.parametrize("call", ["save_state", "load_state", "end_training"])
def test_a_failure_is_raised_once_by_the_next_call(job, tmp_path, monkeypatch, caplog, call):
    one = job()
    one.train(1, save_at=[1])
    one.wait()
    with monkeypatch.context() as patched:
        patched.setattr(sf, "save_async", lambda *args, **named: Full())
        one.accelerator.save_state()
    while "a save failed in the background: no space left" not in caplog.text:
        time.sleep(0.01)
    with pytest.raises(sf.Exhausted):
        getattr(one.accelerator, call)()
    one.accelerator.save_state()
    one.wait()
    last = "checkpoint_3" if call == "save_state" else "checkpoint_2"  # it has begun one nevertheless
    assert kept(tmp_path)[-1] == last
    again = job(seed=7)
    again.accelerator.load_state()
    assert same(again.said(), one.said())


def test_saves_run_no_collective(ranks, tmp_path):
    ranks(2)(saves_alone, str(tmp_path))


def saves_alone(rank, world, root):
    job = Job(root)
    job.train(1)
    calls = []
    job.accelerator.wait_for_everyone = lambda: calls.append(1)  # accelerate's own
    dist.barrier()
    kept = dist.barrier, dist.broadcast, dist.all_reduce, dist.broadcast_object_list, dist.all_gather
    for call in kept:
        setattr(dist, call.__name__, None)
    job.accelerator.save_state()
    job.accelerator.project_configuration.automatic_checkpoint_naming = False
    for _ in range(2):
        job.accelerator.save_state(f"{root}/again")
    for call in kept:
        setattr(dist, call.__name__, call)
    job.wait()
    assert calls == [1]


# Attaching


def test_attach(job, monkeypatch, caplog):
    one = job()
    with pytest.raises(sf.Invalid, match="attached already"):
        attach(one.accelerator)
    with pytest.raises(sf.Invalid, match=r"expected an accelerate.Accelerator"):
        attach(one.model)
    other = job(attached=False)
    assert "save_state" not in vars(other.accelerator)  # the class is as it was
    other.train(1)
    with pytest.raises(sf.Invalid, match="has begun to train"):
        attach(other.accelerator)
    other = job(attached=False)
    rows = iter(other.loader)
    next(rows)
    with pytest.raises(sf.Invalid, match="has begun to train"):
        attach(other.accelerator)
    assert "save_state" not in vars(other.accelerator)
    monkeypatch.setattr(accelerate, "__version__", "1.16.0")
    job()
    assert "accelerate 1.16.0: shardfast was tried with 1.15.0" in caplog.text
    monkeypatch.setattr(accelerate, "__version__", "1.13")
    job()
    for old in ("1.12.0", "1.12.0.dev0", "0.34.2"):
        monkeypatch.setattr(accelerate, "__version__", old)
        with pytest.raises(sf.Unsupported, match=f"accelerate {old}: 1.13.0 is the oldest"):
            job()


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (DistributedType.DEEPSPEED, '"shardfast": {} .*deepspeed.md'),
        (DistributedType.MEGATRON_LM, "Megatron-LM plugin"),
    ],
)
def test_other_engines_are_refused(job, kind, found):
    one = job(attached=False)
    one.accelerator.project_configuration.save_on_each_node = True
    one.accelerator.state._shared_state["distributed_type"] = kind
    try:
        with pytest.raises(sf.Unsupported, match=f"(?s){found}.*save_on_each_node=True"):
            attach(one.accelerator)
    finally:
        one.accelerator.state._shared_state["distributed_type"] = DistributedType.NO
