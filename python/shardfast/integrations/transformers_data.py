"""The position in the data of a Trainer whose training loader has a state.

Such a loader goes on by itself, so the trainer's own skip of batches is off; the steps of the epoch are counted as if
it had skipped. Other loaders are the trainer's matter.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset
from transformers.trainer_utils import has_length

import shardfast as sf

_OVER = object()


class Data:
    """The training loader of a trainer.

    Attributes:
        loads: Whether this training takes its position from the checkpoint.
        sets_random: Whether the random state is set here, not where the trainer sets it.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._loader: Any = None
        self._due: Callable[[], None] | None = None
        self.loads = False
        self.sets_random = False

    def take(self, loader: Any, *, is_saved: bool) -> None:
        """Takes the loader of a training that begins.

        Args:
            loader: It.
            is_saved: Whether the checkpoint that is resumed from has a position.

        Raises:
            Unsupported: Its position cannot be saved.
        """
        self._loader = loader if _is_stateful(loader) else None
        self._due, self.sets_random = None, False
        self.loads = is_saved and self._loader is not None and not self._trainer.args.ignore_data_skip
        if self._loader is None:
            return
        if type(loader).__name__ == "DataLoaderDispatcher":
            raise sf.Unsupported(
                "dispatch_batches with a stateful data loader: rank 0 alone knows the position: pass "
                'accelerator_config={"dispatch_batches": False} to TrainingArguments'
            )
        if self._trainer.args.enable_jit_checkpoint:
            raise sf.Unsupported(
                "enable_jit_checkpoint with a stateful data loader: it saves within a step, behind whose batches the "
                "loader is already: turn one of them off"
            )

    def position(self) -> sf.Sharded | None:
        """The loader as a piece of the data; ``None`` if it has no state."""
        if self._loader is None:
            return None
        trainer = self._trainer
        inner = max(trainer.get_tp_size(), 1) * trainer.get_cp_size() * trainer.get_sp_size()
        args = trainer.args
        return sf.Sharded(self._loader, args.process_index // inner, max(args.world_size // inner, 1))

    def where(self, epochs: int, steps: int) -> tuple[int, int]:
        """The epochs and the batches of this one that are behind, from what the trainer computes.

        Under another number of batches in an epoch, as another number of data ranks has it, the trainer's counts are
        wrong; the saved fraction of the epoch is right.
        """
        if not self.loads or not has_length(self._loader):
            return epochs, steps
        batches, epoch = len(self._loader), float(self._trainer.state.epoch)
        whole = int(epoch + 1e-9)
        every = self._trainer.args.gradient_accumulation_steps
        done = int((epoch - whole) * batches + 1e-6) // every * every
        if done == 0 and hasattr(self._loader, "use_stateful_dataloader"):
            # accelerate's wrapper was at its end, and after a load of that makes two iterators, each of which draws
            # from the random state. The next epoch begins without it.
            self.loads = self.loads and isinstance(self._loader.dataset, IterableDataset)
        return whole, done

    def run_epoch(
        self, original: Callable[..., Any], set_random: Callable[[Any], None], *args: Any, **named: Any
    ) -> Any:
        """``Trainer._run_epoch()``, of which the first one goes on at the position.

        Args:
            original: It.
            set_random: Sets the random state of the checkpoint, as often as it is called.
            args: Its arguments.
            named: Its arguments.
        """
        call = inspect.signature(original).bind(*args, **named)
        given = call.arguments
        checkpoint, done = given["resume_from_checkpoint"], given["steps_trained_in_current_epoch"]
        is_first = checkpoint is not None and given["epoch"] == given["epochs_trained"]
        if self._loader is None or not is_first:
            return original(*args, **named)
        if done == 0 and not self.loads:
            if hasattr(self._loader, "base_dataloader"):
                iter(self._loader.base_dataloader)  # the wrapper has one from its beginning, and later epochs make one
            return original(*args, **named)
        _set_epoch(self._loader, given["epoch"])
        if done == 0:
            set_random(checkpoint)
        batches = iter(self._loader)
        for _ in range(0 if self.loads else done):
            next(batches, None)
        first = next(batches, _OVER)
        self.sets_random = done > 0 or first is not _OVER
        if self.sets_random:  # else the position was an epoch's end, and the trainer begins the next one
            read = () if first is _OVER else (first,)
            given["train_dataloader"] = _Begun(self._loader, itertools.chain(read, batches))
        if done > 0:
            self._due = functools.partial(set_random, checkpoint)
            given["num_update_steps_per_epoch"] -= done // self._trainer.args.gradient_accumulation_steps
            given["steps_in_epoch"] = _Rest(given["steps_in_epoch"], done)
            given["steps_trained_in_current_epoch"] = 0
        return original(*call.args, **call.kwargs)

    def after_batches(self) -> None:
        """Sets the random state behind the first batches of a resumed epoch, as the trainer does after its skip."""
        due, self._due = self._due, None
        if due is not None:
            due()


class _Begun:
    """A loader of which some batches were read."""

    def __init__(self, loader: Any, batches: Iterator[Any]) -> None:
        self._loader, self._batches = loader, batches

    def __iter__(self) -> Iterator[Any]:
        return self._batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def set_epoch(self, epoch: int) -> None:
        """Does nothing: it is that of the batches that were read."""


class _Rest(int):
    """How many batches of an epoch are left. A number of them, divided by it, is the part of the epoch that is over."""

    _batches: int
    _done: int

    def __new__(cls, batches: int, done: int) -> _Rest:
        self = super().__new__(cls, batches - done)
        self._batches, self._done = batches, done
        return self

    def __rtruediv__(self, batches: Any) -> float:
        return float((self._done + batches) / self._batches)


def _is_stateful(loader: Any) -> bool:
    has = all(callable(getattr(type(loader), name, None)) for name in ("state_dict", "load_state_dict"))
    return has and bool(getattr(loader, "use_stateful_dataloader", True))  # accelerate's wrapper always has the methods


def _set_epoch(loader: Any, epoch: int) -> None:
    """Sets the number of the epoch as the trainer does."""
    sampler: Any = getattr(getattr(loader, "batch_sampler", None), "batch_sampler", None)
    one: Any
    for one in (loader, sampler):
        if hasattr(one, "set_epoch"):
            one.set_epoch(epoch)
