"""Megatron-Core's models: where their tensors lie is what ``sharded_state_dict()`` says, asked once per layout.

Each rank reads its own answer: no collective, no tensor is touched. A leaf's name is the key of
``non_homogeneous_layers=True``, which numbers a layer as the whole model does, whatever the pipeline; where keys come
stacked, the number is that of the prepended axis.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from megatron.core import dist_checkpointing, parallel_state
from torch import nn

from ...state.catalog import Ints, Kind, Module, NamedPart, Outline, Part, Refused, Region
from ...state.padding import padded
from ..torch.hooks import Place, outline_of_modules
from ..torch.modules import Modules
from .fsdp import renew, runs_in, sharded_in, whole_parameters
from .optimizer import MegatronOptimizers, cut, moved, of_embedding

_GATHERING = "remove_forward_pre_hook_handles"
"""Where Megatron's DDP has the hooks that gather parameters in forward passes, while there are any."""

_DIMENSIONS = (
    ("tp", "tensor_model"),
    ("cp", "context"),
    ("ep", "expert_model"),
    ("dp", "data"),
    ("pp", "pipeline_model"),
)
"""Names of coordinates, and what the functions that tell them have in theirs."""

_METADATA = {"non_homogeneous_layers": True, "singleton_local_shards": False}


class MegatronModules(Modules):
    """A model, or the model chunks of one rank."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._names: dict[int, dict[str, str]] = {}
        self._within: dict[int, Place] = {}
        super().__init__(modules)

    def _state_of(self, module: nn.Module) -> Mapping[str, Any]:
        with whole_parameters(module):
            return self._whole_state_of(module)

    def _whole_state_of(self, module: nn.Module) -> Mapping[str, Any]:
        _expect_understood(module)
        runs, originals = runs_in(module), dict[int, str]()
        for name, tensor in itertools.chain(
            module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
        ):
            originals.setdefault(id(tensor), name)
        found: dict[str, list[tuple[str, Part]]] = {}
        for entry in _said(_unwrapped(module)):
            original = originals.get(id(entry.data))
            if original is None:
                raise Refused(f"its sharded_state_dict() has {entry.key!r}, which is none of its parameters or buffers")
            name, part = _part(entry)
            if id(entry.data) in runs:
                run = runs[id(entry.data)]
                own = (torch.distributed.get_rank(),)
                part = cut(part, entry.data, run.local.detach(), run.start, own, run.owners)
            found.setdefault(name, []).append((original, part))
            self._within[id(part.within)] = id(module), original
        self._names[id(module)] = {pieces[0][0]: name for name, pieces in found.items()}
        state = {pieces[0][0]: _one([part for _, part in pieces]) for pieces in found.values()}
        _expect_all(module, state)
        return state

    def announce(self, notice: Callable[[str], None]) -> Sequence[torch.Tensor]:
        for module in self._modules:
            if getattr(module, _GATHERING, None):
                raise Refused(
                    "overlap_param_gather: parameters of other ranks' runs are those of the step before until the next "
                    "forward pass: call disable_forward_pre_hook() of each chunk before a save, and "
                    "enable_forward_pre_hook() after it, as Megatron's own loop does"
                )
        return super().announce(notice)

    def outline(self) -> Outline | None:
        if any(map(sharded_in, self._modules)):  # whose parameters take turns in their places
            return None
        parts = (part for part in self._tensors.values() if isinstance(part, Part))
        pieces = [piece for part in parts for piece in (part, *part.others)]
        tensors: list[tuple[Place, Any, None]] = [(self._within[id(piece.within)], piece, None) for piece in pieces]
        parameters = [place for place, piece, _ in tensors if isinstance(piece.within, nn.Parameter)]
        found = outline_of_modules(self._modules, tensors, parameters, {}, lambda entry: entry, "megatron.core.")
        if found is None:
            return None
        gathering: list[tuple[str, Kind]] = [(_GATHERING, "names")]
        objects = [
            (module, [*slots, *(gathering if hasattr(module, _GATHERING) else ())]) for module, slots in found.objects
        ]
        return dataclasses.replace(found, objects=objects)

    def _release(self) -> None:
        super()._release()
        for part in itertools.chain.from_iterable(map(sharded_in, self._modules)):
            renew(part)

    def _loaded(self, module: nn.Module) -> nn.Module:
        return cast(nn.Module, _unwrapped(module))

    def _names_of(self, module: nn.Module) -> Callable[[str], str]:
        names = self._names[id(module)]
        return lambda original: names.get(original, original)

    def _parameters_of(self, module: nn.Module, state: Mapping[str, Any]) -> Iterable[tuple[str, nn.Parameter | Part]]:
        return ((name, part) for name, part in state.items() if isinstance(part.within, nn.Parameter))


def _one(pieces: Sequence[Part]) -> Part:
    """A leaf of which a rank has several tensors, such as experts."""
    return pieces[0] if len(pieces) == 1 else dataclasses.replace(pieces[0], others=pieces[1:])


def _unwrapped(module: Any) -> Any:
    """The model inside of what wraps it: ``DistributedDataParallel``, ``Float16Module``."""
    outer = module
    while not hasattr(type(module), "sharded_state_dict") or type(module).__module__.startswith(_WRAPPERS):
        module = getattr(module, "module", None)
        if module is None:
            raise Refused(
                f"a {type(outer).__name__} around modules of Megatron-Core, without a sharded_state_dict() that says "
                "where their tensors lie: put the model inside of it into the state"
            )
    return module


_WRAPPERS = ("megatron.core.distributed.", "megatron.core.transformer.module")


def _expect_understood(chunk: nn.Module) -> None:
    for name, parameter in chunk.named_parameters():
        if type(parameter) is not nn.Parameter:
            raise Refused(f"its parameter {name!r} is a {type(parameter).__name__}, which is not understood")


def _said(model: Any) -> Iterator[Any]:
    """The tensors and factories that the model says it has, each once."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    said = model.sharded_state_dict(metadata={**_METADATA, "dp_cp_group": group})
    for entry in _values(said):
        if isinstance(entry, dist_checkpointing.mapping.ShardedObject):
            if not _is_empty(entry.data):
                raise Refused(f"its {entry.key!r} is a {type(entry.data).__name__}, which is not understood")
        else:
            yield entry


def _is_empty(extra: object) -> bool:
    """Whether a layer's extra state says nothing: TransformerEngine's without fp8 is a tensor of no elements."""
    return extra is None or (isinstance(extra, torch.Tensor) and not extra.numel())


def _values(said: Any) -> Iterator[Any]:
    if isinstance(said, dict):
        said = said.values()
    if isinstance(said, (list, tuple)) or not hasattr(said, "key"):
        for one in said:
            yield from _values(one)
    else:
        yield said


def _part(entry: Any) -> tuple[str, Part]:
    """The leaf's name, and this rank's part of it."""
    tensor, pieces = entry.data, [entry]
    if isinstance(entry, dist_checkpointing.mapping.ShardedTensorFactory):
        ghost = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        pieces = sorted(_values(entry.build_fn(entry.key, ghost, entry.replica_id, None)), key=_start)
        at = 0
        for piece in pieces:
            if _start(piece) != at or not piece.data.is_contiguous():
                raise Refused(f"its {entry.key!r} is cut otherwise than into runs")
            at += piece.data.numel()
        if at != tensor.numel():
            raise Refused(f"its {entry.key!r} is cut into {at} of {tensor.numel()} elements")
    first = pieces[0]
    name, axes = _name(first, first.key if all(piece.key == first.key for piece in pieces) else entry.key)
    shape, before = _stacked(entry.key, pieces, axes)
    regions = tuple(_region(piece, axes, before[piece.key]) for piece in pieces)
    return name, Part(
        tensor.detach(),
        shape,
        regions,
        _padding(first.global_shape[axes]) if first.allow_shape_mismatch else "",
        holders=_holders(tensor, first),
        within=tensor,
    )


def _start(piece: Any) -> int:
    return int(piece.data.storage_offset())


def _stacked(key: str, pieces: Sequence[Any], axes: int) -> tuple[Ints, dict[str, int]]:
    """The shape of the tensor that pieces are of, and by the piece's key the rows before its own.

    A Mamba layer's projection is five matrices, each with a key and cut by tensor parallelism. One below the other they
    are what a rank has without it. Keys with numbers may be others on other ranks.
    """
    shapes = {piece.key: tuple(piece.global_shape[axes:]) for piece in pieces}
    first, *others = shapes.values()
    if not others:
        return first, dict.fromkeys(shapes, 0)
    is_named = all(one.startswith(f"{key}.") and one.removeprefix(f"{key}.").isidentifier() for one in shapes)
    if not is_named or any(shape[1:] != first[1:] for shape in others):
        raise Refused(f"its {key!r} is cut into {', '.join(map(repr, shapes))}, which are not understood as its rows")
    ends = itertools.accumulate((shape[0] for shape in shapes.values()), initial=0)
    before = dict(zip(shapes, ends, strict=False))
    return (sum(shape[0] for shape in shapes.values()), *first[1:]), before


def _region(piece: Any, axes: int, before: int) -> Region:
    ones = (1,) * (piece.prepend_axis_num - axes)
    offset = tuple(piece.global_offset[axes:])
    return Region((offset[0] + before, *offset[1:]) if before else offset, (*ones, *piece.local_shape))


def _name(piece: Any, key: str) -> tuple[str, int]:
    """The name with the layer's number, and how many prepended axes that takes away."""
    head, layers, tail = key.partition("layers.")
    if not piece.prepend_axis_num or not layers or tail[:1].isdigit():
        return key, 0
    return f"{head}{layers}{piece.global_offset[0]}.{tail}", 1


def _padding(rows: int) -> str:
    """Between which counts a vocabulary lies that is padded to ``rows``.

    Megatron pads it to a multiple of ``make_vocab_size_divisible_by`` (128 by default) times the tensor parallelism.
    Its training loop knows how long it really is.
    """
    there = sys.modules.get("megatron.training.global_vars")
    args, tokenizer = getattr(there, "_GLOBAL_ARGS", None), getattr(there, "_GLOBAL_TOKENIZER", None)
    known = getattr(tokenizer, "vocab_size", None)
    if getattr(args, "padded_vocab_size", None) == rows and isinstance(known, int) and 0 < known <= rows:
        return padded(known, known)
    multiple = math.gcd(rows, 128 * parallel_state.get_tensor_model_parallel_world_size())
    return padded(rows - multiple + 1, rows)


def _holders(tensor: torch.Tensor, piece: Any) -> Ints:
    """The ranks that hold the same part, from the process groups."""
    stages = of_embedding(tensor)
    if stages:
        return moved(_holders_in_stage(tensor, piece), stages)
    return _holders_in_stage(tensor, piece)


def _holders_in_stage(tensor: torch.Tensor, piece: Any) -> Ints:
    is_whole = tuple(piece.local_shape) == tuple(piece.global_shape[piece.prepend_axis_num :])
    if not getattr(tensor, "allreduce", True):
        ranks = _ranks(parallel_state.get_expert_data_parallel_group())
        return moved(ranks, _ranks(parallel_state.get_expert_tensor_parallel_group())) if is_whole else ranks
    if is_whole:
        group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    else:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return _ranks(group)


def _ranks(group: Any) -> Ints:
    return tuple(sorted(torch.distributed.get_process_group_ranks(group)))


def _expect_all(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Refuses what the module's state dict holds and its sharded one does not."""
    held = {id(piece.within) for part in state.values() for piece in (part, *part.others)}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor) and id(value) not in held and not _is_empty(value):
            raise Refused(f"its {name!r} is in its state_dict() and not in its sharded_state_dict()")


class MegatronObjects:
    """Models of Megatron-Core, and what wraps them."""

    def module(self, value: object) -> Module | None:
        """Answers as :class:`shardfast.state.catalog.Objects` says."""
        chunks: Sequence[Any] = value if isinstance(value, (list, tuple)) else [value]
        kind = sys.modules["megatron.core.transformer.module"].MegatronModule
        if not chunks or not all(isinstance(chunk, nn.Module) for chunk in chunks):
            return None
        if not any(isinstance(part, kind) for chunk in chunks for part in chunk.modules()):
            return None
        if not parallel_state.model_parallel_is_initialized():
            raise Refused("a model of Megatron-Core, whose process groups are not there: initialize_model_parallel()")
        modules = MegatronModules(chunks)
        return Module(modules, modules.parameters)

    def optimizer(
        self, value: object, names: Mapping[int, Sequence[NamedPart]], beside: Collection[int] = ()
    ) -> MegatronOptimizers | None:
        """Answers as :class:`shardfast.state.catalog.Objects` says."""
        kinds = sys.modules.get("megatron.core.optimizer.optimizer")
        if kinds is None or not isinstance(value, kinds.MegatronOptimizer):
            return None
        return MegatronOptimizers(value, names, beside)

    def coordinates(self, things: Sequence[object]) -> Mapping[str, int]:
        """Answers as :class:`shardfast.state.catalog.Objects` says, in the order of Megatron's own groups."""
        is_there = any(isinstance(thing, (MegatronModules, MegatronOptimizers)) for thing in things)
        found: dict[str, int] = {}
        for name, parallelism in _DIMENSIONS if is_there else ():
            with contextlib.suppress(Exception):  # a group that was not made
                if getattr(parallel_state, f"get_{parallelism}_parallel_world_size")() > 1:
                    found[name] = getattr(parallel_state, f"get_{parallelism}_parallel_rank")()
        return found


def objects() -> MegatronObjects:
    """Returns the adapter of this framework's objects."""
    return MegatronObjects()
