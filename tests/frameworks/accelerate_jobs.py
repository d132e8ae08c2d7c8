"""What a user of accelerate has, for tests."""

import contextlib
import os
import signal
from pathlib import Path

import accelerate
import shardfast as sf
import torch
from accelerate import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, ProjectConfiguration
from shardfast.integrations.accelerate import attach
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

accelerate.data_loader.is_datasets_available = bool  # it is not there: each rank would import it, for seconds

ROWS, WIDTH = 48, 16
FULL = StateDictOptions(full_state_dict=True, cpu_offload=False)


class Rows(Dataset):
    """Rows that tell their numbers, and are noted as they are read."""

    def __init__(self, rows=ROWS):
        self.rows, self.read = rows, []

    def __len__(self):
        return self.rows

    def __getitem__(self, number):
        self.read.append(number)
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(number)), number


class Counter:
    """A registered object."""

    def __init__(self):
        self.steps = 0
        self.fail = None

    def state_dict(self):
        if self.fail is not None:
            self.fail()
        return {"steps": self.steps, "trace": torch.arange(self.steps)}

    def load_state_dict(self, state):
        self.steps = state["steps"]
        torch.rand(3)  # the random state is set after this


class Stream(IterableDataset):
    """Rows in order, with a position of their own."""

    def __init__(self):
        self.position = 0

    def __iter__(self):
        while self.position < ROWS:
            self.position += 1
            yield torch.zeros(WIDTH), self.position - 1

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 4))


class Job:
    """What a user of accelerate has."""

    def __init__(
        self,
        root,
        *,
        seed=0,
        kind="ddp",
        stateful=True,
        batch=2,
        workers=0,
        attached=True,
        rows=ROWS,
        limit=None,
        automatic=True,
        shuffle=True,
        accumulated=1,
        **options,
    ):
        for singleton in (AcceleratorState, GradientState, PartialState):
            singleton._shared_state.clear()
        plugin = None
        if kind == "fsdp":
            PartialState(cpu=True)._shared_state["distributed_type"] = DistributedType.MULTI_GPU
            plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
        data = {"use_seedable_sampler": True, "use_stateful_dataloader": stateful, **options}
        self.accelerator = one = Accelerator(
            cpu=True,
            fsdp_plugin=plugin,
            gradient_accumulation_steps=accumulated,
            dataloader_config=DataLoaderConfiguration(**data),
            project_config=ProjectConfiguration(str(root), automatic_checkpoint_naming=automatic, total_limit=limit),
        )
        if attached:
            attach(one)
        torch.manual_seed(seed)
        self.data = Rows(rows)
        loader = DataLoader(self.data, batch, shuffle=shuffle, num_workers=workers)
        inner = net(seed)
        plain = torch.optim.AdamW(inner.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(plain, lambda step: 1 / (1 + step))
        self.model, self.optimizer, self.loader, self.schedule = one.prepare(inner, plain, loader, schedule)
        self.counter = Counter()
        one.register_for_checkpointing(self.counter)
        torch.manual_seed(100 * seed + one.process_index)
        self.seen = []

        sharded = any(isinstance(parameter, DTensor) for parameter in self.model.parameters())
        assert sharded == (kind == "fsdp") and one.is_fsdp2 == sharded

    def step(self, rows, numbers):
        with self.accelerator.accumulate(self.model):
            loss = self.model(rows).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
        self.counter.steps += 1
        self.seen += numbers.tolist()
        return loss.item()

    def train(self, steps, save_at=(), place=None, first=None):
        """Trains so many steps, over epochs; the losses."""
        losses = []
        while len(losses) < steps:
            for rows, numbers in self.loader if first is None else first:
                losses.append(self.step(rows, numbers))
                if self.counter.steps in save_at:
                    self.accelerator.save_state(place)
                if len(losses) == steps:
                    break
            first = None
        return losses

    def wait(self):
        """Waits until all saves are durable."""
        self.accelerator.state.destroy_process_group = lambda: None  # ranks wait for each other at their end
        self.accelerator.end_training()

    def said(self):
        """All of the state, whole on every rank."""
        optimizer, model = self.optimizer.optimizer, self.model
        state = get_optimizer_state_dict(model, optimizer, options=FULL)["state"]
        return {
            "model": {name: value.clone() for name, value in get_model_state_dict(model, options=FULL).items()},
            "optimizer": {f"{n}.{k}": v.clone() for n, of in state.items() for k, v in of.items()},
            "schedule": self.schedule.state_dict()["last_epoch"],
            "lr": self.schedule.get_last_lr(),
            "counter": self.counter.steps,
            "step": self.accelerator.step,
        }


def streams(root, seed=0, **options):
    job = Job(root, seed=seed, **options)
    workers = options.get("workers", 0)
    job.loader = job.accelerator.prepare_data_loader(DataLoader(Stream(), 2, num_workers=workers))
    return job


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    return one == other


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def jobs_alone(tmp_path, monkeypatch):
    """A fixture that makes jobs of one process, and waits for their saves."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    made = []

    def make(root=tmp_path, **options):
        made.append(Job(root, **options))
        return made[-1]

    yield make
    for one in made:
        with contextlib.suppress(sf.Error):
            one.wait()


def kept(root):
    return sorted(path.name for path in Path(root, "checkpoints").iterdir())
