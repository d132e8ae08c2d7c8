"""torchtitan's trainings, saved and loaded by Shardfast.

One name in the user's configuration::

    from shardfast.integrations.torchtitan import Shardfast

    config.checkpoint = Shardfast.Config(enable=True, interval=500, keep_latest_k=3)

Each option of torchtitan's ``BaseCheckpointManager.Config`` keeps its meaning. ``step-N`` holds a checkpoint,
``shardfast``, with the entries ``model``, ``optimizer``, ``lr_scheduler``, ``dataloader``, ``train_state`` and
``random``. What torchtitan wrote is loaded by torchtitan, and it writes and reads Hugging Face's format.

Names of torchtitan 0.3.0 that are used: those of ``components.checkpointer`` (the module says that its interface is
new), and those of ``torchtitan_state``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.checkpointer.base import DATALOADER, LR_SCHEDULER, MODEL, OPTIMIZER, BaseCheckpointManager
from torchtitan.config import TORCH_DTYPE_MAP

import shardfast as sf

from .places import is_far, of_rank_0
from .torchtitan_places import checkpoint_of, expect_directory, newest_step, prepare, prune, replace, step_of
from .torchtitan_state import entries, load_all, model_alone
from .trackers import Saves
from .versions import expect_version

TESTED = "0.3.0"


class Shardfast(BaseCheckpointManager):  # type: ignore[misc]
    """Saves and loads a training of torchtitan, which makes it of its :class:`Config`."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]
        """Options of torchtitan, and ours."""

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[Any],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        if not self.enable:
            return
        expect_version("torchtitan", importlib.metadata.version("torchtitan"), oldest=TESTED, tried=TESTED)
        if config.last_save_in_hf and sd_adapter is None:
            raise sf.Invalid("last_save_in_hf: this model has no adapter for Hugging Face's names: leave it out")
        self._config = config
        self.folder = expect_directory("checkpoint.folder", base_folder or ".") / config.folder
        expect_directory("checkpoint.folder", config.folder)
        self.save_future: Future[None] | None = None
        self._given = {
            "dataloader": dataloader,
            "model_parts": model_parts,
            "optimizers": optimizers,
            "lr_schedulers": lr_schedulers,
            "sd_adapter": sd_adapter,
            "base_folder": base_folder,
        }
        self._own = dict(states)
        self.states = {**states, OPTIMIZER: optimizers, LR_SCHEDULER: lr_schedulers, DATALOADER: dataloader}
        self._saves = Saves()
        self._pending: sf.Pending | None = None

    def _of_torchtitan(self) -> CheckpointManager:
        """torchtitan's manager, for what it wrote and for Hugging Face's format."""
        options = {field.name: getattr(self._config, field.name) for field in dataclasses.fields(self._config)}
        options = {name: value for name, value in options.items() if not name.startswith("_")} | {"keep_latest_k": 0}
        config = CheckpointManager.Config(**options)
        return CheckpointManager(config, states=dict(self._own), **self._given)

    def _is_due(self, step: int, last_step: bool) -> bool:
        config = self._config
        is_first = step == 1 and config.enable_first_step_checkpoint
        return not config.load_only and (is_first or last_step or step % config.interval == 0)

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if not self._is_due(curr_step, last_step):
            return False
        config = self._config
        if last_step and config.last_save_in_hf:
            self._saves.settle(0)
            return bool(self._of_torchtitan().save(curr_step, last_step=True))
        if last_step and config.last_save_model_only:
            state = model_alone(self._given["model_parts"], TORCH_DTYPE_MAP[config.export_dtype])
        else:
            state = entries(self.states, self._given["model_parts"])
        directory, is_rank_0 = step_of(self.folder, curr_step), not dist.is_initialized() or dist.get_rank() == 0
        is_again = False

        def begin() -> sf.Pending:
            nonlocal is_again
            place, is_again = of_rank_0(lambda: prepare(directory))
            self._pending = sf.save_async(place, state, step=curr_step)
            return self._pending

        def named() -> None:
            if is_rank_0:
                if is_again:
                    replace(directory)
                if config.keep_latest_k > 0:
                    prune(self.folder, curr_step, config.keep_latest_k)

        self.save_future = Future()  # says that there is one to wait for
        self._saves.begin(begin, named)
        return True

    def _load(self, step: int = -1) -> bool:
        self._saves.settle(0)
        config = self._config
        found = newest_step(self.folder) if step == -1 else step
        if found is None and not config.initial_load_path and not config.initial_load_in_hf:
            return False  # a fresh start
        is_initial = found is None
        model_only = config.initial_load_model_only if is_initial else found == 0
        if is_initial and (config.initial_load_in_hf or is_far(str(config.initial_load_path))):
            return bool(self._of_torchtitan().load(-1))
        place = Path(str(config.initial_load_path)) if found is None else step_of(self.folder, found)
        url = checkpoint_of(place)
        if url is None:
            return bool(self._of_torchtitan().load(-1 if found is None else found))
        parts = self._given["model_parts"]
        if model_only:
            sf.load(url, {MODEL: parts}, only=MODEL, cast=True)
        else:
            self._expect_all(url)
            loader = self.states[DATALOADER]
            load_all(str(url), entries(self.states, parts), config.exclude_from_loading, loader)
        return True

    def _expect_all(self, url: Path) -> None:
        """Refuses a checkpoint from which no training goes on."""

        def look() -> bool:
            with sf.mapped(url) as checkpoint:
                return any(name.startswith("train_state/") for name in checkpoint.value_names())

        if not of_rank_0(look):
            raise sf.Invalid(
                f"{url} has the model alone (last_save_model_only=True): a training goes on from an earlier step "
                "(load_step=), or begins with it (initial_load_path=, in another folder)"
            )

    def _maybe_wait_for_staging(self) -> None:
        if self._pending is not None:
            with contextlib.suppress(sf.Error):  # the next save, or the end, raises it
                self._pending.staged()
            self._pending = None

    def _wait_for_saving(self) -> None:
        self.save_future = None
        self._saves.settle(0)

    def _close(self) -> None:
        self._saves.settle(0)
