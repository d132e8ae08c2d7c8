"""Energon's loaders by units: the states of their workers, each with what it has left of the data.

Tried with megatron-energon 7.4.1, whose ``SavableDataLoader`` gives out a ``SavableDataLoaderState``: data classes, and
``FlexState``, a class of dicts. Private names in use, of the loader: ``_has_workers``, ``_epoch_iterator``.
"""

from __future__ import annotations

import dataclasses
from inspect import GEN_CREATED, getgeneratorstate
from typing import Any

from megatron.energon.savable_loader import SavableDataLoader, SavableDataLoaderState
from megatron.energon.state import FlexState

from ..state.catalog import Refused
from ..state.stateful import Stateful
from ..state.units import OWN, REPLICATED, UNITS

_SIZE, _NEXT = "micro_batch_size", "next_worker_id"


def stateful_of(value: object) -> Stateful | None:
    """Returns a stand-in for a loader in pieces; ``None`` if it is none of Energon's."""
    return _Loader(value) if isinstance(value, SavableDataLoader) else None


class _Loader(Stateful):
    """A loader as a piece of the data. Its units are the states of its workers.

    Energon deals out its data to all workers of all data ranks, so the number of these workers stays: 2 data ranks with
    4 workers each go on as 4 with 2.
    """

    def __init__(self, loader: Any) -> None:
        super().__init__(self._read, self._write)
        self._loader = loader
        self._workers = max(loader.num_workers, 1)

    def __repr__(self) -> str:
        return f"{type(self._loader).__name__}({self._workers} workers)"

    def _read(self) -> dict[str, Any]:
        state = self._saved()
        if state is None:  # it has not begun
            return {REPLICATED: {_SIZE: None}, UNITS: []}
        own = {_NEXT: state.next_worker_id}
        return {REPLICATED: {_SIZE: state.micro_batch_size}, UNITS: _plain(state.worker_states), OWN: own}

    def _saved(self) -> SavableDataLoaderState | None:
        """Energon's own state. Between ``iter()`` and the first sample it would wait for workers that do not run."""
        loader, iterator = self._loader, self._loader._epoch_iterator
        is_waiting = loader._has_workers and iterator is not None and getgeneratorstate(iterator) == GEN_CREATED
        if not is_waiting:
            return loader.save_state_rank()
        loader._has_workers = False
        try:
            return loader.save_state_rank()
        finally:
            loader._has_workers = True

    def check(self, state: Any) -> None:
        """Refuses the states of another number of workers, and a load into a loader that has begun."""
        if self._loader._has_workers:
            raise Refused("its workers run already, and would go on with the old position: load before iter()")
        if state[UNITS] and len(state[UNITS]) != self._workers:
            raise Refused(
                f"this data rank gets the states of {len(state[UNITS])} workers, and its loader has {self._workers}: "
                "load with as many workers on all data ranks together as saved, evenly"
            )

    def _write(self, state: Any) -> None:
        if not state[UNITS]:
            return
        self._loader.restore_state_rank(
            SavableDataLoaderState(
                worker_states=[FlexState(unit) if isinstance(unit, dict) else unit for unit in state[UNITS]],
                next_worker_id=state.get(OWN, {_NEXT: 0})[_NEXT],
                micro_batch_size=state[REPLICATED][_SIZE],
            )
        )


def _plain(value: Any) -> Any:
    """A state with plain dicts in place of those of a class, whose parts say the same."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **parts)
    return value
