"""States that the measures save: sharded tensors, modules with their optimizers, Python values."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

State = dict[str, DTensor]
"""One rank's view of a sharded state: global names, this rank's parts."""

LAYER = {
    "attention.qkv": (3072, 1024),
    "attention.out": (1024, 1024),
    "up": (4096, 1024),
    "down": (1024, 4096),
    "norm": (1024,),
}
KINDS = ("weight", "exp_avg", "exp_avg_sq")


def sharded(total_bytes: int, seed: int, dim: int = 0) -> State:
    """Weights and two Adam moments in fp32, layer by layer.

    With ``dim`` 0 sharded over all ranks as FSDP2 does; with 1 matrices by columns, vectors on every rank.
    """
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    layer_bytes = len(KINDS) * 4 * sum(math.prod(shape) for shape in LAYER.values())
    generator = torch.Generator().manual_seed(seed + dist.get_rank())
    state: State = {}
    for layer in range(max(1, round(total_bytes / layer_bytes))):
        for name, shape in LAYER.items():
            placement = Shard(dim) if dim < len(shape) else Replicate()
            local = [
                size // world if isinstance(placement, Shard) and at == dim else size for at, size in enumerate(shape)
            ]
            for kind in KINDS:
                values = torch.empty(local).uniform_(-1, 1, generator=generator)
                state[f"layers.{layer}.{name}.{kind}"] = DTensor.from_local(values, mesh, [placement], run_check=False)
    return state


def bytes_of(state: State) -> int:
    """Of all ranks, each element once."""
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def zero(state: State) -> None:
    for tensor in state.values():
        tensor.to_local().zero_()


def expect_equal(state: State, saved: State, who: str) -> None:
    """Refuses a load that gave other bytes than were saved."""
    for name, tensor in state.items():
        if not torch.equal(tensor.to_local(), saved[name].to_local()):
            raise AssertionError(f"{who} loaded other bytes than it saved: {name}")


def expect_equal_whole(state: State, saved: State, who: str) -> None:
    """The same for two layouts of one state; compares a sample of the tensors, gathered."""
    names = list(state)
    for name in names[:: max(1, len(names) // 8)]:
        if not torch.equal(state[name].full_tensor(), saved[name].full_tensor()):
            raise AssertionError(f"{who} loaded other bytes than it saved: {name}")


class Stage(torch.nn.Module):
    """One rank's pipeline stage: its parameters' names are those of no other rank, and it trains without messages."""

    def __init__(self, layers: list[torch.nn.Module]) -> None:
        super().__init__()
        setattr(self, f"stage{dist.get_rank()}", torch.nn.Sequential(*layers))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        stage: torch.nn.Sequential = getattr(self, f"stage{dist.get_rank()}")
        result: torch.Tensor = stage(inputs)
        return result


class Weight(torch.nn.Module):
    """One parameter."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(elements).uniform_(-1, 1))


def counted(tensors: int, bytes_each: int) -> tuple[Stage, torch.optim.AdamW]:
    """A module and its AdamW with ``tensors`` tensors in all: each parameter has two moments and a step counter."""
    module = Stage([Weight(bytes_each // 4) for _ in range(tensors // 4)])
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-6)
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    return module, optimizer


def trainable(total_bytes: int) -> tuple[Stage, torch.optim.AdamW, torch.Tensor]:
    """A network of ``total_bytes`` on all ranks together with its AdamW, after one step, and a batch for it."""
    width = 1024
    layer_bytes = len(KINDS) * 4 * (width * 4 * width * 2)
    layers: list[torch.nn.Module] = []
    for _ in range(max(1, round(total_bytes / dist.get_world_size() / layer_bytes))):
        layers += [torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)]
    module = Stage(layers)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-6)
    batch = torch.empty(64, width).uniform_(-1, 1)
    module(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return module, optimizer, batch


def values(size: int, *, as_bytes: bool) -> dict[str, Any]:
    """About ``size`` encoded bytes of Python values, the same on every rank: one buffer, or many numbers and texts."""
    chance = random.Random(size)
    if as_bytes:
        return {"tokens": chance.randbytes(size)}
    # A float takes nine encoded bytes, a small record of a name and two numbers about thirty.
    return {
        "losses": [chance.random() for _ in range(size // 2 // 9)],
        "files": [{"name": f"shard-{at:06}", "offset": at * 4096} for at in range(size // 2 // 36)],
    }
