"""PyTorch's tensors, modules and optimizers, said as regions, names and plain data."""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..catalog import (
    Compared,
    Destination,
    Hold,
    Ints,
    Layout,
    Memory,
    Module,
    Outline,
    Refused,
    Region,
    Rounds,
    Source,
    Target,
)
from .torch_capture import (
    Place,
    announce_loads,
    announce_steps,
    announces_steps,
    hold_of,
    is_dtensor,
    outline_of_modules,
    outline_of_optimizers,
)
from .torch_groups import expect_same, groups_value, hyperparameters, saved_groups
from .torch_placement import (
    Placed,
    chunks,
    everyone,
    expect_shape,
    local_of,
    mesh_covers_job,
    parts,
    placed,
    text,
    views,
)
from .torch_rounds import carries, carry

DTYPES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float4_e2m1fn_x2: "F4",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
}
"""Element types that safetensors shares with torch, by their safetensors names."""

_OF_NAME = {name: dtype for dtype, name in DTYPES.items()}
_ARRAY_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*DTYPES, torch.complex128, torch.complex32)}

WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Path components that `torch.compile`, activation checkpointing and FSDP put into names of parameters."""

_LAZY = (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)

_EXTRA_STATE = "_extra_state"  # what nn.Module calls the result of get_extra_state() in a state dict


def _memory(tensor: torch.Tensor, local: torch.Tensor) -> tuple[Memory, ...]:
    out = []
    for view in parts(tensor, local):
        item, device = view.element_size(), view.device.index if view.is_cuda else None
        out.append(Memory(view.data_ptr(), tuple([stride * item for stride in view.stride()]), device))
    return tuple(out)


def _is_direct(local: torch.Tensor) -> bool:
    """Whether bytes can be copied from and to the tensor's own memory: the host's, or that of a CUDA device."""
    reached = local.is_cpu or (local.is_cuda and torch.version.cuda is not None)
    return reached and not local.is_conj() and not local.is_neg()


@functools.lru_cache(maxsize=64)
def _is_plain(kind: type) -> bool:
    """Whether tensors of that type are their memory and nothing else."""
    return not issubclass(kind, _LAZY) and not hasattr(kind, "__tensor_flatten__")


def _is_storable(tensor: torch.Tensor) -> bool:
    return _is_plain(type(tensor)) and tensor.layout is torch.strided and not tensor.is_quantized


def _expect_storable(tensor: torch.Tensor) -> None:
    if _is_storable(tensor):
        return
    if isinstance(tensor, _LAZY):
        raise Refused(f"a {type(tensor).__name__} has no shape yet: run the module once (a dry run) first")
    if tensor.layout is not torch.strided:
        raise Refused(f"a tensor of layout {tensor.layout} cannot be stored: store its parts, or its to_dense()")
    if tensor.is_quantized:
        raise Refused("a quantized tensor cannot be stored: store its int_repr(), scale and zero point")
    if hasattr(tensor, "__tensor_flatten__") and not is_dtensor(tensor):
        raise Refused(f"a {type(tensor).__name__} wraps other tensors and cannot be stored: store what it wraps")


@functools.lru_cache(maxsize=4096)
def _whole(dtype: str, shape: Ints) -> Layout:
    """The layout of a plain tensor that has elements."""
    return Layout(dtype, tuple(shape), (Region((0,) * len(shape), tuple(shape)),))


def _one_box(tensor: torch.Tensor, local: torch.Tensor, dtype: str) -> Layout | None:
    """The layout of a ``DTensor`` whose part here is one box, all of ``local``."""
    if tensor.dtype is not local.dtype or chunks(tensor) is not None:
        return None
    there = placed(tensor)
    return _layout(there, dtype) if len(there.regions) == 1 and local.shape == there.local_shape else None


@functools.lru_cache(maxsize=4096)
def _layout(there: Placed, dtype: str) -> Layout:
    return Layout(dtype, there.shape, there.regions, there.text, there.holders)


# Modules and optimizers


class _Names:
    """Fully qualified names of a module's state, without what wrappers add to them."""

    def __init__(self, module: nn.Module) -> None:
        wrappers = (nn.parallel.DistributedDataParallel, nn.parallel.DataParallel)
        self._wrapped = {f"{path}.module" if path else "module" for path in _paths(module, wrappers)}

    def __call__(self, name: str) -> str:
        kept, path = [], ""
        for component in name.split("."):
            path = f"{path}.{component}" if path else component
            if component not in WRAPPERS and path not in self._wrapped:
                kept.append(component)
        return ".".join(kept)


def _paths(module: nn.Module, kinds: tuple[type, ...]) -> Iterator[str]:
    return (path for path, child in module.named_modules() if isinstance(child, kinds))


@dataclass(frozen=True)
class _Replicated:
    """A part of a module that ``DistributedDataParallel`` keeps the same on all ranks of the job.

    Attributes:
        prefix: Of the names of what it holds.
        ignored: Names behind the prefix of what it leaves alone.
    """

    prefix: str
    ignored: frozenset[str]

    def covers(self, name: str) -> bool:
        return name.startswith(self.prefix) and name.removeprefix(self.prefix) not in self.ignored


def _replicated(module: nn.Module) -> Iterator[_Replicated]:
    for path in _paths(module, (nn.parallel.DistributedDataParallel,)):
        wrapper: Any = module.get_submodule(path)
        # Ranks outside of its group may hold the same as well, or something else.
        if torch.distributed.get_world_size(wrapper.process_group) == torch.distributed.get_world_size():
            prefix = f"{path}.module." if path else "module."
            yield _Replicated(prefix, frozenset(getattr(wrapper, "parameters_to_ignore", ())))


class _Modules:
    """One module, or several parts of one (pipeline stages), as named tensors and values."""

    def __init__(self, modules: Sequence[nn.Module], adapter: TorchAdapter) -> None:
        self._modules = modules
        self._of_parameters: list[Place] = []
        self.parameters: dict[str, nn.Parameter] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._values: dict[str, object] = {}
        self._places: dict[str, tuple[nn.Module, str]] = {}
        self._derived: list[str] = []
        self._replicated: dict[int, list[_Replicated]] = {}
        for module in modules:
            names = _Names(module)
            self._replicated[id(module)] = list(_replicated(module))
            state = module.state_dict(keep_vars=True)
            own = {id(tensor) for tensor in itertools.chain(module.parameters(), module.buffers())}
            for original, value in state.items():
                name = names(original)
                is_tensor = isinstance(value, torch.Tensor) and original.rsplit(".", 1)[-1] != _EXTRA_STATE
                if name in self._places:
                    twin = self._tensors.get(name)
                    if twin is None or not is_tensor or adapter.identity(twin) != adapter.identity(value):
                        raise Refused(f"two parts of the module have an entry {name!r}, and they are not the same")
                    continue
                self._places[name] = (module, original)
                if is_tensor:
                    self._tensors[name] = value
                    if id(value) not in own:
                        self._derived.append(name)
                else:
                    self._values[name] = value
            for original, parameter in module.named_parameters(remove_duplicate=False):
                if names(original) not in self.parameters:
                    self.parameters[names(original)] = parameter
                    self._of_parameters.append((id(module), original))

    def announce(self, notice: Callable[[], None]) -> Sequence[torch.Tensor]:
        for module in self._modules:
            announce_loads(module, notice)
        return ()

    def holders(self, of: Mapping[int, Ints]) -> Mapping[str, Ints]:
        return {
            name: everyone()
            for name, (module, original) in self._places.items()
            if name in self._tensors and any(wrapper.covers(original) for wrapper in self._replicated[id(module)])
        }

    def compared(self) -> Mapping[str, Compared]:
        # Statistics of normalisation layers drift apart in sound programs.
        return {name: "on request" for name in self._tensors if name not in self.parameters}

    def outline(self) -> Outline | None:
        if self._derived or self._values or any(chunks(tensor) is not None for tensor in self._tensors.values()):
            return None
        tensors = {(id(self._places[name][0]), self._places[name][1]): own for name, own in self._tensors.items()}
        return outline_of_modules(self._modules, tensors, self._of_parameters)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self._tensors

    def values(self) -> Mapping[str, object]:
        return self._values

    def accepts(self, name: str) -> bool:
        return False

    def create(self, name: str, dtype: str, shape: Ints, *, dry: bool) -> torch.Tensor:
        raise Refused(f"a module has no place for {name!r}")

    def merges(self, name: str) -> bool:
        return False

    def renamed(self, name: str, parameter: Callable[[str], str]) -> str:
        return name

    def restore(
        self,
        created: Mapping[str, torch.Tensor],
        values: Mapping[str, object],
        parameter: Callable[[str], str],
        *,
        strict: bool,
    ) -> Callable[[], None]:
        # What is no parameter or buffer itself, such as extra state, gets in by the module's own door.
        partial: dict[nn.Module, dict[str, Any]] = {}
        for name, value in {**{name: self._tensors[name] for name in self._derived}, **values}.items():
            module, original = self._places[name]
            partial.setdefault(module, {})[original] = value

        def install() -> None:
            for module, entries in partial.items():
                module.load_state_dict(entries, strict=False)

        return install


class _Optimizers:
    """One optimizer, or several (pipeline stages), in terms of parameters' names, never of their positions.

    Leaves: ``state.<FQN>.<name>``, ``global.<name>`` for state of no parameter, and ``param_groups``, a list of the
    groups with their parameters' names.
    """

    def __init__(self, optimizers: Sequence[Any], names: Mapping[int, str], adapter: TorchAdapter) -> None:
        self._adapter = adapter
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

    def compared(self) -> Mapping[str, Compared]:
        # What is made of a shard alone may be equal while it is zero. A step counter is what it is of any shard.
        return {
            f"state.{fqn}.{name}": "every save"
            for fqn, (state, parameter, _) in self._owned.items()
            if is_dtensor(parameter)
            for name, value in state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor) and not is_dtensor(value)
            if name != "step" and value.shape != parameter.shape
        }

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
            return torch.empty(shape, dtype=_OF_NAME[dtype], device="meta" if dry else "cpu")
        _, parameter, group = self._owned[place[0]]
        is_step = place[1] == "step"
        on_host = is_step and not (group.get("fused") or group.get("capturable"))
        device = torch.device("meta" if dry else "cpu" if on_host else parameter.device)
        with torch.no_grad():
            if shape == tuple(parameter.shape) and not is_step:
                return torch.empty_like(parameter, dtype=_OF_NAME[dtype], device=device, requires_grad=False)
            return torch.empty(shape, dtype=_OF_NAME[dtype], device=device)

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
                        self._adapter.fill(group[name], value)
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
                        self._adapter.expect_fill(now, value)
                out.append((group, said))
        return out


def _is_zero_redundancy(optimizer: object) -> bool:
    module = sys.modules.get("torch.distributed.optim")
    kind = getattr(module, "ZeroRedundancyOptimizer", None)
    return kind is not None and isinstance(optimizer, kind)


# The adapter


class TorchAdapter:
    """PyTorch: plain tensors, ``DTensor``, ``nn.Module`` and ``torch.optim.Optimizer``."""

    refers = True

    def is_tensor(self, value: object) -> bool:
        return isinstance(value, torch.Tensor)

    def layout(self, tensor: torch.Tensor) -> Layout:
        is_sharded = is_dtensor(tensor)
        local = local_of(tensor) if is_sharded else tensor
        _expect_storable(local)
        dtype = DTYPES.get(tensor.dtype)
        if dtype is None:
            raise Refused(f"a tensor of {tensor.dtype} cannot be stored: safetensors has no such type")
        shape = tuple(tensor.shape)
        if not is_sharded:
            whole = (Region((0,) * len(shape), shape),) if tensor.numel() else ()
            return Layout(dtype, shape, whole)
        if chunks(tensor) is not None:
            return Layout(dtype, shape, tuple(region for region, _ in views(tensor, local)), text(tensor))
        there = placed(tensor)
        expect_shape(there, tensor, local)
        return _layout(there, dtype)

    def source(self, tensor: torch.Tensor) -> Source:
        local = local_of(tensor)
        if _is_direct(local):
            return Source(_memory(tensor, local), local)
        with torch.no_grad():
            _expect_memory(local)
            plain = local.resolve_conj().resolve_neg().cpu()
            return Source(_memory(tensor, plain), plain, is_copy=plain is not local)

    def stream(self, device: int) -> int | None:
        return int(torch.cuda.current_stream(device).cuda_stream)

    def carrier(self, world: int) -> Callable[[Rounds], None] | None:
        return carry if carries(world) else None

    def hold(self, tensors: Sequence[torch.Tensor]) -> Hold:
        return hold_of(tensors)

    def target(self, tensor: torch.Tensor, dtype: str) -> Target:
        local = local_of(tensor)
        wanted = _OF_NAME[dtype]
        if local.dtype is wanted and _is_direct(local) and local.is_contiguous():
            return Target(_memory(tensor, local), local)
        with torch.no_grad():
            _expect_memory(local)
            if local.numel() and any(s == 0 < size - 1 for s, size in zip(local.stride(), local.shape, strict=True)):
                raise Refused("an expanded tensor, whose elements share memory, cannot be loaded into: clone() it")
            if local.dtype is wanted and _is_direct(local):
                return Target(_memory(tensor, local), local)
            staging = torch.empty(local.shape, dtype=wanted)
            return Target(_memory(tensor, staging), staging, lambda: _copy(local, staging))

    def destination(self, tensor: torch.Tensor, dtype: str) -> Destination:
        local = local_of(tensor)
        kind = local.dtype
        if kind is _OF_NAME.get(dtype) and local.is_contiguous() and _is_direct(local) and _is_storable(local):
            layout = _whole(dtype, tensor.shape) if local is tensor else _one_box(tensor, local, dtype)
            if layout is not None and local.numel():
                pointer, stride, item = local.data_ptr(), local.stride(), local.element_size()
                device = local.device.index if local.is_cuda else None
                memory = Memory(pointer, tuple([step * item for step in stride]), device)
                identity = (local.device, pointer, layout.shape, local.shape, stride, kind)
                return Destination(layout, identity, Target((memory,), local))
        return Destination(self.layout(tensor), self.identity(tensor), None)

    def allocate(self, dtype: str, shape: Ints) -> torch.Tensor:
        return torch.empty(shape, dtype=_OF_NAME[dtype])

    def view(self, dtype: str, shape: Ints, buffer: Any) -> torch.Tensor:
        if dtype not in _OF_NAME:
            raise Refused(f"PyTorch has no type for {dtype}")
        return torch.frombuffer(buffer, dtype=_OF_NAME[dtype]).view(shape)

    def expect_fill(self, tensor: torch.Tensor, value: object) -> None:
        """Refuses a value that :meth:`fill` could not copy."""
        if tensor.ndim == 0 and isinstance(value, (bool, int, float)):
            return
        if not isinstance(value, torch.Tensor):
            raise Refused(f"the checkpoint holds a {type(value).__name__} where a tensor stands here")
        if value.shape != tensor.shape or value.dtype != tensor.dtype:
            raise Refused(
                f"the checkpoint holds a tensor of {value.dtype} {list(value.shape)} where one of {tensor.dtype} "
                f"{list(tensor.shape)} stands here"
            )

    def fill(self, tensor: torch.Tensor, value: object) -> None:
        self.expect_fill(tensor, value)
        local = local_of(tensor)
        if not isinstance(value, torch.Tensor):
            _copy(local, torch.tensor(value, dtype=local.dtype))
            return
        with torch.no_grad():
            for region, view in views(tensor, local):
                bounds = zip(region.offsets, region.lengths, strict=True)
                _copy(view, value[tuple(slice(offset, offset + length) for offset, length in bounds)])

    def identity(self, tensor: torch.Tensor) -> Hashable:
        local = local_of(tensor)
        if not _is_plain(type(local)) or local.layout is not torch.strided or local.is_meta or local.numel() == 0:
            return id(tensor)
        return (local.device, local.data_ptr(), tensor.shape, local.shape, local.stride(), local.dtype)

    def module(self, value: object) -> Module | None:
        parts: Sequence[Any] = value if isinstance(value, (list, tuple)) else [value]
        if not parts or not all(isinstance(part, nn.Module) for part in parts):
            return None
        modules = _Modules(parts, self)
        return Module(modules, modules.parameters)

    def optimizer(self, value: object, names: Mapping[int, str]) -> _Optimizers | None:
        parts: Sequence[Any] = value if isinstance(value, (list, tuple)) else [value]
        if not parts or not all(isinstance(part, torch.optim.Optimizer) for part in parts):
            return None
        return _Optimizers(parts, names, self)

    def lower_value(self, value: object) -> tuple[str, object] | None:
        if isinstance(value, torch.Tensor):
            return "array", self._lower_tensor(value)
        if isinstance(value, torch.dtype):
            return "dtype", ["torch", str(value).removeprefix("torch.")]
        if isinstance(value, torch.Size):
            return "torch_size", list(value)
        if isinstance(value, torch.device):
            return "torch_device", str(value)
        if isinstance(value, torch.Generator):
            raise Refused("a torch.Generator cannot be stored: store its get_state()")
        return None

    def _lower_tensor(self, tensor: torch.Tensor) -> list[object]:
        if is_dtensor(tensor):
            raise Refused(
                "a DTensor cannot be part of a value: make it an entry of its own, or store its full_tensor()"
            )
        _expect_storable(tensor)
        name = str(tensor.dtype).removeprefix("torch.")
        if name not in _ARRAY_DTYPES:
            raise Refused(f"a tensor of {tensor.dtype} cannot be stored")
        _expect_memory(tensor)
        with torch.no_grad():
            data = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        size = data.numel() * data.element_size()
        return ["torch", name, list(data.shape), ctypes.string_at(data.data_ptr(), size) if size else b""]

    def raise_value(self, tag: str, payload: Any) -> Any:
        if tag == "torch_size":
            return torch.Size(payload)
        if tag == "torch_device":
            try:
                return torch.device(payload)
            except RuntimeError as error:
                raise Refused(f"{payload!r} is no device of this torch") from error
        if tag not in ("array", "dtype") or payload[0] != "torch":
            return NotImplemented
        dtype = _ARRAY_DTYPES.get(payload[1]) if tag == "array" else getattr(torch, payload[1], None)
        if not isinstance(dtype, torch.dtype):
            raise Refused(f"this torch has no dtype {payload[1]!r}")
        if tag == "dtype":
            return dtype
        _, _, shape, data = payload
        if math.prod(shape) * dtype.itemsize != len(data):
            raise Refused(
                f"a tensor of {dtype} {shape} needs {math.prod(shape) * dtype.itemsize} bytes, has {len(data)}"
            )
        tensor = torch.empty(shape, dtype=dtype)
        ctypes.memmove(tensor.data_ptr(), data, len(data))
        return tensor


def _expect_memory(local: torch.Tensor) -> None:
    if local.device.type == "meta":
        raise Refused("a tensor on the meta device has no memory: give it some first (to_empty)")


def _copy(destination: torch.Tensor, source: torch.Tensor) -> None:
    with torch.inference_mode(destination.is_inference()), torch.no_grad():
        destination.copy_(source)


def adapter() -> TorchAdapter:
    """The adapter of this framework."""
    return TorchAdapter()
