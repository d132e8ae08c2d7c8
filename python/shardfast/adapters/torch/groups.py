"""Parameter groups of PyTorch's optimizers, with their parameters by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ...state.catalog import Refused
from .memory import fill

_JOBS_OWN = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
"""Entries of a parameter group about the order and the kernels of a job's steps, not about what it computes."""


_STEP = "step"
"""The entry of a group in which some optimizers, such as TransformerEngine's, count the steps of all its parameters."""

_CLASS = "optimizer_class"
"""The entry of a saved group that names the class of its optimizer; never one of a live group."""

_CHOOSE = (
    '; per_rank="rank0" takes what the lowest rank saved, per_rank="index" what the rank of the same number saved, '
    "modulo the number of saving ranks"
)

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


def saved_by_parameter(copies: Any, decisive: int, parameter: Callable[[str], str]) -> dict[str, dict[str, Any]]:
    """The saved group of each parameter, by its present name, from the ranks' copies of the saved value.

    The first ``decisive`` copies decide, each over those behind it.

    Raises:
        Refused: If other copies differ.
    """
    found: dict[str, dict[str, Any]] = {}
    decided: set[str] = set()
    for number, copy in enumerate(copies):
        if number <= decisive:
            decided.update(found)
        for fqn, group in _named(copy, parameter):
            if fqn not in decided:
                what = f"parameter {fqn!r} was saved in two groups"
                expect_same(found.setdefault(fqn, group), group, what, _CHOOSE)
    return found


def empty_as_saved(copies: Any, groups: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The groups without parameters, each with the hyper-parameters of the one that was saved in its place.

    No name tells which one that is: it has the same number among as many, and no parameters either.
    """
    first = copies[0] if len(copies) else []
    if not isinstance(first, list) or len(first) != len(groups):
        return []
    return [
        (group, hyperparameters(said))
        for group, said in zip(groups, first, strict=True)
        if not group["params"] and not said["params"] and hyperparameter_names(group) == hyperparameter_names(said)
    ]


def _named(copy: Any, parameter: Callable[[str], str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The parameters of a rank's saved groups, by their present names, each with its group."""
    for group in copy if isinstance(copy, list) else [copy]:
        if not isinstance(group, dict) or not isinstance(group.get("params"), list):
            raise Refused("the saved param_groups are no list of groups with their parameters' names")
        for fqn in map(parameter, group["params"]):
            yield fqn, group


def expect_same(one: Mapping[str, Any], other: Mapping[str, Any], what: str, remedy: str = "") -> None:
    """Refuses two groups with different hyper-parameters."""
    if one is other:
        return
    names = sorted({*hyperparameters(one), *hyperparameters(other)})
    differ = [name for name in names if not equal(one.get(name), other.get(name))]
    if differ:
        shown = ", ".join(f"{name} = {one.get(name)!r} and {other.get(name)!r}" for name in differ)
        raise Refused(f"{what} with different hyper-parameters: {shown}{remedy}")


def put_into(groups: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """Gives groups their hyper-parameters. What several have stays one, unless theirs differ now.

    A count of steps that the saved group does not have is taken away: optimizers that keep it there begin without one.
    """
    given: dict[int, list[object]] = {}
    for group, said in groups:
        for name, value in said.items():
            given.setdefault(id(group.get(name)), []).append(value)
    for group, said in groups:
        if _STEP not in said:
            group.pop(_STEP, None)
        for name, value in said.items():
            now = group.get(name)
            first, *others = given[id(now)]
            is_one = all(equal(first, other) for other in others)
            if not isinstance(now, torch.Tensor):
                group[name] = first if is_one and name in group else value
                continue
            if not is_one:
                group[name] = now = now.clone()
            fill(now, value)


_PLAIN = (int, str, bool, type(None))


def equal(one: object, other: object) -> bool:
    """Whether two values of an optimizer are the same in type and value, and in the sign of a number that is zero."""
    kind = type(one)
    if kind is not type(other):
        return False
    if one is other:
        return True
    if kind in _PLAIN:  # most of them: a check for a mapping takes as long as ten of these
        return bool(one == other)
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype is other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, (float, complex)):
        return repr(one) == repr(other)  # what is not a number equals itself here
    return bool(one == other)
