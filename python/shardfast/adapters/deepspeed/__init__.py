"""DeepSpeed's engines: the model inside, as ZeRO keeps it, by the engine's own records, without a message.

Up to stage 2 each rank has whole parameters. In stage 3 it has a run of each, ``ds_tensor``, of ⌈numel / ranks⌉
elements, the last ones padded. Tried with DeepSpeed 0.19.8; of what it keeps to itself this file uses a parameter's
``ds_tensor``, ``ds_shape``, ``ds_status``, ``ds_persist``, ``ds_process_group``, ``ds_secondary_tensor``,
``partition()``.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...state.catalog import Flat, Inside, Ints, Kind, Module, NamedPart, Outline, Part, Refused, Restored
from ..torch.modules import Modules
from ..torch.placement import text_of_run
from .optimizer import KINDS, DeepSpeedOptimizers, begin_load, call, peers, refresh

LEFT_OUT = "shardfast_left_out"
"""An engine's attribute: names of parameters that are frozen, and left out of a save or a load."""

TIED = "tied_modules."
"""Before names of what several stages of a pipeline have."""

_CUT = Inside(("ds_tensor",), "ds_status")
"""Where a parameter of stage 3 has this rank's run; one that was gathered since is looked at anew."""

_EXPERT = re.compile(r"(?<=\bdeepspeed_experts\.)\d+")


def is_partitioned(parameter: object) -> bool:
    """Whether a parameter is one of stage 3, which lies elsewhere."""
    return hasattr(parameter, "ds_id")


class DeepSpeedModules(Modules):
    """The module of an engine."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._parts: dict[int, Part] = {}
        self._left_out: set[str] = vars(engine).setdefault(LEFT_OUT, set())
        _expect_understood(engine)
        super().__init__([engine.module])

    def _state_of(self, module: nn.Module) -> Mapping[str, Any]:
        state: dict[str, Any] = copy.copy(module.state_dict(keep_vars=True))
        for name in self._left_out.intersection(state):
            del state[name]
        for name, value in state.items():
            if is_partitioned(value):
                state[name] = self._parts.setdefault(id(value), _part(name, value))
        for name, parameter in module.named_parameters():
            if is_partitioned(parameter) and id(parameter) not in self._parts and name not in self._left_out:
                raise Refused(f"its parameter {name!r}, which ZeRO stage 3 has cut, is not in its state_dict()")
        return state

    def _parameters_of(self, module: nn.Module, state: Mapping[str, Any]) -> Iterable[tuple[str, nn.Parameter | Part]]:
        for name, parameter in super()._parameters_of(module, state):
            if name in self._left_out:
                continue
            yield name, self._parts.get(id(parameter), parameter)

    def _names_of(self, module: nn.Module) -> Callable[[str], str]:
        names = super()._names_of(module)
        firsts = {f"{path}.deepspeed_experts.": first for path, first in _first_experts(module)}

        def name_of(original: str) -> str:
            for path, first in firsts.items():
                if original.startswith(path):
                    local = _EXPERT.search(original, len(path) - 1)
                    if local is not None:
                        number = str(first + int(local[0]))
                        original = f"{original[: local.start()]}{number}{original[local.end() :]}"
            return names(original)

        return name_of

    def holders(self, of: Mapping[int, Ints]) -> Mapping[str, Ints]:
        found: dict[str, Ints] = {}
        for name, tensor in self._tensors.items():
            if not isinstance(tensor, Part):
                ranks = peers(self._engine, tensor)
                found[name] = self._over_stages(name, ranks) if name.startswith(TIED) else ranks
        return found

    def _over_stages(self, name: str, ranks: Ints) -> Ints:
        """The holders of a tied module's tensor, which several stages of a pipeline have."""
        tied = getattr(self._engine.module, "tied_comms", {}).get(name.removeprefix(TIED).partition(".")[0])
        if tied is None:
            return ranks
        me = torch.distributed.get_rank()
        return tuple(sorted({rank + other - me for rank in ranks for other in tied["ranks"]}))

    def coordinates(self) -> dict[str, int]:
        """Returns this rank's coordinates in the engine's groups, by the name of the dimension."""
        groups, grid = sys.modules["deepspeed.utils.groups"], getattr(self._engine, "grid", None)
        asked: list[tuple[str, Any, str]] = [
            ("dp", groups, "_get_data_parallel"),
            ("sp", groups, "_get_sequence_parallel"),
        ]
        if grid is not None:
            asked = [("pp", grid, "get_pipe_parallel"), ("dp", grid, "get_data_parallel")]
        found: dict[str, int] = {}
        for name, owner, function in asked:
            with contextlib.suppress(Exception):  # a group that was not made
                if getattr(owner, f"{function}_world_size")() > 1:
                    found[name] = getattr(owner, f"{function}_rank")()
        with contextlib.suppress(Exception):  # no experts
            experts = groups._get_max_expert_size_name()
            if groups._get_expert_parallel_world_size(experts) > 1:
                found["ep"] = groups._get_expert_parallel_rank(experts)
        return found

    def outline(self) -> Outline | None:
        self._inside.update({name: _CUT for name, value in self._tensors.items() if isinstance(value, Part)})
        found = super().outline()
        left_out: list[tuple[str, Kind]] = [(LEFT_OUT, "names")]
        return found and dataclasses.replace(found, objects=[*found.objects, (self._engine, left_out)])

    def restore(
        self,
        created: Mapping[str, torch.Tensor],
        values: Mapping[str, object],
        parameter: Callable[[str], str],
        *,
        strict: bool,
        absent: Sequence[str] = (),
        decisive: Mapping[str, int] = {},
        filled: Collection[str] = (),
    ) -> Restored:
        begin_load(self._engine.optimizer)
        return super().restore(
            created, values, parameter, strict=strict, absent=absent, decisive=decisive, filled=filled
        )

    def _release(self) -> None:
        super()._release()
        parameter: Any
        for parameter in self._modules[0].parameters():
            if is_partitioned(parameter) and _is_gathered(parameter):  # it is gathered again when it is used
                parameter.partition()
            if getattr(parameter, "ds_secondary_tensor", None) is not None:  # as after a step: hpZ makes it again
                parameter.ds_secondary_tensor = None
        refresh(self._engine.optimizer)


def _first_experts(module: nn.Module) -> Iterator[tuple[str, int]]:
    """The paths of modules with experts, and the number of the first one in the whole model."""
    moe = sys.modules.get("deepspeed.moe.layer")
    for path, part in module.named_modules(remove_duplicate=False):
        if moe is not None and isinstance(part, moe.MoE):
            groups = sys.modules["deepspeed.utils.groups"]
            group = call(groups, "_get_expert_parallel_group", part.expert_group_name)
            first = torch.distributed.get_rank(group) * part.num_local_experts
            yield f"{path}.deepspeed_moe.experts".lstrip("."), first


def _is_gathered(parameter: Any) -> bool:
    return bool(parameter.ds_status.name != "NOT_AVAILABLE")


def _part(name: str, parameter: Any) -> Part:
    """This rank's run of a parameter of stage 3."""
    try:
        piece, shape = parameter.ds_tensor, tuple(parameter.ds_shape)
        ranks = tuple(torch.distributed.get_process_group_ranks(parameter.ds_process_group))
        size, is_whole = piece.ds_numel, _is_gathered(parameter)
        is_elsewhere = piece.status.name != "AVAILABLE" or parameter.nvme_swapper is not None
    except AttributeError as error:
        raise Refused(f"its parameter {name!r} lacks what ZeRO stage 3 is known to note ({error})") from error
    numel = math.prod(shape)
    if numel != parameter.ds_numel or piece.numel() != size or size != -(-numel // len(ranks)):
        raise Refused(
            f"its parameter {name!r} of {numel} elements has {piece.numel()} on each of {len(ranks)} ranks, and "
            f"{-(-numel // len(ranks))} are expected: DeepSpeed of this version cuts it otherwise than is known"
        )
    if is_elsewhere:
        raise Refused(f"its parameter {name!r} is offloaded to NVMe, which is not understood: offload to the CPU")
    if hasattr(piece, "ds_quant_scale"):
        raise Refused(f"its parameter {name!r} is quantised by ZeRO, which is not understood: turn it off")
    if hasattr(parameter, "comm"):
        raise Refused(f"its parameter {name!r} is cut by MiCS, which is not understood: use ZeRO stage 3 without it")
    if is_whole and not parameter.ds_persist:
        raise Refused(
            f"its parameter {name!r} is gathered now, and what was written to it is not in the shards yet: leave "
            "deepspeed.zero.GatheredParameters before; after a forward without a step call "
            "engine.empty_partition_cache()"
        )
    start = ranks.index(torch.distributed.get_rank()) * size
    stop = min(start + size, numel)
    regions = (Flat(start, stop),) if start < stop else ()
    owners = tuple(sorted(ranks[: -(-numel // size)])) if numel else ()
    mine = (torch.distributed.get_rank(),) if regions else None
    elements = piece.detach()[: max(stop - start, 0)]
    return Part(elements, shape, regions, text_of_run(3, len(ranks)), mine, owners, within=piece)


def _expect_understood(engine: Any) -> None:
    """Refuses an engine whose parameters are cut in a way that does not say where a rank's part belongs."""
    grid = getattr(engine, "grid", None)  # of a pipeline, whose stages count as model parallelism elsewhere
    cut = engine.mp_world_size if grid is None else grid.get_slice_parallel_world_size()
    if cut > 1 or _size(engine, "autotp_size") > 1:
        raise Refused(
            "a DeepSpeedEngine with tensor parallelism (AutoTP, or a model parallel unit), whose parameters do not "
            "say how they are cut: save it with DeepSpeed"
        )
    for name, part in engine.module.named_modules():
        if type(part).__name__ == "AutoEPMoELayer":
            raise Refused(f"its part {name!r} is an AutoEPMoELayer, which is not understood: save it with DeepSpeed")


def _size(engine: Any, name: str) -> int:
    asked = getattr(engine, name, None)
    return int(asked()) if callable(asked) else 0


class DeepSpeedObjects:
    """Engines of DeepSpeed and their optimizers."""

    def module(self, value: object) -> Module | None:
        """Answers as :class:`shardfast.state.catalog.Objects` says."""
        if isinstance(value, sys.modules["deepspeed.runtime.engine"].DeepSpeedEngine):
            modules = DeepSpeedModules(value)
            return Module(modules, modules.parameters)
        parts: Sequence[Any] = value if isinstance(value, (list, tuple)) else [value]
        for part in parts if all(isinstance(part, nn.Module) for part in parts) else ():
            for name, parameter in part.named_parameters():
                marks = vars(parameter)
                if "ds_id" in marks or "_hp_mapping" in marks:
                    raise Refused(
                        f"its parameter {name!r} is one that DeepSpeed's ZeRO steps, in copies that a load must set, "
                        "too: put the engine into the state in place of its module"
                    )
        return None

    def optimizer(
        self, value: object, names: Mapping[int, Sequence[NamedPart]], beside: Collection[int] = ()
    ) -> DeepSpeedOptimizers | None:
        """Answers as :class:`shardfast.state.catalog.Objects` says."""
        kind = type(value)
        if kind.__name__ in KINDS and kind.__module__.startswith("deepspeed.runtime."):
            return DeepSpeedOptimizers(value, names, beside)
        return None

    def coordinates(self, things: Sequence[object]) -> Mapping[str, int]:
        """Answers as :class:`shardfast.state.catalog.Objects` says."""
        found: dict[str, int] = {}
        for thing in things:
            if isinstance(thing, DeepSpeedModules):
                found = {**thing.coordinates(), **found}
        return found


def objects() -> DeepSpeedObjects:
    """Returns the adapter of this framework's objects."""
    return DeepSpeedObjects()
