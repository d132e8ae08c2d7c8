"""Energon's loaders by units: the states of their workers, each with what it has left of the data.

Tried with megatron-energon 7.4.1, whose ``SavableDataLoader`` gives out a ``SavableDataLoaderState``: data classes, and
``FlexState``, a class of dicts. Private names in use, of the loader: ``_has_workers``, ``_epoch_iterator``,
``_global_sample_idx``.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from inspect import GEN_CREATED, getgeneratorstate
from typing import Any

from megatron.energon.savable_loader import SavableDataLoader, SavableDataLoaderState
from megatron.energon.state import FlexState

from ..state.catalog import Refused
from ..state.stateful import Stateful
from ..state.units import OWN, REPLICATED, UNITS

_SIZE, _NEXT, _SETTINGS = "micro_batch_size", "next_worker_id", "settings"

_OWN = {"worker_config", "slice_offsets", "len", "batch_size"}
"""The settings of a dataset that are those of a rank or a worker, and that which Energon compares itself."""


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

    @property
    def own_piece(self) -> tuple[int, int]:
        """The data rank and the number of data ranks."""
        config = self._loader.dataset.worker_config
        return config.rank, config.world_size

    def __repr__(self) -> str:
        return f"{type(self._loader).__name__}({self._workers} workers)"

    def _read(self) -> dict[str, Any]:
        state = self._saved()
        if state is None:  # it has not begun
            return {REPLICATED: {_SIZE: None}, UNITS: []}
        own = {_NEXT: state.next_worker_id}
        shared = {_SIZE: state.micro_batch_size, _SETTINGS: dict(_flat(self._loader.dataset.config()))}
        return {REPLICATED: shared, UNITS: _plain(state.worker_states), OWN: own}

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
        """Refuses the states of other workers or settings, and a load into a loader that has begun."""
        loader, units = self._loader, state[UNITS]
        if loader._has_workers or loader._global_sample_idx:
            raise Refused("it has begun, and would go on with the old position: load before iter(), or into a new one")
        there = state[REPLICATED].get(_SETTINGS)  # none if it had not begun; older states have none
        if (units or there is not None) and len(units) != self._workers:
            raise Refused(
                f"this data rank gets the states of {len(units)} workers, and its loader has {self._workers}: "
                "load with as many workers on all data ranks together as saved, evenly"
            )
        if units and isinstance(units[0], dict) != (not loader.num_workers):
            raise Refused(
                "the states of worker processes are of another kind than that of none, it was saved with "
                f"{'none' if loader.num_workers else 'some'}, and its loader has {loader.num_workers}: load as saved"
            )
        here = dict(_flat(loader.dataset.config()))
        for name in {**here, **there} if there is not None else ():
            if there.get(name) != here.get(name):
                raise Refused(
                    f"its {name} is {there.get(name)!r} in the checkpoint and {here.get(name)!r} here, and samples "
                    "would be lost and come again: make the loader with the settings of the save"
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


def _flat(settings: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The settings of a dataset that its positions depend on, by path; no flags, names of functions, paths of files."""
    if isinstance(settings, dict):
        for key, value in settings.items():
            is_name = isinstance(value, str) and key not in ("type", "name")
            if key == "shards":
                yield f"{path}{key}", hashlib.sha256(repr([*_flat(value)]).encode()).hexdigest()
            elif not is_name and key not in _OWN and not key.startswith("_"):
                yield from _flat(value, f"{path}{value.get('type', key) if isinstance(value, dict) else key}.")
    elif isinstance(settings, (list, tuple)):
        for number, value in enumerate(settings):
            yield from _flat(value, f"{path}{number}.")
    elif isinstance(settings, (str, int, float, type(None))) and not isinstance(settings, bool):
        yield path.rstrip("."), settings
