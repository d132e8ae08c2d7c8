"""A small GPT trained on the Python standard library's own sources, saved by Shardfast, under any layout.

The same script runs on one process, with FSDP2 on several, or with FSDP2 × tensor parallel (``--tp 2``), and goes on
from the newest committed checkpoint of ``run``, whatever layout saved it::

    torchrun --nproc-per-node 2 examples/train.py ./run --steps 40
    torchrun --nproc-per-node 4 examples/train.py ./run --steps 60 --tp 2
    python examples/train.py ./run --steps 80

``make demo`` runs all of that and a SIGKILL in the middle of a save.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import sysconfig
import time
from pathlib import Path

import shardfast as sf
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

VOCABULARY = 256  # bytes
CONTEXT = 128


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        # Under tensor parallelism a rank has some of the heads: their number follows from the projections' width.
        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (-1, self.head_width)).transpose(1, 2)

        q, k, v = heads(self.query(x)), heads(self.key(x)), heads(self.value(x))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    """About 10.9 million parameters with the defaults."""

    def __init__(self, width: int = 384, layers: int = 6, heads: int = 6) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def parallelize(model: GPT, mesh: DeviceMesh) -> None:
    """Shards the model in place: tensor parallel inside the blocks, FSDP2 around them."""
    plan = {
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.out": RowwiseParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    for block in model.blocks:
        if mesh["tp"].size() > 1:
            parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


class Batches:
    """Random windows of the text, the same for a step whatever the number of ranks; each rank takes its share."""

    def __init__(self, text: Tensor, batch: int, rank: int, world: int, seed: int) -> None:
        self.text, self.batch, self.rank, self.world = text, batch, rank, world
        self.seed, self.position = seed, 0

    def next(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed + self.position)
        self.position += 1
        starts = torch.randint(len(self.text) - CONTEXT - 1, (self.batch,), generator=generator)
        mine = starts.tensor_split(self.world)[self.rank]
        windows = torch.stack([self.text[start : start + CONTEXT + 1] for start in mine.tolist()])
        return windows[:, :-1], windows[:, 1:]

    def state_dict(self) -> dict[str, int]:
        return {"seed": self.seed, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seed, self.position = state["seed"], state["position"]


def standard_library_text(limit_bytes: int = 4 << 20) -> Tensor:
    parts, total = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        parts.append(path.read_bytes())
        total += len(parts[-1])
        if total >= limit_bytes:
            break
    return torch.frombuffer(bytearray(b"".join(parts)[:limit_bytes]), dtype=torch.uint8).long()


def tell(record: dict[str, object]) -> None:
    """One line of JSON on the standard output, in one write: all ranks share it."""
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="where the checkpoints are: a path or any other store URL")
    parser.add_argument("--steps", type=int, default=40, help="train up to this step")
    parser.add_argument("--every", type=int, default=5, help="save every so many steps")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each block (tensor parallel)")
    parser.add_argument("--batch", type=int, default=8, help="windows a step, over all ranks")
    args = parser.parse_args()

    distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if distributed:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if distributed else 0
    world = dist.get_world_size() if distributed else 1

    torch.manual_seed(0)
    model = GPT()
    data_rank, data_world = 0, 1
    if distributed:
        mesh = init_device_mesh("cpu", (world // args.tp, args.tp), mesh_dim_names=("dp", "tp"))
        parallelize(model, mesh)
        data_rank, data_world = mesh["dp"].get_local_rank(), mesh["dp"].size()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    batches = Batches(standard_library_text(), args.batch, data_rank, data_world, seed=1)

    extra = {"losses": [], "random": sf.random_state()}
    state = {"model": model, "optimizer": optimizer, "dataloader": batches, "extra": extra}
    checkpointer = sf.Checkpointer(args.run, every=sf.steps(args.every), keep=sf.last(3) | sf.every(30))
    # On another number of ranks, rank n goes on with the random state of the saved rank n, modulo their number.
    start = checkpointer.restore(state, per_rank="index")
    parameters = sum(p.numel() for p in model.parameters())
    tell({"rank": rank, "pid": os.getpid(), "start": start, "parameters": parameters})

    for step in range(start, args.steps):
        began = time.perf_counter()
        tokens, targets = batches.next()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if distributed:
            dist.all_reduce(mean)
            mean /= world
        extra["losses"].append(mean.item())
        trained = time.perf_counter()
        checkpointer.step(step + 1, state)
        if rank == 0:
            record = {"step": step + 1, "loss": mean.item(), "train_ms": (trained - began) * 1e3}
            record |= {"saving": (step + 1) % args.every == 0, "save_ms": (time.perf_counter() - trained) * 1e3}
            tell(record)

    checkpointer.close()
    if distributed:
        dist.destroy_process_group()
    tell({"rank": rank, "ended": os.getpid()})


if __name__ == "__main__":
    main()
