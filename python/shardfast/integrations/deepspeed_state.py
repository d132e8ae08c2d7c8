"""Contents of an engine's checkpoint beside its parameters and its optimizer, and what a load does with it.

- ``engine/…`` are values of the job: how many steps it made, its schedule, and the caller's ``client_state``.
- ``random/own`` is each rank's random state.
"""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist

import shardfast as sf

_log = logging.getLogger("shardfast")

_COUNTS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
_REMEDIES = (
    "load_checkpoint() has load_module_strict=False for leaves that are missing or unexpected; what else is named here "
    "are arguments of shardfast.load(), which loads the engine and its optimizer from this checkpoint, too"
)
_LEFT_OUT = "shardfast_left_out"
"""An engine's attribute: the names of parameters that a save leaves out."""


class State:
    """The state of an engine."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        steps = hasattr(engine.optimizer, "param_groups") and type(engine.optimizer).__name__ != "DummyOptim"
        inside = getattr(engine.optimizer, "optimizer", None)
        self._optimizer = engine.optimizer if steps and type(inside).__name__ != "DummyOptim" else None

    def _beside(self) -> dict[str, Any]:
        """Returns the other values of an engine, by name."""
        engine = self._engine
        found: dict[str, Any] = {"scheduler": engine.lr_scheduler}
        if engine.random_ltd_enabled():
            found["random_ltd"] = engine.random_ltd_scheduler
        if engine.training_dataloader is not None and engine.curriculum_learning_enabled():
            found["data_sampler"] = engine.training_dataloader.data_sampler
        return {name: one for name, one in found.items() if one is not None}

    def to_save(self, client_state: dict[str, Any], *, exclude_frozen: bool) -> dict[str, Any]:
        """The state of this rank for a save.

        Args:
            client_state: As the caller gave it.
            exclude_frozen: Whether parameters that are not trained are left out.
        """
        engine = self._engine
        frozen = {name for name, one in engine.module.named_parameters() if not one.requires_grad}
        setattr(engine, _LEFT_OUT, frozen if exclude_frozen else set())
        values: dict[str, Any] = {name: getattr(engine, name) for name in _COUNTS}
        values |= {name: one.state_dict() for name, one in self._beside().items()}
        values |= {"client": [client_state], "world_size": dist.get_world_size(), "without_frozen": exclude_frozen}
        state: dict[str, Any] = {"model": engine, "engine": values, "random": {"own": sf.random_state()}}
        if self._optimizer is not None:
            state["optimizer"] = self._optimizer
        return state

    def load(
        self,
        url: str,
        values: dict[str, Any],
        *,
        strict: bool,
        optimizer: bool,
        scheduler: bool,
        counts: bool,
        pickle: bool,
    ) -> dict[str, Any]:
        """Loads a checkpoint.

        Args:
            url: It.
            values: Its values ``engine/…``.
            strict: As in :func:`shardfast.load`.
            optimizer: Whether the optimizer is loaded, too; else it goes on from the parameters.
            scheduler: Whether the schedule is.
            counts: Whether the counts of steps are.
            pickle: As in :func:`shardfast.load`.

        Returns:
            The caller's state.
        """
        engine = self._engine
        setattr(engine, _LEFT_OUT, set())
        if values["without_frozen"]:
            frozen = {name for name, one in engine.module.named_parameters() if not one.requires_grad}
            setattr(engine, _LEFT_OUT, frozen)
        client: dict[str, Any] = {"client": None}
        state: dict[str, Any] = {"model": engine}
        only = ["model"]
        if optimizer and self._optimizer is not None:
            state["optimizer"] = self._optimizer
            only.append("optimizer")
        if counts and values["world_size"] == dist.get_world_size():
            state["random"] = {"own": sf.random_state()}
            only.append("random")
        try:
            # In another world rank 0's for all, which is the one that DeepSpeed saves.
            sf.load(url, {"engine": client}, only="engine/client", per_rank="rank0", pickle=pickle)
            sf.load(url, state, only=only, strict=strict, pickle=pickle)
        except sf.Invalid as error:
            raise sf.Invalid(f"{error}\n{_REMEDIES}") from error
        finally:
            setattr(engine, _LEFT_OUT, set())
        for name in _COUNTS if counts else ():
            setattr(engine, name, values[name])
        for name, one in self._beside().items() if counts else ():
            if name not in values and dist.get_rank() == 0:
                _log.warning("%s has no %s: that of the engine stays as it is", url, name)
            elif name in values and (scheduler or name != "scheduler"):
                one.load_state_dict(values[name])
        found: dict[str, Any] = client["client"][0]
        return found
