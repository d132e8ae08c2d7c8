"""A data loader that is stopped at any step and goes on under other numbers of processes and workers: each byte once.

Several sources are packed into windows of bytes. The last of these commands goes on where the first was stopped, even
by ``kill -9`` in a save, and counts what both have read::

    torchrun --nproc-per-node 2 examples/loader.py runs/loader --workers 2 --steps 40
    torchrun --nproc-per-node 3 examples/loader.py runs/loader --workers 1
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import shardfast as sf
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

WINDOW, BATCH, SAVE_EVERY = 256, 4, 10
SOURCES = sorted(Path(sysconfig.get_path("stdlib")).glob("c*.py"))


class Packed(IterableDataset):
    """Windows of bytes, cut from the sources one after the other.

    A unit of work is a source with its offset; what of it is in no whole window yet is the unit ``"buffer"``.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.units: list[dict[str, Any]] | None = None  # what is left to read

    def __iter__(self) -> Iterator[torch.Tensor]:
        units = self.left()
        while units:
            window = b""
            while units and len(window) < WINDOW:
                unit = units[0]
                text = SOURCES[unit["source"]].read_bytes()[unit["offset"] :][: WINDOW - len(window)]
                window += text
                unit["offset"] += len(text)
                unit["weight"] -= len(text)
                if not unit["weight"]:
                    del units[0]
            # The last window is shorter: 256 fills it up.
            yield torch.tensor([*window, *[256] * (WINDOW - len(window))])

    def left(self) -> list[dict[str, Any]]:
        if self.units is None:  # nothing was loaded: this worker of this process begins with its own sources
            worker = get_worker_info()
            number, count = (worker.id, worker.num_workers) if worker is not None else (0, 1)
            mine = range(self.rank * count + number, len(SOURCES), self.ranks * count)
            self.units = [{"source": at, "offset": 0, "weight": SOURCES[at].stat().st_size} for at in mine]
        return self.units

    def state_dict(self) -> dict[str, Any]:
        return {"replicated": {"sources": len(SOURCES)}, "units": [dict(unit) for unit in self.left()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.units = [dict(unit) for unit in state["units"]]


def train(run: str, workers: int, steps: int) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    loader = StatefulDataLoader(Packed(rank, ranks), batch_size=BATCH, num_workers=workers)
    read = {"bytes": torch.zeros(256, dtype=torch.int64)}  # how often all processes have read each byte value
    state = {"read": read, "dataloader": sf.Sharded(loader, index=rank, count=ranks)}
    with sf.Checkpointer(run, every=sf.steps(SAVE_EVERY), keep=sf.last(2)) as checkpointer:
        step = checkpointer.restore(state)  # before iter(): the position is that of the next iterator
        batches = iter(loader)
        while step < steps:
            step += 1
            counts = torch.zeros(257, dtype=torch.int64)  # the last of them counts batches
            batch = next(batches, None)
            if batch is not None:
                counts[:256] += torch.bincount(batch.flatten(), minlength=257)[:256]
                counts[256] += 1
            dist.all_reduce(counts)
            if not counts[256]:
                break
            read["bytes"] += counts[:256]
            if rank == 0:
                print(f"step {step}: {int(read['bytes'].sum()):,} bytes", flush=True)
            checkpointer.step(step, state)
    if rank == 0 and step < steps:
        text = torch.tensor([*b"".join(path.read_bytes() for path in SOURCES)])
        once = torch.equal(torch.bincount(text, minlength=256), read["bytes"])
        print("all sources: each byte once" if once else "all sources: BYTES ARE LOST OR REPEATED", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", help="a directory, or a URL such as s3://bucket/run")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1_000_000)
    dist.init_process_group("gloo")
    train(**vars(parser.parse_args()))
    dist.destroy_process_group()
