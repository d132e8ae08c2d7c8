"""Contents of a Trainer's checkpoint, and the small files beside it.

- ``model/…``, ``optimizer/…``, ``scheduler/…``, ``scaler/…`` are the trainer's; ``random/own`` is each rank's.
- ``data/position`` is that of a loader with a state.
- ``trainer/…`` are values: ``state`` is what ``trainer_state.json`` says, from rank 0.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from pathlib import Path
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from transformers.trainer import TRAINING_ARGS_NAME

import shardfast as sf

from .transformers_model import adapter_names, adapter_of, is_peft, plain, write_configurations
from .transformers_places import Found, url_of

_log = logging.getLogger("shardfast")

_AT_INDEX = "index"
"""In another world, rank i goes on with what rank i modulo the number of saving ranks saved."""


class State:
    """The state of a trainer.

    Attributes:
        pickle: Whether what has no form as data is pickled.
    """

    def __init__(self, trainer: Any, pickle: bool) -> None:
        self._trainer = trainer
        self.pickle = pickle
        self._adapter: list[str] | None = None

    def begin_training(self) -> None:
        """Looks at the model anew."""
        self._adapter = None

    def to_save(self, position: sf.Sharded | None) -> dict[str, Any]:
        """The state of this rank for a save.

        Args:
            position: Where the loader is, if it has a state.
        """
        trainer = self._trainer
        state: dict[str, Any] = {"model": self._model()}
        if not trainer.args.save_only_model:
            state |= self._beside()
            state["random"] = {"own": sf.random_state()}
            if position is not None:
                state["data"] = {"position": position}
        values: dict[str, Any] = {"holds": sorted(state), "world_size": trainer.args.world_size}
        values["state"] = dataclasses.asdict(trainer.state) if trainer.is_world_process_zero() else None
        return {**state, "trainer": values}

    def load(self, found: Found, position: sf.Sharded | None) -> None:
        """Loads all but the random state.

        Args:
            found: A checkpoint.
            position: Where the loader shall be, if it is to be loaded.
        """
        state = {"model": self._model(), **self._beside()}
        if position is not None:
            state["data"] = {"position": position}
        here = [key for key in state if key in found.holds]
        if self._trainer.is_world_process_zero():
            self._log_differences(found, state)
        self._fill(found.url, {key: state[key] for key in here})

    def load_model(self, directory: str) -> None:
        """Loads the model of a directory alone."""
        self._fill(url_of(directory), {"model": self._model()})

    def load_random(self, found: Found) -> None:
        """Sets the random state, if the checkpoint has it."""
        if "random" in found.holds:
            self._fill(found.url, {"random": {"own": sf.random_state()}})

    def waits_for_copies(self) -> bool:
        """Whether more than an optimizer's step changes parameters: optimizers with another mode for evaluation."""
        return callable(getattr(_inside(self._trainer.optimizer), "eval", None))

    def write_small_files(self, directory: str, limit: int | None) -> None:
        """Writes what tools look for beside the weights, as the trainer does.

        Args:
            directory: Where.
            limit: ``save_total_limit``, which the arguments do not have during a save.
        """
        trainer = self._trainer
        write_configurations(plain(trainer), directory, is_adapter=is_peft(trainer))
        tokenizer = getattr(trainer.data_collator, "tokenizer", None)
        processing = trainer.processing_class if trainer.processing_class is not None else tokenizer
        if processing is not None:
            processing.save_pretrained(directory)
        args = copy.copy(trainer.args)
        args.save_total_limit = limit
        torch.save(args, Path(directory) / TRAINING_ARGS_NAME)

    def _fill(self, url: str, state: dict[str, Any]) -> None:
        try:
            sf.load(url, state, only=list(state), per_rank=_AT_INDEX, pickle=self.pickle)
        except sf.Invalid as error:
            raise sf.Invalid(
                f"{error}\nArguments that are named here are those of shardfast.load(), which loads parts of {url}. A "
                "position in the data is left out with TrainingArguments(ignore_data_skip=True)"
            ) from error

    def _log_differences(self, found: Found, state: dict[str, Any]) -> None:
        missing = sorted(key for key in state if key not in found.holds)
        unused = sorted(key for key in found.holds if key not in state and key not in ("random", "data"))
        if missing:
            _log.warning("%s has no %s: these begin anew", found.directory, ", ".join(missing))
        if unused:
            _log.warning("%s has %s, which this training has not: not loaded", found.directory, ", ".join(unused))
        world_size = self._trainer.args.world_size
        if found.world_size != world_size:
            _log.warning(
                "%s was saved by %d ranks and is loaded by %d: rank i takes the random state of rank i modulo %d",
                found.directory,
                found.world_size,
                world_size,
                found.world_size,
            )

    def _beside(self) -> dict[str, Any]:
        """Returns the other values of the trainer, by key."""
        trainer = self._trainer
        state: dict[str, Any] = {"optimizer": _inside(trainer.optimizer), "scheduler": trainer.lr_scheduler}
        scaler = getattr(trainer.accelerator, "scaler", None)
        if scaler is not None and scaler.is_enabled():
            state["scaler"] = scaler
        return state

    def _model(self) -> Any:
        """Returns what is saved of the model: it, or the part that its adapters are and what else is trained."""
        trainer = self._trainer
        if not is_peft(trainer):
            return trainer.model
        if self._adapter is None:
            self._adapter = adapter_names(plain(trainer))
        return adapter_of(plain(trainer), self._adapter)


def _inside(optimizer: Any) -> Any:
    """PyTorch's optimizer, whose steps can be waited with; accelerate's around it runs no hooks."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
