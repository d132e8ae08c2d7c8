"""Resumes a Trainer: which checkpoint, and what is loaded when.

The trainer loads a model first and random states last, once the batches of its first step are there. Here model,
optimizer, schedule, scaler and position come together, where the trainer loads its optimizer.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import shardfast as sf

from . import transformers_places as places
from .transformers_data import Data
from .transformers_state import State

_log = logging.getLogger("shardfast")


class Resume:
    """The loads of one trainer. Most methods are called in place of the trainer's of the same name."""

    def __init__(self, trainer: Any, state: State) -> None:
        self._trainer = trainer
        self._state = state
        self._data = Data(trainer)
        self._loader: Any = None
        self._found: places.Found | None = None
        self._load_random: Any = trainer._load_rng_state  # the trainer's own

    def find(self, resume: Any) -> str | None:
        """The directory to resume from; all ranks call it.

        Args:
            resume: ``resume_from_checkpoint`` of the trainer.
        """
        output_dir = self._trainer.args.output_dir
        if resume is True:
            resume = places.newest(output_dir)
            if resume is None:
                _log.info("%s has no checkpoint to resume from: the training begins", output_dir)
        directory = os.fspath(resume) if resume else None
        self._found = None if directory is None else places.look(directory)
        return directory

    def position(self) -> sf.Sharded | None:
        """Returns the position of the training loader, if it has a state."""
        return self._data.position()

    def get_train_dataloader(self, original: Any) -> Any:
        """Remembers the loader."""
        self._loader = original()
        return self._loader

    def init_training_state(self, original: Any, *args: Any, **named: Any) -> tuple[int, int]:
        """Counts epochs and steps as the loader's position is counted."""
        self._data.take(self._loader, is_saved=self._found is not None and "data" in self._found.holds)
        self._loader = None
        return self._data.where(*original(*args, **named))

    def load_from_checkpoint(self, original: Any, resume_from_checkpoint: str, model: Any = None) -> None:
        """Leaves the model to :meth:`load_optimizer_and_scheduler`."""
        if self._is_found(resume_from_checkpoint):
            return
        if places.is_ours(resume_from_checkpoint):
            self._state.load_model(resume_from_checkpoint)
        else:
            original(resume_from_checkpoint, model)

    def load_optimizer_and_scheduler(self, original: Any, checkpoint: str | None) -> None:
        """Loads all but the random state."""
        if self._found is not None and self._is_found(checkpoint):
            self._state.load(self._found, self._data.position() if self._data.loads else None)
        else:
            original(checkpoint)

    def load_scaler(self, original: Any, checkpoint: str | None) -> None:
        """Does nothing where the scaler is loaded with the optimizer."""
        if not self._is_found(checkpoint):
            original(checkpoint)

    def load_rng_state(self, original: Any, checkpoint: str | None) -> None:
        """Sets the random state, unless that is done at another time."""
        if not self._data.sets_random:
            self._set_random(checkpoint)

    def run_epoch(self, original: Any, *args: Any, **named: Any) -> Any:
        """Begins the first epoch at the position."""
        return self._data.run_epoch(original, self._set_random, *args, **named)

    def get_batch_samples(self, original: Any, *args: Any, **named: Any) -> Any:
        """Reads the batches of a step; behind those of the first one it sets the random state."""
        batches = original(*args, **named)
        self._data.after_batches()
        return batches

    def _set_random(self, checkpoint: str | None) -> None:
        if self._found is not None and self._is_found(checkpoint):
            self._state.load_random(self._found)
        else:
            self._load_random(checkpoint)

    def _is_found(self, directory: str | None) -> bool:
        if self._found is None or directory is None:
            return False
        return os.path.abspath(directory) == os.path.abspath(self._found.directory)  # with a slash at its end, too
