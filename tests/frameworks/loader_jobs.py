"""Datasets whose state is units, and jobs that read them through loaders on several ranks."""

import json
import os
import signal
import time
from pathlib import Path

import shardfast as sf
import torch
import torch.distributed as dist
from shardfast import adapters
from shardfast.data import Stream
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader


class Packed(IterableDataset):
    """Documents, packed into windows of tokens. Token n of document d is 1000 d + n.

    A unit is a document with its offset, or what is left of one in a buffer that is no whole window yet.
    """

    def __init__(self, documents, rank, ranks, window=4):
        self.all = [{"id": number, "at": 0, "weight": size} for number, size in enumerate(documents)]
        self.rank, self.ranks, self.window = rank, ranks, window
        self.units = None

    def _units(self):
        if self.units is None:  # a fresh start: every piece takes its own
            info = get_worker_info()
            worker, workers = (info.id, info.num_workers) if info else (0, 1)
            mine = self.rank * workers + worker
            self.units = [dict(unit) for unit in self.all[mine :: self.ranks * workers]]
        return self.units

    def __iter__(self):
        units = self._units()
        while units:
            window = []
            while units and len(window) < self.window:
                unit = units[0]
                take = min(unit["weight"], self.window - len(window))
                window += [1000 * unit["id"] + unit["at"] + n for n in range(take)]
                unit["at"] += take
                unit["weight"] -= take
                if not unit["weight"]:
                    units.pop(0)
            yield torch.tensor(window + [-1] * (self.window - len(window)))

    def state_dict(self):
        return {"replicated": {"window": self.window}, "units": [dict(unit) for unit in self._units()]}

    def load_state_dict(self, state):
        assert state["replicated"] == {"window": self.window}
        self.units = [dict(unit) for unit in state["units"]]


class Opaque(Packed):
    def state_dict(self):
        return {"left": super().state_dict()["units"]}

    def load_state_dict(self, state):
        self.units = state["left"]


class Iterating(Packed):
    """The iterator has the state, not the dataset."""

    def __iter__(self):
        return _Iterator(self)

    state_dict = load_state_dict = None


class _Iterator:
    def __init__(self, dataset):
        self._inner = Packed([], dataset.rank, dataset.ranks, dataset.window)
        self._inner.all = dataset.all
        self._tokens = None

    def __iter__(self):
        return self

    def __next__(self):
        self._tokens = self._tokens or iter(self._inner)
        return next(self._tokens)

    def state_dict(self):
        return self._inner.state_dict()

    def load_state_dict(self, state):
        self._inner.load_state_dict(state)
        self._tokens = None


def of_all_ranks(loader):
    """Declares a loader of one of several data ranks as the only one: all are in this process, at one position."""
    stands = adapters.stands_for(loader)
    one = sf.Stateful(stands.state_dict, stands.load_state_dict)
    one.check = stands.check
    return sf.Sharded(one, 0, 1)


KINDS = {"packed": Packed, "opaque": Opaque, "iterating": Iterating}


def loader_of(documents, rank, ranks, workers, kind="packed", batch=2, every=1):
    context = "fork" if workers else None
    dataset = KINDS[kind](documents, rank, ranks)
    return StatefulDataLoader(
        dataset, batch_size=batch, num_workers=workers, snapshot_every_n_steps=every, multiprocessing_context=context
    )


def reads(rank, world, place, documents, workers, batches, resume, kind="packed", every=1, kill_ms=None):
    """Goes on behind the checkpoint ``resume``, reads so many batches of each rank, or all of them, saves at ``place``.

    Returns what was read, or the load's error; writes it down beside the checkpoint, and whether the pass has ended.
    With ``kill_ms`` it dies in the save.
    """
    loader = loader_of(documents, rank, world, workers, kind, every=every)
    state = {"dataloader": sf.Sharded(loader, rank, world)}
    if resume is not None:
        try:
            sf.load(resume, state)
        except sf.Error as error:
            return f"{type(error).__name__}: {error}"
    got, rows = [], iter(loader)
    while batches is None or batches > 0:
        batch = next(rows, None)
        if batch is None:
            break
        got += [token for token in batch.flatten().tolist() if token >= 0]
        batches = None if batches is None else batches - 1
    if place is not None:
        Path(f"{place}-{rank}.json").write_text(json.dumps({"got": got, "ended": batches is None or batches > 0}))
    if kill_ms is not None:
        dist.barrier()
        sf.save_async(place, state)
        time.sleep(kill_ms / 1000)
        os.kill(os.getpid(), signal.SIGKILL)
    if place is not None:
        sf.save(place, state)
    return got


def lines_of(shards):
    for shard in shards:
        for number in range(5 + 3 * (shard % 4)):
            yield {"token": 1000 * shard + number}


def at_the_end(rank, world, place, workers, size, ended, resume):
    """Reads a stream to its end, until it says so if it has ``ended``, and saves; or counts two passes behind that."""
    import datasets  # as in :func:`streams`

    dataset = datasets.IterableDataset.from_generator(numbers_of, gen_kwargs={"sizes": [4, 4]})
    context = "fork" if workers else None
    stream = Stream(dataset, rank, world)
    loader = StatefulDataLoader(stream, batch_size=size, num_workers=workers, multiprocessing_context=context)
    state = {"dataloader": sf.Sharded(loader, rank, world)}
    if resume is not None:
        sf.load(resume, state)
        return [sum(len(batch["x"]) for batch in loader) for _ in range(2)]
    seen = 0
    for batch in loader:
        seen += len(batch["x"])
        if seen == 8 and not ended:
            break
    sf.save(place, state)
    return seen


def numbers_of(sizes):
    for size in sizes:
        for number in range(size):
            yield {"x": number}


def streams(rank, world, place, workers, batches, resume, buffer):
    """As :func:`reads`, of a stream of ``datasets`` with eleven shards."""
    import datasets  # starts a thread, and ranks are forked from a process with one

    dataset = datasets.IterableDataset.from_generator(lines_of, gen_kwargs={"shards": list(range(11))})
    stream = Stream(dataset.map(lambda one: {"token": one["token"] + 7}), rank, world, buffer=buffer)
    context = "fork" if workers else None
    loader = StatefulDataLoader(stream, batch_size=2, num_workers=workers, multiprocessing_context=context)
    state = {"dataloader": sf.Sharded(loader, rank, world)}
    if resume is not None:
        sf.load(resume, state)
    got = []
    for number, batch in enumerate(loader):
        got += batch["token"].tolist()
        if number + 1 == batches:
            break
    if place is not None:
        sf.save(place, state)
    return got
