"""Megatron-Core's optimizers: this rank's runs of parameters, said as parts of the whole ones, without a message.

The distributed optimizer steps runs of the local parameters, which lie in boxes of the global ones. Its own records
(``gbuf_ranges``) say which run it has of which parameter; the model's parts say where that parameter's elements belong.
Beside the state of PyTorch's optimizer, ``state.<FQN>.master`` is the copy in fp32 of a 16-bit parameter.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state

from ...state.catalog import Ints, Kind, NamedPart, Outline, Part, Refused
from ..torch.hooks import Place, is_dtensor
from ..torch.masters import MasterOptimizers, Run, regions_of_run
from ..torch.placement import local_of
from .fsdp import stepped_by


class _Shard(NamedTuple):
    """Elements of a model's parameter that an optimizer of PyTorch steps: a run of them, or all.

    Attributes:
        model: The parameter.
        stepped: What is stepped.
        start: Its first element among those of the parameter that this rank has.
        alike: The ranks that step the same run of the same part of a model.
        local: Where its elements lie, if it is a DTensor.
        there: The same run of the parameter's own elements, if these lie elsewhere than in the parameter.
    """

    model: torch.Tensor
    stepped: torch.Tensor
    start: int
    alike: Ints
    local: torch.Tensor | None = None
    there: torch.Tensor | None = None

    @property
    def elements(self) -> torch.Tensor:
        """Returns the stepped elements, as a plain tensor."""
        return (self.stepped if self.local is None else self.local).detach()

    @property
    def now(self) -> torch.Tensor:
        """The same run of the parameter's own elements."""
        if self.there is not None:
            return self.there
        return self.model.detach().reshape(-1)[self.start : self.start + self.elements.numel()]


def _inner_optimizers(optimizer: Any) -> Iterator[Any]:
    """The optimizers with parameters of a ``ChainedOptimizer`` or a layer-wise one, or itself.

    Raises:
        Refused: If it chains them in another way.
    """
    if not hasattr(optimizer, "chained_optimizers"):
        if not getattr(optimizer, "is_stub_optimizer", False):  # of a rank without parameters
            yield optimizer
        return
    if type(optimizer).__name__ not in ("ChainedOptimizer", _LAYER_WISE):
        raise Refused(f"a {type(optimizer).__name__} of Megatron-Core is not understood: save the state without it")
    for one in optimizer.chained_optimizers:
        yield from _inner_optimizers(one)


_LAYER_WISE = "LayerWiseDistributedOptimizer"

_Divided = dict[int, tuple[torch.Tensor, int]]
"""Parameters that a layer-wise optimizer divides among ranks, by ``id``, each with the rank that steps it."""


def _divided(optimizer: Any) -> _Divided:
    """Returns the lists of whole parameters of layer-wise optimizers in a chain, one for each rank of a group.

    Raises:
        Refused: If one steps other parameters than its lists give to this rank.
    """
    found: _Divided = {}
    for one in getattr(optimizer, "chained_optimizers", ()):
        found.update(_divided(one))
    if type(optimizer).__name__ != _LAYER_WISE:
        return found
    has_lists = set()
    for is_expert, group in enumerate(("dp_cp", "expt_dp")):
        lists = getattr(optimizer, f"{group}_params_list")
        if lists:  # else each rank steps its parameters of that kind, as replicas do
            has_lists.add(bool(is_expert))
            for rank, models in zip(_ranks(getattr(optimizer.pg_collection, group)), lists, strict=True):
                found.update((id(model), (model, rank)) for model in models)
    shards = itertools.chain.from_iterable(_shards(one, found) for one in _inner_optimizers(optimizer))
    stepped = {id(shard.model) for shard in shards if (not getattr(shard.model, "allreduce", True)) in has_lists}
    given = {number for number, (_, rank) in found.items() if rank == torch.distributed.get_rank()}
    if stepped != given:
        raise Refused(
            f"a {_LAYER_WISE} steps {len(stepped - given)} parameters that its lists do not give to this rank, and "
            f"leaves out {len(given - stepped)} that they do: its groups were changed after it was made, so make it "
            "anew"
        )
    return found


def _shards(optimizer: Any, divided: _Divided) -> Iterator[_Shard]:
    kind, inside = type(optimizer).__name__, getattr(optimizer, "optimizer", None)
    if inside is not None and (not isinstance(inside, torch.optim.Optimizer) or hasattr(inside, "sub_optimizers")):
        kind = type(inside).__name__
    if kind == "DistributedOptimizer" and optimizer.ddp_config.use_megatron_fsdp:
        for one in stepped_by(optimizer):
            alike = (torch.distributed.get_rank(),) if one.run.owners else _replicas(one.model)
            yield _Shard(one.model, one.stepped, one.before, alike, one.run.local, one.there)
    elif kind == "DistributedOptimizer":
        yield from _runs(optimizer)
    elif kind in ("Float16OptimizerWithFloat16Params", "FP32Optimizer"):
        halves = getattr(optimizer, "float16_groups", []), getattr(optimizer, "fp32_from_float16_groups", [])
        copies = {
            id(copy): model for models, of in zip(*halves, strict=True) for model, copy in zip(models, of, strict=True)
        }
        for group in optimizer.optimizer.param_groups:
            for stepped in group["params"]:
                model = copies.get(id(stepped), stepped)
                yield _Shard(model, stepped, 0, divided[id(model)][1:] if id(model) in divided else _replicas(model))
    else:
        raise Refused(f"a {kind} of Megatron-Core is not understood: save the state without it")


def _runs(optimizer: Any) -> Iterator[_Shard]:
    """Yields this rank's run of each parameter, by the records of a distributed optimizer."""
    if optimizer.config.use_precision_aware_optimizer:
        raise Refused("a DistributedOptimizer with use_precision_aware_optimizer is not understood: turn it off")
    alike = _instances(optimizer)
    for of_dtypes in optimizer.gbuf_ranges:
        for model, ranges in itertools.chain.from_iterable(
            bucket["param_map"].items() for buckets in of_dtypes.values() for bucket in buckets
        ):
            group, number = optimizer.model_param_group_index_map[model]
            stepped = optimizer.optimizer.param_groups[group]["params"][number]
            run = ranges["param"]
            if stepped.numel() != run.end - run.start:
                raise Refused(f"a DistributedOptimizer steps {stepped.numel()} elements where its records say {run}")
            yield _Shard(model, stepped, run.start, alike)


def _owners(inner: Sequence[Any], divided: _Divided) -> Iterator[tuple[torch.Tensor, Ints]]:
    """The ranks that step some run of each parameter that this rank has, whether itself does or not."""
    yield from ((model, (rank,)) for model, rank in divided.values())
    me = torch.distributed.get_rank()
    for optimizer in inner:
        if type(optimizer).__name__ != "DistributedOptimizer":
            yield from ((shard.model, shard.alike) for shard in _shards(optimizer, divided))
            continue
        if optimizer.ddp_config.use_megatron_fsdp:
            yield from ((one.model, one.run.owners or _replicas(one.model)) for one in stepped_by(optimizer))
            continue
        ranks, alike = _ranks(optimizer.data_parallel_group), _instances(optimizer)
        for buffer in optimizer.buffers:
            for model, (first, stop, number) in buffer.param_index_map.items():
                bucket = buffer.buckets[number]
                share = bucket.grad_data.numel() // len(ranks)
                owners = ranks[(first - bucket.offset) // share : -((bucket.offset - stop) // share)]
                yield model, tuple(rank + owner - me for owner in owners for rank in alike)


def _ranks(group: Any) -> list[int]:
    return list(torch.distributed.get_process_group_ranks(group))


def _replicas(model: torch.Tensor) -> Ints:
    """The ranks with the same part of a data-parallel replica."""
    if getattr(model, "allreduce", True):
        return tuple(sorted(_ranks(parallel_state.get_data_parallel_group(with_context_parallel=True))))
    return tuple(sorted(_ranks(parallel_state.get_expert_data_parallel_group())))


def _instances(optimizer: Any) -> Ints:
    """The ranks of this one's place in the other instances of a distributed optimizer, and itself."""
    if optimizer.ddp_config.num_distributed_optimizer_instances == 1:
        return (torch.distributed.get_rank(),)
    return tuple(sorted(_ranks(parallel_state.get_inter_distributed_optimizer_instance_group())))


def _peers(model: torch.Tensor) -> list[int]:
    """The ranks of this one's place in data parallelism that have other parts of the same parameter, or copies."""
    if getattr(model, "allreduce", True):
        return _ranks(parallel_state.get_tensor_model_parallel_group())
    return _ranks(parallel_state.get_expert_tensor_and_model_parallel_group())


def moved(ranks: Ints, peers: Sequence[int]) -> Ints:
    """The same ranks at each of this rank's peers: Megatron's groups are axes of one grid of ranks."""
    me = torch.distributed.get_rank()
    return tuple(sorted({rank + peer - me for rank in ranks for peer in peers}))


def cut(part: Part, model: torch.Tensor, elements: torch.Tensor, start: int, alike: Ints, owners: Ints) -> Part:
    """The part of the whole parameter that a run of a part of it is.

    Args:
        part: That of the parameter ``model`` of this rank.
        model: That parameter.
        elements: The run's memory.
        start: Its first element in the part.
        alike: The ranks of this one's place in other data-parallel replicas that have the same run.
        owners: Those that have any run of the part.
    """
    holders = sharers = None
    if part.holders is not None:
        peers = _peers(model)
        holders = tuple(sorted(set(moved(alike, peers)) & set(part.holders)))
        sharers = moved(owners, peers) if owners else None
    regions = regions_of_run(part.regions, start, start + elements.numel())
    return Part(elements, part.shape, regions, part.text, holders, sharers, within=model)


def _is_saved_elsewhere(model: torch.Tensor) -> bool:
    """Whether it is a tied embedding of which the first stage of the pipeline saves what the optimizer has."""
    stages = of_embedding(model)
    return bool(stages) and stages[0] != torch.distributed.get_rank()


def of_embedding(model: torch.Tensor) -> Ints:
    """This rank's places in the stages that have the same embedding, if it is tied over several; else none."""
    if not getattr(model, "shared_embedding", False) or parallel_state.get_pipeline_model_parallel_world_size() < 2:
        return ()
    return tuple(sorted(_ranks(parallel_state.get_embedding_group())))


class MegatronOptimizers(MasterOptimizers):
    """One optimizer of Megatron, whatever it chains."""

    _of_the_layout = ("is_expert_parallel",)
    _from_the_model = ": reload_model_params()"

    def __init__(self, optimizer: Any, names: Mapping[int, Sequence[NamedPart]], beside: Collection[int] = ()) -> None:
        self._inner, divided = list(_inner_optimizers(optimizer)), _divided(optimizer)
        owners: dict[str, Ints] = {}
        copied: dict[str, torch.Tensor] = {}
        models: list[torch.Tensor] = []
        for model, ranks in _owners(self._inner, divided):
            models.append(model)
            for fqn, _ in names.get(id(model), ()):
                owners[fqn] = (*owners.get(fqn, ()), *ranks)
                if model.dtype in (torch.bfloat16, torch.float16):
                    copied[fqn] = model
        runs = []
        for shard in itertools.chain.from_iterable(_shards(one, divided) for one in self._inner):
            if id(shard.model) not in names:
                raise Refused(
                    f"a parameter of shape {tuple(shard.model.shape)} belongs to no model of the state: put the model, "
                    "or the list of this rank's chunks, into the state beside the optimizer"
                )
            for fqn, part in names[id(shard.model)]:
                if part is None:
                    raise Refused(f"{fqn!r} is a parameter of a model that is not Megatron's")
                run = cut(part, shard.model, shard.elements, shard.start, shard.alike, owners[fqn])
                run = dataclasses.replace(run, within=shard.stepped, elsewhere=_is_saved_elsewhere(shard.model))
                runs.append(Run(fqn, shard.model, run, shard.now))
                if shard.stepped.dtype is shard.now.dtype:
                    copied.pop(fqn, None)
        scaled = [one for one in self._inner if getattr(one, "grad_scaler", None)]
        super().__init__([one.optimizer for one in self._inner], runs, scaled, beside, copied, models)

    @staticmethod
    def _scaler(one: Any) -> Any:
        return one.grad_scaler

    def _part(self, leaf: str, part: Part, value: torch.Tensor, place: Place) -> torch.Tensor | Part:
        found = super()._part(leaf, part, local_of(value), place)
        return dataclasses.replace(found, within=value) if is_dtensor(value) and isinstance(found, Part) else found

    def _create_part(
        self, leaf: str, place: Place, part: Part, shape: Ints, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor | Part:
        if not shape or shape != part.shape or not is_dtensor(part.within) or device.type == "meta":
            return super()._create_part(leaf, place, part, shape, dtype, device)
        return self._part(leaf, part, torch.zeros_like(part.within, dtype=dtype), place)

    def outline(self) -> Outline | None:
        if any(map(is_dtensor, itertools.chain.from_iterable(group["params"] for group in self._groups))):
            return None
        found = super().outline()
        if found is None:
            return None
        outer: list[tuple[Any, Sequence[tuple[str, Kind]]]] = [(one, [("optimizer", "object")]) for one in self._inner]
        return dataclasses.replace(found, objects=[*found.objects, *outer])
