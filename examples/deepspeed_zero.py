"""DeepSpeed's ZeRO on CPUs: saved by any stage on any number of processes, resumed by another.

A small model of characters is trained on the Python standard library's own sources. The last of these commands goes on
where the first was stopped, even by ``kill -9`` in a save::

    torchrun --nproc-per-node 2 examples/deepspeed_zero.py runs/zero --stage 2 --steps 20
    torchrun --nproc-per-node 3 examples/deepspeed_zero.py runs/zero --stage 3 --steps 40
"""

from __future__ import annotations

import argparse
import logging
import os
import sysconfig
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import shardfast.integrations.deepspeed  # noqa: F401  # saves and loads engines with the block below
import torch
import torch.distributed as dist
from torch import Tensor, nn

LENGTH, BATCH, WIDTH = 32, 24, 64
SAVE_EVERY = 5


class Model(nn.Module):
    """The next character from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(256, WIDTH)
        self.memory = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.out = nn.Linear(WIDTH, 256)

    def forward(self, text: Tensor) -> Tensor:
        return self.out(self.memory(self.characters(text[:, :-1]))[0]).flatten(0, 1)


def batch_of(step: int, sources: Tensor) -> Tensor:
    """This process's share of a step's batch, which is the same text for any number of processes."""
    starts = torch.randint(len(sources) - LENGTH, (BATCH,), generator=torch.Generator().manual_seed(step))
    share = BATCH // dist.get_world_size()
    mine = starts[dist.get_rank() * share :][:share]
    return torch.stack([sources[start : start + LENGTH] for start in mine])


def train(run: str, stage: int, steps: int) -> None:
    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40])
    sources = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    torch.manual_seed(0)
    model = Model()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        config={
            "train_micro_batch_size_per_gpu": BATCH // dist.get_world_size(),
            "zero_optimization": {"stage": stage},
            "shardfast": {},
        },
    )
    engine.load_checkpoint(run)  # the newest, if there is one
    while engine.global_steps < steps:
        batch = batch_of(engine.global_steps, sources)
        loss = nn.functional.cross_entropy(engine(batch), batch[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"step {engine.global_steps}: loss {mean.item():.4f}", flush=True)
        if engine.global_steps % SAVE_EVERY == 0:
            engine.save_checkpoint(run)  # returns at once; the training goes on
    engine.destroy()  # waits for the last save


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", help="a directory, or a URL such as s3://bucket/run")
    parser.add_argument("--stage", type=int, default=2, choices=(0, 1, 2, 3))
    parser.add_argument("--steps", type=int, default=20)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which it would compile first
    dist.init_process_group("gloo")
    train(**vars(parser.parse_args()))
    dist.destroy_process_group()
