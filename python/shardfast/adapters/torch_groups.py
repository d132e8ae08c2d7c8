"""Parameter groups of PyTorch's optimizers, with their parameters by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..catalog import Refused

_JOBS_OWN = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
"""Entries of a parameter group about the order and the kernels of a job's steps, not about what it computes."""


_CLASS = "optimizer_class"
"""The entry of a saved group that names the class of its optimizer; never one of a live group."""

_OF_SCHEDULERS = frozenset({"initial_lr", "swa_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"})
"""Entries that learning rate schedulers add to a group."""


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a group that belong to a checkpoint, without those of the job."""
    return {name: value for name, value in group.items() if name not in _JOBS_OWN and name != _CLASS}


def hyperparameter_names(group: Mapping[str, Any]) -> set[str]:
    """The hyper-parameters of a group's optimizer, without what schedulers add."""
    return set(hyperparameters(group)) - _OF_SCHEDULERS


def saved_class(group: Mapping[str, Any]) -> str | None:
    """The class of the optimizer that saved a group."""
    said = group.get(_CLASS)
    return said if isinstance(said, str) else None


def groups_value(
    groups: Sequence[Mapping[str, Any]], names: Sequence[list[str]], classes: Sequence[str]
) -> dict[str, object]:
    """The value of the parameter groups: for each its hyper-parameters, parameters' names and optimizer's class."""
    said = [
        {"params": of, _CLASS: kind, **hyperparameters(group)}
        for group, of, kind in zip(groups, names, classes, strict=True)
    ]
    return {"param_groups": said}


def saved_groups(copies: Any) -> Iterator[dict[str, Any]]:
    """The groups of all ranks' copies of the saved value."""
    for groups in copies:
        for group in groups if isinstance(groups, list) else [groups]:
            if not isinstance(group, dict) or not isinstance(group.get("params"), list):
                raise Refused("the saved param_groups are no list of groups with their parameters' names")
            yield group


def expect_same(one: Mapping[str, Any], other: Mapping[str, Any], what: str) -> None:
    """Refuses two groups with different hyper-parameters."""
    if one is other:
        return
    names = sorted({*hyperparameters(one), *hyperparameters(other)})
    differ = [name for name in names if not equal(one.get(name), other.get(name))]
    if differ:
        shown = ", ".join(f"{name} = {one.get(name)!r} and {other.get(name)!r}" for name in differ)
        raise Refused(f"{what} with different hyper-parameters: {shown}")


def equal(one: object, other: object) -> bool:
    """Whether two values of an optimizer are the same."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    return one == other
