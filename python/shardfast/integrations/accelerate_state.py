"""An accelerator as a state: models, optimizers, schedules, registered objects, loaders, counters and random states."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import accelerate

import shardfast as sf

from .accelerate_loaders import Loader
from .places import of_rank_0

_log = logging.getLogger("shardfast")


class _Random(sf.Stateful):
    """This process's random state. Processes for which none was saved keep their own, as in accelerate."""

    def __init__(self, process: int, before: Callable[[], None]) -> None:
        self._process, self._own, self._before = process, sf.random_state().value, before
        super().__init__(self._read, self._write)

    def _read(self) -> dict[str, Any]:
        return {"process": self._process, "state": self._own.state_dict()}  # type: ignore[attr-defined]

    def check(self, state: Any) -> None:
        """Refuses a state of generators that are not here."""
        self._own.check(state["state"])  # type: ignore[attr-defined]

    def _write(self, state: dict[str, Any]) -> None:
        self._before()
        if state["process"] == self._process:
            self._own.load_state_dict(state["state"])  # type: ignore[attr-defined]
        else:
            _log.warning("process %d: no random state was saved for it: it keeps its own", self._process)


def _numbered(name: str, things: Sequence[Any]) -> dict[str, Any]:
    """Things by names as accelerate's files have them: ``model``, ``model_1``, …"""
    return {f"{name}_{number}" if number else name: thing for number, thing in enumerate(things)}


def _stepping(optimizer: Any) -> Any:
    """The optimizer that steps, whose parameters are copied while the training goes on until its next step.

    One with modes writes parameters when these change: of its wrapper they are copied at once.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    return optimizer if hasattr(inner, "eval") else inner


class State:
    """The state of an accelerator.

    Args:
        accelerator: Whose it is; what is prepared or registered may change.
    """

    def __init__(self, accelerator: accelerate.Accelerator) -> None:
        self._accelerator = accelerator

    def warn_of_gradients(self) -> None:
        """Says that gradients are not saved, between the micro-batches of a step."""
        if not self._accelerator.sync_gradients:
            _log.warning("save_state() between the micro-batches of a step: their gradients are not saved")

    def to_save(self) -> dict[str, Any]:
        """Returns the state that is saved."""
        return {**{key: loader.entries() for key, loader in self._loaders().items()}, **self._without_loaders()}

    def load(self, place: str, models: Sequence[Any], *, is_strict: bool, pickle: bool) -> None:
        """Fills what is prepared and registered here. All processes call it.

        Args:
            place: The checkpoint.
            models: Those of the prepared models that are to be loaded.
            is_strict: Whether models' names must match.
            pickle: Loads pickles.
        """
        saved: set[str] = of_rank_0(lambda: _names(place))
        keys = {name.partition("/")[0] for name in saved}
        state = self._without_loaders()
        self._expect_as_many(saved)
        if self._accelerator.scaler is not None and "accelerate/scaler" not in saved:
            raise sf.Invalid(f"{place} has no state of a gradient scaler: load with the mixed_precision= it has")
        loaders = {key: loader.entries() for key, loader in self._loaders().items()}
        there = {
            key: {name: one for name, one in of.items() if _has(saved, f"{key}/{name}")} for key, of in loaders.items()
        }
        # Loaders first, epochs before positions, and random states last: what they do draws random numbers.
        state = {**{key: of for key, of in there.items() if of}, **state}
        kept = {key for key in _numbered("model", self._accelerator._models) if not _is_in(state[key], models)}
        only = [key for key in state if key not in kept and key != "accelerate"]
        only += [f"accelerate/{name}" for name in state["accelerate"]]
        left = sorted(keys - state.keys())
        if left:
            _log.warning("%s: not loaded, since nothing of that name is prepared here: %s", place, ", ".join(left))
        named = {"only": only, "per_rank": "index"}
        if not is_strict:
            plan = sf.plan_load(place, state, strict=False, only=only, per_rank="index")
            others = [name for name in [*plan.missing, *plan.unexpected] if not name.startswith("model")]
            if others:
                raise sf.Invalid(f"{place}: strict=False is for models, and these do not match: {', '.join(others)}")
        sf.load(place, state, strict=is_strict, pickle=pickle, **named)  # type: ignore[arg-type]

    def _loaders(self) -> dict[str, Loader]:
        loaders = _numbered("dataloader", self._accelerator._dataloaders)
        return {key: Loader(self._accelerator, one) for key, one in loaders.items()}

    def _expect_as_many(self, saved: set[str]) -> None:
        there = len({name.partition("/")[2].partition(".")[0] for name in saved if name.startswith("custom/")})
        here = len(self._accelerator._custom_objects)
        if there != here:
            raise sf.Invalid(
                f"the checkpoint has {there} registered objects, here are {here}: register_for_checkpointing() the "
                "same ones, in the same order"
            )

    def _without_loaders(self) -> dict[str, Any]:
        one = self._accelerator
        state: dict[str, Any] = {
            **_numbered("model", one._models),
            **_numbered("optimizer", [_stepping(optimizer) for optimizer in one._optimizers]),
            **_numbered("scheduler", one._schedulers),
        }
        if one._custom_objects:
            state["custom"] = {str(number): thing for number, thing in enumerate(one._custom_objects)}
        state["accelerate"] = {
            "step": sf.Stateful(lambda: one.step, lambda step: setattr(one, "step", step)),
            "iteration": sf.Stateful(lambda: one.project_configuration.iteration, self._go_on_behind),
            **({} if one.scaler is None else {"scaler": one.scaler}),
            "random": sf.PerRank(_Random(one.process_index, self._make_iterators)),
        }
        return state

    def _make_iterators(self) -> None:
        for loader in self._loaders().values():
            loader.make_iterator()

    def _go_on_behind(self, iteration: int) -> None:
        project = self._accelerator.project_configuration
        project.iteration = max(project.iteration, iteration)


def _is_in(thing: Any, things: Sequence[Any]) -> bool:
    return any(thing is one for one in things)


def _has(saved: set[str], name: str) -> bool:
    return any(one == name or one.startswith(f"{name}.") for one in saved)


def _names(place: str) -> set[str]:
    with sf.mapped(place) as checkpoint:
        return {*checkpoint, *checkpoint.value_names()}
