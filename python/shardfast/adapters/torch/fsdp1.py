"""``FullyShardedDataParallel`` (FSDP1): parameters that lie in flat buffers, each rank's run of them said as parts.

Where a parameter lies is read from the flat parameter's own records (``_param_infos``, ``_shard_param_infos``), as
PyTorch's ``FlatParamHandle`` wrote them: no collective, no whole tensor. With ``use_orig_params=True`` an optimizer
steps views of the flat buffer, one for each parameter; without it the flat parameter itself, which all are runs of.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import fsdp

from ...state.catalog import Flat, Ints, Module, NamedPart, Outline, Part, Refused
from .hooks import Place, loads_by_itself
from .modules import Modules
from .placement import coordinates_in, text_of_flat
from .refused import expect_understood_module

Wrapped = fsdp.FullyShardedDataParallel


class _Handle:
    """A flat parameter and the wrapper that shards it, as PyTorch's private records say.

    Attributes:
        flat: The flat parameter.
        local: This rank's shard of it.
        mesh: The mesh that the wrapper was given; ``None`` where it was given process groups, or nothing.

    Raises:
        Refused: If the records are not those of a PyTorch that we know, or speak of what cannot be said as runs.
    """

    def __init__(self, path: str, wrapper: Any) -> None:
        self.mesh: Any = getattr(wrapper, "_device_mesh", None)
        self._where = f"its part {path!r}" if path else "it"
        try:
            self._handle = handle = wrapper._handle
            self.flat = flat = handle.flat_param
            # The shard is noted at the first forward. Before, the flat parameter is the shard.
            noted = getattr(flat, "_local_shard", None)
            self.local: torch.Tensor = (flat if noted is None else noted).detach()
            self._is_sharded: bool = handle.uses_sharded_strategy
            self._is_original: bool = handle._use_orig_params
            self._originals = flat._params if self._is_original else [flat] * len(flat._param_infos)
            self._records = list(zip(flat._param_infos, flat._shapes, flat._shard_param_infos, strict=True))
            spans = zip(handle._get_flat_param_offsets(), flat._is_padding_mask, strict=True)
            self._spans = [span for span, is_padding in spans if not is_padding]
            self._shared = flat._shared_param_infos
            self._across = getattr(wrapper, "_inter_node_pg", None)
            is_summoned = handle._training_state.name == "SUMMON_FULL_PARAMS"
            is_extended = any(extension is not None for extension in flat._param_extensions)
            apart = [
                info.param_name for info, whole in zip(flat._param_infos, flat._contiguities, strict=True) if not whole
            ]
            self._is_between = wrapper.training_state.name != "IDLE" or handle._needs_pre_backward_unshard
            # What FSDP1 computes with in place of the shard, of the same shape where it does not shard.
            computed_with = getattr(flat, "_mp_shard", None)
            is_computed_with = computed_with is not None and computed_with.data_ptr() == flat.data_ptr()
            is_moved = flat.shape == self.local.shape and flat.data_ptr() != self.local.data_ptr()
            is_converted = is_moved and not is_computed_with and not handle._offload_params
            replaced = [] if handle._skipped_use_sharded_views else self._replaced()
            self._text = text_of_flat(
                wrapper.sharding_strategy.name,
                handle.process_group.size(),
                keeps_shapes=handle._use_orig_params and not handle.uses_sharded_strategy,
            )
        except (AttributeError, TypeError, ValueError) as error:
            raise Refused(
                f"{self._where} is wrapped in FullyShardedDataParallel, and PyTorch {torch.__version__} keeps other "
                f"records of that than Shardfast knows ({error}): shard it with FSDP2 (fully_shard)"
            ) from error
        if is_summoned:
            raise Refused(f"{self._where} is inside summon_full_params(): save and load outside of it")
        if is_extended:
            raise Refused(
                f"{self._where} is wrapped in FullyShardedDataParallel and has parameters that are sharded in another "
                "way, too (tensor parallelism): shard it with FSDP2 (fully_shard)"
            )
        if apart:
            raise Refused(
                f"{self._where} is wrapped in FullyShardedDataParallel, and its parameter {apart[0]!r} was not "
                "contiguous then, so that its run of elements is no run of the parameter: make it contiguous before"
            )
        if is_converted:
            raise Refused(
                f"{self._where} is wrapped in FullyShardedDataParallel and was converted or moved after its first "
                "forward (to(), half(), cpu()), which FullyShardedDataParallel does not follow: convert it before its "
                "first forward, or load into a new one with cast=True"
            )
        if replaced:
            raise Refused(
                f"{self._where} is wrapped in FullyShardedDataParallel, and its parameter {replaced[0]!r} was replaced "
                "(by .data = or another nn.Parameter), which FullyShardedDataParallel takes over at the next forward: "
                "enter and leave FullyShardedDataParallel.summon_full_params() before, or write with copy_()"
            )

    def _replaced(self) -> list[str]:
        """Names of parameters that do not lie in the flat parameter any more, as ``_writeback_orig_params`` asks it."""
        if not self._is_original or self.is_unsharded:
            return []
        memory = self.flat.untyped_storage().data_ptr()
        return [
            f"{info.module_name}.{info.param_name}".lstrip(".")
            for (info, _, shard), original in zip(self._records, self._originals, strict=True)
            if shard.in_shard
            and (
                getattr(info.module, info.param_name, original) is not original
                or original.untyped_storage().data_ptr() != memory
            )
        ]

    @property
    def is_unsharded(self) -> bool:
        """Whether the whole flat parameter stands in place of the shard."""
        return bool(self.flat.data_ptr() != self.local.data_ptr() or self.flat.numel() != self.local.numel())

    @property
    def _refusal(self) -> str:
        """Why nothing can be loaded now."""
        if not self._is_between:
            return ""
        return (
            f"{self._where} is between forward and backward, and a backward would mix what the forward used with what "
            "is loaded: load before the forward or after the backward, and run forwards without a backward under "
            "torch.no_grad()"
        )

    @functools.cached_property
    def _ranks(self) -> list[Ints] | None:
        """By shard the ranks of the job that hold it; ``None`` where groups of ranks do not tell that of all ranks."""
        distributed = torch.distributed
        me, world = distributed.get_rank(), distributed.get_world_size()
        group = distributed.get_process_group_ranks(self._handle.process_group)
        if not self._is_sharded:
            return [tuple(sorted(group))] if len(group) == world else None
        # Ranks with copies of this rank's shard.
        copies = [me] if self._across is None else distributed.get_process_group_ranks(self._across)
        firsts = [copy - group.index(me) for copy in copies]
        shards = [tuple(sorted(first + number for first in firsts)) for number in range(len(group))]
        is_grid = sorted(itertools.chain.from_iterable(shards)) == [*range(world)]
        is_mine = all(rank in shards[number] for number, rank in enumerate(group))
        return shards if is_grid and is_mine else None

    def _sharers(self, first: int, last: int) -> Ints | None:
        """The ranks that hold any of those elements of the whole flat parameter, both ends included."""
        if self._ranks is None:
            return None
        if not self._is_sharded:
            return self._ranks[0]
        size = self.local.numel()
        return tuple(sorted(itertools.chain.from_iterable(self._ranks[first // size : last // size + 1])))

    @property
    def _holders(self) -> Ints | None:
        """The ranks that hold this rank's shard."""
        if self._ranks is None:
            return None
        return next(ranks for ranks in self._ranks if torch.distributed.get_rank() in ranks)

    def parts(self) -> Iterator[tuple[nn.Module, str, Part]]:
        """The parameters in it, with the modules that hold them and their names there."""
        holders, refusal = self._holders, self._refusal
        found: dict[tuple[int, str], Part] = {}
        for (info, shape, shard), span, within in zip(self._records, self._spans, self._originals, strict=True):
            regions: tuple[Flat, ...] = ()
            tensor = self.local[:0]
            if shard.in_shard and shard.numel_in_shard:
                regions = (Flat(shard.intra_param_start_idx, shard.intra_param_end_idx + 1),)
                tensor = self.local[shard.offset_in_shard : shard.offset_in_shard + shard.numel_in_shard]
            start, length = (0, 0) if self._is_original else (shard.offset_in_shard or 0, self.local.numel())
            part = Part(
                _counting_writes_of(within, start, tensor, self._is_sharded),
                tuple(shape),
                regions,
                self._text,
                holders,
                self._sharers(*span),
                within=within,
                start=start,
                length=length,
                refusal=refusal,
            )
            found[id(info.module), info.param_name] = part
            yield info.module, info.param_name, part
        for shared in self._shared:
            yield shared.module, shared.param_name, found[id(shared.prim_module), shared.prim_param_name]

    def reshard(self) -> None:
        """Lets go of what was gathered before a load, so that the next forward gathers what was loaded."""
        is_lazy = not hasattr(self.flat, "_full_param_padded")  # nothing was gathered yet
        if self._is_sharded and not is_lazy and not self._handle.needs_unshard():
            self._handle.reshard(free_unsharded_flat_param=True)
            self._handle.post_reshard()


def _counting_writes_of(within: torch.Tensor, start: int, tensor: torch.Tensor, is_sharded: bool) -> torch.Tensor:
    """``tensor`` as a view of ``within``, whose version counter counts its writes, if that lies there now.

    A parameter that is not sharded keeps its shape.
    """
    flat = within.detach()
    if not flat.is_contiguous():
        return tensor
    view = flat.view(-1)[start : start + tensor.numel()]
    if view.numel() != tensor.numel() or view.data_ptr() != tensor.data_ptr() or view.dtype is not tensor.dtype:
        return tensor
    return view if is_sharded or view.numel() != flat.numel() else flat


class FsdpModules(Modules):
    """Modules with parts that are wrapped in ``FullyShardedDataParallel``."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._handles: list[_Handle] = []
        self._slots: dict[tuple[int, str], str] = {}
        super().__init__(modules)

    def _state_of(self, module: nn.Module) -> Mapping[str, Any]:
        if not _is_wrapped(module):
            return super()._state_of(module)
        expect_understood_module(module)
        state: OrderedDict[str, Any] = OrderedDict()
        metadata: dict[str, dict[str, Any]] = {}
        vars(state)["_metadata"] = metadata  # as PyTorch's own
        _collect(module, "", state, metadata)
        paths: dict[int, list[str]] = {}
        for path, part in module.named_modules(remove_duplicate=False):
            paths.setdefault(id(part), []).append(path)
        for path, wrapper in module.named_modules():
            if not isinstance(wrapper, Wrapped) or getattr(wrapper, "_handle", None) is None:
                continue
            handle = _Handle(path, wrapper)
            self._handles.append(handle)
            flat_names = [name for name, value in state.items() if value is handle.flat]
            for name in flat_names:
                del state[name]
            for holder, name, part in handle.parts():
                for path in paths[id(holder)]:
                    original = f"{path}.{name}" if path else name
                    state[original] = part
                    if flat_names:
                        self._slots[id(module), original] = flat_names[0]
        _expect_whole_below(module, state)
        return state

    def _parameters_of(self, module: nn.Module, state: Mapping[str, Any]) -> Iterable[tuple[str, nn.Parameter | Part]]:
        parts = {name: value for name, value in state.items() if isinstance(value, Part)}
        for name, parameter in super()._parameters_of(module, state):
            if name not in parts and not _is_flat(parameter):
                yield name, parameter
        yield from parts.items()

    def _slot(self, module: nn.Module, original: str) -> Place:
        return id(module), self._slots.get((id(module), original), original)

    @property
    def meshes(self) -> list[Any]:
        """The meshes that wrappers were given."""
        return list({id(handle.mesh): handle.mesh for handle in self._handles if handle.mesh is not None}.values())

    def outline(self) -> Outline | None:
        return None if any(handle.is_unsharded for handle in self._handles) else super().outline()

    def _release(self) -> None:
        super()._release()
        for handle in self._handles:
            handle.reshard()


def _is_wrapped(module: nn.Module) -> bool:
    return any(isinstance(part, Wrapped) for part in module.modules())


def _is_flat(parameter: object) -> bool:
    return bool(getattr(parameter, "_is_flat_param", False))


def _collect(module: nn.Module, prefix: str, state: dict[str, Any], metadata: dict[str, dict[str, Any]]) -> None:
    """Collects ``module.state_dict(keep_vars=True)`` and its metadata without the hooks of FSDP1, which gather.

    Names keep what activation checkpointing adds to them, which its hooks would take away.
    """
    if type(module).state_dict is not nn.Module.state_dict or "state_dict" in vars(module):
        raise Refused(
            f"its part {prefix.rstrip('.')!r} has a state_dict() of its own and FullyShardedDataParallel around it, "
            "which would gather for that: give it get_extra_state() instead, or shard it with FSDP2 (fully_shard)"
        )
    own = vars(module)
    metadata[prefix[:-1]] = {"version": getattr(module, "_version", 1)}
    for hook in own["_state_dict_pre_hooks"].values():
        if not _is_of_wrapper(hook):
            hook(module, prefix, True)
    operator.methodcaller("_save_to_state_dict", state, prefix, True)(module)
    for name, part in own["_modules"].items():
        if part is not None:
            _collect(part, f"{prefix}{name}.", state, metadata)
    for hook in own["_state_dict_hooks"].values():
        if not _is_of_wrapper(hook):
            raise Refused(
                f"its part {prefix.rstrip('.')!r} has a hook on its state dict, {getattr(hook, '__qualname__', hook)}, "
                "and FullyShardedDataParallel around it would gather for that: remove the hook, or shard with FSDP2"
            )


def _is_of_wrapper(hook: object) -> bool:
    """Whether it is a hook of FSDP1, or one of activation checkpointing, which changes names only."""
    return getattr(hook, "__module__", "").startswith(("torch.distributed.fsdp.", _CHECKPOINTING))


_CHECKPOINTING = "torch.distributed.algorithms._checkpoint."


def _expect_whole_below(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Refuses modules that load themselves and would be given flat shards."""
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(part, Wrapped) or not loads_by_itself(part):
            continue
        below = (name for name, value in state.items() if name.startswith(prefix) and isinstance(value, Part))
        flat = next(below, None)
        if flat is not None:
            raise Refused(
                f"its part {path!r} does more at a load than to fill tensors (a hook or a method of its own), and this "
                f"rank has a shard of its {flat!r} only: move that into get_extra_state() and set_extra_state()"
            )


class FsdpObjects:
    """Modules with ``FullyShardedDataParallel`` in them. Optimizers step parts of them by name, as any do."""

    def module(self, value: object) -> Module | None:
        """Answers as :class:`shardfast.state.catalog.Objects` says."""
        parts: Sequence[Any] = value if isinstance(value, (list, tuple)) else [value]
        if not parts or not all(isinstance(part, nn.Module) for part in parts) or not any(map(_is_wrapped, parts)):
            return None
        modules = FsdpModules(parts)
        return Module(modules, modules.parameters)

    def optimizer(self, value: object, names: Mapping[int, Sequence[NamedPart]], beside: Collection[int] = ()) -> None:
        """Never: PyTorch's own optimizers are the torch adapter's."""

    def coordinates(self, things: Sequence[object]) -> Mapping[str, int]:
        """Answers as :class:`shardfast.state.catalog.Objects` says."""
        modules = (thing for thing in things if isinstance(thing, FsdpModules))
        return coordinates_in([mesh for one in modules for mesh in one.meshes])


def objects() -> FsdpObjects:
    """Returns the adapter of this framework's objects."""
    return FsdpObjects()
