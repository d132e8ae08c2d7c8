"""Refuses, by name, states of other libraries on PyTorch that Shardfast does not understand yet.

Each of these looks like an ordinary module, optimizer or tensor, but holds one rank's part under the name of the whole.
Saved as such, the rest would be lost.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ...state.catalog import Refused

_PARTITIONED = {
    "deepspeed": "DeepSpeed",
    "megatron": "Megatron",
}
"""Libraries whose optimizers hold one rank's partition, by the first component of their modules' names."""


def _qualified(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _library(value: object) -> str | None:
    """The library of :data:`_PARTITIONED` that defines the class of ``value`` or one that it derives from."""
    roots = (kind.__module__.partition(".")[0] for kind in type(value).__mro__)
    return next((_PARTITIONED[root] for root in roots if root in _PARTITIONED), None)


def expect_understood_module(module: nn.Module) -> None:
    """Refuses a module that holds parts of parameters under the names of the whole ones."""
    if _library(module) is not None and hasattr(module, "optimizer"):
        raise Refused(
            f"a {_qualified(module)}, which holds an optimizer beside its module: put its module into the state, and "
            "save what else it holds with its own library"
        )
    for name, parameter in module.named_parameters():
        marks = parameter.__dict__  # faster than `getattr` for what few parameters have
        if "ds_id" in marks:
            raise Refused(
                f"its parameter {name!r} is partitioned by DeepSpeed ZeRO stage 3, and this rank holds a part of it: "
                "save with DeepSpeed, or put the consolidated state dict into the state"
            )
        if marks.get("tensor_model_parallel", False) and _tensor_parallel_size() > 1:
            raise Refused(
                f"its parameter {name!r} is split over {_tensor_parallel_size()} ranks by Megatron's tensor "
                "parallelism, and has the same name on all of them: save with Megatron's dist_checkpointing"
            )


def _tensor_parallel_size() -> int:
    parallel = sys.modules.get("megatron.core.parallel_state")
    return int(parallel.get_tensor_model_parallel_world_size()) if parallel is not None else 1


def expect_understood_tensor(tensor: torch.Tensor) -> None:
    """Refuses a tensor that is one rank's part of another one without saying which."""
    if is_sharded_tensor(type(tensor)):
        raise Refused(
            "a ShardedTensor cannot be stored: use DTensor, or store its local_shards() under names of their own"
        )
    if "_fsdp_flattened" in tensor.__dict__:
        raise Refused(
            "a parameter that FullyShardedDataParallel has flattened, of which this rank holds a run of elements: put "
            "the wrapped module itself into the state, not what is inside of it"
        )


@functools.lru_cache(maxsize=64)
def is_sharded_tensor(kind: type) -> bool:
    """Whether it is the type of a ``ShardedTensor``."""
    module = sys.modules.get("torch.distributed._shard.sharded_tensor")
    return module is not None and issubclass(kind, module.ShardedTensor)


def expect_understood_owner(value: object) -> None:
    """Refuses an object that owns parameters and is no optimizer of PyTorch's, or one that holds a partition.

    Its state dict need not be the whole state: that of a partitioning optimizer is one rank's part.
    """
    library = _library(value)
    groups = getattr(value, "param_groups", None)
    owns = isinstance(groups, list) and any(_parameters(groups))
    if library is not None and (owns or type(value).__name__.endswith("Optimizer")):
        raise Refused(
            f"a {_qualified(value)}: {library}'s objects hold one rank's partition of a state, and Shardfast does not "
            f"understand it yet: save it with {library}"
        )
    if owns and not isinstance(value, torch.optim.Optimizer):
        raise Refused(
            f"a {_qualified(value)} owns parameters (it has param_groups) and is no torch.optim.Optimizer, so what "
            "else it holds is not known: put the torch optimizers that it steps into the state, in a list; or, if "
            "its state_dict() is the whole state of this rank, shardfast.PerRank(it)"
        )


def _parameters(groups: list[Any]) -> Iterator[bool]:
    for group in groups:
        members = group.get("params", ()) if isinstance(group, dict) else ()
        yield from (isinstance(member, torch.Tensor) for member in members)
