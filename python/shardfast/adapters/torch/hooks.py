"""How PyTorch announces and counts changes, and whether a described state is still the same.

Optimizers step and modules load through hooks of PyTorch. Other writes in place show in a tensor's version counter,
unless they go through ``.data``, a fused kernel or foreign code.
"""

from __future__ import annotations

import copy
import functools
import itertools
import re
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...state.catalog import Hold, Inside, Kind, Outline, Refused

Notice = Callable[[str], None]


def is_dtensor(tensor: object) -> bool:
    """Whether it is a ``DTensor``, PyTorch's or of another library, without importing what defines it."""
    is_one = _is_kind_of_dtensor(type(tensor))  # type: ignore[arg-type]  # types are hashable
    return is_one if is_one is not None else all(hasattr(tensor, name) for name in _OF_DTENSOR)


@functools.lru_cache(maxsize=64)
def _is_kind_of_dtensor(kind: type) -> bool | None:
    """Whether tensors of that type are; ``None`` for another library's, if they have all that is read of one."""
    dtensor = sys.modules.get("torch.distributed.tensor")
    if dtensor is not None and issubclass(kind, dtensor.DTensor):
        return True
    is_called_so = issubclass(kind, torch.Tensor) and any(base.__name__ == "DTensor" for base in kind.__mro__)
    return None if is_called_so else False


_OF_DTENSOR = ("_local_tensor", "_spec", "device_mesh", "placements")


# Before a change


@functools.cache
def announce_steps(notice: Notice) -> None:
    """Calls ``notice`` before any optimizer of this process steps.

    The hook is the one for all optimizers: it runs before an optimizer's own hooks, which may write parameters; it also
    covers optimizers that are not saved but own some of the parameters; and it adds nothing to any optimizer.
    """

    def before_step(optimizer: object, args: object, kwargs: object) -> None:
        notice("")

    register_optimizer_step_pre_hook(before_step)


@functools.cache
def follow_steps(before: Callable[[object], None], after: Callable[[object], None]) -> None:
    """Calls ``before`` before and ``after`` behind each step of any optimizer of this process.

    Hooks for all optimizers: the first runs before, the second behind an optimizer's own hooks.
    """

    def before_step(optimizer: object, args: object, kwargs: object) -> None:
        before(optimizer)

    def after_step(optimizer: object, args: object, kwargs: object) -> None:
        after(optimizer)

    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)


def announces_steps(optimizer: torch.optim.Optimizer) -> bool:
    """Whether steps of that optimizer run hooks; they do not if its class is not registered with PyTorch."""
    return bool(getattr(type(optimizer).step, "hooked", False))


class _BeforeLoad:
    """One of a module's hooks. A copy of the module may keep it; a pickle replaces it by a function without effect."""

    def __init__(self, notice: Notice) -> None:
        self.notice = notice

    def __call__(self, *args: object) -> None:
        self.notice("load_state_dict()")

    def __deepcopy__(self, memo: object) -> _BeforeLoad:
        return self

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return getattr, ("", "format")  # takes any arguments, does nothing, and is there without us


def announce_loads(module: nn.Module, notice: Notice) -> None:
    """Calls ``notice`` before that module or one below it loads a state dict."""
    for part in module.modules():
        if isinstance(part, torch.jit.ScriptModule):
            continue
        hooks = vars(part).get("_load_state_dict_pre_hooks", {})
        ours = [hook.hook for hook in hooks.values() if isinstance(getattr(hook, "hook", None), _BeforeLoad)]
        if not any(hook.notice == notice for hook in ours):
            part.register_load_state_dict_pre_hook(_BeforeLoad(notice))  # type: ignore[no-untyped-call]


# Loads as modules know them


_OF_TORCH = ("torch.nn.", "torch.distributed.", "torch._dynamo.", "torch.jit.")
"""Modules with hooks and methods that convert older state dicts, or that have no effect after our load."""


def _is_of_torch(hook: object) -> bool:
    return isinstance(hook, _BeforeLoad) or getattr(hook, "__module__", "").startswith(_OF_TORCH)


def loads_by_itself(module: nn.Module) -> bool:
    """Whether loading a state dict does more to the module than to fill its parameters and buffers."""
    own = vars(module)
    kind: Any = type(module)
    if _class_loads_by_itself(kind) or any(name in own for name in _LOADS):
        return True
    before = [getattr(hook, "hook", hook) for hook in own.get("_load_state_dict_pre_hooks", {}).values()]
    return not all(map(_is_of_torch, (*before, *own.get("_load_state_dict_post_hooks", {}).values())))


_LOADS = ("load_state_dict", "_load_from_state_dict")


@functools.lru_cache(maxsize=4096)
def _class_loads_by_itself(kind: type) -> bool:
    return not all(_is_of_torch(getattr(kind, name)) for name in _LOADS)


VERSION = "_version"
"""Name that PyTorch gives the version of a class of modules, and the end of the name of a leaf with a saved one."""


def versions_in(state: Mapping[str, Any], module: nn.Module) -> dict[str, Any]:
    """Returns the versions of the parts that load by themselves, by path, as the module's state dict has them."""
    metadata = getattr(state, "_metadata", None)
    if not isinstance(metadata, dict):
        return {}
    parts = dict(module.named_modules(remove_duplicate=False))
    ends: set[str] = set()  # of paths: a wrapper may have the state dict of what it wraps
    for path in (path for path, part in parts.items() if loads_by_itself(part)):
        ends.update(path[start:] for start in (0, *(dot.end() for dot in re.finditer(r"\.", path))))
    return {
        path: local.get("version")
        for path, local in metadata.items()
        if (loads_by_itself(parts[path]) if path in parts else path in ends)
    }


def _with_versions(
    state: Mapping[str, Any], prefix: str, entries: Mapping[str, Any], versions: Mapping[str, Any], unfilled: set[str]
) -> dict[str, Any]:
    """A copy of a part's state dict with those entries and with the saved versions.

    A part of another version gets only what was loaded: its hooks convert that, and must not convert what was here.
    """
    given = OrderedDict({**state, **entries})
    metadata = getattr(state, "_metadata", None)
    if not isinstance(metadata, dict):
        return given
    vars(given)["_metadata"] = metadata = copy.deepcopy(metadata)  # as PyTorch's own
    for path, version in versions.items():
        above = f"{path}." if path else ""
        local = metadata.get(above.removeprefix(prefix).rstrip(".")) if above.startswith(prefix) else None
        if local is None:
            continue
        if local.get("version") != version:
            for name in (name for name in unfilled if name.startswith(above)):
                given.pop(name.removeprefix(prefix), None)
        local["version"] = version
    return given


def load_by_hooks(
    module: nn.Module, entries: Mapping[str, Any], versions: Mapping[str, Any], unfilled: set[str]
) -> None:
    """Loads the parts of ``module``, whose tensors are filled, for which a load does more than to fill tensors.

    Such parts have hooks or methods of their own: they rebuild caches, convert, count. Each gets its own state dict,
    with ``entries`` in place of what is not a tensor of its own.

    Args:
        module: The whole.
        entries: By name in its state dict.
        versions: The saved versions of parts, by path. A part without one is of its class's version.
        unfilled: Names in its state dict of what is not loaded.

    Raises:
        Refused: If a part leaves out one of ``entries`` that it has otherwise now.
    """
    paths = {path for path, part in module.named_modules() if loads_by_itself(part)}
    every = dict(module.named_modules(remove_duplicate=False))
    paths.update(next(_prefixes(name, every)) for name in entries)
    for path in sorted(paths):
        if any(above in paths for above in itertools.islice(_prefixes(path, every), 1, None)):
            continue  # loaded with what it is a part of
        part, prefix = every[path], f"{path}." if path else ""
        mine = {name.removeprefix(prefix): value for name, value in entries.items() if name.startswith(prefix)}
        loaded = part.load_state_dict(_with_versions(part.state_dict(), prefix, mine, versions, unfilled), strict=False)
        left_out = mine.keys() & set(getattr(loaded, "unexpected_keys", ()))
        now = part.state_dict() if left_out else {}
        for name in sorted(left_out):
            if not _are_equal(now.get(name), mine[name]):
                raise Refused(
                    f"{prefix}{name} is in its state_dict(), but its load_state_dict() does not take it, and its value "
                    "here is not that of the checkpoint. Other tensors are loaded, this one is not in effect: make "
                    "the module as it was made when it was saved (quantise the same weights), then load again"
                )


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and not isinstance(one, torch.Tensor) and bool(one == other)


def _prefixes(name: str, paths: Mapping[str, object]) -> Iterator[str]:
    """Yields the paths that are ``name`` or above it, the longest first."""
    while name:
        if name in paths:
            yield name
        name = name.rpartition(".")[0]
    yield ""


# After a change


def hold_of(tensors: Sequence[torch.Tensor]) -> Hold:
    """Holds the storages of plain tensors."""
    if not hasattr(torch.Tensor, "_version"):
        raise Refused("this PyTorch has no version counters, so it cannot tell whether a tensor was written")
    # Tensors do not keep the memory: `tensor.data = other` releases it.
    storages = list(map(torch.Tensor.untyped_storage, tensors))
    # In PyTorch 2.7 a storage owns its Python object once Python has let go of it, and a reference that is then taken
    # from a weak one does not keep the storage alive: to read it after its tensor's end would end the process.
    retain = getattr(torch.UntypedStorage, "_fix_weakref", None)
    return Hold(storages, torch.UntypedStorage.data_ptr, "_version", retain)


# Whether nothing has changed


_METHODS = ("state_dict", "_save_to_state_dict", "get_extra_state")
_SLOTS = ("_parameters", "_buffers")
_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks")
OF_DTENSORS = Inside(("_local_tensor",), "_spec")
"""Where a ``DTensor`` has this rank's memory."""

_OF_MODULES: list[tuple[str, Kind]] = [
    ("_modules", "objects"),
    *((slot, "entries") for slot in _SLOTS),
    *((name, "names") for name in ("_non_persistent_buffers_set", *_HOOKS)),
]
MEMBER = ""
"""The name of a place that is the parameter itself, as an optimizer's group lists it."""

SAYING = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")
_OF_WRAPPED: list[tuple[str, Kind]] = [("param_groups", "groups"), ("optim", "object")]


def place(tensor: torch.Tensor) -> Hashable:
    """The address of a tensor and how its memory is read, for a torch without DLPack's exchange table."""
    return (
        tensor.data_ptr(),
        tensor.device,
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _is_plain(module: nn.Module, of: str | None) -> bool:
    """Whether the module's state dict is what is in its slots, without any further code but that of ``of``."""
    if isinstance(module, torch.jit.ScriptModule) or any(name in vars(module) for name in _METHODS):
        return False
    for name in _METHODS:
        method = getattr(type(module), name)
        if method is not getattr(nn.Module, name) and (of is None or not method.__module__.startswith(of)):
            return False
    if not all(isinstance(vars(module).get(name), (dict, set)) for name, _ in _OF_MODULES):
        return False  # another torch
    hooks = [hook for name in _HOOKS for hook in vars(module)[name].values()]
    # FSDP2's put the sharded parameters into the slots: when these are there, they do nothing. FSDP1's are not run.
    known = "torch.distributed.fsdp." if of is None else of
    return all(getattr(hook, "__module__", "").startswith(known) for hook in hooks)


Place = tuple[int, str]
"""The place of an entry: the ``id`` of a live module and a path below it, or of a live parameter and a name."""

PlacedTensors = Sequence[tuple[Place, Any, "Inside | None"]]
"""The tensors of a bundle, with the places of their entries: a part has that of what it lies within. Then where in its
entry a tensor is, if others are there, too."""


def outline_of_modules(
    roots: Sequence[nn.Module],
    tensors: PlacedTensors,
    parameters: Sequence[Place],
    values: Mapping[str, Place],
    value_of: Callable[[Any], object],
    of: str | None = None,
) -> Outline | None:
    """The outline of modules; ``None`` if only their state dicts show what they hold.

    Args:
        roots: The modules.
        tensors: Those of the bundle; their places are paths below a root.
        parameters: The places of the parameters.
        values: Those of values, by leaf name.
        value_of: Makes a value of its entry.
        of: The package whose modules' methods are known to say no more than what is in their slots.
    """
    modules = list(dict.fromkeys(itertools.chain.from_iterable(root.modules() for root in roots)))
    if not all(_is_plain(module, of) for module in modules):
        return None
    entries = ((id(module), name) for module in modules for slot in _SLOTS for name in getattr(module, slot))
    number = {entry: number for number, entry in enumerate(entries)}
    below = {
        (id(root), path): id(module) for root in roots for path, module in root.named_modules(remove_duplicate=False)
    }

    def number_of(place: Place) -> int:
        path, _, name = place[1].rpartition(".")
        return number[below[place[0], path], name]

    inside = _inside(tensors)
    if inside is None:
        return None
    names = list(values)
    return Outline(
        [(module, _OF_MODULES) for module in modules],
        [number_of(place) for place, _, _ in tensors],
        list(map(number_of, parameters)),
        list(map(number_of, values.values())),
        inside,
        lambda entries: dict(zip(names, map(value_of, entries), strict=True)),
        place=place,
    )


def outline_of_optimizers(
    optimizers: Sequence[tuple[Any, Any]],
    tensors: PlacedTensors,
    values: Mapping[str, Place],
    constants: Mapping[str, Callable[[Any], object]],
    groups: Callable[[Sequence[dict[str, Any]]], Mapping[str, object]],
    *,
    with_members: bool = False,
    lists: Sequence[tuple[Any, str]] = (),
) -> Outline | None:
    """The outline of optimizers; ``None`` for those with state of what is neither a parameter nor a name.

    Args:
        optimizers: With what holds each one's state (itself, or the optimizer inside).
        tensors: Those of the bundle; their places are whose they are and their names.
        values: Likewise the places of the other entries, by leaf name, groups excepted.
        constants: What makes the values, by name, of those that are not their entries.
        groups: Makes the values of the groups.
        with_members: Whether parameters themselves, as groups list them, are among the tensors.
        lists: Objects and their attributes that list parameters which no group lists.
    """
    of_holders: list[tuple[str, Kind]] = [("param_groups", "members" if with_members else "groups"), ("state", "state")]
    objects: list[tuple[Any, Sequence[tuple[str, Kind]]]] = [(owner, [(name, "listed")]) for owner, name in lists]
    places: list[Place] = [(id(member), MEMBER) for owner, name in lists for member in getattr(owner, name)]
    for optimizer, holder in optimizers:
        if holder is not optimizer:
            objects.append((optimizer, _OF_WRAPPED))
        hooks: list[tuple[str, Kind]] = [(name, "names") for name in SAYING if name in vars(holder)]
        objects.append((holder, [*of_holders, *hooks]))
        if with_members:
            places += ((id(member), MEMBER) for group in holder.param_groups for member in group["params"])
        for key, entries in holder.state.items():
            if isinstance(key, torch.Tensor) and isinstance(entries, dict):
                places += ((id(key), name) for name in entries)
            elif type(key) is str:
                places.append((id(holder), key))
            else:
                return None
    number = {place: number for number, place in enumerate(places)}
    weak = [weakref.ref(optimizer) for optimizer, _ in optimizers]
    names = list(values)

    def values_of(entries: Sequence[object]) -> Mapping[str, object]:
        live: list[Any] = [optimizer() for optimizer in weak]
        of_all = [group for optimizer in live for group in optimizer.param_groups]
        found = dict(zip(names, entries, strict=True))
        found.update({name: value_of(found[name]) for name, value_of in constants.items()})
        return {**found, **groups(of_all)}

    inside = _inside(tensors)
    if inside is None:
        return None
    others = [number[place] for place in values.values()]
    return Outline(
        objects,
        [number[place] for place, _, _ in tensors],
        (),
        others,
        inside,
        values_of,
        members="params",
        place=place,
    )


def _inside(tensors: PlacedTensors) -> dict[int, Inside] | None:
    """Returns tensors' places inside of entries; ``None`` while a DTensor's collective is still in flight."""
    sharded = {number: tensor for number, (_, tensor, _) in enumerate(tensors) if is_dtensor(tensor)}
    if not all(type(getattr(tensor, "_local_tensor", None)) is torch.Tensor for tensor in sharded.values()):
        return None
    wrapped = {number: there for number, (_, _, there) in enumerate(tensors) if there is not None}
    return {**dict.fromkeys(sharded, OF_DTENSORS), **wrapped}
