"""A training in the pods of a JobSet or a TrainJob. It saves when its pods are told to go, and goes on where it was.

The manifests beside it start ``pod.sh`` in each pod, which starts ``torchrun``. On one machine::

    torchrun --nproc-per-node 2 examples/kubernetes/train.py runs/kubernetes 2000
"""

from __future__ import annotations

import os
import sys

import shardfast as sf
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


def main(run: str, steps: int) -> None:
    dist.init_process_group()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": optimizer}

    # Kubernetes sends SIGTERM. terminationGracePeriodSeconds in the manifests is longer than `within`.
    ckpt = sf.Checkpointer(run, every=sf.steps(50), keep=sf.last(3), on_signal="SIGTERM", within="90s")
    for step in range(ckpt.restore(state) + 1, steps + 1):
        torch.manual_seed(step * dist.get_world_size() + dist.get_rank())
        batch = torch.randn(32, 64)
        loss = (model(batch) - batch.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ckpt.step(step, state)
        if ckpt.stopping:
            # Also where another pod got the signal. That one ends with 1, so that Kubernetes starts all anew.
            print(f"told to stop: step {step} is durable", flush=True)
            break
    else:
        print(f"done: step {steps} is durable", flush=True)
    ckpt.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
