"""Data loaders in a state: the call of a save beside one without the loader, a resumed epoch beside accelerate's.

`run.py` starts it in an environment that has torchdata: `loaders.py SETTINGS ANSWER`.
"""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import shardfast as sf
import torch
from figures import ACCELERATE, OURS, Figures, median, ours_first, ratio, spread, summary, table
from ranks import (
    Settings,
    answer,
    asked,
    drop_page_cache,
    run,
    turned,
)
from shardfast.data import DistributedSampler
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

INDEX, STREAM = "with an index", "a stream"
NOTES = {
    OURS: "sf.load into a StatefulDataLoader, with shardfast.data.DistributedSampler where there is an index",
    ACCELERATE: "skip_first_batches of a plain DataLoader, which transformers' Trainer calls, too",
}

STATE_S = 1.0
"""Seconds that a worker needs for its state."""

WORKERS, BATCH = 2, 8
BATCHES_BETWEEN = 8
"""Batches between two saves, and so between two states of a worker."""

LAYERS, WIDTH = 100, 64


class Slow(IterableDataset[int]):
    """Numbers without an end; a worker's state takes long."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.at += 1
            yield self.at

    def state_dict(self) -> dict[str, Any]:
        time.sleep(STATE_S)
        info = get_worker_info()
        return {"replicated": {}, "units": [{"id": info.id if info is not None else 0, "at": self.at}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = max((unit["at"] for unit in state["units"]), default=0)


def _slow_loader(every: int) -> StatefulDataLoader[int]:
    return StatefulDataLoader(
        Slow(), BATCH, num_workers=WORKERS, snapshot_every_n_steps=every, multiprocessing_context="fork"
    )


def saves_worker(settings: Settings) -> dict[str, Any]:
    """Calls of saves with such a loader in the state and without it, by turns; times between a loop's batches.

    Workers send their state with the batch before each save.
    """
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = _slow_loader(BATCHES_BETWEEN)
    plain = {"model": model, "optimizer": optimizer}
    states = [("with", plain | {"dataloader": sf.Sharded(loader, 0, 1)}), ("without", plain)]
    calls: dict[str, list[float]] = {"with": [], "without": []}
    loop_ms: dict[str, list[float]] = {}
    count = 3 if settings.quick else 12
    batches = iter(loader)
    # Each state is saved by one Checkpointer, as a training does: a description is kept for the next save of its state.
    keepers = {name: sf.Checkpointer(settings.where / f"loader-saves-{name}", keep=sf.last(1)) for name in calls}

    def step() -> None:
        model(torch.randn(1, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def save(number: int, name: str, state: dict[str, Any]) -> None:
        began = time.perf_counter()
        keepers[name].save(number, state)
        took = (time.perf_counter() - began) * 1e3
        keepers[name].wait()
        step()
        if number > 0:
            calls[name].append(took)

    for number in range(count + 1):
        for _ in range(BATCHES_BETWEEN):
            next(batches)
            step()
        for name, state in turned(states, number):
            save(number, name, state)
    for keeper in keepers.values():
        keeper.close()
    del batches
    for every in (1, BATCHES_BETWEEN):
        rows = iter(_slow_loader(every))
        next(rows)
        ends = [time.perf_counter()]
        for _ in range(BATCHES_BETWEEN * (1 if settings.quick else 2)):
            next(rows)
            ends.append(time.perf_counter())
        loop_ms[str(every)] = [(end - begin) * 1e3 for begin, end in itertools.pairwise(ends)]
        del rows
    return {"calls_ms": calls, "loop_ms": loop_ms, "state_s": STATE_S, "tensors": 4 * 2 * LAYERS}


class Samples(Dataset[int]):
    """Samples with an index; counts those that are read."""

    def __init__(self, length: int) -> None:
        self.length, self.read = length, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> int:
        self.read += 1
        return number


class Numbers(IterableDataset[int]):
    """The same without an index: one unit."""

    def __init__(self, length: int) -> None:
        self.length, self.read = length, 0
        self.units = [{"id": 0, "offset": 0, "weight": length}]

    def __iter__(self) -> Iterator[int]:
        for unit in self.units:
            while unit["weight"]:
                self.read += 1
                unit["offset"] += 1
                unit["weight"] -= 1
                yield unit["offset"] - 1

    def state_dict(self) -> dict[str, Any]:
        return {"replicated": {}, "units": [dict(unit) for unit in self.units]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.units = [dict(unit) for unit in state["units"]]


def _ours(data: Any, batch: int = BATCH) -> Any:
    sampler = DistributedSampler(data, 1, 0, seed=1) if isinstance(data, Samples) else None
    return StatefulDataLoader(data, batch, sampler=sampler)


def _restored(place: Path, data: Any) -> Any:
    loader = _ours(data)
    sf.load(str(place), {"dataloader": sf.Sharded(loader, 0, 1)})
    if isinstance(data, Samples):
        loader.sampler.set_epoch(0)
    return loader


def _skipped(data: Any, behind: int) -> Any:
    from accelerate import skip_first_batches

    sampler = torch.utils.data.DistributedSampler(data, 1, 0, seed=1) if isinstance(data, Samples) else None
    return skip_first_batches(DataLoader(data, BATCH, sampler=sampler), behind // BATCH)


def resumed_worker(settings: Settings, behind: int) -> dict[str, Any]:
    """By kind of dataset and system: seconds from the loader to the next batch behind so many, and old samples read."""
    import accelerate  # the other ranks do without: it takes seconds

    accelerate.PartialState(cpu=True)
    found: dict[str, Any] = {}
    for kind, dataset in ((INDEX, Samples), (STREAM, Numbers)):
        place = settings.where / f"loader-{kind.split()[-1]}"
        expected = _read(place, dataset(2 * behind), behind)
        ways: list[tuple[str, Callable[[Any], Any]]] = [
            (OURS, functools.partial(_restored, place)),
            (ACCELERATE, lambda data: _skipped(data, behind)),
        ]
        for number in range(settings.warm_ups + settings.rounds):
            for name, way in turned(ways, number):
                data = dataset(2 * behind)
                drop_page_cache(place)
                began = time.perf_counter()
                batch = next(iter(way(data)))
                took = time.perf_counter() - began
                if not torch.equal(batch, expected[:BATCH]):
                    raise AssertionError(f"{name} goes on with {batch}, not with {expected[:BATCH]}")
                of = found.setdefault(kind, {}).setdefault(name, {"seconds": [], "old": []})
                if number >= settings.warm_ups:
                    of["seconds"].append(took)
                    of["old"].append(data.read - BATCH)
    return found


def _read(place: Path, data: Any, behind: int) -> torch.Tensor:
    """Reads so many samples, in larger batches than those of the measure, and saves; the next batch."""
    loader = _ours(data, 1000)
    batches = iter(loader)
    for _ in range(behind // 1000):
        next(batches)
    sf.save(str(place), {"dataloader": sf.Sharded(loader, 0, 1)})
    batch: torch.Tensor = next(batches)
    return batch


def _show_saves(found: dict[str, Any]) -> Figures:
    calls = found["calls_ms"]
    beyond = [one - other for one, other in zip(calls["with"], calls["without"], strict=True)]
    rows: list[list[object]] = [[f"{name} the loader", median(of), spread(of)] for name, of in calls.items()]
    rows.append(["the difference, save by save", median(beyond), spread(beyond)])
    for every, of in found["loop_ms"].items():
        rows.append([f"between two batches, snapshot_every_n_steps={every}", median(of), spread(of)])
    title = f"the call of a save, ms, {found['tensors']} tensors, a loader whose workers need {found['state_s']:.0f} s"
    table(f"{title} for their state", ("", "median", "(min .. max)"), rows)
    loops = {every: summary(of) for every, of in found["loop_ms"].items()}
    return {"calls_ms": {name: summary(of) for name, of in calls.items()}, "beyond_ms": summary(beyond), "loop": loops}


def _show_resumed(found: dict[str, Any], behind: int) -> Figures:
    rows: list[list[object]] = []
    figures: dict[str, Any] = {}
    for kind, systems in found.items():
        figures[kind] = {}
        for name, of in ours_first(systems):
            times, milliseconds = ratio(of["seconds"], systems[OURS]["seconds"]), [one * 1e3 for one in of["seconds"]]
            rows.append([
                kind, name, f"{median(milliseconds):.1f}", spread(milliseconds, 1), f"{median(times):.1f}",
                spread(times, 1), max(of["old"]),
            ])  # fmt: skip
            figures[kind][name] = {"ms": summary(milliseconds), "of_ours": summary(times), "old": max(of["old"])}
    columns = ("ms", "(min .. max)", f"of {OURS}'s", "(min .. max)", "old samples read")
    table(f"from a new loader to the batch behind {behind:,} samples", ("", "", *columns), rows)
    for name, note in NOTES.items():
        print(f"  {name}: {note}")
    return figures


def main() -> None:
    settings = asked(gigabytes=1.0, processes=1)
    os.environ["OMP_NUM_THREADS"] = "1"
    behind = 100_000 if settings.quick else 1_000_000
    saves, resumed = run(saves_worker, settings), run(resumed_worker, settings, behind)
    answer({"saves": _show_saves(saves), "resumed": _show_resumed(resumed, behind)})


if __name__ == "__main__":
    main()
