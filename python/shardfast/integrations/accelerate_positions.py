"""Positions in the data, of loaders with a state that accelerate prepared.

The position in a map-style dataset is the number of samples of the epoch's order that all processes have consumed. Any
number of processes and workers goes on behind it, with any batch size.

Private names: ``dl_state_dict`` and ``base_dataloader`` of the loaders of accelerate 1.15.0; of torchdata 0.11.0
``StatefulDataLoader._iterator`` and ``_initial_iter_for_state_dict``, ``_finished`` of an iterator, and the keys of a
loader's state.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler

import shardfast as sf

_log = logging.getLogger("shardfast")

FINISHED = "_iterator_finished"
"""In the state of a loader of torchdata's, whether the epoch is over."""

_REMEDY = "pass use_seedable_sampler=True to DataLoaderConfiguration"


def is_seedable(sampler: Any) -> bool:
    """Whether a sampler's order depends on a seed and the epoch alone."""
    return isinstance(sampler, SeedableRandomSampler)


def sampler_of(order: Any) -> Any:
    """The sampler of a batch sampler, as the user gave it."""
    return order.sampler.sampler if isinstance(order.sampler, _Rest) else order.sampler


class _Rest:
    """A sampler whose next iteration begins behind some samples.

    Attributes:
        sampler: The sampler.
        following: Number of samples that the next iteration leaves out.
        behind: Number of samples that the newest iteration has left out.
        loaded: The state that a load gave, until the next iteration.
    """

    def __init__(self, sampler: Any, following: int, loaded: dict[str, Any]) -> None:
        self.sampler, self.following, self.behind = sampler, following, 0
        self.loaded: dict[str, Any] | None = loaded

    def __iter__(self) -> Iterator[Any]:
        self.behind, self.following, self.loaded = self.following, 0, None
        return itertools.islice(iter(self.sampler), self.behind, None)

    def __len__(self) -> int:
        return len(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        """Hands the epoch on."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)


class Position(sf.Stateful):
    """The position of a loader in an epoch's order, which is the ``sampler`` of the batch sampler ``order``."""

    def __init__(self, loader: Any, order: Any) -> None:
        super().__init__(self._read, self._write)
        self._loader, self._order = loader, order

    def __repr__(self) -> str:
        return f"the position in {type(self._loader.dataset).__name__}"

    def _read(self) -> dict[str, Any]:
        rest, sampler = self._order.sampler, sampler_of(self._order)
        if isinstance(rest, _Rest) and rest.loaded is not None:
            return rest.loaded
        snapshot, behind, length = self._loader.state_dict(), getattr(rest, "behind", 0), len(sampler)
        there = behind + _yielded(snapshot) * self._shape()["samples"]
        consumed = length if snapshot[FINISHED] else min(length, there)
        is_known = is_seedable(sampler) or not hasattr(sampler, "generator")
        if not is_known and not _has_order(snapshot) and 0 < consumed < length:
            _log.warning(
                "%r: its shuffled order is not saved, and a resume in the middle of the epoch reads other samples: %s",
                self,
                _REMEDY,
            )
        return {
            "snapshot": snapshot,
            "behind": behind,
            "consumed": consumed,
            "length": length,
            "is_known": is_known,
            "has_state": _has_state(snapshot),
            **self._shape(),
        }

    def _shape(self) -> dict[str, int]:
        """Who reads, and how many samples of all processes are a step."""
        shards = [
            one for one in (self._loader.batch_sampler, self._loader.sampler) if isinstance(one, BatchSamplerShard)
        ]
        count = shards[0].num_processes if shards else 1
        steps = 1 if not shards or shards[0].split_batches else count
        return {"samples": self._order.batch_size * steps, "processes": count, "workers": self._loader.num_workers}

    def _is_as_saved(self, state: dict[str, Any]) -> bool:
        return state["snapshot"] is not None and all(state[name] == own for name, own in self._shape().items())

    def check(self, state: Any) -> None:
        """Refuses another order, what other readers cannot take up, and a loader that is in use.

        Raises:
            Invalid: Saying which.
        """
        length, is_within = len(self._order.sampler), 0 < state["consumed"] < state["length"]
        if is_within and state["length"] != length:
            raise sf.Invalid(
                f"{self!r}: an epoch had {state['length']} samples, and has {length} here: load with the same dataset"
            )
        if not self._is_as_saved(state):
            if state["has_state"]:
                raise sf.Invalid(
                    f"{self!r}: the dataset's own state is opaque: load with as many processes and workers, and the "
                    "batch size, with which it was saved"
                )
            if is_within and not state["is_known"]:
                raise sf.Invalid(f"{self!r}: its shuffled order is not in the checkpoint: {_REMEDY}, and save again")
        expect_unused(self._loader, repr(self))

    def _write(self, state: dict[str, Any]) -> None:
        order, snapshot, following = self._order, {}, 0
        is_over = state["consumed"] >= state["length"]
        if self._is_as_saved(state) and not is_over:
            snapshot, following = state["snapshot"], state["behind"]
        elif not is_over:
            following = state["consumed"]
        order.sampler = sampler_of(order)
        if following:  # torchdata's own samplers have a state, which another one would not take
            order.sampler = _Rest(order.sampler, following, state)
        self._loader.base_dataloader.load_state_dict(snapshot)
        self._loader.dl_state_dict = snapshot or {FINISHED: is_over}


def expect_unused(loader: Any, name: str) -> None:
    """Refuses a load into a loader of which a loop is under way.

    Raises:
        Invalid: One is.
    """
    base = loader.base_dataloader
    made = base._iterator
    is_in_use = made is not None and not base._initial_iter_for_state_dict and not made._finished
    if is_in_use and sys.getrefcount(made) > 3:  # the loader's, this name's, the call's, and a loop's
        raise sf.Invalid(
            f"{name}: its iterator was made before this load and would go on with the old position: load before iter()"
        )


def as_consumed(states: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """The pieces' states for another number of them.

    Raises:
        Invalid: They are not at the same place.
    """
    places = sorted({one["consumed"] for one in states})
    if len(places) > 1:
        raise sf.Invalid(f"processes had consumed {' and '.join(map(str, places))} samples: save where they agree")
    return [{**states[0], "snapshot": None, "has_state": any(one["has_state"] for one in states)}] * count


def _yielded(snapshot: dict[str, Any]) -> int:
    """How many batches a loader of torchdata's has given out in this epoch."""
    if "_snapshot" in snapshot:
        return int(snapshot["_snapshot"]["_snapshot_step"] + snapshot["_steps_since_snapshot"])
    return int(snapshot.get("_num_yielded", 0))


def _has_order(snapshot: dict[str, Any]) -> bool:
    """Whether the state has that of torchdata's own samplers."""
    main = snapshot["_snapshot"]["_main_snapshot"] if "_snapshot" in snapshot else snapshot
    return main.get("_sampler_iter_state") is not None


def _has_state(snapshot: dict[str, Any]) -> bool:
    """Whether the state has a dataset's own."""
    workers = snapshot["_snapshot"]["_worker_snapshots"].values() if "_snapshot" in snapshot else [snapshot]
    return any(worker.get("dataset_state") is not None for worker in workers)
