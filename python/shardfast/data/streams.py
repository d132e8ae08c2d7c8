"""Streams of ``datasets`` by units: a shard with its position, and the samples of a shuffle buffer.

Private names of datasets 4.7, the version tried: ``IterableDataset._ex_iterable`` with its ``ex_iterable``,
``BufferShuffledExamplesIterable``, ``_distributed``, ``_prepare_ex_iterable_for_iteration()``. Inside of a worker its
iteration would take that worker's shards only, so it begins as if there were no workers
(``torch.utils.data._utils.worker._worker_info``).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from ..errors import Invalid
from ..state.catalog import Refused
from ..state.units import OWN, REPLICATED, UNITS

_SHARD_WEIGHT = 1 << 20  # beside a buffered sample's, so that pieces get as many shards

_BY_SHARD = {
    "ArrowExamplesIterable",
    "ExamplesIterable",
    "FilteredExamplesIterable",
    "FormattedExamplesIterable",
    "MappedExamplesIterable",
    "RebatchedArrowExamplesIterable",
    "SelectColumnsIterable",
    "VerticallyConcatenatedMultiSourcesExamplesIterable",
}
"""The steps of a stream that give the same samples when each shard is read by itself."""

_STEPS = {
    "BufferShuffledExamplesIterable": "shuffle() keeps samples in a buffer that is in no state: leave it out, and pass "
    "buffer= and seed= to Stream",
    "SkipExamplesIterable": "skip() counts over all shards: hold samples out by filter(), or by files of their own",
    "TakeExamplesIterable": "take() counts over all shards: hold samples out by filter(), or by files of their own",
    "RepeatExamplesIterable": "repeat() would repeat each shard by itself: iterate again, with set_epoch()",
    "with_indices": "with_indices=True counts over all shards: have the files say the number",
    "drop_last_batch": "drop_last_batch=True would drop samples of each shard: leave it out",
}
"""By the step that is none of these: what it does, and what to do instead."""


class Stream(IterableDataset[Any]):
    """Reads a stream of ``datasets``, each sample once, under changing numbers of data ranks and workers.

    Its units are the stream's shards, each with its position, and the samples that wait in the shuffle buffer. Pass it
    to torchdata's ``StatefulDataLoader``, and that, in a :class:`shardfast.Sharded`, to saves and loads. A piece reads
    its shards one after the other.

    Args:
        dataset: A ``datasets.IterableDataset``, with ``map()``, ``filter()``, ``batch()``, ``select_columns()``,
            ``with_format()``, or of several concatenated. What does not go shard by shard is refused, such as
            ``shuffle()``, ``take()``, ``skip()`` and ``interleave_datasets()``.
        rank: This data rank.
        ranks: Number of data ranks.
        buffer: Number of samples from which the next one is drawn; 0 keeps the order of the shards.
        seed: Of the draws, with the epoch.

    Raises:
        Invalid: ``dataset`` is another kind of object, or has a step that does not go shard by shard; a number is none.
    """

    def __init__(self, dataset: Any, rank: int, ranks: int, *, buffer: int = 0, seed: int = 0) -> None:
        for name in ("num_shards", "shard", "_ex_iterable", "state_dict"):
            if not hasattr(dataset, name):
                raise Invalid(f"Stream({type(dataset).__name__}): expected a datasets.IterableDataset")
        if dataset._distributed is not None:
            raise Invalid("Stream(dataset): it was split by split_dataset_by_node(), and a Stream deals out all shards")
        steps = list(_steps_of(dataset._ex_iterable))
        for step in steps:
            counts = [name for name in ("with_indices", "drop_last_batch") if getattr(step, name, False)]
            name = counts[0] if counts else type(step).__name__
            if name not in _BY_SHARD:
                other = f"{name} gives other samples where each shard is read by itself: give each source a Stream"
                raise Invalid(f"Stream(dataset): its {_STEPS.get(name, other)}")
        for name, value in (("rank", rank), ("ranks", ranks), ("buffer", buffer)):
            _expect_whole(f"Stream({name}={value!r})", value)
        if not rank < ranks:
            raise Invalid(f"Stream(rank={rank!r}, ranks={ranks!r}): expected one of the data ranks")
        self._dataset, self._rank, self._ranks = dataset, rank, ranks
        self._steps = [_noted(step) for step in _steps_of(dataset._prepare_ex_iterable_for_iteration())]
        self._buffer, self._seed, self._epoch = buffer, seed, 0
        # The epoch that set_epoch() announced, if any, in memory that persistent workers share.
        self._announced = torch.full((), -1, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self._units: list[dict[str, Any]] | None = None
        self._waiting: list[Any] = []
        self._is_begun = False
        self._iterators = 0  # those in the middle of a pass
        self._open: Any = None
        self._random: random.Random | None = None
        # The state of a batched map() can leave out the end of a shard (datasets 4.7): samples are counted instead.
        self._is_counted = any(getattr(step, "batched", False) for step in steps)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes up a copy's state: no iterator reads it, and its workers share memory of its own."""
        self.__dict__.update(state, _iterators=0)
        self._announced.share_memory_()

    @property
    def own_piece(self) -> tuple[int, int]:
        """The data rank and the number of data ranks."""
        return self._rank, self._ranks

    def expect_unused(self) -> None:
        """Refuses a load while an iterator is read, which would not move.

        Raises:
            Refused: One is.
        """
        if self._iterators:
            raise Refused("its iterator runs and would go on with the old position: load before iter()")

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next pass, from which the draws follow. A pass after a load goes on with its own."""
        _expect_whole(f"Stream.set_epoch({epoch!r})", epoch)
        self._announced.fill_(epoch)
        if self._units is None or self._is_over():
            self._epoch = epoch

    def _is_over(self) -> bool:
        """Whether a pass was begun and nothing of it is left; what a load brought begins with ``iter()``."""
        return self._is_begun and self._units is not None and not self._units and not self._waiting

    def _left(self) -> list[dict[str, Any]]:
        """The shards that this piece has to read; at a fresh start every so-manieth one."""
        if self._units is not None:
            return self._units
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        # The first worker of each rank comes before any second one: no rank has two more shards than another.
        mine = range(worker * self._ranks + self._rank, self._dataset.num_shards, self._ranks * workers)
        return [{"id": number, "at": None, "weight": _SHARD_WEIGHT} for number in mine]

    def __iter__(self) -> Iterator[Any]:
        """The samples that are left; behind a pass that is over, all again."""
        # When it is called, not when it is read: torchdata makes an iterator for a load that it may not read.
        if self._is_over():
            self._units = self._random = None
        if self._units is None and self._announced >= 0:  # in a persistent worker it is news
            self._epoch = int(self._announced)
        self._is_begun = True
        return self._pass()

    def _pass(self) -> Iterator[Any]:
        left = self._units = self._left()
        if self._random is None:
            self._random = random.Random(f"{self._seed} {self._epoch} {[unit['id'] for unit in left]}")
        samples = self._samples(left)
        self._iterators += 1
        try:
            while True:
                for sample in samples:
                    self._waiting.append(sample)
                    if len(self._waiting) > self._buffer:
                        break
                if not self._waiting:
                    break
                # Removed before it is given out: a state has what is left.
                number = self._random.randrange(len(self._waiting))
                self._waiting[number], self._waiting[-1] = self._waiting[-1], self._waiting[number]
                yield self._waiting.pop()
        finally:
            self._iterators -= 1

    def _samples(self, left: list[dict[str, Any]]) -> Iterator[Any]:
        while left:
            unit = left[0]
            self._open = self._dataset.shard(num_shards=self._dataset.num_shards, index=unit["id"])
            if unit["at"] is not None:
                self._open.load_state_dict(unit["at"])
            samples = iter(self._open)
            before, read = unit.get("read", 0), 0
            while True:
                try:
                    sample = _next_alone(samples)
                except StopIteration:
                    break
                read += 1
                if read <= before:
                    continue
                if self._is_counted:
                    unit["read"] = read
                else:
                    unit["at"] = True  # its position is that of the open one
                yield sample
            if read < before:
                raise Invalid(
                    f"shard {unit['id']} of the stream: {before} samples were read of it, and it has {read} here"
                )
            self._open = None
            del left[0]

    def state_dict(self) -> dict[str, Any]:
        """The shards with their positions, and the samples that wait."""
        units = [dict(unit) for unit in self._left()]
        if units and units[0]["at"] is not None and self._open is not None:
            units[0] |= {"at": self._open.state_dict(), "read": 0}
        waiting = [{"sample": sample} for sample in self._waiting]
        own = {"random": None if self._random is None else self._random.getstate()}
        shared = {"epoch": self._epoch, "shards": self._dataset.num_shards, "steps": self._steps}
        return {REPLICATED: shared, UNITS: [*units, *waiting], OWN: own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on with these shards and samples.

        Raises:
            Invalid: It is of another stream, or an iterator runs.
        """
        shared = state.get(REPLICATED) if isinstance(state, dict) else None
        if not isinstance(shared, dict) or "shards" not in shared:
            raise Invalid("Stream: what is stored is no state of a Stream: load it into what was saved")
        for name, own in (("shards", self._dataset.num_shards), ("steps", self._steps)):
            there = shared.get(name, own)  # older states say no steps
            if there != own:
                raise Invalid(
                    f"Stream: it is another stream, where positions mean other samples ({name}: {there} in the "
                    f"checkpoint, {own} here): load into the same steps over the same files, with the same batch sizes"
                )
        try:
            self.expect_unused()
        except Refused as refused:
            raise Invalid(f"Stream: {refused}") from refused
        self._epoch = state[REPLICATED]["epoch"]
        self._units = [dict(unit) for unit in state[UNITS] if "sample" not in unit]
        self._waiting = [unit["sample"] for unit in state[UNITS] if "sample" in unit]
        self._open = None
        self._is_begun = False
        drawn = state.get(OWN)
        self._random = None
        if drawn is not None and drawn["random"] is not None:
            self._random = random.Random()
            self._random.setstate(drawn["random"])


def _steps_of(iterable: Any) -> Iterator[Any]:
    """The steps of a stream, from the last one to its sources."""
    yield iterable
    for inner in [getattr(iterable, "ex_iterable", None), *getattr(iterable, "ex_iterables", ())]:
        if inner is not None:
            yield from _steps_of(inner)


def _next_alone(samples: Iterator[Any]) -> Any:
    """The next sample, read as if this process were no worker."""
    info, torch_worker._worker_info = torch_worker._worker_info, None
    try:
        return next(samples)
    finally:
        torch_worker._worker_info = info


def _noted(step: Any) -> str:
    """The name of a step, and its batch size where positions count batches."""
    name, is_batched = type(step).__name__, getattr(step, "batched", hasattr(step, "batch_size"))
    return f"{name}(batch_size={step.batch_size})" if is_batched else name


def _expect_whole(call: str, value: object) -> None:
    """Refuses an argument that is no whole number from 0 on."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise Invalid(f"{call}: expected a whole number from 0 on, found a {type(value).__name__}")
