"""The systems that are measured: ours and rivals, each in its best documented configuration, all durable on return.

A system saves and loads one rank's state: a flat dict of DTensors. What a rival does not make durable by itself is made
so here, and counted: the file and the directory are synced.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

import shardfast as sf
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

State = dict[str, DTensor]


def sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


class System(Protocol):
    name: str
    note: str

    def save(self, path: Path, state: State) -> None: ...
    def load(self, path: Path, state: State) -> None: ...


class Shardfast:
    name = "shardfast"
    note = "durable by itself, checksums written and verified, resharding, atomic commit"

    def save(self, path: Path, state: State) -> None:
        sf.save(path, {"model": state})

    def load(self, path: Path, state: State) -> None:
        sf.load(path, {"model": state})


class Dcp:
    """torch.distributed.checkpoint, synchronous: the asynchronous one writes the same way after a copy."""

    def __init__(self, threads: int) -> None:
        self.name = f"DCP, {threads} thread{'s' if threads > 1 else ''}"
        self.note = "FileSystemWriter(sync_files=True); directory synced for it; no checksums"
        self.threads = threads

    def save(self, path: Path, state: State) -> None:
        writer = dcp.FileSystemWriter(path, thread_count=self.threads, sync_files=True)
        dcp.save(dict(state), storage_writer=writer)
        if dist.get_rank() == 0:
            sync(path)
            sync(path.parent)

    def load(self, path: Path, state: State) -> None:
        dcp.load(dict(state), storage_reader=dcp.FileSystemReader(path))


class Safetensors:
    name = "safetensors"
    note = "one file a rank, local shards only: no resharding, no commit, no checksums; synced for it"

    def save(self, path: Path, state: State) -> None:
        path.mkdir(parents=True, exist_ok=True)
        file = path / f"rank{dist.get_rank()}.safetensors"
        save_file({name: tensor.to_local() for name, tensor in state.items()}, file)
        sync(file)
        sync(path)
        sync(path.parent)

    def load(self, path: Path, state: State) -> None:
        with safe_open(path / f"rank{dist.get_rank()}.safetensors", framework="pt") as file:
            for name, tensor in state.items():
                tensor.to_local().copy_(file.get_tensor(name))


def systems() -> list[System]:
    return [Shardfast(), Dcp(1), Dcp(2), Safetensors()]


def state_of(total_bytes: int, seed: int) -> State:
    """Weights and two Adam moments in fp32, layer by layer, sharded over all ranks as FSDP2 does."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shapes = {
        "attention.qkv": (3072, 1024),
        "attention.out": (1024, 1024),
        "up": (4096, 1024),
        "down": (1024, 4096),
        "norm": (1024,),
    }
    layer_bytes = 3 * 4 * sum(torch.Size(shape).numel() for shape in shapes.values())
    generator = torch.Generator().manual_seed(seed + dist.get_rank())
    state: State = {}
    for layer in range(max(1, round(total_bytes / layer_bytes))):
        for name, shape in shapes.items():
            for kind in ("weight", "exp_avg", "exp_avg_sq"):
                local = torch.empty(shape[0] // dist.get_world_size(), *shape[1:]).uniform_(-1, 1, generator=generator)
                state[f"layers.{layer}.{name}.{kind}"] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    return state
