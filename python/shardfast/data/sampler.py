"""A ``DistributedSampler`` whose state is how many samples of the epoch all data ranks together have consumed."""

from __future__ import annotations

import logging
import operator
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from ..errors import Invalid
from ..state.catalog import Refused

_log = logging.getLogger("shardfast")

_AT_ONCE = 4096

_BATCHES = "torchdata.stateful_dataloader.sampler"
"""The module of the batch sampler whose iterator says how much of a sampler it has read."""

KEYS = {"epoch", "consumed", "length", "seed", "shuffle"}


class _Pass:
    """An iteration that has begun; it lives until that has ended, or is dropped."""


_newest: weakref.WeakKeyDictionary[DistributedSampler, weakref.ref[_Pass]] = weakref.WeakKeyDictionary()
"""By sampler its newest pass; beside the sampler, which stays one that can be copied."""


class DistributedSampler:
    """Deals the samples of a dataset to data ranks, as PyTorch's sampler of this name, and goes on after a load.

    All ranks together read the epoch's order from its begin to its end. The state is how much of it they have consumed,
    the same on every rank. So another number of ranks, workers or another batch size goes on behind it. The order is
    that of PyTorch's sampler with the same arguments.

    In a ``StatefulDataLoader`` the samples count that the training got, not those that workers have read ahead. After a
    load the first iteration gives the rest of the epoch; ``set_epoch()`` with another epoch drops it, with a warning.
    A subclass with an ``__iter__`` of its own is refused by saves and loads: it may read ahead of what it gives out.

    Args:
        dataset: What has a length.
        num_replicas: Number of data ranks; that of the process group if it is ``None``.
        rank: This data rank; that of the process group if it is ``None``.
        shuffle: Whether the order is random, from ``seed`` and the epoch.
        seed: The same on all ranks.
        drop_last: Leaves out the samples at the end that do not suffice for all ranks; otherwise some of the epoch's
            first samples come again there.

    Raises:
        Invalid: ``rank`` is no rank of ``num_replicas``, or an argument is of another kind.
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if (num_replicas is None or rank is None) and not (dist.is_available() and dist.is_initialized()):
            raise Invalid("DistributedSampler: expected num_replicas and rank, or a process group; found none of them")
        self.num_replicas = dist.get_world_size() if num_replicas is None else _whole("num_replicas", num_replicas)
        self.rank = dist.get_rank() if rank is None else _whole("rank", rank)
        if not hasattr(dataset, "__len__"):
            found = f"found {type(dataset).__name__}: give its loader units (docs: Data loaders)"
            raise Invalid(f"DistributedSampler(dataset): expected a dataset with a length, {found}")
        if not 0 <= self.rank < self.num_replicas:
            raise Invalid(
                f"DistributedSampler(num_replicas={num_replicas!r}, rank={rank!r}): expected one of the ranks"
            )
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = _whole("seed", seed)
        self.drop_last = drop_last
        self.epoch = 0
        # How far the newest iteration is, in samples of all ranks, of which epoch it is, and where the next one begins.
        self._consumed = 0
        self._iterated: int | None = None
        self._resumed: int | None = None
        self._is_announced = False

    def __len__(self) -> int:
        """The number of this rank's samples in a whole epoch."""
        return self._share(len(self.dataset))

    def _share(self, samples: int) -> int:
        extra = 0 if self.drop_last else self.num_replicas - 1
        return (samples + extra) // self.num_replicas

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, from which the order of the next iteration follows."""
        epoch = _whole("epoch", epoch)
        if epoch != self.epoch and self._resumed is not None:
            if self._resumed < len(self.dataset):
                _log.warning(
                    "set_epoch(%d) after a load in epoch %d, of which %d of %d samples were read: the rest is left out",
                    epoch,
                    self.epoch,
                    self._resumed,
                    len(self.dataset),
                )
            self._resumed = None
        self.epoch = epoch
        self._is_announced = True

    def __iter__(self) -> Iterator[int]:
        """This rank's samples; after a load the rest of them."""
        # Loaders call iter() several times before they draw, so the position is taken with the first sample.
        length = len(self.dataset)
        this = _Pass()
        _newest[self] = weakref.ref(this)
        begun, self._resumed = self._resumed or 0, None
        if not self._share(length - begun) and not self._is_announced:
            begun = 0  # the epoch had ended, and no other one is announced: the next one
        share = self._share(length - begun)
        self._consumed, self._iterated = begun if share else length, self.epoch
        if self.shuffle:
            generator = torch.Generator()
            generator.manual_seed(self.seed + self.epoch)
            order = torch.randperm(length, generator=generator)
        else:
            order = torch.arange(length)
        mine = torch.arange(share) * self.num_replicas + begun + self.rank
        # Behind the end the epoch's first samples follow again.
        samples = order[mine % length] if share else order[:0]
        # As numbers some at a time: the first batch does not wait for those of a long epoch.
        for number, sample in enumerate(one for some in torch.split(samples, _AT_ONCE) for one in some.tolist()):
            consumed = begun + (number + 1) * self.num_replicas
            self._consumed = consumed if number + 1 < share else length  # with drop_last, too
            yield sample

    def state_dict(self) -> dict[str, Any]:
        """How much of the epoch's order was given out. All ranks say the same when they are at the same sample."""
        # An epoch that is announced counts once it is read: as long as another one is, that is the position.
        is_announced = self.epoch != self._iterated and not (self._is_read() and self._consumed < len(self.dataset))
        return {
            "epoch": self.epoch if is_announced else self._iterated,
            "consumed": 0 if is_announced else self._consumed,
            "length": len(self.dataset),
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def _is_read(self) -> bool:
        return self in _newest and _newest[self]() is not None

    @property
    def own_piece(self) -> tuple[int, int]:
        """The rank and the number of ranks."""
        return self.rank, self.num_replicas

    def expect_unused(self) -> None:
        """Refuses a load while an iteration goes on, which would not move.

        Raises:
            Refused: One does.
        """
        if self._is_read():
            raise Refused("its iterator was made before this load and has the old position: load before iter()")

    def is_begun(self, state: dict[str, Any]) -> bool:
        """Whether a state is of the epoch of the newest iteration, and not of one that was announced since."""
        return bool(state["epoch"] == self._iterated)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on behind what was consumed, with the next iteration.

        Raises:
            Invalid: As :meth:`check`.
        """
        try:
            self.check(state)
        except Refused as refused:
            raise Invalid(f"DistributedSampler: {refused}") from refused
        self.epoch = self._iterated = state["epoch"]
        self._consumed = self._resumed = state["consumed"]
        self._is_announced = False
        _newest.pop(self, None)

    def check(self, state: Any) -> None:
        """Refuses a state of another order.

        Raises:
            Refused: It is of another length, seed or shuffling, or no state of a sampler.
        """
        if not isinstance(state, dict) or set(state) != KEYS:
            raise Refused(f"it is no state of a DistributedSampler: expected {sorted(KEYS)}")
        own = self.state_dict()
        other = [
            f"{key} is {state[key]!r} in the checkpoint and {own[key]!r} here"
            for key in ("length", "seed", "shuffle")
            if state[key] != own[key]
        ]
        if other:
            raise Refused(f"the sampler's order is another one: {', '.join(other)}")


def _whole(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError as error:
        raise Invalid(f"DistributedSampler: {name}: expected a whole number, found {value!r}") from error


def sampler_of(loader: Any) -> DistributedSampler | None:
    """The sampler of a loader, if it is one of these."""
    for sampler in (getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)):
        if isinstance(sampler, DistributedSampler):
            return sampler
    return None


def expect_positions(values: Iterable[tuple[str, Any]]) -> None:
    """Refuses samplers of a state whose position is not known, or would be that of another reader.

    Each object comes with its place, and itself or what stands for it.

    Raises:
        Invalid: A sampler or batch sampler reads in its own way, or two objects have it.
    """
    places: dict[DistributedSampler, str] = {}
    for place, stateful in values:
        found = getattr(stateful, "value", stateful)
        sampler = found if isinstance(found, DistributedSampler) else sampler_of(found)
        if sampler is None:
            continue
        batches = getattr(found, "batch_sampler", None)
        reads = getattr(type(batches), "__iter__", None)
        is_known = batches is None or hasattr(batches, "state_dict") or getattr(reads, "__module__", "") == _BATCHES
        if type(sampler).__iter__ is not DistributedSampler.__iter__:
            problem = (
                f"{type(sampler).__name__} has an __iter__ of its own, and how far that has read ahead is not known: "
            )
            problem += "take DistributedSampler itself and order the dataset, or give the dataset units"
        elif not is_known:
            problem = (
                f"{type(batches).__name__} has no state, and how far it has read ahead is not known: pass sampler= "
            )
            problem += f"and batch_size= to the loader, take {_BATCHES}.BatchSampler, or give it state_dict()"
        elif places.setdefault(sampler, place) != place:
            problem = f"its sampler is that of {places[sampler]}, too: give each loader a sampler of its own"
        else:
            continue
        raise Invalid(f"{place}: {problem}")
