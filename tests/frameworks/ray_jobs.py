"""Training functions for workers of Ray and for trials of Tune, which import them from here."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import ray
import ray.train
import shardfast as sf
import shardfast.integrations.ray as shardfast_ray

WIDTH = 64


def score_of(step):
    """The best checkpoints are those of steps 6 and 8."""
    return -abs(step - 6.5)


def note(folder, **facts):
    """Appends a line to what this test's workers tell it."""
    with (Path(folder) / "notes").open("a") as notes:
        notes.write(json.dumps(facts) + "\n")


def kill_once(config, rank, step):
    """Ends this process as `kill -9` does, at the step, on the rank and so long behind that; once for a test."""
    mark = Path(config["folder"]) / "killed"
    at, of, seconds = config.get("kill") or (None, None, None)
    if (step, rank) == (at, of) and not mark.exists():
        mark.touch()
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        if config.get("waits"):
            time.sleep(60)


def inodes(directory):
    """The inodes of a checkpoint's files by their paths."""
    return {
        str(path.relative_to(directory)): path.stat().st_ino
        for path in sorted(Path(directory).rglob("*"))
        if path.is_file() and path.name != ".pinned"
    }


def train_sharded(config):
    """FSDP2: a step's loss is the same for any number of workers, since all have one batch."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 16))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer, "extra": {"losses": []}}
    ckpt = sf.Checkpointer(shardfast_ray.run_url(), every=sf.steps(2), keep=sf.last(1))
    start = shardfast_ray.restore(ckpt, state)
    named = ray.train.get_checkpoint()
    note(config["folder"], rank=rank, world=world, start=start, named=named and named.path)
    for step in range(start, config["steps"]):
        kill_once(config, rank, step)
        batch = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state["extra"]["losses"].append(loss.item())
        ckpt.step(step + 1, state)
        if not (Path(config["folder"]) / "hurry").exists():
            time.sleep(config.get("pause", 0.0))
        shardfast_ray.report({"step": step + 1, "loss": loss.item(), "score": score_of(step + 1)}, ckpt)
    ckpt.close()
    if rank == 0:
        files = inodes(f"{ckpt.url}/step-{config['steps']:08d}")  # none in an object store
        note(config["folder"], losses=state["extra"]["losses"], inodes=files)


def train_arrays(config):
    """NumPy alone, without a process group: each worker has a part of one array, and its number."""
    context = ray.train.get_context()
    rank = context.get_world_rank()
    url = config.get("url") or shardfast_ray.run_url()
    ckpt = sf.Checkpointer(url, every=sf.steps(1), keep=sf.last(1))
    state = {"model": {"w": np.zeros(8)}, "extra": {"rank": sf.PerRank(rank)}}
    try:
        start = shardfast_ray.restore(ckpt, state)
    except sf.Error as error:
        note(config["folder"], rank=rank, error=f"{type(error).__name__}: {error}")
        time.sleep(3)  # Ray ends the others as soon as one worker has failed
        raise
    go_on = threading.Event()
    for step in range(start, config["steps"]):
        state["model"]["w"] += 1.0
        ckpt.step(step + 1, state)
        if step + 1 == config["steps"]:  # the last one is held back between its commit and its pin
            ckpt.when_durable(lambda url: go_on.wait(60))
        shardfast_ray.report({"step": step + 1}, ckpt)
    until = time.monotonic() + 60
    while config["steps"] - 1 not in named_steps(0.2) and time.monotonic() < until:
        pass
    early = named_steps(1.0)
    go_on.set()
    ckpt.close()
    late = named_steps(None)
    note(config["folder"], rank=rank, start=start, world=context.get_world_size(), url=ckpt.url, named=[early, late])


def named_steps(timeout_s):
    """The steps that Ray names once it has got all reports, or after so many seconds."""
    mode = ray.train.CheckpointConsistencyMode.COMMITTED
    return [one.metrics["step"] for one in ray.train.get_all_reported_checkpoints(mode, timeout_s)]


def trial(config):
    """One of a population: its value grows by its rate, so the faster trial's state is the better one."""
    state = {"model": {"value": np.zeros(1)}, "extra": {"by": []}}
    ckpt = sf.Checkpointer(shardfast_ray.run_url(), every=sf.steps(1), keep=sf.last(1))
    start = shardfast_ray.restore(ckpt, state)
    named = ray.tune.get_checkpoint()
    note(config["folder"], rate=config["rate"], start=start, named=named and named.path, url=ckpt.url,
         value=float(state["model"]["value"][0]))  # fmt: skip
    for step in range(start, config["steps"]):
        time.sleep(0.05)
        state["model"]["value"] += config["rate"]
        ckpt.step(step + 1, state)
        shardfast_ray.report({"step": step + 1, "value": float(state["model"]["value"][0])}, ckpt)
    ckpt.close()
