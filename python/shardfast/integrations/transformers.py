"""transformers' Trainer and its subclasses, saved and resumed by Shardfast.

Call :func:`attach` before ``train()``::

    import shardfast.integrations.transformers

    trainer = transformers.Trainer(model, args, train_dataset=data)
    shardfast.integrations.transformers.attach(trainer)
    trainer.train(resume_from_checkpoint=True)  # the newest committed checkpoint, or a fresh start

The trainer's arguments keep their meaning. A checkpoint is ``checkpoint-N/shardfast``, beside the trainer's small
files. Directories that the trainer wrote are loaded by the trainer. What fails in the background is logged at once, and
raised by the next save or at the end of the training.

Tried with transformers 5.23.0. Private names of the trainer in use: ``_save_checkpoint``,
``_save_optimizer_and_scheduler``, ``_save_scaler``, ``_save_rng_state``, ``_save``, ``_load_from_checkpoint``,
``_load_optimizer_and_scheduler``, ``_load_scaler``, ``_load_rng_state``, ``_load_best_model``, ``_get_output_dir``,
``_init_training_state``, ``_run_epoch`` and ``_finalize_training``; of the model ``_hf_peft_config_loaded``.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import shardfast as sf

from . import transformers_places as places
from .trackers import Saves
from .transformers_options import expect_supported, expect_this_version, expect_trainer
from .transformers_resume import Resume
from .transformers_state import State

_SAVING = (
    "train",
    "save_model",
    "_save_checkpoint",
    "_save_optimizer_and_scheduler",
    "_save_scaler",
    "_save_rng_state",
    "_load_best_model",
    "_finalize_training",
)
_RESUMING = (
    "get_train_dataloader",
    "get_batch_samples",
    "_init_training_state",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_scaler",
    "_load_rng_state",
    "_run_epoch",
)
_NOT_CALLED = (
    "save_model",
    "_save",
    "_save_optimizer_and_scheduler",
    "_save_scaler",
    "_save_rng_state",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_scaler",
    "_load_rng_state",
    "_load_best_model",
)
"""The trainer's methods that a save or a load of ours does not call."""


def attach(trainer: Any, *, save_only_model: bool | None = None, pickle: bool = False) -> None:
    """Lets a trainer save and resume by Shardfast. Every rank calls it, once, before ``train()``.

    Args:
        trainer: A ``transformers.Trainer``, or one of a subclass.
        save_only_model: In place of that in the trainer's arguments. ``False`` saves the optimizer of a model that was
            sharded by its ``distributed_config``, too, with whose arguments no ``Trainer`` is made.
        pickle: Pickle what in a schedule has no form as data; such a checkpoint runs code when it is loaded.

    Raises:
        Invalid: It is no trainer, has begun to train, or is attached already.
        Unsupported: It has options with which state would be missing.
    """
    expect_this_version()
    expect_trainer(trainer, _NOT_CALLED)
    expect_supported(trainer)
    if save_only_model is not None:
        trainer.args.save_only_model = save_only_model
    state = State(trainer, pickle)
    resume = Resume(trainer, state)
    loop = _Loop(trainer, state, resume)
    for names, made in ((_SAVING, loop), (_RESUMING, resume)):
        for name in names:
            original = getattr(trainer, name)
            method = functools.partial(getattr(made, name.removeprefix("_")), original)
            setattr(trainer, name, functools.wraps(original)(method))


class _Loop:
    """The saves of one trainer. Its methods are called in place of the trainer's of the same name."""

    def __init__(self, trainer: Any, state: State, resume: Resume) -> None:
        self._trainer = trainer
        self._state = state
        self._resume = resume
        self._saves = Saves()
        self._begun: list[Path] = []
        self._is_saving = False
        self._limit: int | None = None

    def train(self, original: Any, resume_from_checkpoint: Any = None, *args: Any, **named: Any) -> Any:
        """Resumes from the newest checkpoint that is whole, or from the one that is named."""
        self._saves.settle(0)
        expect_supported(self._trainer)
        self._state.begin_training()
        resume = self._resume.find(resume_from_checkpoint)
        return original(resume, *args, **named)

    def save_checkpoint(self, original: Any, *args: Any, **named: Any) -> None:
        """Lets the trainer write its small files, then begins a save."""
        trainer = self._trainer
        trial = named.get("trial", args[1] if len(args) > 1 else None)
        step, limit = int(trainer.state.global_step), trainer.args.save_total_limit
        directory = Path(trainer._get_output_dir(trial=trial)) / f"checkpoint-{step}"
        if directory in self._begun:
            self._saves.settle(0)
        self._begun.append(directory)  # from here on nothing removes it
        if trainer.is_world_process_zero():
            places.begin(directory)
        self._is_saving, self._limit, trainer.args.save_total_limit = True, limit, None
        try:
            original(*args, **named)
        finally:
            self._is_saving, trainer.args.save_total_limit = False, limit
        begun, best = len(self._begun), trainer.state.best_model_checkpoint
        state = self._state.to_save(self._resume.position())

        def conclude() -> None:
            if trainer.is_world_process_zero():
                places.conclude(directory, limit, best, lambda: self._begun[begun:])

        def begin() -> sf.Pending:
            pending = sf.save_async(places.url_of(directory), state, step=step, pickle=self._state.pickle)
            if self._state.waits_for_copies():
                pending.staged()
            return pending

        self._saves.begin(begin, conclude)

    def save_model(self, original: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes no weights into the directory of a checkpoint."""
        if not self._is_saving or output_dir is None:
            original(output_dir, _internal_call=_internal_call)
        elif self._trainer.args.should_save:
            os.makedirs(output_dir, exist_ok=True)
            self._state.write_small_files(output_dir, self._limit)

    def save_optimizer_and_scheduler(self, original: Any, *args: Any, **named: Any) -> None:
        """Writes nothing while a checkpoint is saved; the same goes for the scaler and random states."""
        if not self._is_saving:
            original(*args, **named)

    save_scaler = save_optimizer_and_scheduler
    save_rng_state = save_optimizer_and_scheduler

    def load_best_model(self, original: Any) -> None:
        """Loads the model alone."""
        self._saves.settle(0)
        best = self._trainer.state.best_model_checkpoint
        if places.is_ours(best):
            self._state.load_model(best)
        else:
            original()

    def finalize_training(self, original: Any, *args: Any, **named: Any) -> Any:
        """Waits for the saves in flight before the trainer ends, which may remove all but the best one."""
        self._saves.settle(0)
        return original(*args, **named)
