"""The ranks of the measures with data loaders, which `loaders.py` starts in an environment that has torchdata.

`python bench/loader_ranks.py SETTINGS ANSWER`: the settings as JSON, and the file for what was found.
"""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import shardfast as sf
import torch
from environments import answer, asked
from figures import OURS
from footprint import extra_memory
from fsdp import BUDGET_BYTES
from loaders import ACCELERATE, INDEX, PIECES, PIECES_THEN, STREAM, UNITS, WORLD_THEN
from ranks import Settings, drop_page_cache, of_all, remove, run, timed, turned
from resharding import read_from_disk
from shardfast import session, units
from shardfast.data import DistributedSampler
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

STATE_S = 1.0
"""Seconds that a worker needs for its state."""

WORKERS, BATCH = 2, 8
BATCHES_BETWEEN = 8
"""Batches between two saves, and so between two states of a worker."""

LAYERS, WIDTH = 100, 64
TOKENS = 512 << 10
"""Elements of a token buffer: 2 MiB."""

BUFFERS, MANY = "buffers", "units"
"""The states of the first processes, in the order of their names."""


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


class Buffers:
    """A dataset's state: token buffers, each a unit."""

    def __init__(self, numbers: range) -> None:
        self.units = [{"id": number, "tokens": _tokens(number)} for number in numbers]

    def state_dict(self) -> dict[str, Any]:
        return {"replicated": {}, "units": self.units}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.units = list(state["units"])

    @property
    def size(self) -> int:
        return sum(unit["tokens"].nbytes for unit in self.units)


def _tokens(number: int) -> torch.Tensor:
    return torch.arange(number, number + TOKENS, dtype=torch.int32)


class Many:
    """A dataset's state: many units."""

    def __init__(self, numbers: range) -> None:
        self.units = [{"id": number, "offset": number % 97, "weight": 1 + number % 5} for number in numbers]

    def state_dict(self) -> dict[str, Any]:
        return {"replicated": {}, "units": self.units}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.units = list(state["units"])


def pieces_worker(settings: Settings) -> dict[str, Any]:
    """Saves buffers, and many units, in as many pieces as processes; the call of a save with many units."""
    rank, world = torch.distributed.get_rank(), settings.processes
    each = max(1, settings.total_bytes // (4 * TOKENS) // world)
    sf.save(str(settings.where / BUFFERS), {"data": sf.Sharded(Buffers(_share(rank, each)), rank, world)})
    many = {"data": sf.Sharded(Many(_share(rank, UNITS // world)), rank, world)}
    sf.save(str(settings.where / MANY), many)
    return {"bytes": each * world * 4 * TOKENS}


def _share(rank: int, each: int) -> range:
    return range(rank * each, (rank + 1) * each)


def buffers_worker(settings: Settings) -> dict[str, Any]:
    """Of cold loads of the buffers: bytes needed, read and from storage, of all pieces; extra memory of the worst."""
    if session.current().staging_bytes != BUDGET_BYTES:
        raise RuntimeError("the budget is not the one to be measured")
    rank, world, place = torch.distributed.get_rank(), settings.processes, settings.where / BUFFERS
    found: dict[str, list[Any]] = {"seconds": [], "needed": [], "read": [], "from_storage": [], "extra": []}
    for _ in range(settings.rounds):
        buffers, plans = Buffers(range(0)), []
        state = {"data": sf.Sharded(buffers, rank, world)}
        drop_page_cache(place)
        before = read_from_disk()
        seconds: list[float] = []

        def load(state: dict[str, Any] = state, plans: list[Any] = plans, seconds: list[float] = seconds) -> None:
            seconds.append(timed(lambda: plans.append(sf.load(str(place), state))).seconds)

        extra = extra_memory(load) - buffers.size
        fetched = read_from_disk() - before
        if not all(torch.equal(unit["tokens"], _tokens(unit["id"])) for unit in buffers.units):
            raise AssertionError("other tokens were loaded")
        every = of_all((buffers.size, plans[0].bytes_read, fetched, extra, [unit["id"] for unit in buffers.units]))
        if sorted(itertools.chain(*(ids for *_, ids in every))) != list(range(sum(len(ids) for *_, ids in every))):
            raise AssertionError("units are missing, or are there twice")
        sums = [sum(one[at] for one in every) for at in range(3)]
        for name, value in zip(("needed", "read", "from_storage"), sums, strict=True):
            found[name].append(value)
        found["extra"].append(max(one[3] for one in every))
        found["seconds"].append(seconds[0])
    return found


def units_worker(settings: Settings) -> dict[str, Any]:
    """Seconds of loads of many units under another number of pieces, and of the dealing in each of them."""
    rank, world, place = torch.distributed.get_rank(), settings.processes, str(settings.where / MANY)
    deal, dealing = units.dealt, [0.0]

    def dealt(*args: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            return deal(*args, **named)
        finally:
            dealing[0] += time.perf_counter() - began

    units.dealt = dealt
    found: dict[str, list[float]] = {"dealt_s": [], "load_s": [], "save_ms": []}
    for number in range(settings.warm_ups + settings.rounds):
        dealing[0], many = 0.0, Many(range(0))
        state = {"data": sf.Sharded(many, rank, world)}
        took = timed(lambda state=state: sf.load(place, state)).seconds
        if sum(of_all(len(many.units))) != UNITS // PIECES * PIECES:
            raise AssertionError("units are missing")
        again = settings.where / "units-again"
        began = time.perf_counter()
        pending = sf.save_async(str(again), state)
        called = time.perf_counter() - began
        pending.committed()
        remove(again)
        if number >= settings.warm_ups:
            found["dealt_s"].append(max(of_all(dealing[0])))
            found["load_s"].append(took)
            found["save_ms"].append(max(of_all(called)) * 1e3)
    units.dealt = deal
    return found


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


def main() -> None:
    settings = asked()
    os.environ["OMP_NUM_THREADS"] = "1"
    alone = replace(settings, processes=1)
    budget = {session.STAGING_BYTES: str(BUDGET_BYTES)}
    found = run(pieces_worker, replace(settings, processes=PIECES))
    found["buffers"] = run(buffers_worker, replace(settings, processes=PIECES_THEN), environment=budget)
    found["units"] = run(units_worker, replace(settings, processes=WORLD_THEN))
    found["saves"] = run(saves_worker, alone)
    found["behind"] = 100_000 if settings.quick else 1_000_000
    found["resumed"] = run(resumed_worker, alone, found["behind"])
    found["budget_bytes"] = BUDGET_BYTES
    answer(found)


if __name__ == "__main__":
    main()
