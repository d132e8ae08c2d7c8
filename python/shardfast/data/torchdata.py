"""torchdata's ``StatefulDataLoader``: the states of its workers as units, for other numbers of workers and data ranks.

A snapshot of 0.11 (tried) is ``{"_snapshot": {"_worker_snapshots": {"worker_0": …}, …}, …}`` with workers, and flat
without. A worker's ``dataset_state`` is the dataset's, ``fetcher_state["dataset_iter_state"]`` that of an iterator with
a state. A loader's ``_iterator``, ``next_iter_state`` and ``_initial_iter_for_state_dict`` are private, too, as are an
iterator's ``_finished``, and ``base_dataloader`` of accelerate's wrappers.
"""

from __future__ import annotations

import inspect
import logging
import operator
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from ..state import units
from ..state.catalog import Refused
from ..state.stateful import Stateful, looks_ahead
from ..state.units import LOADER, OWN, REPLICATED, UNITS
from . import prefetch
from .sampler import KEYS, DistributedSampler, sampler_of

_SNAPSHOT, _MAIN, _WORKERS = "_snapshot", "_main_snapshot", "_worker_snapshots"
_FETCHER, _DATASET, _ITERATOR = "fetcher_state", "dataset_state", "dataset_iter_state"
_FINISHED, _BEHIND = "_iterator_finished", "_steps_since_snapshot"
_BATCHES, _SINGLY = "_sampler_iter_state", "_index_sampler_state"

_OPAQUE, _ORDER = "snapshot", "order"
_SAMPLER = "sampler"

_SAME_ORDER = "load with the same, or leave the loader out (only=) to begin anew"

_log = logging.getLogger("shardfast")
_warned: weakref.WeakSet[Any] = weakref.WeakSet()


def stateful_of(value: object) -> Stateful | None:
    """Returns the stand-in for a loader in pieces; ``None`` if it is none of torchdata's."""
    return _Loader(value) if isinstance(value, StatefulDataLoader) else None


def expect_unused(loader: Any) -> None:
    """Refuses a load into a loader with whose iterator the program would go on.

    Raises:
        Refused: It is in the middle of its data.
    """
    loader = loader.value if isinstance(loader, _Loader) else loader
    if not isinstance(loader, StatefulDataLoader):
        return
    loader = _inner(loader)
    if loader._iterator is None or loader._initial_iter_for_state_dict or loader._iterator._finished:
        return
    # The loader holds it, and the call does; a third one is the program, or a wrapper's generator.
    if sys.getrefcount(loader._iterator) > 2 or loader.persistent_workers:
        raise Refused(
            "its iterator was made before this load and would go on with the old position: load before iter()"
        )


def expect_save(value: object, steps: int) -> None:
    """Prepares a loader for a save that is due so many steps from now; see :mod:`.prefetch`."""
    # A wrapper of accelerate's has read ahead of the step.
    if isinstance(value, StatefulDataLoader) and not hasattr(value, "base_dataloader"):
        prefetch.expect_save(value, steps)


def expect_as_saved(loader: Any, snapshot: Any) -> None:
    """Refuses a loader's own snapshot with which its ``iter()`` would fail, or begin anew.

    Raises:
        Refused: It is of another number of workers, another sampler or another kind of dataset.
    """
    # Other states are those of a subclass, which reads them itself.
    if isinstance(loader, StatefulDataLoader) and isinstance(snapshot, dict) and _FINISHED in snapshot:
        there = len(_workers_of(snapshot)) if _SNAPSHOT in snapshot else 0
        if there != loader.num_workers:
            raise Refused(
                f"it was saved with {there} workers, this loader has {loader.num_workers}: put it into the state as "
                "shardfast.Sharded(loader, index, count), in the save, too (docs: Data loaders)"
            )
        _expect_slots(loader.dataset, _slots_in(snapshot))
        is_ours = sampler_of(loader) is not None and not hasattr(loader.batch_sampler, "state_dict")
        if set(_positions(snapshot)) != ({_SINGLY if loader.batch_sampler is None else _BATCHES} if is_ours else set()):
            raise Refused(f"it was saved with another kind of sampler or batch sampler: {_SAME_ORDER}")


def _inner(loader: Any) -> Any:
    """The loader in a wrapper of accelerate's, which counts what it has read ahead."""
    return getattr(loader, "base_dataloader", loader)


class _Loader(Stateful):
    """A loader as a piece of the data. Its own pieces are its workers."""

    def __init__(self, loader: Any) -> None:
        self.value = loader
        self.subject = type(loader.dataset).__name__
        if callable(getattr(loader.dataset, "split", None)):
            self.split = loader.dataset.split

    def __repr__(self) -> str:
        return f"{type(self.value).__name__}({self.subject})"

    def state_dict(self) -> dict[str, Any]:
        """The units of all workers; a sampler's position; a snapshot that only an equal loader can use."""
        loader, sampler = _inner(self.value), sampler_of(self.value)
        if loader._iterator is None and loader.next_iter_state is None:  # making an iterator would start workers
            return self._at(sampler.state_dict() if sampler is not None else None)
        snapshot = loader.next_iter_state if loader._iterator is None else self.value.state_dict()
        workers = _workers_of(snapshot)
        slots = _slots_in(snapshot)
        if not slots and sampler is not None and (position := _position(snapshot, sampler, loader)) is not None:
            return self._at(position)
        if len(slots) == 1 and isinstance(loader.dataset, IterableDataset):  # another one has a sampler, too
            (slot,) = slots
            states = [_state(worker, slot) for worker in workers]
            if all(units.has_units(state) for state in states):
                self._warn_of_age(snapshot.get(_BEHIND, 0))
                found = _by_units(snapshot, slot, states)
                found[REPLICATED][LOADER] = type(self.value).__name__
                return found
        return {LOADER: type(self.value).__name__, _OPAQUE: snapshot, _ORDER: _order_of(loader, snapshot)}

    def _at(self, position: dict[str, Any] | None) -> dict[str, Any]:
        return {REPLICATED: {LOADER: type(self.value).__name__, _SAMPLER: position}, UNITS: []}

    def merged(self, shared: list[Any]) -> list[Any]:
        """Merges what data ranks share that are dealt out: the pass has ended if it has on all of them."""
        if not all(isinstance(one, dict) and "finished" in one for one in shared):
            return shared
        common = {"finished": all(one["finished"] for one in shared), "behind": max(one["behind"] for one in shared)}
        return [{**one, **common} for one in shared]

    def _warn_of_age(self, batches: int) -> None:
        if batches and not looks_ahead.get() and self.value not in _warned:
            _warned.add(self.value)
            _log.warning(
                "%r: its workers' states are %d batches old (snapshot_every_n_steps=%s): from this save only as many "
                "workers and data ranks can go on; this is said once",
                self,
                batches,
                _inner(self.value).snapshot_every_n_steps,
            )

    def check(self, state: Any) -> None:
        """Refuses what this loader cannot take up."""
        if units.loader_of(state) is None:
            raise Refused(
                "it was not saved from a StatefulDataLoader: load it into what it was saved from, the dataset"
            )
        shared = state.get(REPLICATED, {})
        if "slot" in shared:
            _expect_slots(self.value.dataset, {shared["slot"]})
        if _OPAQUE in state:
            snapshot = state[_OPAQUE]
            self._expect_equal(len(_workers_of(snapshot)) if _SNAPSHOT in snapshot else 0)
            _expect_slots(self.value.dataset, _slots_in(snapshot))
            here = _order_of(_inner(self.value), snapshot)
            if state[_ORDER] != here:
                raise Refused(f"it was saved with {state[_ORDER]}, this loader has {here}: {_SAME_ORDER}")
        elif _SAMPLER in shared:
            position, sampler = shared[_SAMPLER], sampler_of(self.value)
            if position is not None and sampler is None:
                raise Refused(
                    f"it was saved with a shardfast.data.DistributedSampler, and this loader has none: {_SAME_ORDER}"
                )
            if sampler is not None and position is not None:
                sampler.check(position)
        elif not self._is_as_saved(state):
            if shared["behind"]:
                raise Refused(
                    f"its workers' states are {shared['behind']} batches old, and other workers cannot read these "
                    "again: load with as many workers and data ranks as saved; let snapshot_every_n_steps divide the "
                    "number of batches between saves"
                )
            if not shared["agrees"]:
                raise Refused(
                    'what the workers share ("replicated") differs from worker to worker, and this loader has others: '
                    "load with as many workers and data ranks as saved"
                )

    def _expect_equal(self, there: int) -> None:
        if there != self.value.num_workers:
            has_index = not isinstance(self.value.dataset, IterableDataset)
            way = "take a shardfast.data.DistributedSampler, and no state_dict()" if has_index else 'give it "units"'
            raise Refused(
                f"it was saved with {there} workers, this loader has {self.value.num_workers}, and the state of "
                f"{self.subject} is opaque: {way} (docs: Data loaders)"
            )

    def _is_as_saved(self, state: dict[str, Any]) -> bool:
        return OWN in state and state[OWN]["workers"] == self.value.num_workers

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on with the next ``iter()``."""
        if _OPAQUE in state:
            self.value.load_state_dict(state[_OPAQUE])
        elif _SAMPLER in state[REPLICATED]:
            sampler, position = sampler_of(self.value), state[REPLICATED][_SAMPLER]
            if sampler is not None and position is not None:
                sampler.load_state_dict(position)
            _inner(self.value).load_state_dict({})
        elif self._is_as_saved(state):
            own, before, states = state[OWN], 0, []
            for number, count in enumerate(own["counts"]):
                shared = state[REPLICATED]["dataset"] if own["shared"] is None else own["shared"][number]
                states.append({REPLICATED: shared, UNITS: state[UNITS][before : before + count], **own["own"][number]})
                before += count
            self.value.load_state_dict(_with(own[_OPAQUE], state[REPLICATED]["slot"], states))
        else:
            shared, every = state[REPLICATED], state[UNITS]
            # Workers end with their pass, whatever their last state says is left; a dataset of this process goes on.
            ended = shared["finished"] and (shared["by_workers"] or not every)
            self.value.load_state_dict({} if ended else self._dealt(shared, every))

    def _dealt(self, shared: dict[str, Any], every: list[Any]) -> dict[str, Any]:
        """A snapshot in which units are dealt out to the workers."""
        workers = self.value.num_workers
        split = getattr(self, "split", None)
        dealt = units.dealt([units.weight_of(unit) for unit in every], workers or 1, splits=split is not None)
        pieces = [
            _put(
                {"worker_id": number, _DATASET: None, _FETCHER: {_ITERATOR: None, "fetcher_ended": False}},
                shared["slot"],
                {REPLICATED: shared["dataset"], UNITS: units.taken(of, [every[one.unit] for one in of], split)},
            )
            for number, of in enumerate(dealt)
        ]
        units.expect_apart([units.id_of(unit) for piece in pieces for unit in _state(piece, shared["slot"])[UNITS]])
        # What the loader counts begins anew; an iterable dataset has no sampler.
        main = {
            "_sampler_iter_state": None,
            "_index_sampler_state": None,
            "_sampler_iter_yielded": 0,
            "_IterableDataset_len_called": None,
            "_shared_seed": None,
        }
        if not workers:
            return {**main, **pieces[0], "_num_yielded": 0, _FINISHED: False}
        # Drawing a seed would change the job's random state; the job's own is the same in each resume.
        main |= {"_num_workers": workers, "_base_seed": torch.initial_seed() % 2**62}
        snapshot = {
            "_snapshot_step": 0,
            "_last_yielded_worker_id": workers - 1,
            _MAIN: main,
            _WORKERS: {f"worker_{number}": piece for number, piece in enumerate(pieces)},
        }
        return {_SNAPSHOT: snapshot, _BEHIND: 0, _FINISHED: False}


def _workers_of(snapshot: dict[str, Any]) -> list[dict[str, Any]]:
    """The states of workers; without any the loader is one itself."""
    if _SNAPSHOT not in snapshot:
        return [snapshot]
    of = snapshot[_SNAPSHOT][_WORKERS]
    return [of[f"worker_{number}"] for number in range(len(of))]


def _slots_in(snapshot: dict[str, Any]) -> set[str]:
    """Returns the keys of the workers' states: the dataset's, its iterator's, or both."""
    found = set()
    for worker in _workers_of(snapshot):
        states = {_DATASET: worker[_DATASET], _ITERATOR: (worker.get(_FETCHER) or {}).get(_ITERATOR)}
        found |= {slot for slot, state in states.items() if state is not None}
    return found


def _state(worker: dict[str, Any], slot: str) -> Any:
    return worker[_DATASET] if slot == _DATASET else worker[_FETCHER][_ITERATOR]


def _put(worker: dict[str, Any], slot: str, state: Any) -> dict[str, Any]:
    """A worker with this state in its place."""
    if slot == _DATASET:
        return {**worker, _DATASET: state}
    return {**worker, _FETCHER: {**worker[_FETCHER], _ITERATOR: state}}


def _with(snapshot: dict[str, Any], slot: str, states: Sequence[Any]) -> dict[str, Any]:
    """A snapshot with these states of its workers."""
    pieces = [_put(worker, slot, state) for worker, state in zip(_workers_of(snapshot), states, strict=True)]
    if _SNAPSHOT not in snapshot:
        return pieces[0]
    workers = {f"worker_{number}": piece for number, piece in enumerate(pieces)}
    return {**snapshot, _SNAPSHOT: {**snapshot[_SNAPSHOT], _WORKERS: workers}}


def _by_units(snapshot: dict[str, Any], slot: str, states: Sequence[Any]) -> dict[str, Any]:
    """A snapshot whose workers' states are units."""
    shared = [state[REPLICATED] for state in states]
    agrees = all(_is_same(one, shared[0]) for one in shared)
    has_workers = _SNAPSHOT in snapshot
    return {
        REPLICATED: {
            "slot": slot,
            "dataset": shared[0] if agrees else None,
            "agrees": agrees,
            "behind": snapshot.get(_BEHIND, 0),
            "finished": snapshot[_FINISHED],
            "by_workers": has_workers,
        },
        UNITS: [unit for state in states for unit in state[UNITS]],
        OWN: {
            "workers": len(states) if has_workers else 0,
            "counts": [len(state[UNITS]) for state in states],
            "shared": None if agrees else shared,
            "own": [{OWN: state[OWN]} if OWN in state else {} for state in states],
            _OPAQUE: _with(snapshot, slot, [None] * len(states)),
        },
    }


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return type(one) is type(other) and torch.equal(one, other)
    return bool(one == other)


def _has_state(value: object) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def _expect_slots(dataset: Any, there: set[str]) -> None:
    """Refuses a state that this dataset does not take, or one that lacks what the dataset goes on from."""
    is_iterable = isinstance(dataset, IterableDataset)
    # A generator has no state: that of others is known only once iter() has made one, as torchdata does, too.
    makes_iterator = is_iterable and not inspect.isgeneratorfunction(type(dataset).__iter__)
    iterator = iter(dataset) if makes_iterator else None
    here = {_DATASET} if _has_state(dataset) and iterator is not dataset else set()
    here |= {_ITERATOR} if _has_state(iterator) else set()
    if there - here or (is_iterable and here and not there):
        found, own = (" and ".join(sorted(of)) or "none" for of in (there, here))
        raise Refused(
            f"{type(dataset).__name__} here has another kind of state: expected {found}, as in the checkpoint, found "
            f"{own}: load into a dataset with the state_dict() and load_state_dict() of the saved one"
        )


def _main_of(snapshot: dict[str, Any]) -> dict[str, Any]:
    main: dict[str, Any] = snapshot[_SNAPSHOT][_MAIN] if _SNAPSHOT in snapshot else snapshot
    return main


def _order_of(loader: Any, snapshot: dict[str, Any]) -> str:
    """The names of what makes a loader's order; the number of batches and their size where these are counted."""
    batches, main = loader.batch_sampler, _main_of(snapshot)
    if isinstance(loader.dataset, IterableDataset):
        return "its dataset's order" if _slots_in(snapshot) else f"batch_size={loader.batch_size}"
    makers = [loader.sampler] if batches is None else [batches, getattr(batches, "sampler", None)]
    kinds = [type(maker) for maker in makers if maker is not None]
    names = " of ".join(f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}" for kind in kinds)
    if main[_BATCHES] is not None or main[_SINGLY] is not None:
        return names
    return f"{names} ({operator.length_hint(makers[0], -1)} batches of {getattr(batches, 'batch_size', None)})"


def _positions(snapshot: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The state of a sampler of ours behind what was asked for, by whether that was batches or single samples."""
    main = _main_of(snapshot)
    of_batches = main[_BATCHES] if isinstance(main[_BATCHES], dict) else {}
    found = {_BATCHES: of_batches.get("sampler_state"), _SINGLY: main[_SINGLY]}
    return {key: one for key, one in found.items() if isinstance(one, dict) and one.keys() == KEYS}


def _position(snapshot: dict[str, Any], sampler: DistributedSampler, loader: Any) -> dict[str, Any] | None:
    """The sampler's position behind the last batch that the training got; ``None`` if the snapshot does not tell it."""
    position = next(iter(_positions(snapshot).values()), None)
    if position is None:
        return None
    size = 1 if loader.batch_sampler is None else loader.batch_sampler.batch_size
    later = snapshot.get(_BEHIND, 0) * size * sampler.num_replicas
    ended = (snapshot[_FINISHED] and sampler.is_begun(position)) or position["consumed"] + later >= position["length"]
    return {**position, "consumed": position["length"] if ended else position["consumed"] + later}
