"""PyTorch's optimizers as named tensors and values."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..catalog import Ints, Outline, Refused
from .torch_capture import Place, announce_steps, announces_steps, is_dtensor, outline_of_optimizers
from .torch_groups import expect_same, groups_value, hyperparameters, saved_groups
from .torch_memory import OF_NAME, expect_fill, fill
from .torch_placement import chunks, everyone, mesh_covers_job


class Optimizers:
    """One optimizer, or several (pipeline stages), in terms of parameters' names, never of their positions.

    Leaves: ``state.<FQN>.<name>``, ``global.<name>`` for state of no parameter, and ``param_groups``, a list of the
    groups with their parameters' names.
    """

    def __init__(self, optimizers: Sequence[Any], names: Mapping[int, str]) -> None:
        self._groups: list[dict[str, Any]] = []
        self._group_names: list[list[str]] = []
        self._owned: dict[str, tuple[Any, torch.Tensor, dict[str, Any]]] = {}
        self._states: list[Any] = []
        self._optimizers: list[tuple[Any, Any]] = []
        for optimizer in optimizers:
            named = [self._name(number, group, names) for number, group in enumerate(optimizer.param_groups)]
            self._groups += optimizer.param_groups
            self._group_names += named
            fqns = {id(p): fqn for group, of in zip(optimizer.param_groups, named, strict=True)
                    for p, fqn in zip(group["params"], of, strict=True)}  # fmt: skip
            # ZeRO stage 1 shards whole parameters: what this rank holds is in the optimizer inside.
            holder = optimizer.optim if _is_zero_redundancy(optimizer) else optimizer
            self._states.append(holder.state)
            self._optimizers.append((optimizer, holder))
            for group in holder.param_groups:
                for parameter in group["params"]:
                    fqn = fqns[id(parameter)]
                    if self._owned.setdefault(fqn, (holder.state, parameter, group))[1] is not parameter:
                        raise Refused(
                            f"two of its parameters are called {fqn!r}: hold their modules under one key of the state, "
                            "in one nn.ModuleDict"
                        )

    def _name(self, number: int, group: dict[str, Any], names: Mapping[int, str]) -> list[str]:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise Refused(
                    f"a parameter of shape {tuple(parameter.shape)} in param_groups[{number}] belongs to no module of "
                    "the state, so it has no name: put its module into the state, beside the optimizer"
                )
        return [names[id(parameter)] for parameter in group["params"]]

    def _entries(self) -> Iterator[tuple[str, object, Place]]:
        for fqn, (state, parameter, _) in self._owned.items():
            for name, value in state.get(parameter, {}).items():
                yield f"state.{fqn}.{name}", value, (id(parameter), name)
        for _, holder in self._optimizers:
            for name, value in holder.state.items():
                if not isinstance(name, torch.Tensor):
                    yield f"global.{name}", value, (id(holder), name)

    def announce(self, notice: Callable[[], None]) -> Sequence[torch.Tensor]:
        announce_steps(notice)
        announced = []
        for optimizer, holder in self._optimizers:
            if announces_steps(optimizer) and announces_steps(holder):
                announced += [parameter for group in optimizer.param_groups for parameter in group["params"]]
                for entries in holder.state.values():
                    announced += entries.values() if isinstance(entries, dict) else ()
        return [tensor for tensor in announced if isinstance(tensor, torch.Tensor) and not tensor.is_inference()]

    def holders(self, of: Mapping[int, Ints]) -> Mapping[str, Ints]:
        known: dict[str, Ints] = {}
        for fqn, (state, parameter, _) in self._owned.items():
            if any(_is_zero_redundancy(optimizer) for optimizer, _ in self._optimizers):
                break
            whole = of.get(id(parameter))
            if whole is None and is_dtensor(parameter) and mesh_covers_job(parameter):
                whole = everyone()
            if whole is not None:
                # What is not sharded with its parameter (a step counter) is the same wherever the parameter is.
                known |= {f"state.{fqn}.{name}": whole for name in state.get(parameter, {})}
        return known

    def outline(self) -> Outline | None:
        tensors: dict[Place, torch.Tensor] = {}
        values: dict[str, Place] = {}
        for name, value, place in self._entries():
            if not isinstance(value, torch.Tensor):
                values[name] = place
            elif chunks(value) is None:
                tensors[place] = value
            else:
                return None
        groups = functools.partial(groups_value, names=self._group_names)
        return outline_of_optimizers(self._optimizers, tensors, values, groups)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return {name: value for name, value, _ in self._entries() if isinstance(value, torch.Tensor)}

    def values(self) -> Mapping[str, object]:
        values = {name: value for name, value, _ in self._entries() if not isinstance(value, torch.Tensor)}
        return {**values, **groups_value(self._groups, self._group_names)}

    def _split(self, name: str) -> tuple[str, str] | None:
        """The owned parameter and the name of its state in ``state.<FQN>.<name>``."""
        path = name.removeprefix("state.") if name.startswith("state.") else ""
        end = path.rfind(".")
        while end > 0:
            if path[:end] in self._owned:
                return path[:end], path[end + 1 :]
            end = path.rfind(".", 0, end)
        return None

    def accepts(self, name: str) -> bool:
        return self._split(name) is not None or (name.startswith("global.") and bool(self._states))

    def create(self, name: str, dtype: str, shape: Ints, *, dry: bool) -> torch.Tensor:
        place = self._split(name)
        if place is None:
            return torch.empty(shape, dtype=OF_NAME[dtype], device="meta" if dry else "cpu")
        _, parameter, group = self._owned[place[0]]
        is_step = place[1] == "step"
        on_host = is_step and not (group.get("fused") or group.get("capturable"))
        device = torch.device("meta" if dry else "cpu" if on_host else parameter.device)
        with torch.no_grad():
            if shape == tuple(parameter.shape) and not is_step:
                return torch.empty_like(parameter, dtype=OF_NAME[dtype], device=device, requires_grad=False)
            return torch.empty(shape, dtype=OF_NAME[dtype], device=device)

    def merges(self, name: str) -> bool:
        return name == "param_groups"

    def renamed(self, name: str, parameter: Callable[[str], str]) -> str:
        path = name.removeprefix("state.") if name.startswith("state.") else ""
        end = path.rfind(".")
        while end > 0:
            fqn = parameter(path[:end])
            if fqn != path[:end]:
                return f"state.{fqn}{path[end:]}"
            end = path.rfind(".", 0, end)
        return name

    def restore(
        self,
        created: Mapping[str, torch.Tensor],
        values: Mapping[str, object],
        parameter: Callable[[str], str],
        *,
        strict: bool,
    ) -> Callable[[], None]:
        groups = self._restored_groups(values["param_groups"], parameter, strict) if "param_groups" in values else []
        entries = {name: value for name, value in {**created, **values}.items() if name != "param_groups"}

        def install() -> None:
            for name, value in entries.items():
                place = self._split(name)
                if place is not None:
                    state, owner, _ = self._owned[place[0]]
                    state[owner][place[1]] = value
                else:
                    self._states[0][name.removeprefix("global.")] = value
            for group, saved in groups:
                for name, value in saved.items():
                    if isinstance(group.get(name), torch.Tensor):
                        fill(group[name], value)
                    else:
                        group[name] = value

        return install

    def _restored_groups(
        self, copies: object, parameter: Callable[[str], str], strict: bool
    ) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """The groups of this rank with the hyper-parameters that their parameters were saved with."""
        of_parameter: dict[str, dict[str, Any]] = {}
        for saved in saved_groups(copies):
            for fqn in map(parameter, saved["params"]):
                expect_same(of_parameter.setdefault(fqn, saved), saved, f"parameter {fqn!r} was saved in two groups")
        out = []
        for group, names in zip(self._groups, self._group_names, strict=True):
            found = [(fqn, of_parameter[fqn]) for fqn in names if fqn in of_parameter]
            if strict and len(found) < len(names):
                unknown = next(fqn for fqn in names if fqn not in of_parameter)
                raise Refused(
                    f"no saved parameter group has {unknown!r}: strict=False leaves it as it is (a checkpoint of tied "
                    "weights speaks of the first of their names only)"
                )
            for fqn, saved in found[1:]:
                expect_same(found[0][1], saved, f"parameters {found[0][0]!r} and {fqn!r}, in one group here, were not")
            if found:
                said = hyperparameters(found[0][1])
                for name, value in said.items():
                    now = group.get(name)
                    if isinstance(now, torch.Tensor):
                        expect_fill(now, value)
                out.append((group, said))
        return out


def _is_zero_redundancy(optimizer: object) -> bool:
    module = sys.modules.get("torch.distributed.optim")
    kind = getattr(module, "ZeroRedundancyOptimizer", None)
    return kind is not None and isinstance(optimizer, kind)
