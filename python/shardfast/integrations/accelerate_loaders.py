"""The loaders that accelerate prepared, as parts of a state.

Each loader's epoch is saved, with the seed of a ``SeedableRandomSampler``. Of a loader with a state
(``use_stateful_dataloader=True``) the position is saved, too.

Private names of accelerate 1.15.0: ``_fetch_batches`` and ``_update_state_dict`` of ``DataLoaderDispatcher``, and
``dl_state_dict`` and ``base_dataloader`` of loaders; of torchdata 0.11.0
``StatefulDataLoader._initial_iter_for_state_dict``.
"""

from __future__ import annotations

from typing import Any

import accelerate
from accelerate.data_loader import DataLoaderDispatcher
from torch.utils.data import BatchSampler, IterableDataset

import shardfast as sf

from .accelerate_positions import FINISHED, Position, as_consumed, expect_unused, is_seedable, sampler_of


class Loader:
    """A loader that accelerate prepared."""

    def __init__(self, accelerator: accelerate.Accelerator, loader: Any) -> None:
        self._accelerator, self._loader = accelerator, loader
        self._is_stateful = bool(getattr(loader, "use_stateful_dataloader", False))
        self._is_dispatched = isinstance(loader, DataLoaderDispatcher)

    def entries(self) -> dict[str, Any]:
        """Returns its entries in a state."""
        found: dict[str, Any] = {"epoch": sf.Stateful(self._epoch, self._set_epoch)}
        if not self._is_stateful:
            return found
        index, count = _data_rank(self._accelerator)
        order = _order_of(self._loader)
        if self._is_dispatched:  # by process 0, whose position is that of all
            own = _Dispatched(self._accelerator, self._loader) if order is None else Position(self._loader, order)
            found["position"] = sf.PerRank(own)
        elif order is not None:
            found["position"] = sf.Sharded(Position(self._loader, order), index, count, reshard=as_consumed)
        else:
            found["position"] = sf.Sharded(self._loader, index, count)
        return found

    def prepared(self) -> None:
        """Mends what accelerate leaves before the first step of a loader with a state.

        To see the state accelerate has made an iterator, whose workers are reading in the order before the
        ``SeedableRandomSampler`` was set: it is dropped.
        """
        if not self._is_stateful:
            return
        base = self._loader.base_dataloader
        if base._initial_iter_for_state_dict and base.num_workers and is_seedable(self._sampler()):
            base.load_state_dict({})
        if self._is_dispatched and "_fetch_batches" not in vars(self._loader):
            _note_before_reading(self._loader)

    def make_iterator(self) -> None:
        """Makes the iterator that the next loop goes on with, before the random state is set, from which it draws.

        A loop that begins another epoch makes its own, as it does without a load.
        """
        loader = self._loader
        is_iterable = not self._is_dispatched and _order_of(loader) is None
        if self._is_stateful and (is_iterable or not loader.dl_state_dict[FINISHED]):
            loader.base_dataloader.state_dict()

    def _epoch(self) -> dict[str, Any]:
        loader = self._loader
        # In the loop's last round the epoch is over for a loader that goes on by itself.
        is_last = self._is_stateful and loader.end_of_dataloader
        is_over = is_last and loader in self._accelerator.gradient_state.dataloader_references
        sampler = self._sampler()
        seeds = {"seed": sampler.initial_seed, "epoch": sampler.epoch} if is_seedable(sampler) else None
        return {"iteration": getattr(loader, "iteration", 0) + is_over, "sampler": seeds}

    def _sampler(self) -> Any:
        order = _order_of(self._loader)
        return None if order is None else sampler_of(order)

    def _set_epoch(self, state: dict[str, Any]) -> None:
        loader, sampler = self._loader, self._sampler()
        if state["sampler"] is not None and is_seedable(sampler):
            sampler.initial_seed, sampler.epoch = state["sampler"]["seed"], state["sampler"]["epoch"]
        if self._is_stateful:
            loader.end_of_dataloader = False
        if hasattr(loader, "iteration"):
            loader.set_epoch(state["iteration"])


def _data_rank(accelerator: accelerate.Accelerator) -> tuple[int, int]:
    """Which part of the data this process reads, of how many, as accelerate deals it out."""
    mesh = accelerator.torch_device_mesh
    if mesh is None:
        return accelerator.process_index, accelerator.num_processes
    sizes = {name: mesh[name].size() for name in mesh.mesh_dim_names}
    inner = sizes.get("tp", 1) * sizes.get("cp", 1)
    return accelerator.process_index // inner, sizes.get("dp_replicate", 1) * sizes.get("dp_shard", 1)


def _order_of(loader: Any) -> Any:
    """The batch sampler that all processes have, whose ``sampler`` is the epoch's order; ``None`` if there is none."""
    if isinstance(loader.dataset, IterableDataset):
        return None
    order = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    while hasattr(order, "batch_sampler"):
        order = order.batch_sampler
    is_known = hasattr(order, "sampler") and isinstance(getattr(order, "batch_size", None), int)
    return order if is_known and hasattr(order.sampler, "__len__") else None


def _note_before_reading(loader: Any) -> None:
    """Lets a loader that dispatches batches note its state before it reads those of another step.

    accelerate notes it while it reads, and takes off what it counts as ahead: with workers, split batches or a dataset
    with a state it is another place than that of the training.
    """
    fetch = loader._fetch_batches

    def noting(iterator: Any) -> Any:
        loader.dl_state_dict = {**loader.base_dataloader.state_dict(), FINISHED: False}
        return fetch(iterator)

    def tag() -> None:
        loader.dl_state_dict = {**loader.dl_state_dict, FINISHED: loader.end_of_dataloader}

    loader._fetch_batches, loader._update_state_dict = noting, tag


class _Dispatched(sf.Stateful):
    """The position of a loader in an iterable dataset, which process 0 reads for all."""

    def __init__(self, accelerator: accelerate.Accelerator, loader: Any) -> None:
        super().__init__(self._read, self._write)
        self._is_main, self._loader = accelerator.is_main_process, loader

    def _read(self) -> dict[str, Any]:
        snapshot = self._loader.state_dict()
        is_over, workers = bool(snapshot[FINISHED]), self._loader.num_workers
        return {"snapshot": snapshot if self._is_main else {}, "is_over": is_over, "workers": workers}

    def check(self, state: Any) -> None:
        """Refuses another number of workers, and a loader that is in use.

        Raises:
            Invalid: Saying which.
        """
        here = self._loader.num_workers
        if state["workers"] != here and not state["is_over"]:
            raise sf.Invalid(f"a loader was saved with {state['workers']} workers, and has {here} here: use as many")
        expect_unused(self._loader, f"the position in {type(self._loader.dataset).__name__}")

    def _write(self, state: dict[str, Any]) -> None:
        snapshot = state["snapshot"] if self._is_main else {}
        self._loader.base_dataloader.load_state_dict({} if state["is_over"] else snapshot)
        self._loader.dl_state_dict = snapshot or {FINISHED: state["is_over"]}
