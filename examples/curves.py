"""Losses before and after a change of layout: the figure of the guide's page on layouts.

A small GPT with dropout trains under one layout, saves, and goes on from the checkpoint for 20 steps:

1. in the same layout, beside the run that was not interrupted;
2. in another layout, beside a run in that layout whose state was put there by PyTorch's own full state dicts.

The losses of each pair are compared bit for bit; one that differs ends this with an error. ``scripts/site.sh`` runs it
for the guide::

    python examples/curves.py losses.svg
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import shardfast as sf
import torch
import torch._dynamo  # what torch imports when first used, and slowly: once here instead of in every process
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F
from train import GPT, Batches, Block, parallelize, standard_library_text

SAVED, LAST = 20, 40  # the step of the save, and the last one
BATCH, MICROBATCHES = 8, 2
SHARED = StateDictOptions(full_state_dict=True)


class Net(GPT):
    """The GPT of ``train.py``, smaller and with dropout. Of a stage, what other stages have is ``None``."""

    def __init__(self) -> None:
        super().__init__(width=64, layers=2, heads=4)

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks.children():
            x = F.dropout(block(x), 0.1)
        return x if self.head is None else self.head(self.norm(x))


def make_stage(is_first: bool) -> Net:
    """One of two stages. The blocks keep their numbers as names."""
    stage = Net()
    number = 0 if is_first else 1
    stage.blocks = nn.ModuleDict({str(number): stage.blocks[number]})
    if is_first:
        stage.norm = stage.head = None
    else:
        stage.tokens = stage.positions = None
    return stage


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Run:
    """A training run in one of the layouts, on the ranks of the default group.

    Attributes:
        part: The model, or the stage of it that this rank has.
        share: Which share of each batch this rank computes with, and of how many.
        schedule: That of a pipeline.
    """

    def __init__(self, layout: str, text: Tensor) -> None:
        torch.manual_seed(0)
        rank, world = dist.get_rank(), dist.get_world_size()
        self.share, self.schedule = (rank, world), None
        self.is_first = False
        if layout == "one process":
            self.part: nn.Module = Net()
        elif layout == "FSDP1":
            policy, device = ModuleWrapPolicy({Block}), torch.device("cpu")
            self.part = FullyShardedDataParallel(Net(), auto_wrap_policy=policy, device_id=device, use_orig_params=True)
        elif layout in ("FSDP2", "FSDP2 × TP"):
            dp = world if layout == "FSDP2" else 2
            mesh = init_device_mesh("cpu", (dp, world // dp), mesh_dim_names=("dp", "tp"))
            self.part = Net()
            parallelize(self.part, mesh)
            self.share = mesh["dp"].get_local_rank(), mesh["dp"].size()
        else:
            mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("pp", "dp"))
            number = mesh["pp"].get_local_rank()
            self.part = fully_shard(make_stage(number == 0), mesh=mesh["dp"])
            stage = PipelineStage(self.part, number, 2, torch.device("cpu"), group=mesh.get_group("pp"))
            self.schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)
            self.is_first = number == 0
            self.share = mesh["dp"].get_local_rank(), mesh["dp"].size()
        self.optimizer = torch.optim.AdamW(self.part.parameters(), lr=3e-3, foreach=False)
        self.batches = Batches(text, BATCH, *self.share, seed=1)
        torch.manual_seed(self.share[0])  # ranks that compute with the same tokens drop the same

    def state(self, *, with_random: bool) -> dict[str, Any]:
        """What is saved. A pipeline gives the lists of its stages and optimizers."""
        objects: dict[str, Any] = {"model": self.part, "optimizer": self.optimizer}
        if self.schedule is not None:
            objects = {key: [value] for key, value in objects.items()}
        random = {"random": sf.random_state()} if with_random else {}
        return {**objects, "dataloader": self.batches, **random}

    def losses(self, steps: range) -> dict[int, float]:
        """Trains; by step the mean of the losses that the ranks see."""
        found = {}
        for step in steps:
            tokens, targets = self.batches.next()
            seen: list[Tensor] = []
            if self.schedule is None:
                seen.append(loss_of(self.part(tokens), targets))
                seen[0].backward()
            elif self.is_first:
                self.schedule.step(tokens)
            else:
                self.schedule.step(target=targets, losses=seen)
            self.optimizer.step()
            self.optimizer.zero_grad()
            total = torch.tensor([sum(loss.item() for loss in seen), len(seen)], dtype=torch.float64)
            dist.all_reduce(total)
            found[step] = (total[0] / total[1]).item()
        return found

    def gathered(self) -> dict[str, dict[str, Any]]:
        """The whole state by PyTorch's full state dicts; those of stages are put together."""
        optimizer = get_optimizer_state_dict(self.part, self.optimizer, options=SHARED)
        mine = (get_model_state_dict(self.part, options=SHARED), optimizer["state"], optimizer["param_groups"][0])
        all_of_them: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(all_of_them, mine)
        model, state = ({k: v for of_rank in all_of_them for k, v in of_rank[kind].items()} for kind in (0, 1))
        return {"model": model, "state": state, "group": mine[2]}

    def put(self, whole: dict[str, dict[str, Any]]) -> None:
        """Sets the whole state, which :meth:`gathered` gave under another layout, by PyTorch's own means."""
        set_model_state_dict(self.part, whole["model"], options=SHARED)
        groups = [{**whole["group"], "params": list(whole["state"])}]
        optimizer = {"state": whole["state"], "param_groups": groups}
        set_optimizer_state_dict(self.part, self.optimizer, optimizer, options=SHARED)
        self.batches.position = SAVED


# What the ranks of a job do. Rank 0 writes the losses.

Losses = dict[str, dict[int, float]]
"""By the name of a curve the losses by step."""


def train(rank: int, text: Tensor, at: Path, layout: str) -> Losses:
    run = Run(layout, text)
    before = run.losses(range(1, SAVED + 1))
    sf.save(str(at / "checkpoint"), run.state(with_random=True), step=SAVED)
    whole = run.gathered()
    if rank == 0:
        torch.save(whole, at / "whole.pt")
    return {"before": before, "after": run.losses(range(SAVED + 1, LAST + 1))}


def resume(rank: int, text: Tensor, at: Path, layout: str) -> Losses:
    run = Run(layout, text)
    sf.load(str(at / "checkpoint"), run.state(with_random=True))
    return {"shardfast": run.losses(range(SAVED + 1, LAST + 1))}


def relay(rank: int, text: Tensor, at: Path, layout: str) -> Losses:
    """Goes on in another layout, once from the checkpoint, once from PyTorch's state dicts."""
    found = {}
    for kind in ("shardfast", "pytorch"):
        run = Run(layout, text)
        if kind == "shardfast":
            sf.load(str(at / "checkpoint"), run.state(with_random=False), only=["model", "optimizer", "dataloader"])
        else:
            run.put(torch.load(at / "whole.pt"))
        found[kind] = run.losses(range(SAVED + 1, LAST + 1))
    return found


def of_rank(rank: int, do: Callable[..., Losses], text: Tensor, world: int, at: Path, layout: str) -> None:
    torch.set_num_threads(1)
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # PyTorch's gathering warns of its own speed
    dist.init_process_group("gloo", init_method=f"file://{at}/{do.__name__}", rank=rank, world_size=world)
    found = do(rank, text, at, layout)
    if rank == 0:
        (at / f"{do.__name__}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def job(do: Callable[..., Losses], text: Tensor, at: Path, layout: str, world: int) -> Losses:
    """Runs ``do`` on so many processes."""
    torch.multiprocessing.start_processes(of_rank, (do, text, world, at, layout), world, start_method="fork")
    found = json.loads((at / f"{do.__name__}.json").read_text())
    return {kind: {int(step): loss for step, loss in losses.items()} for kind, losses in found.items()}


class Change(NamedTuple):
    """Layouts, each with a number of processes: one saves, the other goes on."""

    saved: str
    processes: int
    loaded: str
    loading: int


CHANGES = [
    Change("FSDP2 × TP", 4, "FSDP2 × TP", 4),
    Change("FSDP1", 4, "FSDP2 × TP", 4),
    Change("pipeline × FSDP2", 4, "one process", 1),
    Change("FSDP2", 2, "FSDP1", 4),
]


def measured(change: Change, text: Tensor) -> tuple[str, Losses]:
    """The title of a panel, and its curves: before the save, what is expected after it, and what a load gives."""
    with tempfile.TemporaryDirectory() as directory:
        at = Path(directory)
        trained = job(train, text, at, change.saved, change.processes)
        if change.saved == change.loaded:
            resumed = job(resume, text, at, change.loaded, change.loading)
            title, reference, expected = f"{change.saved}, no change", "uninterrupted", trained["after"]
        else:
            resumed = job(relay, text, at, change.loaded, change.loading)
            title = f"{change.saved} on {change.processes} → {change.loaded}"
            title += f" on {change.loading}" if change.loading > 1 else ""
            reference, expected = "PyTorch's full state dicts", resumed["pytorch"]
    differing = [step for step, loss in expected.items() if resumed["shardfast"][step] != loss]
    print(f"{title}: {len(expected)} losses, {len(differing)} differ", flush=True)
    if differing:
        raise SystemExit(f"{title}: expected equal losses, these steps differ: {differing}")
    return title, {
        "before the save": trained["before"],
        reference: expected,
        "Shardfast's checkpoint": resumed["shardfast"],
    }


def picture(path: Path, panels: list[tuple[str, Losses]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(2, 2, figsize=(11, 7), sharey=True, layout="constrained")
    for axes, (title, curves) in zip(grid.flat, panels, strict=False):
        styles = [("0.3", 1.6), ("0.75", 7), ("tab:red", 1.8)]
        for (name, losses), (color, width) in zip(curves.items(), styles, strict=True):
            axes.plot(list(losses), list(losses.values()), color=color, linewidth=width, label=name)
        axes.axvline(SAVED, color="0.3", linestyle="dotted")
        axes.set(xlabel="step", ylabel="loss", title=title)
        axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", type=Path, help="the SVG to write")
    parser.add_argument("--panels", type=int, default=len(CHANGES), help="draw only the first ones")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the processes are forked
    text = standard_library_text()
    picture(options.figure, [measured(change, text) for change in CHANGES[: options.panels]])


if __name__ == "__main__":
    sys.exit(main())
