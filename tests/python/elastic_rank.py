"""A rank of an elastic training, which says the loss of each step in a file.

Arguments are the run, the file, and the step at which the training ends; with 0 it ends when there is a file
``<run>.end``. A rank that fails while there is a file ``<run>.stale-<machine>`` tries to save a broken state, as a
program may that saves whatever it has when it fails, and says there what came of it.
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import shardfast as sf
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

EVERY = 5
START_S = 100.0
PATIENCE_S = 6.0
PAUSE_S = 0.02


def saves_at_the_end(ckpt: sf.Checkpointer, step: int, state: dict, stale: Path) -> None:
    """Saves what is not a number, and says what came of it."""
    with torch.no_grad():
        for parameter in state["model"].parameters():
            parameter.fill_(float("nan"))
    try:
        ckpt.step(step + EVERY - step % EVERY, state)
        ckpt.wait()
    except sf.Error as error:
        stale.write_text(f"{type(error).__name__}: {error}")
    else:
        stale.write_text("saved")


def trains(run: str, losses: str, last: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(24, 60), torch.nn.Tanh(), torch.nn.Linear(60, 12))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer}
    ckpt = sf.Checkpointer(run, every=sf.steps(EVERY), keep=sf.last(2), timeout_s=120)
    start = step = ckpt.restore(state)
    group, is_over = f"{time.time_ns()} {os.uname().nodename}", False
    while not is_over and (step < last or last == 0):
        torch.manual_seed(step)
        batch = torch.randn(12, 24)[rank::world]
        ends = last == 0 and rank == 0 and os.path.exists(f"{run}.end")
        try:
            loss = (model(batch) - batch[:, :12]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            told = torch.tensor([loss.item() / world, float(ends)], dtype=torch.float64)
            dist.all_reduce(told)
        except Exception:
            stale = Path(f"{run}.stale-{os.uname().nodename}")
            if stale.exists():
                saves_at_the_end(ckpt, step, state, stale)
            raise
        step += 1
        if rank == 0:
            with open(losses, "a") as out:
                said = {"group": group, "world": world, "start": start, "step": step, "loss": told[0].item().hex()}
                out.write(json.dumps(said) + "\n")
        ckpt.step(step, state)
        is_over = bool(told[1])
        time.sleep(PAUSE_S)
    ckpt.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=START_S))
    dist.barrier()
    set_timeout = getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)
    set_timeout(timedelta(seconds=PATIENCE_S))  # of collectives, from now on
    trains(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    dist.destroy_process_group()
