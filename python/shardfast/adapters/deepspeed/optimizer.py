"""DeepSpeed's optimizers: the runs of parameters that they step in flat buffers, by their own records.

``state.<FQN>.master`` is the copy in fp32 of a 16-bit parameter. An fp32 parameter has a copy, too, in stages 1 and 2:
it is not saved, and a load makes it equal. Tried with DeepSpeed 0.19.8; of what it keeps to itself this file uses
``_hp_mapping`` of a parameter, and ``_lazy_init_hp_params_optimizer_state()`` of an optimizer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...state.catalog import Flat, NamedPart, Part, Refused, Region, Restored
from ..torch.masters import MasterOptimizers, Run, regions_of_run
from ..torch.placement import text_of_run
from ..torch.steps import TorchSteps

KINDS = (
    "DeepSpeedZeroOptimizer",
    "DeepSpeedZeroOptimizer_Stage3",
    "BF16_Optimizer",
    "FP16_UnfusedOptimizer",
    "FP16_Optimizer",
)
"""Classes of optimizers around one of PyTorch's."""

_NOTED = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""What changes in a loss scaler."""


class _Stepped(NamedTuple):
    """Part of a model's parameter that an optimizer of PyTorch steps.

    Attributes:
        model: The parameter.
        within: The tensor that is stepped, such as a flat buffer.
        elements: The parameter's run in it.
        at: Where that begins.
        length: How many elements the buffer has; 0 if the parameter is stepped by itself.
        start: Its first element in the parameter.
        there: The same run of the parameter's own elements.
        owners: The ranks that step a run of the parameter.
        alike: Those that step the same run.
    """

    model: torch.Tensor
    within: torch.Tensor
    elements: torch.Tensor
    at: int
    length: int
    start: int
    there: torch.Tensor
    owners: tuple[int, ...] | None
    alike: tuple[int, ...] | None


def peers(engine: Any, parameter: torch.Tensor) -> tuple[int, ...]:
    """The ranks of data parallelism that have the same elements."""
    of_experts = getattr(parameter, "group_name", None)
    if of_experts is not None and not getattr(parameter, "allreduce", True):
        group = call(sys.modules["deepspeed.utils.groups"], "_get_expert_data_parallel_group", of_experts)
    else:
        group = engine.seq_data_parallel_group
    return tuple(sorted(torch.distributed.get_process_group_ranks(group)))


def call(owner: Any, name: str, *arguments: object) -> Any:
    """Calls what DeepSpeed keeps to itself."""
    found = getattr(owner, name, None)
    if found is None:
        raise Refused(f"DeepSpeed of this version has no {name}(): it is not understood, save with DeepSpeed")
    return found(*arguments)


def _name(zero: Any, parameter: torch.Tensor) -> str:
    names: Mapping[torch.Tensor, str] = getattr(zero, "param_names", {})
    return repr(names.get(parameter, f"of shape {tuple(parameter.shape)}"))


def _stepped(zero: Any) -> Iterator[_Stepped]:
    """Yields the parts that the optimizer inside steps, by the records of that around it.

    Raises:
        Refused: If they are not those of a DeepSpeed that is known, or speak of what is not understood.
    """
    kind = type(zero).__name__
    try:
        if kind == "DeepSpeedZeroOptimizer_Stage3":
            yield from _of_stage_3(zero)
        elif kind == "DeepSpeedZeroOptimizer":
            flats = zip(zero.bit16_groups, zero.bit16_groups_flat, zero.single_partition_of_fp32_groups, strict=True)
            yield from _of_partitions(zero, flats)
        elif kind == "BF16_Optimizer":
            flats = zip(zero.bf16_groups, zero.bf16_groups_flat, zero.fp32_groups_flat_partition, strict=True)
            yield from _of_partitions(zero, flats)
        elif kind == "FP16_UnfusedOptimizer":
            for models, copies in zip(zero.fp16_groups, zero.fp32_groups, strict=True):
                for model, copy in zip(models, copies, strict=True):
                    yield _Stepped(model, copy, copy.detach(), 0, 0, 0, model.detach(), None, None)
        else:
            yield from _of_whole_buffers(zero)
    except (AttributeError, KeyError, ValueError) as error:
        raise Refused(f"a {kind} lacks records that are known of DeepSpeed 0.19 ({error}): save with it") from error


def _of_partitions(zero: Any, flats: Iterator[tuple[Sequence[Any], torch.Tensor, torch.Tensor]]) -> Iterator[_Stepped]:
    """Stages 1 and 2: parameters lie in a buffer of 16 bits, of which each rank steps its share in fp32."""
    for (models, flat, copy), group in zip(flats, zero.real_dp_process_group, strict=True):
        ranks = list(torch.distributed.get_process_group_ranks(group))
        share = flat.numel() // len(ranks)
        low = ranks.index(torch.distributed.get_rank()) * share
        for model in models:
            at = (model.data_ptr() - flat.data_ptr()) // flat.element_size()
            first, last = max(at, low), min(at + model.numel(), low + share)
            _expect_inside(zero, model, at, flat)
            _expect_recorded(zero, model, max(last - first, 0), first - at, first - low)
            if first < last:
                elements = copy.detach()[first - low : last - low]
                there = model.detach().reshape(-1)[first - at : last - at]
                owners = tuple(ranks[at // share : -(-(at + model.numel()) // share)])
                where = first - low, copy.numel(), first - at
                yield _Stepped(model, copy, elements, *where, there, owners, (torch.distributed.get_rank(),))


def _expect_inside(zero: Any, model: torch.Tensor, at: int, flat: torch.Tensor) -> None:
    if not 0 <= at <= flat.numel() - model.numel():
        raise Refused(
            f"parameter {_name(zero, model)} does not lie where its optimizer has put it: undo offload_states() or "
            "what else has moved it"
        )


def _expect_recorded(zero: Any, model: Any, count: int, start: int, at: int) -> None:
    """Refuses a parameter whose record of what this rank steps is not what follows from where it lies."""
    noted = getattr(model, "_hp_mapping")  # noqa: B009  # which a parameter of ZeRO has
    where = (0, 0, 0)
    if noted is not None:
        address = noted.lp_fragment_address
        where = (address.numel, address.start, noted.hp_fragment_address.start)
    if where != ((count, start, at) if count else (0, 0, 0)):
        raise Refused(
            f"parameter {_name(zero, model)}: DeepSpeed notes that this rank steps {where[0]} of its elements from "
            f"{where[1]} on, at {where[2]} of its buffer, and by where it lies these are {count} from {start} on, at "
            f"{at}: its records are not understood"
        )


def _of_whole_buffers(zero: Any) -> Iterator[_Stepped]:
    """``FP16_Optimizer``: each rank steps all of the buffer."""
    for models, flat, copy in zip(zero.fp16_groups, zero.fp16_groups_flat, zero.fp32_groups_flat, strict=True):
        for model in models:
            at = (model.data_ptr() - flat.data_ptr()) // flat.element_size()
            _expect_inside(zero, model, at, flat)
            elements = copy.detach()[at : at + model.numel()]
            yield _Stepped(model, copy, elements, at, copy.numel(), 0, model.detach().reshape(-1), None, None)


def _of_stage_3(zero: Any) -> Iterator[_Stepped]:
    """Stage 3: what this rank has of parameters, in the order of sub-groups, in buffers of fp32."""
    if zero.swap_optimizer or zero.params_in_nvme_and_cpu:
        raise Refused("ZeRO stage 3 with NVMe offload is not understood: offload to the CPU")
    if zero.offload_optimizer and any(device != "cpu" for device in zero.subgroup_to_device.values()):
        raise Refused("ZeRO stage 3 with a part of its optimizer offloaded (ratio) is not understood: offload all")
    pairs = zip(zero.fp16_groups, zero.fp16_partitioned_groups, zero.fp32_partitioned_groups_flat, strict=True)
    for models, pieces, copy in pairs:
        at = 0
        for model, piece in zip(models, pieces, strict=True):
            if model.ds_tensor is not piece:
                raise Refused(f"parameter {_name(zero, model)}: what its optimizer steps is not what it lists")
            ranks = list(torch.distributed.get_process_group_ranks(model.ds_process_group))
            start = ranks.index(torch.distributed.get_rank()) * piece.ds_numel
            count = max(min(piece.ds_numel, model.ds_numel - start), 0)
            owners = tuple(sorted(ranks[: -(-model.ds_numel // piece.ds_numel)]))
            if count:
                me = (torch.distributed.get_rank(),)
                where = at, copy.numel(), start
                yield _Stepped(model, copy, copy.detach()[at : at + count], *where, piece.detach()[:count], owners, me)
            at += piece.ds_numel
        if at != copy.numel():
            raise Refused(f"a sub-group of ZeRO stage 3 has {copy.numel()} elements, and its parameters {at}")


_LISTS = {
    "DeepSpeedZeroOptimizer_Stage3": ("fp16_groups", "fp32_partitioned_groups_flat"),
    "DeepSpeedZeroOptimizer": ("bit16_groups", "single_partition_of_fp32_groups"),
    "BF16_Optimizer": ("bf16_groups", "fp32_groups_flat_partition"),
    "FP16_UnfusedOptimizer": ("fp16_groups", "fp32_groups"),
    "FP16_Optimizer": ("fp16_groups", "fp32_groups_flat"),
}
"""The attributes of optimizers that list parameters, and what is stepped for them."""


def _copied(zero: Any) -> Iterator[torch.Tensor]:
    """The parameters of which some rank steps a copy in another element type; in stage 3 what this rank has of them."""
    for models, copies in zip(*(getattr(zero, name) for name in _LISTS[type(zero).__name__]), strict=True):
        first = copies if isinstance(copies, torch.Tensor) else next(iter(copies), None)
        for model in (getattr(model, "ds_tensor", model) for model in models):
            if first is not None and model.dtype is not first.dtype:
                yield model


def _models(zero: Any) -> Iterator[torch.Tensor]:
    """The parameters that some rank steps; in stage 3 what this rank has of them."""
    for models in getattr(zero, _LISTS[type(zero).__name__][0]):
        yield from (getattr(model, "ds_tensor", model) for model in models)


def _stage(zero: Any) -> int:
    if type(zero).__name__ == "DeepSpeedZeroOptimizer_Stage3":
        return 3
    return 2 if getattr(zero, "partition_gradients", False) else int(hasattr(zero, "real_dp_process_group"))


@contextlib.contextmanager
def _listed(zero: Any) -> Iterator[None]:
    """Inside, the groups of the optimizer of PyTorch list what it steps: in stage 3 they do so in a step only."""
    copies = zero.fp32_partitioned_groups_flat if _stage(zero) == 3 else ()
    groups = zero.optimizer.param_groups
    before = [group["params"] for group in groups]
    for number, copy in enumerate(copies):
        group = groups[zero.sub_group_to_group_id[number]]
        if not any(copy is member for member in group["params"]):
            group["params"] = [*group["params"], copy]
    try:
        yield
    finally:
        for group, members in zip(groups, before, strict=True) if copies else ():
            group["params"] = members


class _Scaler:
    """The loss scaler of an optimizer, whichever object has it."""

    def __init__(self, zero: Any) -> None:
        candidates = (getattr(zero, name, None) for name in ("loss_scaler", "loss_scale_config"))
        self._owner = next((one for one in candidates if one is not None), zero)
        # ZeRO says it itself, others by their configuration.
        self.is_dynamic = any(getattr(one, "dynamic_loss_scale", False) for one in (zero, self._owner))

    def state_dict(self) -> dict[str, object]:
        return {name: getattr(self._owner, name) for name in _NOTED if hasattr(self._owner, name)}

    def load_state_dict(self, said: Mapping[str, object]) -> None:
        for name, value in said.items():
            setattr(self._owner, name, value)


class DeepSpeedOptimizers(MasterOptimizers):
    """An optimizer of an engine, in terms of the parameters of the engine's module."""

    _of_the_layout = ("moe", "name", "_ds_source_param_group_id")

    def __init__(self, zero: Any, names: Mapping[int, Sequence[NamedPart]], beside: Collection[int] = ()) -> None:
        _expect_understood(zero)
        self._zero = zero
        runs = []
        for one in _stepped(zero):
            key = getattr(one.model, "ds_tensor", one.model)
            if id(key) not in names:
                raise Refused(
                    f"parameter {_name(zero, one.model)} belongs to no engine of the state: put the engine into the "
                    "state beside its optimizer"
                )
            for fqn, whole in names[id(key)]:
                runs.append(Run(fqn, key, _run(zero, one, whole), one.there))
        models = list(_copied(zero))
        copied = {fqn: model for model in models for fqn, _ in names.get(id(model), ())}
        # Up to 0.17 optimizers of other types have a scaler, too, and do not use it.
        is_scaled = _Scaler(zero).is_dynamic and any(model.dtype is torch.float16 for model in models)
        scaled = [zero] if is_scaled else []
        with _listed(zero):
            super().__init__([zero.optimizer], runs, scaled, beside, copied, _models(zero))

    @staticmethod
    def _scaler(one: Any) -> Any:
        return _Scaler(one)

    def announce(self, notice: Callable[[str], None]) -> Sequence[torch.Tensor]:
        with _listed(self._zero):
            return super().announce(notice)

    def steps(self) -> TorchSteps:
        with _listed(self._zero):
            return super().steps()

    def _lists(self) -> Sequence[tuple[Any, str]]:
        return [(self._zero, _LISTS[type(self._zero).__name__][1])] if _stage(self._zero) == 3 else []

    def restore(
        self,
        created: Mapping[str, Any],
        values: Mapping[str, object],
        parameter: Callable[[str], str],
        *,
        strict: bool,
        absent: Sequence[str] = (),
        decisive: Mapping[str, int] = {},
        filled: Collection[str] = (),
    ) -> Restored:
        if "param_groups" in values:
            _loading.add(self._zero)
        restored = super().restore(created, values, parameter, strict=strict, absent=absent, decisive=decisive)

        def install() -> None:
            restored.install()
            _loading.discard(self._zero)
            _fill_copies(self._zero)
            _link(self._zero)

        return Restored(install, restored.missing, restored.unexpected)


def _run(zero: Any, one: _Stepped, whole: Part | None) -> Part:
    if whole is None:
        shape = tuple(one.model.shape)
        box: Region | Flat = Flat(0, one.model.numel()) if one.length else Region((0,) * len(shape), shape)
        text = text_of_run(_stage(zero), len(one.owners or ())) if one.length else ""
        found = regions_of_run((box,), one.start, one.start + one.elements.numel())
    else:
        shape, text, found = whole.shape, whole.text, whole.regions
    # Of a tied parameter the first of its stages in a pipeline saves what the optimizer has.
    elsewhere = bool(one.length and getattr(one.model, "ds_pipe_replicated", False))
    part = Part(one.elements, shape, found, text, one.alike, one.owners, within=one.within, elsewhere=elsewhere)
    return dataclasses.replace(part, start=one.at, length=one.length)


_loading: weakref.WeakSet[Any] = weakref.WeakSet()
"""Optimizers that the load in progress fills: what they step need not be made from the model."""


def begin_load(zero: Any) -> None:
    """A load of a model begins; whether one of its optimizer comes with it is not known yet."""
    if zero is not None:
        _loading.discard(zero)


def refresh(zero: Any) -> None:
    """Makes what an optimizer steps from the parameters that a load filled, unless the load fills that, too."""
    if type(zero).__name__ in KINDS and zero not in _loading:
        for one in _stepped(zero):
            one.elements.copy_(one.there.reshape(one.elements.shape))


def _fill_copies(zero: Any) -> None:
    """Makes copies of fp32 parameters equal to them."""
    for one in _stepped(zero):
        if one.elements.dtype is one.there.dtype and one.elements.data_ptr() != one.there.data_ptr():
            one.elements.copy_(one.there.reshape(one.elements.shape))


def _link(zero: Any) -> None:
    """Lets parameters find the moments that there are now, as the first step does."""
    link = getattr(zero, "_lazy_init_hp_params_optimizer_state", None)
    copies = [member for group in zero.optimizer.param_groups for member in group["params"]]
    if link is not None and copies and all(zero.optimizer.state.get(copy) for copy in copies):
        zero.__dict__["_hp_optimizer_states_linked"] = False
        link()


def _expect_understood(zero: Any) -> None:
    inside = type(zero.optimizer)
    if getattr(zero, "zenflow", False):
        raise Refused("ZenFlow, whose optimizer runs beside the training, is not understood: turn it off")
    if getattr(zero, "round_robin_gradients", False):
        raise Refused(
            "round_robin_gradients puts parameters in another order into the buffers, of which DeepSpeed's own records "
            "do not know: turn it off"
        )
    if "superoffload" in type(zero).__module__ or ".onebit" in inside.__module__:
        raise Refused(f"a {inside.__name__} of {inside.__module__} is not understood: save it with DeepSpeed")
    if not isinstance(zero.optimizer, torch.optim.Optimizer):
        raise Refused(f"a {type(zero).__name__} around a {inside.__name__}, which steps nothing: leave it out")
