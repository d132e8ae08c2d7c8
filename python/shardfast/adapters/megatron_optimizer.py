"""Megatron-Core's optimizers: this rank's runs of parameters, said as parts of the whole ones, without a message.

The distributed optimizer steps runs of the local parameters, which lie in boxes of the global ones. Its own records
(``gbuf_ranges``) say which run it has of which parameter; the model's parts say where that parameter's elements belong.
Beside the state of PyTorch's optimizer, ``state.<FQN>.master`` is the copy in fp32 of a 16-bit parameter.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from megatron.core import parallel_state

from ..catalog import Compared, Flat, Inside, Ints, Kind, NamedPart, Outline, Part, Refused, Region, Restored
from ..padding import differ_by_padding
from . import torch_accounts as accounts
from .megatron_fsdp import is_rounded, stepped_by
from .torch_capture import MEMBER, Place, is_dtensor, outline_of_optimizers
from .torch_groups import equal, groups_value
from .torch_optimizers import Optimizers
from .torch_placement import local_of
from .torch_wrapped import constants_of

MASTER = "master"
_SCALER = "loss_scaler"
_OF_THE_LAYOUT = ("is_expert_parallel",)
"""What Megatron notes in groups of how it laid them out, beside hyper-parameters."""


class _Shard(NamedTuple):
    """What an optimizer of PyTorch steps for a parameter of the model: a run of its elements, or all.

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
        """What is stepped, as a plain tensor."""
        return (self.stepped if self.local is None else self.local).detach()


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
    """What layer-wise optimizers in a chain divide: each has lists of whole parameters, one for each rank of a group.

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
    """What this rank steps of each parameter, by the records of a distributed optimizer."""
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


def _moved(ranks: Ints, peers: Sequence[int]) -> Ints:
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
    at, regions = 0, list[Region | Flat]()
    stop = start + elements.numel()
    for region in part.regions:
        size = region.stop - region.start if isinstance(region, Flat) else math.prod(region.lengths)
        first, last = max(start - at, 0), min(stop - at, size)
        if first < last and last - first == size:
            regions.append(region)
        elif first < last:
            before, box = (region.start, region.box) if isinstance(region, Flat) else (0, region)
            regions.append(Flat(before + first, before + last, box))
        at += size
    holders = sharers = None
    if part.holders is not None:
        peers = _peers(model)
        holders = tuple(sorted(set(_moved(alike, peers)) & set(part.holders)))
        sharers = _moved(owners, peers) if owners else None
    return Part(elements, part.shape, tuple(regions), part.text, holders, sharers, within=model)


_PIECE = "\0"
"""Between a name and a number in the names by which the pieces of one parameter are told apart inside."""


def _outside(name: str) -> str:
    """The name in a checkpoint of what is called ``name`` inside."""
    head, piece, tail = name.partition(_PIECE)
    return head + tail.partition(".")[1] + tail.partition(".")[2] if piece else name


class MegatronOptimizers(Optimizers):
    """One optimizer of Megatron, whatever it chains.

    The optimizers of PyTorch inside step tensors of which several can be pieces of one parameter, such as experts.
    """

    def __init__(self, optimizer: Any, names: Mapping[int, Sequence[NamedPart]], beside: Collection[int] = ()) -> None:
        self._masters: dict[str, Part] = {}
        self._shards: list[tuple[str, _Shard]] = []
        inside: dict[int, list[NamedPart]] = {}
        models: dict[str, torch.Tensor] = {}
        inner, divided = list(_inner_optimizers(optimizer)), _divided(optimizer)
        owners: dict[str, Ints] = {}
        for model, ranks in _owners(inner, divided):
            for fqn, _ in names.get(id(model), ()):
                owners[fqn] = (*owners.get(fqn, ()), *ranks)
        self._inner = inner
        self._scaled = [one for one in inner if getattr(one, "grad_scaler", None)]
        for shard in itertools.chain.from_iterable(_shards(one, divided) for one in inner):
            if id(shard.model) not in names:
                raise Refused(
                    f"a parameter of shape {tuple(shard.model.shape)} belongs to no model of the state: put the model, "
                    "or the list of this rank's chunks, into the state beside the optimizer"
                )
            for fqn, part in names[id(shard.model)]:
                if part is None:
                    raise Refused(f"{fqn!r} is a parameter of a model that is not Megatron's")
                name = fqn
                for number in itertools.count(1):
                    if name not in models:
                        break
                    name = f"{fqn}{_PIECE}{number}"
                run = cut(part, shard.model, shard.elements, shard.start, shard.alike, owners[fqn])
                run = dataclasses.replace(run, within=shard.stepped)
                inside.setdefault(id(shard.stepped), []).append((name, run))
                models[name] = shard.model
                if shard.stepped.dtype is not shard.model.dtype:
                    self._masters[name] = run
                    self._shards.append((fqn, shard))
        self._pieces: dict[str, list[str]] = {}
        for name in models:
            self._pieces.setdefault(_outside(name), []).append(name)
        for stepped in itertools.chain.from_iterable(group["params"] for one in inner for group in one.param_groups):
            if id(stepped) not in inside:
                raise Refused(f"its records name no parameter of which it steps a run of shape {tuple(stepped.shape)}")
        optimizers = [one.optimizer for one in inner]
        counters = collections.Counter(
            id(value)
            for entries in itertools.chain.from_iterable(one.state.values() for one in optimizers)
            for value in (entries.values() if isinstance(entries, dict) else ())
            if isinstance(value, torch.Tensor) and not value.ndim
        )
        # A load of Megatron's own leaves one step counter for all parameters.
        self._counters: dict[int, list[str]] = {number: [] for number, count in counters.items() if count > 1}
        super().__init__(optimizers, inside, beside)
        self._group_names = [list(dict.fromkeys(map(_outside, names))) for names in self._group_names]
        self.parameters = models

    def _entries(self) -> Iterator[tuple[str, object, Place]]:
        yield from super()._entries()
        for name, run in self._masters.items():
            yield f"state.{name}.{MASTER}", run, (id(run.within), MEMBER)

    def _part(self, leaf: str, part: Part, value: torch.Tensor, place: Place) -> torch.Tensor | Part:
        several = self._counters.get(id(value))
        if several is not None:
            whole = (Region((), ()),)
            return Part(value, (), whole, holders=part.sharers, within=value, several=several, name=_outside(leaf))
        found = super()._part(leaf, part, local_of(value), place)
        return dataclasses.replace(found, within=value) if is_dtensor(value) and isinstance(found, Part) else found

    def _create_part(
        self, leaf: str, place: Place, part: Part, shape: Ints, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor | Part:
        if not shape or shape != part.shape or not is_dtensor(part.within) or device.type == "meta":
            return super()._create_part(leaf, place, part, shape, dtype, device)
        return self._part(leaf, part, torch.zeros_like(part.within, dtype=dtype), place)

    def announce(self, notice: Callable[[str], None]) -> Sequence[torch.Tensor]:
        return [*super().announce(notice), *self.parameters.values()]

    def outline(self) -> Outline | None:
        if any(held.outer for held in self._held) or any(map(accounts.says_more, self._levels)):
            return None
        if any(map(is_dtensor, itertools.chain.from_iterable(group["params"] for group in self._groups))):
            return None
        placed: dict[str, list[tuple[Place, Any, Inside | None]]] = {}
        values: dict[str, Place] = {}
        for name, value, place in self._entries():
            if isinstance(value, (torch.Tensor, Part)):
                placed.setdefault(_outside(name), []).append((place, value, self._inside.get(name)))
            else:
                values[name] = place
        tensors = list(itertools.chain.from_iterable(placed.values()))
        groups = functools.partial(groups_value, names=self._group_names, classes=self._classes)
        optimizers = [(held.optimizer, held.holder) for held in self._held]
        constants = dict.fromkeys(self._constants, constants_of)
        found = outline_of_optimizers(optimizers, tensors, values, constants, groups, with_members=True)
        if found is None:
            return None
        of, weak = found.values, [weakref.ref(one) for one in self._scaled]
        outer: list[tuple[Any, Sequence[tuple[str, Kind]]]] = [(one, [("optimizer", "object")]) for one in self._inner]

        def values_of(entries: Sequence[Any]) -> Mapping[str, object]:
            live: list[Any] = [one() for one in weak]
            return _as_saved(of(entries), live)

        return dataclasses.replace(found, objects=[*found.objects, *outer], values=values_of)

    def tensors(self) -> Mapping[str, torch.Tensor | Part]:
        pieces: dict[str, list[torch.Tensor | Part]] = {}
        for name, value in super().tensors().items():
            of = pieces.setdefault(_outside(name), [])
            if of and not (isinstance(value, Part) or isinstance(of[0], Part) or torch.equal(of[0], value)):
                raise Refused(f"{_outside(name)} is {of[0]} for one tensor of the parameter and {value} for another")
            of.append(value)
        return {name: _joined(name, of) for name, of in pieces.items()}

    def values(self) -> Mapping[str, object]:
        return _as_saved(super().values(), self._scaled)

    def accepts(self, name: str) -> bool:
        if name == _SCALER:
            return bool(self._scaled)
        pieces = self._bare(name)
        # A parameter that is stepped itself has no place for a copy that is more exact.
        if _is_master(name) and not self._masters.keys() & pieces:
            return False
        # Of a parameter in several tensors this rank may have elements in any of them.
        return any(not self._owned[piece].is_empty for piece in pieces) if pieces else super().accepts(name)

    def drops(self, name: str) -> bool:
        return name != _SCALER and not _is_master(name) and super().drops(name)

    def _bare(self, name: str) -> set[str]:
        """What a leaf's parameter is called inside."""
        place = self._split(name)
        return set() if place is None else set(self._pieces[place[0]])

    def holders(self, of: Mapping[int, Ints]) -> Mapping[str, Ints]:
        return {_outside(name): holders for name, holders in super().holders(of).items()}

    def compared(self) -> Mapping[str, Compared]:
        return {_outside(name): when for name, when in super().compared().items()}

    def create(self, name: str, dtype: str, shape: Ints, *, layout: str = "", beside: str = "", dry: bool) -> Any:
        made = []
        for piece in self._inside_names(name):
            there = self._place_of(piece)
            is_padded = there is not None and differ_by_padding(shape, layout, there.shape, there.text)
            size = there.shape if there is not None and is_padded else shape
            made.append(super().create(piece, dtype, size, layout=layout, beside=beside, dry=dry))
        return _joined(name, made)

    def _place_of(self, name: str) -> Part | None:
        """The part that its parameter is of the whole one."""
        place = self._split(name)
        return None if place is None else self._owned[place[0]].part

    def _inside_names(self, name: str) -> list[str]:
        """What a leaf is called inside, once for each of its pieces."""
        place = self._split(name)
        if place is None:
            return [name]
        return [f"state.{piece}.{place[1]}" for piece in self._pieces[place[0]]]

    def restore(
        self,
        created: Mapping[str, Any],
        values: Mapping[str, object],
        parameter: Callable[[str], str],
        *,
        strict: bool,
        absent: Sequence[str] = (),
        decisive: Mapping[str, int] = {},
    ) -> Restored:
        apart: dict[str, Any] = {}
        for name, made in created.items():
            apart.update(zip(self._inside_names(name), (made, *getattr(made, "others", ())), strict=True))
        scaler = values.get(_SCALER)
        if not (scaler is None or isinstance(scaler, dict)):
            raise Refused(f"{_SCALER} is {scaler!r}: expected what a loss scaler's state_dict() says")
        values = {name: value for name, value in values.items() if name != _SCALER}
        every = {inside: value for name, value in values.items() for inside in self._inside_names(name)}
        gone = [inside for name in absent for inside in self._inside_names(name)]
        restored = super().restore(apart, every, parameter, strict=strict, absent=gone, decisive=decisive)

        def install() -> None:
            restored.install()
            if "param_groups" in values:
                self._expect_masters()
            for one in self._scaled if scaler else ():
                said = one.grad_scaler.state_dict().items()
                one.grad_scaler.load_state_dict({name: _like(now, cast("Any", scaler)[name]) for name, now in said})

        missing, unexpected = (
            list(dict.fromkeys(map(_outside, names))) for names in (restored.missing, restored.unexpected)
        )
        return Restored(install, missing, unexpected)

    def _expect_masters(self) -> None:
        """Refuses a copy in fp32 that is not, rounded, what the model has."""
        for fqn, shard in self._shards:
            run, elements = shard.there, shard.elements
            if run is None:
                run = shard.model.detach().reshape(-1)[shard.start : shard.start + elements.numel()]
            if not is_rounded(elements, run):
                raise Refused(
                    f"state.{fqn}.{MASTER} and the model's {fqn!r} are of different steps after the load: load both "
                    "from one checkpoint that has both, or go on from the model alone: reload_model_params()"
                )


def _as_saved(values: Mapping[str, object], scaled: Sequence[Any]) -> Mapping[str, object]:
    """The values by their names in a checkpoint, with those of the loss scalers of Megatron's optimizers ``scaled``."""
    out: dict[str, object] = {}
    for name, value in values.items():
        other = out.setdefault(_outside(name), value)
        if not equal(other, value):
            raise Refused(f"{_outside(name)} is {other!r} for one of its tensors and {value!r} for another")
    for group in cast("list[dict[str, object]]", out["param_groups"]):
        for name in _OF_THE_LAYOUT:
            group.pop(name, None)
    for one in scaled:
        # Each of a chain's optimizers has one, and all see the same gradients.
        said = {name: _plain(value) for name, value in one.grad_scaler.state_dict().items()}
        if out.setdefault(_SCALER, said) != said:
            raise Refused(f"its loss scalers differ: {out[_SCALER]} and {said}")
    return out


def _plain(value: Any) -> Any:
    """A tensor of one number as that number."""
    return value.item() if isinstance(value, torch.Tensor) else value


def _like(now: Any, value: Any) -> Any:
    return torch.full_like(now, value) if isinstance(now, torch.Tensor) else value


def _is_master(name: str) -> bool:
    return name.startswith("state.") and name.endswith(f".{MASTER}")


def _joined(name: str, pieces: Sequence[Any]) -> Any:
    """A leaf of which this rank has several tensors; one of a number is the same in all of them."""
    first, *others = pieces
    if not others:
        return first
    if not all(isinstance(piece, Part) for piece in pieces):
        if any(piece.ndim for piece in pieces):
            raise Refused(f"{name} is in several tensors, of which one is no part of a parameter's state")
        first, *others = (Part(piece, (), (Region((), ()),), within=piece) for piece in pieces)
    return dataclasses.replace(first, others=others)
