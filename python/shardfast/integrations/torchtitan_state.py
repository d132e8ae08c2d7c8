"""State of a torchtitan training.

Names of torchtitan 0.3.0 that are used: a loader's ``dp_rank`` and ``dp_world_size``; of ``ParallelAwareDataloader``
that its ``state_dict()`` is a pickle of that of torchdata's loader, from which it derives; of ``Trainer`` its state,
``step`` and ``ntokens_seen``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.checkpointer.base import DATALOADER, MODEL, OPTIMIZER, TRAIN_STATE
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import OptimizersContainer

import shardfast as sf

RANDOM = "random"


class _Plain(StatefulDataLoader):  # type: ignore[misc]
    """A loader of torchtitan's with the state that torchdata gives it: data, no pickle.

    Attributes:
        base_dataloader: The loader.
    """

    def __init__(self, loader: Any) -> None:
        object.__setattr__(self, "base_dataloader", loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "base_dataloader"), name)

    def state_dict(self) -> dict[str, Any]:
        """The state of torchdata's loader."""
        state: dict[str, Any] = StatefulDataLoader.state_dict(self.base_dataloader)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Sets the state of torchdata's loader."""
        StatefulDataLoader.load_state_dict(self.base_dataloader, state_dict)


def entries(states: dict[str, Any], model_parts: list[nn.Module]) -> dict[str, Any]:
    """The state of a training, by torchtitan's keys.

    Args:
        states: What torchtitan saves beside the model.
        model_parts: The model's parts on this rank.
    """
    loader: Any = states.get(DATALOADER)
    piece = (loader.dp_rank, loader.dp_world_size) if hasattr(loader, "dp_world_size") else None
    state: dict[str, Any] = {MODEL: model_parts, **{key: one for key, one in states.items() if key != MODEL}}
    optimizers: Any = state.get(OPTIMIZER)
    if type(optimizers) is OptimizersContainer:
        # They hold the state. The container's own state_dict(), which gathers, would be looked into at each save.
        state[OPTIMIZER] = list(optimizers.optimizers)
    if loader is None:
        state.pop(DATALOADER, None)
    elif piece is not None:
        state[DATALOADER] = sf.Sharded(
            _Plain(loader) if isinstance(loader, ParallelAwareDataloader) else loader, *piece
        )
    own = states.get(TRAIN_STATE)
    if own is not None and piece is not None and own.state_dict().keys() == {"step", "ntokens_seen"}:
        state[TRAIN_STATE] = sf.Sharded(own, *piece, reshard=_share_tokens)
    return {**state, RANDOM: sf.random_state()}


def _share_tokens(states: list[Any], count: int) -> list[Any]:
    """States of other data ranks, which together have seen as many tokens."""
    seen = sum(state["ntokens_seen"] for state in states)
    return [{**states[0], "ntokens_seen": seen // count + (at < seen % count)} for at in range(count)]


def model_alone(model_parts: list[nn.Module], dtype: torch.dtype) -> dict[str, Any]:
    """The state of a model that is saved in one dtype."""
    tensors = {name: tensor for part in model_parts for name, tensor in part.state_dict().items()}
    if all(not _is_cast(tensor, dtype) for tensor in tensors.values()):
        return {MODEL: model_parts}
    return {MODEL: {name: one.to(dtype) if _is_cast(one, dtype) else one for name, one in tensors.items()}}


def _is_cast(value: Any, dtype: torch.dtype) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != dtype


def load_all(url: str, state: dict[str, Any], excluded: list[str], loader: Any) -> None:
    """Loads a training's state.

    Raises:
        Invalid: ``exclude_from_loading`` names what there is not.
    """
    unknown = [key for key in excluded if key not in state]
    if unknown:
        raise sf.Invalid(f"exclude_from_loading: {unknown}: expected some of {sorted(state.keys() - {MODEL})}")
    loaded = {key: one for key, one in state.items() if key not in (*excluded, RANDOM)}
    sf.load(url, loaded, only=list(loaded), per_rank="index")
    if loader is not None and DATALOADER in loaded:
        loader.state_dict()  # makes the iterator, which draws from the generators: in the saved training it was there
    if RANDOM not in excluded:
        sf.load(url, {RANDOM: state[RANDOM]}, only=RANDOM, per_rank="index")
