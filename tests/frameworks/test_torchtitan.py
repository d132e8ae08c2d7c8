"""torchtitan's own ``Trainer`` with ``Shardfast`` as its checkpoint manager, and the manager alone.

torchtitan's trainer asks for CUDA. To run it on a CPU, a test's process hides other devices before the import. It then
replaces what torchtitan calls of a device: memory figures for metrics, averages (by sums), barriers that name a device.
"""

import collections
import functools
import importlib.metadata
import logging
import math
import os
import signal
import sys
import threading
import types
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import shardfast as sf
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import scaled_dot_product_attention

VOCABULARY, LENGTH, DOCUMENTS = 2048, 16, 64


class Documents(torch.utils.data.IterableDataset):
    """Documents of a data rank, each read once; its units are those that are left."""

    def __init__(self, rank, world, has_units):
        self.left, self.has_units, self.is_shared = list(range(rank, DOCUMENTS, world)), has_units, False

    def _share(self):
        worker = torch.utils.data.get_worker_info()
        if worker is not None and not self.is_shared:
            self.left, self.is_shared = self.left[worker.id :: worker.num_workers], True

    def __iter__(self):
        self._share()
        while self.left:
            number = self.left.pop(0)
            generator = torch.Generator().manual_seed(number)
            tokens = torch.randint(0, VOCABULARY, (LENGTH + 1,), generator=generator)
            tokens[0] = number  # says which one it is
            yield {"input": tokens[:-1], "positions": torch.arange(LENGTH)}, tokens[1:]

    def state_dict(self):
        self._share()
        if not self.has_units:
            return {"left": self.left}
        return {"replicated": None, "units": [{"id": number} for number in self.left]}

    def load_state_dict(self, state):
        self.is_shared = True
        self.left = [unit["id"] for unit in state["units"]] if self.has_units else state["left"]


@functools.cache
def titan():
    """torchtitan on a CPU, in this process from now on, with data and a tokenizer of ours."""
    warnings.filterwarnings("ignore")
    torch._utils._get_available_device_type = lambda: "cpu"
    device = dict.fromkeys(("reset_peak_memory_stats", "empty_cache"))
    device |= {"max_memory_allocated": 0, "memory_allocated": 0, "memory_stats": collections.defaultdict(int)}
    device |= {
        "get_device_name": "cpu",
        "get_device_properties": types.SimpleNamespace(total_memory=1 << 34, name="cpu"),
    }
    for name, value in device.items():
        setattr(torch.cpu, name, lambda *args, _value=value, **named: _value)
    barrier = dist.barrier
    dist.barrier = lambda group=None, async_op=False, device_ids=None: barrier(group, async_op)

    from torch.distributed.fsdp import FSDPModule
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.models.common.attention import FlexAttention
    from torchtitan.models.common.config_utils import decoder_vocab_size
    from torchtitan.models.llama3 import model_registry
    from torchtitan.trainer import Trainer

    divide = FSDPModule.set_gradient_divide_factor

    def divide_by_sums(self, factor):
        self.set_force_sum_reduction_for_comms(True)
        divide(self, factor)

    def attention(q, k, v, *, enable_gqa=False, scale=None, **others):
        q = nn.functional.dropout(q, 0.1)  # so that random states matter
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa), None

    FSDPModule.set_gradient_divide_factor = divide_by_sums
    FlexAttention.compiled_flex_attn = staticmethod(attention)

    class Loader(ParallelAwareDataloader):
        @dataclass(kw_only=True, slots=True)
        class Config(ParallelAwareDataloader.Config):
            has_units: bool = True

        def __init__(self, config, *, dp_world_size, dp_rank, local_batch_size, snapshot_every_n_steps=None, **others):
            super().__init__(
                Documents(dp_rank, dp_world_size, config.has_units),
                dp_rank=dp_rank,
                dp_world_size=dp_world_size,
                batch_size=local_batch_size,
                num_workers=config.num_workers,
                snapshot_every_n_steps=snapshot_every_n_steps or 1,
            )

    class Tokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config, *, tokenizer_path=None, **others):
            super().__init__()
            self.eos_id = 0

        def encode(self, *args, **named):
            return [1]

        def decode(self, *args, **named):
            return ""

        def get_vocab_size(self):
            return VOCABULARY

    def build(place, steps, checkpoint, *, has_units=True, workers=0, batch=2, **parallelism):
        spec = model_registry("debugmodel")
        del spec.model.layers[1:]
        return Trainer.Config(
            loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec)),
            model_spec=spec,
            tokenizer=Tokenizer.Config(),
            dump_folder=place,
            optimizer=default_adamw(lr=8e-4),
            lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, total_steps=100),
            training=TrainingConfig(local_batch_size=batch, seq_len=LENGTH, steps=steps, disable_cuda_graphs=True),
            dataloader=Loader.Config(has_units=has_units, num_workers=workers),
            metrics=MetricsProcessor.Config(log_freq=1),
            parallelism=ParallelismConfig(**parallelism),
            checkpoint=checkpoint,
        ).build()

    return build


if Path(sys.argv[0]).name == "rank_server.py":
    titan()  # once for all ranks, which are forked from here; the process of the tests has its devices


def environment(rank, world):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}


def options(**more):
    from shardfast.integrations.torchtitan import Shardfast

    return Shardfast.Config(**{"enable": True, "interval": 2, "last_save_model_only": False, **more})


def whole(trainer):
    """What the training holds."""
    (model,) = trainer.model_parts
    tensors = dict(model.named_parameters())
    for one in trainer.optimizers.optimizers:
        for group in one.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                tensors |= {f"{name}.{part}": value for part, value in one.state[parameter].items()}
    whole = {name: one.full_tensor() if hasattr(one, "full_tensor") else one for name, one in tensors.items()}
    tensors = {name: one.detach().clone() for name, one in whole.items()}
    tensors["rates"] = torch.tensor(
        [group["lr"] for one in trainer.optimizers.optimizers for group in one.param_groups]
    )
    return tensors


def train(rank, world, place, steps, kill_at, more, given):
    """Losses by step, the documents read, what was held when the training began, and tokens seen."""
    environment(rank, world)
    build = titan()
    trainer = build(place, steps, options(**more), **given)
    losses, read, held = [], [], {}
    log, step = trainer.metrics_processor.log, trainer.train_step
    load, save = trainer.checkpointer.load, trainer.checkpointer.save

    def logged(number, average, *args, **named):
        losses.append((number, float(average)))
        return log(number, average, *args, **named)

    def loaded(**named):
        result = load(**named)
        if trainer.step:
            held.update(whole(trainer))
        held["tokens"] = trainer.ntokens_seen
        return result

    def saved(number, **named):
        result = save(number, **named)
        if number == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    generate = trainer.batch_generator

    def noted(loader):
        for batch in generate(loader):
            read.extend(batch[0]["input"][:, 0].tolist())
            yield batch

    trainer.metrics_processor.log, trainer.batch_generator = logged, noted
    trainer.checkpointer.load, trainer.checkpointer.save = loaded, saved
    trainer.train_step = step
    trainer.train()
    trainer.close()
    dist.barrier()
    return losses, read, held, whole(trainer)


def differing(one, other):
    return [name for name in one.keys() & other.keys() if name != "tokens" and not torch.equal(one[name], other[name])]


def test_it_goes_on_after_a_kill_in_a_save(ranks, tmp_path):
    straight = ranks(2)(train, str(tmp_path / "whole"), 7, 0, {}, {})
    with pytest.raises(AssertionError, match="died without a word"):
        ranks(2)(train, str(tmp_path / "run"), 7, 4, {}, {})
    resumed = ranks(2)(train, str(tmp_path / "run"), 7, 0, {}, {})
    for expected, found in zip(straight, resumed, strict=True):
        count = len(found[0])
        assert 0 < count < 7
        assert found[0] == expected[0][-count:]
        assert found[1] == expected[1][-2 * count :]
        assert differing(found[3], expected[3]) == []
    assert found[2]["tokens"] == (7 - count) * 2 * LENGTH


@pytest.mark.parametrize(("world", "more"), [(1, {}), (4, {}), (4, {"tensor_parallel_degree": 2})])
def test_it_goes_on_on_another_number_of_ranks(ranks, tmp_path, world, more):
    first = ranks(2)(train, str(tmp_path), 4, 0, {}, {})
    found = ranks(world)(train, str(tmp_path), 6, 0, {}, {"batch": 1, **more})
    for losses, _, held, _ in found:
        assert differing(held, first[0][3]) == []
        assert [step for step, _ in losses] == [5, 6]
        assert all(math.isfinite(loss) for _, loss in losses)
    pieces = world // more.get("tensor_parallel_degree", 1)
    seen = {held["tokens"] for *_, held, _ in found}
    assert seen == {2 * 4 * 2 * LENGTH // pieces}
    read = [number for rank in first for number in rank[1]]
    then = [number for rank in found for number in rank[1]]
    assert not set(read) & set(then)
    assert len(set(then)) == 2 * pieces


def test_workers_go_on(ranks, tmp_path):
    first = ranks(2)(train, str(tmp_path), 4, 0, {}, {"workers": 2})
    then = ranks(2)(train, str(tmp_path), 6, 0, {}, {"workers": 1})
    read = [number for rank in (*first, *then) for number in rank[1]]
    assert len(set(read)) == len(read) == 2 * 6 * 2


def refused(rank, world, place):
    environment(rank, world)
    build = titan()
    trainer = build(place, 4, options(), has_units=False)
    with pytest.raises(sf.Invalid) as error:
        trainer.train()
    excluded = build(place, 3, options(exclude_from_loading=["dataloader"]), has_units=False)
    excluded.train()
    excluded.close()
    return str(error.value), excluded.step


def test_a_loader_without_units_is_refused_on_another_number_of_ranks(ranks, tmp_path):
    ranks(2)(train, str(tmp_path), 2, 0, {}, {"has_units": False})
    ((text, step),) = ranks(1)(refused, str(tmp_path))
    assert (
        "dataloader was saved in 2 pieces, this job has 1, and the state of Documents" in " ".join(text.split()) or text
    )
    assert step == 3


def old(rank, world, place):
    environment(rank, world)
    build = titan()
    from torchtitan.components.checkpointer import CheckpointManager

    checkpoint = CheckpointManager.Config(enable=True, interval=2, last_save_model_only=False)
    trainer = build(place, 2, checkpoint)
    trainer.train()
    trainer.close()
    return whole(trainer)


def test_what_torchtitan_wrote_is_loaded_by_torchtitan(ranks, tmp_path):
    (first,) = ranks(1)(old, str(tmp_path))
    ((_, read, held, _),) = ranks(1)(train, str(tmp_path), 4, 0, {}, {})
    assert differing(held, first) == []
    assert read == [4, 5, 6, 7]
    names = sorted(path.name for path in (tmp_path / "checkpoint").iterdir())
    assert names == ["step-2", "step-4"]
    assert (tmp_path / "checkpoint" / "step-4" / "shardfast" / "COMMIT").exists()


def hugging_face(rank, world, place):
    environment(rank, world)
    build = titan()
    more = {"last_save_model_only": True, "last_save_in_hf": True}
    trainer = build(f"{place}/first", 2, options(**more))
    trainer.train()
    trainer.close()
    initial = f"{place}/first/checkpoint/step-2"
    other = build(f"{place}/other", 1, options(load_only=True, initial_load_path=initial, initial_load_in_hf=True))
    other.checkpointer.load(step=-1)
    return whole(trainer), whole(other), sorted(os.listdir(initial))


def test_the_last_save_in_the_format_of_hugging_face(ranks, tmp_path):
    ((first, then, files),) = ranks(1)(hugging_face, str(tmp_path))
    models = {name for name in first if name.endswith(".weight")}
    assert models
    assert all(torch.equal(first[name], then[name]) for name in models)
    assert any(name.endswith(".safetensors") for name in files)


# The manager alone


class State:
    """``train_state``."""

    def __init__(self):
        self.step = 0

    def state_dict(self):
        return {"step": self.step, "ntokens_seen": 10 * self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


class Job:
    """A model, optimizers and a manager of ours, in one process."""

    def __init__(self, place, seed=0, data=None, **more):
        from torchtitan.components.dataloader import ParallelAwareDataloader
        from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        if data is not None:
            fully_shard(self.model)
        self.optimizers = default_adamw(lr=0.1).build(model_parts=[self.model])
        schedule = LRSchedulersContainer.Config(warmup_steps=2, total_steps=100)
        self.schedulers = schedule.build(optimizers=self.optimizers, training_steps=100)
        self.state = State()
        rank, world = data or (0, 1)
        documents = Documents(rank, world, True)
        self.loader = ParallelAwareDataloader(documents, dp_rank=rank, dp_world_size=world, batch_size=1)
        self.manager = options(**more).build(
            dataloader=self.loader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self.state},
            sd_adapter=None,
            base_folder=str(place),
        )

    def steps(self, until, last=None):
        while self.state.step < until:
            self.state.step += 1
            self.model(torch.ones(3, 4)).square().mean().backward()
            self.manager.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedulers.step()
            self.optimizers.zero_grad()
            self.manager.save(self.state.step, last_step=self.state.step == last)
        return self

    def closed(self):
        self.manager.close()
        return self


def alone(rank, world, place, until, kill_at):
    """The losses of a training by the manager, without torchtitan's loop."""
    job = Job(place, seed=0 if kill_at else 1, data=(rank, world))
    torch.manual_seed(rank)
    job.manager.load()
    losses, batches = [], iter(job.loader)
    while job.state.step < until:
        job.state.step += 1
        inputs = torch.cat([next(batches)[0]["input"][:, :4].float() / VOCABULARY for _ in range(2)])
        loss = nn.functional.dropout(job.model(inputs), 0.2).square().mean()
        loss.backward()
        job.manager.maybe_wait_for_staging()
        job.optimizers.step()
        job.schedulers.step()
        job.optimizers.zero_grad()
        losses.append(loss.item())
        job.manager.save(job.state.step)
        if job.state.step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
    job.closed()
    dist.barrier()
    return losses


@pytest.mark.smoke
def test_the_manager_goes_on_after_a_kill_in_a_save(ranks, tmp_path):
    straight = ranks(2)(alone, str(tmp_path / "whole"), 9, 99)
    with pytest.raises(AssertionError, match="died without a word"):
        ranks(2)(alone, str(tmp_path / "run"), 9, 6)
    resumed = ranks(2)(alone, str(tmp_path / "run"), 9, 0)
    for expected, found in zip(straight, resumed, strict=True):
        assert 0 < len(found) < 9
        assert found == expected[-len(found) :]


def there(place):
    return sorted((path.name for path in (Path(place) / "checkpoint").iterdir()), key=lambda name: (len(name), name))


def test_what_is_due_is_saved(tmp_path):
    Job(tmp_path, enable_first_step_checkpoint=True, interval=3).steps(5, last=5).closed()
    assert there(tmp_path) == ["step-1", "step-3", "step-5"]
    Job(tmp_path / "no", load_only=True).steps(4, last=4).closed()
    assert not (tmp_path / "no").exists()
    off = Job(tmp_path / "off", enable=False).steps(2).closed()
    assert off.manager.load() is False


def test_all_of_it_comes_back(tmp_path):
    first = Job(tmp_path).steps(4).closed()
    other = Job(tmp_path, seed=1)
    assert other.manager.load()
    assert other.state.step == 4
    first.manager.close()
    first.manager.enable = other.manager.enable = False
    first.steps(6), other.steps(6)
    for one, two in zip(first.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_step_is_chosen(tmp_path):
    Job(tmp_path).steps(6).closed()
    other = Job(tmp_path, seed=1)
    assert other.manager.load(step=2)
    assert other.state.step == 2
    with pytest.raises(sf.NotFound, match="step-3: there is no such directory"):
        other.manager.load(step=3)


def test_what_is_half_written_is_passed_over(tmp_path, caplog):
    Job(tmp_path).steps(6).closed()
    (tmp_path / "checkpoint" / "step-6" / "shardfast" / "COMMIT").unlink()
    other = Job(tmp_path, seed=1)
    with caplog.at_level(logging.WARNING, logger="shardfast"):
        assert other.manager.load()
    assert other.state.step == 4
    assert "step-6 was not saved to its end" in caplog.text
    with pytest.raises(sf.NotFound, match="was not saved to its end: load another step"):
        other.manager.load(step=6)
    other.steps(6).closed()
    assert Job(tmp_path).manager.load(step=6)


def test_the_model_alone_at_the_end(tmp_path):
    first = Job(tmp_path, last_save_model_only=True, export_dtype="bfloat16").steps(4, last=4).closed()
    with sf.mapped(tmp_path / "checkpoint" / "step-4" / "shardfast") as checkpoint:
        assert {str(checkpoint[name].dtype) for name in checkpoint} == {"bfloat16"} or all(
            name.startswith("model/") for name in checkpoint
        )
    with pytest.raises(sf.Invalid, match="step-4/shardfast has the model alone"):
        Job(tmp_path).manager.load()
    other = Job(tmp_path / "other", seed=1, initial_load_path=str(tmp_path / "checkpoint" / "step-4"))
    assert other.manager.load()
    assert other.state.step == 0
    for one, two in zip(first.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(one.to(torch.bfloat16).float(), two)


def test_another_trainings_state_is_the_beginning(tmp_path):
    Job(tmp_path).steps(4).closed()
    initial = str(tmp_path / "checkpoint" / "step-4")
    one = Job(tmp_path / "one", seed=1, initial_load_path=initial)
    assert one.manager.load()
    assert one.state.step == 0
    two = Job(tmp_path / "two", seed=1, initial_load_path=initial + "/shardfast", initial_load_model_only=False)
    assert two.manager.load()
    assert two.state.step == 4
    two.steps(6).closed()
    again = Job(tmp_path / "two", seed=1, initial_load_path=initial)
    assert again.manager.load()
    assert again.state.step == 6  # what is in the folder goes before it
    assert Job(tmp_path / "fresh").manager.load() is False


def test_a_seed_is_a_model(tmp_path):
    seed = Job(tmp_path, last_save_model_only=True)
    seed.manager.save(0, last_step=True)
    seed.closed()
    other = Job(tmp_path, seed=1)
    assert other.manager.load()
    assert torch.equal(seed.model[0].weight, other.model[0].weight)


def test_what_is_excluded_stays(tmp_path):
    Job(tmp_path).steps(4).closed()
    other = Job(tmp_path, seed=1, exclude_from_loading=["lr_scheduler", "train_state"])
    assert other.manager.load()
    assert other.state.step == 0
    assert other.schedulers.schedulers[0].last_epoch == 0
    with pytest.raises(sf.Invalid, match=r"exclude_from_loading: \['sched'\]: expected some of"):
        Job(tmp_path, exclude_from_loading=["sched"]).manager.load()


def test_old_ones_go_when_a_newer_one_is_durable(tmp_path, held):
    job = Job(tmp_path, keep_latest_k=2).steps(4)
    job.manager.maybe_wait_for_saving()
    (tmp_path / "checkpoint" / "step-3" / "shardfast").mkdir(parents=True)  # half-written
    held.waits = threading.Event()
    job.steps(6)
    assert there(tmp_path) == ["step-2", "step-3", "step-4", "step-6"]
    held.waits.set()
    job.manager.maybe_wait_for_saving()
    assert there(tmp_path) == ["step-4", "step-6"]
    held.waits, held.fails = None, True
    job.steps(8)
    with pytest.raises(sf.Unavailable):
        job.manager.maybe_wait_for_saving()
    assert there(tmp_path) == ["step-4", "step-6", "step-8"]


def test_a_training_that_goes_back_keeps_what_it_saves(tmp_path):
    Job(tmp_path, keep_latest_k=0).steps(8).closed()
    back = Job(tmp_path, keep_latest_k=2)
    assert back.manager.load(step=2)
    back.steps(4).closed()
    assert there(tmp_path) == ["step-2", "step-4", "step-6", "step-8"]
    back.steps(6).closed()
    assert there(tmp_path) == ["step-4", "step-6", "step-8"]
    assert not list((tmp_path / "checkpoint").glob("*/.*"))


def test_a_step_that_is_saved_again_is_there_all_the_time(tmp_path, held):
    Job(tmp_path).steps(4).closed()
    back = Job(tmp_path)
    back.manager.load(step=2)
    held.waits = threading.Event()
    back.steps(4)
    assert (tmp_path / "checkpoint" / "step-4" / "shardfast" / "COMMIT").exists()
    held.waits.set()
    back.closed()
    directory = tmp_path / "checkpoint" / "step-4"
    (directory / "shardfast").rename(directory / ".shardfast.saving")  # as a process leaves it that dies there
    assert Job(tmp_path).manager.load()
    assert (directory / "shardfast" / "COMMIT").exists()


def test_a_failed_save_is_raised_by_the_next_one_or_the_end(tmp_path, held):
    held.fails = True
    job = Job(tmp_path).steps(2)
    held.fails = False
    with pytest.raises(sf.Unavailable, match="the disk is gone"):
        job.steps(8)
    job.closed()
    held.fails = True
    job.steps(10)
    with pytest.raises(sf.Unavailable, match="the disk is gone"):
        job.closed()


def test_what_is_not_understood_is_refused(tmp_path, monkeypatch, caplog):
    with pytest.raises(sf.Unsupported, match=r"checkpoint\.folder: s3://bucket: expected a directory"):
        Job("s3://bucket")
    with pytest.raises(sf.Invalid, match="last_save_in_hf: this model has no adapter"):
        Job(tmp_path, last_save_model_only=True, last_save_in_hf=True)
    with pytest.raises(ValueError, match="at least 2 checkpoint replicas"):
        Job(tmp_path, keep_latest_k=1)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.4.0")
    with caplog.at_level(logging.WARNING, logger="shardfast"):
        Job(tmp_path)
    assert "torchtitan 0.4.0: shardfast was tried with 0.3.0" in caplog.text
