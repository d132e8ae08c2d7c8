"""Megatron-FSDP: which run of each parameter this rank has, by the records of its buffers, without a message.

Its DTensors are cut unevenly and say so only once the ranks have exchanged where; its buffers know it all along.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ...state.catalog import Ints, Refused
from ..torch.masters import is_rounded
from ..torch.placement import local_of

_MODULE = "megatron.core.distributed.fsdp."


class Run(NamedTuple):
    """A run of a parameter's elements on this rank.

    Attributes:
        local: Its memory.
        start: Its first element in the flattened parameter.
        owners: The ranks that have a run of the parameter; none if each has all of it.
    """

    local: torch.Tensor
    start: int
    owners: Ints


def sharded_in(module: nn.Module) -> Sequence[Any]:
    """The modules in ``module`` that cut parameters into shards.

    Raises:
        Refused: If one does so in a way that is not understood.
    """
    found: list[Any] = []
    part: Any
    for part in module.modules():
        kind = type(part)
        if kind.__module__.startswith(_MODULE) and kind.__name__ == "MegatronFSDP":
            if part.dist_index.use_hybrid_fsdp:
                raise Refused("Megatron-FSDP in several instances (HSDP) is not understood: use one instance")
            found.append(part)
        elif "fsdp" in kind.__module__.lower() and not kind.__module__.startswith(f"{_MODULE}mcore_fsdp_adapter"):
            raise Refused(f"a {kind.__name__} of {kind.__module__} is not understood: wrap the model in Megatron's DDP")
    return found


def _of(owner: Any, name: str) -> Any:
    """Returns an attribute that Megatron-FSDP keeps to itself."""
    found = getattr(owner, name, None)
    if found is None:
        raise Refused(f"a {type(owner).__name__} without {name}: Megatron-FSDP of this version is not understood")
    return found


@contextlib.contextmanager
def whole_parameters(module: nn.Module) -> Iterator[None]:
    """Inside, the module has the parameters that forward passes see, of whole shapes, perhaps without memory."""
    sharded = sharded_in(module)
    were = [part.is_param_fsdp_distributed for part in sharded]
    for part in sharded:
        _of(part, "_replace_param_with_raw_if_needed")()
        part.is_param_fsdp_distributed = True  # so that hooks on state_dict() leave them
    try:
        yield
    finally:
        for part, was in zip(sharded, were, strict=True):
            part.is_param_fsdp_distributed = False
            if was:
                _of(part, "_replace_param_with_distributed_if_needed")()


def renew(part: Any) -> None:
    """Takes note that a load filled parameters: what was gathered before is old, and so are copies that differ.

    A copy in fp32 that a load filled, too, is, rounded, what the model has.
    """
    part.synchronize_param_gather()
    for group in part.param_and_grad_buffer.parameter_groups:
        weights, copies = group.model_weight_buffer, group.main_weight_buffer
        for number in range(len(group.params) if weights and copies else 0):
            weight, copy = (buffer.get_item(number, only_shard=True) for buffer in (weights, copies))
            if not is_rounded(copy, weight):
                copy.copy_(weight)


def runs_in(module: nn.Module) -> Mapping[int, Run]:
    """This rank's runs of the parameters that are cut into shards, by the ``id`` of each."""
    return {
        id(parameter): _run(group.model_weight_buffer, number)
        for part in sharded_in(module)
        for group in part.param_and_grad_buffer.parameter_groups
        if group.model_weight_buffer is not None and group.model_weight_buffer.is_data_distributed
        for number, parameter in enumerate(group.params)
    }


def _run(buffer: Any, number: int) -> Run:
    start, _ = _of(buffer, "_get_item_slice_in_shard")(number)
    ranks = torch.distributed.get_process_group_ranks(buffer.data_parallel_group)
    index, share = buffer.item_index_map[number], buffer.shard_bucket_index.size
    at = index.global_data_index - buffer.bucket_index.global_data_index
    owners = ranks[at // share : -(-(at + index.size) // share)]
    return Run(buffer.get_item(number, only_shard=True), start, tuple(owners))


class Stepped(NamedTuple):
    """Part of a parameter that forward passes see, as an optimizer steps it.

    Attributes:
        model: That parameter.
        stepped: The DTensor that is stepped.
        run: The run of the parameter that it is.
        there: The same run of the parameter's own elements.
        before: How many of the parameter's elements that this rank has lie before the run.
    """

    model: torch.Tensor
    stepped: torch.Tensor
    run: Run
    there: torch.Tensor
    before: int


def stepped_by(optimizer: Any) -> Iterator[Stepped]:
    """Yields the parts that a distributed optimizer of modules of Megatron-FSDP steps."""
    for group in optimizer.optimizer.param_groups:
        for stepped in group["params"]:
            model = stepped.orig_param
            buffers = _of(stepped, "_megatron_fsdp_model").param_and_grad_buffer
            of = buffers.parameter_groups[buffers.param_to_param_group[model]]
            weights, buffer = of.model_weight_buffer, of.main_weight_buffer or of.model_weight_buffer
            own, local = model.detach().reshape(-1), local_of(stepped)
            if buffers.bucketing_policy.data_parallel_sharding_strategy == "no_shard":
                run, there, before = Run(local, 0, ()), own, 0
            else:
                number = buffer.param_idx[model]
                recorded = _run(buffer, number)
                run = Run(local, recorded.start, recorded.owners)
                there = weights.get_item(number, only_shard=True)
                before = 0 if weights.is_data_distributed else run.start
            if local.numel() != there.numel():
                raise Refused(f"its records name {there.numel()} elements where it steps {local.numel()}")
            yield Stepped(model, stepped, run, there, before)
