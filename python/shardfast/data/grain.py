"""Grain's iterators in pieces: refused with other workers, and by one position for all pieces where they have that.

Tried with grain 0.2.18. Its own ``set_state()`` takes a state of two workers for three, and then repeats samples and
leaves others out. Names in states: ``iterators_in_use_states`` of what reads several iterators in turn, as
``mp_prefetch()`` does its workers; ``worker_count`` of a ``DataLoader``; ``global_next_index`` of an
``ElasticIterator``, the same on all data ranks.
"""

from __future__ import annotations

import json
from typing import Any

from grain._src.python.dataset.dataset import DatasetIterator

from ..state.catalog import Refused
from ..state.stateful import Stateful
from ..state.units import REPLICATED, UNITS, has_units

_IN_TURN, _WORKERS, _OF_ALL = "iterators_in_use_states", "worker_count", "global_next_index"


def stateful_of(value: object) -> Stateful | None:
    """Returns a stand-in for an iterator in pieces; ``None`` if it is none of Grain's."""
    is_ours = isinstance(value, DatasetIterator) or type(value).__module__.startswith("grain.")
    is_iterator = all(hasattr(value, name) for name in ("get_state", "set_state"))
    return _Iterator(value) if is_ours and is_iterator else None


class _Iterator(Stateful):
    def __init__(self, iterator: Any) -> None:
        super().__init__(iterator.get_state, iterator.set_state)
        self.subject = type(iterator).__name__

    def state_dict(self) -> Any:
        """The iterator's state; a position of all data ranks as what all pieces share."""
        state = super().state_dict()
        is_of_all = isinstance(state, dict) and state.keys() == {_OF_ALL}
        return {REPLICATED: state, UNITS: []} if is_of_all else state

    def check(self, state: Any) -> None:
        """Refuses the state of other workers."""
        there, here = _iterators(_own(state)), _iterators(_own(self.state_dict()))
        if there != here:
            raise Refused(
                f"it reads with {_listed(there)} workers, or iterators in turn, in the checkpoint and with "
                f"{_listed(here)} here: load with as many, or take grain.experimental.ElasticIterator (docs: Data "
                "loaders)"
            )

    def load_state_dict(self, state: Any) -> None:
        """Goes on behind the last sample that was given out."""
        super().load_state_dict(_own(state))


def _own(state: Any) -> Any:
    return state[REPLICATED] if has_units(state) else state


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
