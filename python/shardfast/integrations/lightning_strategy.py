"""Saves and loads in place of a Lightning strategy's.

Private names of Lightning 2.6 that are used: ``strategy._checkpoint_io``, and those of ``lightning_data``.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision

import shardfast as sf

from .directories import state_of
from .lightning_data import End, Position, Resumption
from .lightning_places import Removals, directory, look, name, prepare, saving
from .lightning_state import OPTIMIZERS, VALUES, WEIGHTS, Elsewhere, dict_of, values_of
from .places import of_rank_0
from .trackers import Saves

METHODS = (
    "save_checkpoint",
    "load_checkpoint",
    "remove_checkpoint",
    "lightning_module_state_dict",
    "optimizer_state",
    "load_model_state_dict",
    "load_optimizer_state_dict",
    "process_dataloader",
    "on_train_start",
    "on_train_end",
    "teardown",
)


_saves = Saves()  # of all strategies: another trainer may load what one saves


class Through:
    """The saves and loads of one strategy; its public methods are those of Lightning's ``Strategy``."""

    def __init__(self, strategy: Any, *, is_async: bool, pickle: bool) -> None:
        self._strategy, self._is_async, self._pickle = strategy, is_async, pickle
        self._own = {method: getattr(strategy, method) for method in METHODS}
        self._removals = Removals(self._own["remove_checkpoint"])
        self._resumed: Resumption | None = None
        self._end: End | None = None
        self._generator: torch.Tensor | None = None

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns a stand-in; gathers nothing."""
        if self._end is not None:  # Lightning asks its loaders for their states next, which draws from the generator
            self._generator = torch.get_rng_state()
        return Elsewhere(WEIGHTS)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Returns a stand-in; gathers nothing."""
        return Elsewhere(OPTIMIZERS)

    @property
    def _trainer(self) -> Any:
        return self._strategy.lightning_module.trainer

    def _position(self) -> Position:
        of: dict[str, int] = getattr(self._strategy, "distributed_sampler_kwargs", {"rank": 0, "num_replicas": 1})
        return Position(self._trainer, of["rank"], of["num_replicas"])

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Begins to save."""
        if storage_options is not None:
            raise sf.Unsupported(f"save_checkpoint(storage_options={storage_options!r}): leave it out")
        plugin = self._strategy._checkpoint_io
        if plugin is not None and type(plugin) is not TorchCheckpointIO:
            raise sf.Unsupported(f"{type(plugin).__name__}: shardfast saves without a CheckpointIO: leave it out")
        state: dict[str, Any] = {"model": self._strategy.model, VALUES: values_of(checkpoint)}
        if OPTIMIZERS in checkpoint:
            if self._strategy.optimizers:
                state["optimizer"] = list(self._strategy.optimizers)
            state |= {"random": sf.random_state(), **self._position().to_save(self._end)}
        step = int(checkpoint["global_step"])
        path, is_hidden, waits = of_rank_0(lambda: self._prepare(filepath))
        number = self._removals.begun(path)

        def named() -> None:
            if self._strategy.is_global_zero:
                if is_hidden:
                    name(path)
                self._removals.durable(number)

        def begin() -> sf.Pending:
            if waits:
                of_rank_0(lambda: prepare(path, is_hidden=is_hidden))
            url = state_of(saving(path) if is_hidden else path)
            return sf.save_async(url, state, step=step, pickle=self._pickle)

        if self._generator is not None:
            torch.set_rng_state(self._generator)
            self._generator = None
        with self._end.there() if self._end is not None else contextlib.nullcontext():
            _saves.begin(begin, named, most=0 if waits else 1)
        if not self._is_async:
            _saves.settle(0)

    def _prepare(self, filepath: Any) -> tuple[Path, bool, bool]:
        """The path of a save, whether it gets its name when it is durable, and whether earlier ones must end first."""
        path = directory(filepath)
        counted = {
            str(one)
            for callback in self._trainer.checkpoint_callbacks
            for one in (*getattr(callback, "best_k_models", ()), getattr(callback, "best_model_path", ""))
        }
        is_hidden = path.exists() or path.is_symlink() or str(filepath) not in counted
        waits = is_hidden and saving(path).exists()
        if not waits:
            prepare(path, is_hidden=is_hidden)
        return path, is_hidden, waits

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes a checkpoint once those begun after it are durable."""
        if self._strategy.is_global_zero:
            self._removals.ask(directory(filepath))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads Lightning's dict; tensors follow when the modules and optimizers are there."""
        _saves.settle(0)
        self._resumed = None
        place, names = of_rank_0(lambda: look(checkpoint_path))
        if place is None:
            return self._own["load_checkpoint"](checkpoint_path, weights_only)  # type: ignore[no-any-return]
        url = str(state_of(place))
        values = dict.fromkeys(one.removeprefix(f"{VALUES}/") for one in names if one.startswith(f"{VALUES}/"))
        state: dict[str, Any] = {VALUES: values}
        # Under another number of ranks Lightning gives all of them what rank 0 saved.
        sf.load(url, state, only=VALUES, per_rank="rank0", pickle=self._pickle)
        if self._trainer.training:
            self._resumed = Resumption(url, names)
        return dict_of(state[VALUES], url)

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Loads the module, and the optimizers where Lightning leaves these to the strategy."""
        weights = checkpoint.get(WEIGHTS)
        if not isinstance(weights, Elsewhere) or weights.url is None:
            self._own["load_model_state_dict"](checkpoint, strict=strict)
            return
        if isinstance(self._strategy.precision_plugin, (HalfPrecision, DoublePrecision)):
            # Lightning converts the module later, and by way of its present dtype bits would be lost.
            self._strategy.precision_plugin.convert_module(self._strategy.model)
        sf.load(weights.url, {"model": self._strategy.model}, only="model", strict=strict)
        if not self._strategy.lightning_restore_optimizer and self._trainer.training:
            self._load_optimizers(checkpoint, weights.url)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Loads the optimizers and the random states."""
        if isinstance(checkpoint[WEIGHTS], Elsewhere):
            self._load_optimizers(checkpoint, checkpoint[WEIGHTS].url)
        else:
            self._own["load_optimizer_state_dict"](checkpoint)

    def _load_optimizers(self, checkpoint: Any, url: str) -> None:
        optimizers, there = list(self._strategy.optimizers), len(checkpoint.get(OPTIMIZERS, ()))
        if OPTIMIZERS not in checkpoint:
            return  # Lightning refuses it, with a text of its own
        if len(optimizers) != there:
            raise sf.Invalid(f"{url} has {there} optimizers, the module configures {len(optimizers)}: expected as many")
        state = {"model": self._strategy.model, "optimizer": optimizers} if optimizers else {}
        sf.load(url, {**state, "random": sf.random_state()}, only=["optimizer", "random"], per_rank="index")

    def process_dataloader(self, dataloader: Any) -> Any:
        """Loads the position of a training loader."""
        loader = self._own["process_dataloader"](dataloader)
        if self._resumed is not None and self._trainer.training:
            self._resumed.meet(loader, self._position())
        return loader

    def on_train_start(self) -> None:
        """Ends a resumption: all iterators are made."""
        resumed, self._resumed, self._end = self._resumed, None, None
        if resumed is not None:
            resumed.end(self._position())
        self._own["on_train_start"]()

    def on_train_end(self) -> None:
        """Waits for the last save, and raises what failed."""
        self._own["on_train_end"]()
        _saves.settle(0)

    def teardown(self) -> None:
        """Waits for the last save."""
        with contextlib.suppress(sf.Error):  # it is in the log; an exception may be on its way already
            _saves.settle(0)
        if self._strategy.lightning_module is not None and self._trainer.training:
            self._end = self._position().end()
        self._own["teardown"]()
