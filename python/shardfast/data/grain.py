"""Grain's iterators in pieces: refused with other workers, and by one position for all pieces where they have that.

Tried with grain 0.2.18. Its own ``set_state()`` takes a state of two workers for three, and then repeats samples and
leaves others out. Names in states: ``iterators_in_use_states`` of what reads several iterators in turn, as
``mp_prefetch()`` does its workers; ``worker_count`` of a ``DataLoader``; ``global_next_index`` of an
``ElasticIterator``, the same on all data ranks. Names in datasets and iterators: see :func:`_order`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from grain._src.python.dataset.dataset import DatasetIterator, MapDataset

from ..state.catalog import Refused
from ..state.stateful import Stateful
from ..state.units import REPLICATED, UNITS, has_units

_IN_TURN, _WORKERS, _OF_ALL = "iterators_in_use_states", "worker_count", "global_next_index"

_ORDER = "shardfast_order"
_ORDERS = ("_seed", "_global_seed", "_window_size", "_proportions")


def stateful_of(value: object) -> Stateful | None:
    """Returns a stand-in for an iterator in pieces; ``None`` if it is none of Grain's."""
    is_ours = isinstance(value, DatasetIterator) or type(value).__module__.startswith("grain.")
    is_iterator = all(hasattr(value, name) for name in ("get_state", "set_state"))
    return _Iterator(value) if is_ours and is_iterator else None


class _Iterator(Stateful):
    def __init__(self, iterator: Any) -> None:
        super().__init__(iterator.get_state, iterator.set_state)
        self.subject, self._iterator = type(iterator).__name__, iterator

    def state_dict(self) -> Any:
        """The iterator's state with its order of samples; a position of all data ranks as what all pieces share."""
        state = super().state_dict()
        if not isinstance(state, dict):
            return state
        noted = {**state, _ORDER: [*_order(self._iterator)]}
        return {REPLICATED: noted, UNITS: []} if _is_of_all(state) else noted

    def check(self, state: Any) -> None:
        """Refuses the state of other workers, and one of another order."""
        saved, own = _own(state), _own(self.state_dict())
        there, here = _iterators(saved), _iterators(own)
        if there != here:
            raise Refused(
                f"it reads with {_listed(there)} workers, or iterators in turn, in the checkpoint and with "
                f"{_listed(here)} here: load with as many, or take grain.experimental.ElasticIterator (docs: Data "
                "loaders)"
            )
        kinds = ["an ElasticIterator's" if _is_of_all(one) else "another iterator's" for one in (saved, own)]
        if kinds[0] != kinds[1]:
            raise Refused(f"its position is {kinds[0]} in the checkpoint and {kinds[1]} here: load into what was saved")
        orders = [one.get(_ORDER) if isinstance(one, dict) else None for one in (saved, own)]
        if orders[0] not in (None, orders[1]):  # older states have none
            raise Refused(
                f"its samples come from {orders[0]} in the checkpoint and from {orders[1]} here, and would be lost and "
                "come again: load with the sources, seeds and weights of the save"
            )

    def load_state_dict(self, state: Any) -> None:
        """Goes on behind the last sample that was given out."""
        state = _own(state)
        if isinstance(state, dict):
            state = {key: value for key, value in state.items() if key != _ORDER}
        super().load_state_dict(state)


def _own(state: Any) -> Any:
    return state[REPLICATED] if has_units(state) else state


def _is_of_all(state: Any) -> bool:
    return isinstance(state, dict) and state.keys() - {_ORDER} == {_OF_ALL}


def _order(step: Any) -> Iterator[str]:
    """Yields what the order of samples follows from; slices are those of a data rank, and functions may change."""
    names = (*_ORDERS, "_batch_size") if isinstance(step, MapDataset) else _ORDERS
    found = [f"{name[1:]}={getattr(step, name)}" for name in names if hasattr(step, name)]
    if found:
        yield f"{type(step).__name__}({', '.join(found)})"
    below = [*getattr(step, "_parents", ()), *getattr(step, "_datasets", ())]
    below += [getattr(step, name) for name in ("_map_parent", "_ds") if hasattr(step, name)]
    if not below and hasattr(step, "__len__"):
        yield f"{len(step)} samples"
    for inner in below:
        yield from _order(inner)


def _listed(numbers: list[int]) -> str:
    return " and ".join(map(str, numbers)) or "no"


def _iterators(state: Any) -> list[int]:
    """How many workers, or iterators that are read in turn, a state is of, for each step of its pipeline with such."""
    if isinstance(state, bytes):
        state = json.loads(state)
    if not isinstance(state, dict):
        return []
    if _WORKERS in state:
        return [state[_WORKERS]]
    if _IN_TURN in state:
        return [len(state[_IN_TURN])]
    return [number for part in state.values() for number in _iterators(part)]
