"""What PyTorch says about changes: before they happen, after they happened, and whether anything is still the same.

Optimizers step and modules load through hooks of PyTorch. What is written in place past them shows in a tensor's
version counter, unless it was written through ``.data``, by a fused kernel or by foreign code.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import is_, itemgetter
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..catalog import Again, Refused

Notice = Callable[[], None]


def is_dtensor(tensor: object) -> bool:
    """Whether it is a ``DTensor``, without importing what defines it."""
    if type(tensor) is torch.Tensor:
        return False
    dtensor = sys.modules.get("torch.distributed.tensor")
    return dtensor is not None and isinstance(tensor, dtensor.DTensor)


# Before a change


@functools.cache
def announce_steps(notice: Notice) -> None:
    """Has ``notice`` called before any optimizer of this process steps.

    The hook is the one for all optimizers: it runs before an optimizer's own hooks, which may write parameters; it also
    speaks for optimizers that are not saved but own some of the parameters; and no optimizer carries anything of ours.
    """

    def before_step(optimizer: object, args: object, kwargs: object) -> None:
        notice()

    register_optimizer_step_pre_hook(before_step)


def announces_steps(optimizer: torch.optim.Optimizer) -> bool:
    """Whether steps of that optimizer run hooks; they do not if its class did not make itself known to PyTorch."""
    return bool(getattr(type(optimizer).step, "hooked", False))


class _BeforeLoad:
    """Stands among a module's hooks. In a copy of the module it does no harm, in a pickle it is nothing."""

    def __init__(self, notice: Notice) -> None:
        self.notice = notice

    def __call__(self, *args: object) -> None:
        self.notice()

    def __deepcopy__(self, memo: object) -> _BeforeLoad:
        return self

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return getattr, ("", "format")  # takes any arguments, does nothing, and is there without us


def announce_loads(module: nn.Module, notice: Notice) -> None:
    """Has ``notice`` called before that module or one below it loads a state dict, by whichever of them it is asked."""
    for part in module.modules():
        if isinstance(part, torch.jit.ScriptModule):
            continue
        hooks = vars(part).get("_load_state_dict_pre_hooks", {})
        ours = [hook.hook for hook in hooks.values() if isinstance(getattr(hook, "hook", None), _BeforeLoad)]
        if not any(hook.notice == notice for hook in ours):
            part.register_load_state_dict_pre_hook(_BeforeLoad(notice))  # type: ignore[no-untyped-call]


# After a change


class TorchHold:
    """Storages of plain tensors in host memory."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        # Not the tensors keep the memory: `tensor.data = other` makes one let go of it.
        self._storages = [tensor.untyped_storage() for tensor in tensors]
        self._pointers = self._now()

    def _now(self) -> list[int]:
        """A storage that is resized has new memory before it gives back the old."""
        return list(map(torch.UntypedStorage.data_ptr, self._storages))

    def stamp(self, tensors: Sequence[torch.Tensor]) -> list[int] | None:
        return None if self._now() != self._pointers else self._versions(tensors)

    def _versions(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        try:
            return [tensor._version for tensor in tensors]
        except AttributeError:
            raise Refused("this torch does not tell whether a tensor was written: it has no version counters") from None

    def changes(self, tensors: Sequence[torch.Tensor], stamp: list[int]) -> list[tuple[int, str]]:
        found: dict[int, str] = {}
        pairs = {"resized or moved": (self._pointers, self._now()), "written": (stamp, self._versions(tensors))}
        for what, (then, now) in pairs.items():
            if then != now:
                for number, (before, after) in enumerate(zip(then, now, strict=True)):
                    if before != after:
                        found.setdefault(number, what)
        return sorted(found.items())


# Whether all is as it was


_METHODS = ("state_dict", "_save_to_state_dict", "get_extra_state")
_SLOTS = ("_parameters", "_buffers")
_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks")
_KINDS = ("_modules", *_SLOTS, "_non_persistent_buffers_set", *_HOOKS)
_CONTAINERS = itemgetter(*_KINDS)


def _is_plain(module: nn.Module) -> bool:
    """Whether the module's state dict is what stands in its slots, and nothing else is done to make it."""
    if isinstance(module, torch.jit.ScriptModule) or any(name in vars(module) for name in _METHODS):
        return False
    if any(getattr(type(module), name) is not getattr(nn.Module, name) for name in _METHODS):
        return False
    if not all(isinstance(vars(module).get(name), (dict, set)) for name in _KINDS):
        return False  # another torch
    hooks = [hook for name in _HOOKS for hook in vars(module)[name].values()]
    # FSDP's puts the sharded parameters into the slots: when they are there, it has nothing to do.
    return all(getattr(hook, "__module__", "").startswith("torch.distributed.fsdp._fully_shard") for hook in hooks)


class _Entries:
    """Some objects of which some are tensors: which ones, and how they were sharded; not which tensors they are.

    Args:
        objects: All of them.
        tensors: The places of the tensors that count.
    """

    def __init__(self, objects: Sequence[Any], tensors: Sequence[int]) -> None:
        self._tensors = _getter(tensors)
        others = sorted(set(range(len(objects))) - set(tensors))
        self._others = _getter(others)
        self._types = [type(objects[place]) for place in others]
        self._sharded = [(n, _spec(objects[p])) for n, p in enumerate(tensors) if is_dtensor(objects[p])]

    def tensors(self, objects: Sequence[Any]) -> Sequence[Any] | None:
        """The tensors, with this rank's memory in place of what is sharded; ``None`` if there may be others now.

        Of what is not sharded, who asks where tensors lie hears that one is a tensor of another kind, or none.
        """
        if list(map(type, self._others(objects))) != self._types:
            return None
        tensors = self._tensors(objects)
        if self._sharded:
            local = list(tensors)
            for number, spec in self._sharded:
                local[number] = getattr(tensors[number], "_local_tensor", None)
                if spec is None or _spec(tensors[number]) is not spec or type(local[number]) is not torch.Tensor:
                    return None
            return local
        return tensors


def _getter(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """What takes the objects at these places."""
    if len(places) < 2:  # of one, `itemgetter` gives the object itself
        return lambda objects: tuple(objects[place] for place in places)
    return itemgetter(*places)


def _spec(tensor: Any) -> object:
    """How a ``DTensor`` is sharded; it is never changed, only replaced."""
    return getattr(tensor, "_spec", None)


Place = tuple[int, str]
"""Where an entry stands: the ``id`` of a live module and a path below it, or of a live parameter and a name."""


class ModulesRecheck:
    """Modules that are what they were: the same modules, with entries of the same names in their slots.

    Args:
        roots: The modules.
        tensors: Places of the entries, as paths below a root.
        parameters: Likewise of the parameters.
    """

    def __init__(self, roots: Sequence[nn.Module], tensors: Sequence[Place], parameters: Sequence[Place]) -> None:
        modules = list(dict.fromkeys(itertools.chain.from_iterable(root.modules() for root in roots)))
        self._modules = [weakref.ref(module) for module in modules]
        self._names, children, objects = self._slots_of(modules)
        number = {id(module): number for number, module in enumerate(modules)}
        self._children = _getter([len(modules) if child is None else number[id(child)] for child in children])
        slots = ((id(module), name) for slot in _SLOTS for module in modules for name in getattr(module, slot))
        of_slot = {slot: number for number, slot in enumerate(slots)}
        place = {
            (id(root), f"{path}.{name}" if path else name): of_slot[id(module), name]
            for root in roots
            for path, module in root.named_modules(remove_duplicate=False)
            for slot in _SLOTS
            for name in getattr(module, slot)
        }
        self._parameters = _getter([place[parameter] for parameter in parameters])
        self._entries = _Entries(objects, [place[tensor] for tensor in tensors])

    @staticmethod
    def of(roots: Sequence[nn.Module], tensors: Sequence[Place], parameters: Sequence[Place]) -> ModulesRecheck | None:
        """For modules with these entries; ``None`` where only making their state dicts again tells."""
        if not all(map(_is_plain, itertools.chain.from_iterable(root.modules() for root in roots))):
            return None
        return ModulesRecheck(roots, tensors, parameters)

    @staticmethod
    def _slots_of(modules: Sequence[nn.Module]) -> tuple[list[Any], list[Any], list[Any]]:
        """Names of all there is in the modules with how many each has, children, and what stands in the slots."""
        chained = itertools.chain.from_iterable
        containers = list(chained(map(_CONTAINERS, map(vars, modules))))
        names: list[Any] = [*map(len, containers), *chained(filter(None, containers))]
        below, *slots = (filter(None, containers[number :: len(_KINDS)]) for number in range(1 + len(_SLOTS)))
        children = list(chained(map(dict.values, below)))
        return names, children, list(chained(map(dict.values, chained(slots))))

    def __call__(self) -> Again | None:
        modules: list[Any] = [module() for module in self._modules]
        if None in modules:
            return None
        names, children, objects = self._slots_of(modules)
        if names != self._names:
            return None
        if not all(map(is_, children, self._children([*modules, None]))):
            return None
        tensors = self._entries.tensors(objects)
        return None if tensors is None else Again({}, tensors, self._parameters(objects))


class OptimizersRecheck:
    """Optimizers that are what they were: as many parameters in each group, and state of the same names for them.

    Args:
        optimizers: With what holds each one's state (itself, or the optimizer inside).
        tensors: Places of the entries that are tensors: whose they are, and their names.
        values: Likewise of the other entries, by leaf name, groups excepted.
        groups: Makes the values of the groups.
    """

    def __init__(
        self,
        optimizers: Sequence[tuple[Any, Any]],
        tensors: Sequence[Place],
        values: Mapping[str, Place],
        groups: Callable[[Sequence[dict[str, Any]]], Mapping[str, object]],
    ) -> None:
        self._optimizers = [(weakref.ref(optimizer), weakref.ref(holder)) for optimizer, holder in optimizers]
        self._groups = groups
        parameters, self._lengths = self._parameters_of(optimizers)
        number = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._names, keys, objects = self._entries_of(optimizers)
        self._of_keys = [number[id(key)] if isinstance(key, torch.Tensor) else key for key in keys]
        place = {entry: number for number, entry in enumerate(self._places_of(optimizers))}
        self._values = [(name, place[value]) for name, value in values.items()]
        self._entries = _Entries(objects, [place[tensor] for tensor in tensors])

    @staticmethod
    def of(
        optimizers: Sequence[tuple[Any, Any]],
        tensors: Sequence[Place],
        values: Mapping[str, Place],
        groups: Callable[[Sequence[dict[str, Any]]], Mapping[str, object]],
    ) -> OptimizersRecheck | None:
        """``None`` for optimizers with state of what is neither a parameter nor a name."""
        known = {id(parameter) for parameter in OptimizersRecheck._parameters_of(optimizers)[0]}
        for _, holder in optimizers:
            for key, entries in holder.state.items():
                if type(key) is not str and not (id(key) in known and isinstance(entries, dict)):
                    return None
        return OptimizersRecheck(optimizers, tensors, values, groups)

    @staticmethod
    def _parameters_of(optimizers: Sequence[tuple[Any, Any]]) -> tuple[list[Any], list[int]]:
        """The parameters of all groups, and how many each group has."""
        every = [optimizer for optimizer, _ in optimizers]
        every += [holder for optimizer, holder in optimizers if holder is not optimizer]
        lists = [group["params"] for optimizer in every for group in optimizer.param_groups]
        lengths = [*(len(optimizer.param_groups) for optimizer in every), *map(len, lists)]
        return list(itertools.chain.from_iterable(lists)), lengths

    @staticmethod
    def _entries_of(optimizers: Sequence[tuple[Any, Any]]) -> tuple[list[Any], list[Any], list[Any]]:
        """Names of the state's entries with where each parameter's end, whose they are, and the entries."""
        names: list[Any] = []
        keys: list[Any] = []
        objects: list[Any] = []
        for _, holder in optimizers:
            states = list(holder.state.values())
            own = [index for index, key in enumerate(holder.state) if type(key) is str]
            for index in own:  # the state of no parameter counts as one entry
                states[index] = {None: states[index]}
            keys += holder.state
            names += itertools.chain.from_iterable(states)
            names += map(len, states)
            objects += itertools.chain.from_iterable(map(dict.values, states))
        return names, keys, objects

    @staticmethod
    def _places_of(optimizers: Sequence[tuple[Any, Any]]) -> Iterator[Place]:
        for _, holder in optimizers:
            for key, entries in holder.state.items():
                if type(key) is str:
                    yield id(holder), key
                else:
                    yield from ((id(key), name) for name in entries)

    def __call__(self) -> Again | None:
        optimizers: list[Any] = []
        for weak, inside in self._optimizers:
            optimizer, holder = weak(), inside()
            if optimizer is None or holder is None or (holder is not optimizer and optimizer.optim is not holder):
                return None
            optimizers.append((optimizer, holder))
        parameters, lengths = self._parameters_of(optimizers)
        names, keys, objects = self._entries_of(optimizers)
        if lengths != self._lengths or names != self._names or len(keys) != len(self._of_keys):
            return None
        for key, expected in zip(keys, self._of_keys, strict=True):
            if not (key is parameters[expected] if type(expected) is int else type(key) is str and key == expected):
                return None
        tensors = self._entries.tensors(objects)
        if tensors is None:
            return None
        groups = list(itertools.chain.from_iterable(optimizer.param_groups for optimizer, _ in optimizers))
        values = {**{name: objects[place] for name, place in self._values}, **self._groups(groups)}
        return Again(values, tensors, parameters)
