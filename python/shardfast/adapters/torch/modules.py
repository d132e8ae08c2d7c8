"""PyTorch's modules as named tensors and values."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...state.catalog import Compared, Inside, Ints, Outline, Part, Refused, Restored
from .hooks import VERSION, Place, announce_loads, load_by_hooks, outline_of_modules, versions_in
from .memory import identity
from .placement import chunks, everyone
from .refused import expect_understood_module
from .wrapped import CONSTANTS, constants_of, drop_computed, expect_same_constants, joined, unwrapped, wraps

WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Path components that `torch.compile`, activation checkpointing and FSDP put into names of parameters."""

_EXTRA_STATE = "_extra_state"  # what nn.Module calls the result of get_extra_state() in a state dict


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
        ignored: Names after the prefix that it does not synchronise.
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


def _are_one(one: torch.Tensor | Part, other: torch.Tensor | Part) -> bool:
    """Whether two are the same elements in the same memory."""
    if isinstance(one, Part) or isinstance(other, Part):
        return one is other
    return identity(one) == identity(other)


class Modules:
    """One module, or several parts of one (pipeline stages), as named tensors and values."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._of_parameters: list[Place] = []
        self.parameters: dict[str, nn.Parameter | Part] = {}
        self._tensors: dict[str, torch.Tensor | Part] = {}
        self._values: dict[str, object] = {}
        self._places: dict[str, tuple[nn.Module, str]] = {}
        self._derived: dict[str, torch.Tensor] = {}
        self._wrapped: list[torch.Tensor] = []
        self._inside: dict[str, Inside] = {}
        self._constants: dict[str, dict[str, object]] = {}
        self._replicated: dict[int, list[_Replicated]] = {}
        self._versions: dict[str, dict[int, tuple[str, Any]]] = {}
        for module in modules:
            own_names = dict[int, str]()
            self._replicated[id(module)] = list(_replicated(module))
            state = self._state_of(module)
            names = self._names_of(module)
            own = {id(tensor) for tensor in itertools.chain(module.parameters(), nn.Module.buffers(module))}
            for original, value in state.items():
                name = names(original)
                is_extra = original.rsplit(".", 1)[-1] == _EXTRA_STATE
                is_tensor = isinstance(value, (torch.Tensor, Part)) and not is_extra
                if name in self._places:
                    twin = self._tensors.get(name)
                    if twin is None or not is_tensor or not _are_one(twin, value):
                        raise Refused(self._of_one_name(name, module))
                    continue
                self._places[name] = (module, original)
                own_names.setdefault(id(value), name)
                if is_tensor and wraps(value):
                    self._unwrap(name, module, original, value)
                elif is_tensor:
                    self._tensors[name] = value
                else:
                    self._values[name] = value
                if is_tensor and isinstance(value, torch.Tensor) and id(value) not in own:
                    self._derived[name] = value
            for original, parameter in self._parameters_of(module, state):
                name = names(original)
                if name not in self._places:  # a wrapper that has the state dict of what it wraps
                    name = own_names.get(id(parameter), name)
                if name not in self.parameters:
                    self.parameters[name] = parameter
                    self._of_parameters.append(self._slot(module, original))
            for path, version in versions_in(state, module).items():
                name = names(f"{path}.{VERSION}" if path else VERSION)
                # What is behind a wrapper of that name counts, not the wrapper.
                self._versions.setdefault(name, {})[id(module)] = path, version
        for name in self._places.keys() & self._versions.keys():
            del self._versions[name]
        self._saved_versions = self._expect_one_version_each()

    def _expect_one_version_each(self) -> dict[str, int]:
        """The versions that a checkpoint keeps, by leaf name: not 1, which is PyTorch's where a class sets none."""
        found: dict[str, int] = {}
        for name, of in self._versions.items():
            versions = {version if type(version) is int else 1 for _, version in of.values()}
            if len(versions) > 1:
                raise Refused(
                    f"its stages have parts of the same name {name.removesuffix(VERSION)!r}, of classes whose _version "
                    f"differs ({', '.join(map(str, sorted(versions)))}): in every stage, call a layer what the whole "
                    "model calls it"
                )
            found[name] = versions.pop()
        return {name: version for name, version in found.items() if version != 1}

    def _unwrap(self, name: str, module: nn.Module, original: str, outer: torch.Tensor) -> None:
        """Takes the tensors inside of one that wraps them."""
        try:
            inside = unwrapped(outer)
        except Refused as refused:
            raise Refused(f"{name}: {refused}") from refused
        self._wrapped.append(outer)
        for below, tensor in inside.tensors.items():
            self._inside[joined(name, below)] = inside.inside[below]
            self._tensors[joined(name, below)] = tensor
            self._places[joined(name, below)] = (module, original)
        if inside.constants:
            self._constants[f"{name}.{CONSTANTS}"] = inside.constants
            self._places[f"{name}.{CONSTANTS}"] = (module, original)

    def _of_one_name(self, name: str, second: nn.Module) -> str:
        """Why two entries of one name cannot be saved; ``second`` has the one that came later."""
        stages = [number for number, module in enumerate(self._modules) if module in (self._places[name][0], second)]
        if len(stages) < 2:
            return f"two parts of it have {name!r} once names of wrappers are left out: rename one of them"
        return (
            f"its stages {' and '.join(f'[{number}]' for number in stages)} both have {name!r}, and these are not the "
            "same tensor: in every stage, call a layer what the whole model calls it, for example by its number there "
            "as a key of an nn.ModuleDict (a slice of an nn.ModuleList counts from 0 again)"
        )

    def _state_of(self, module: nn.Module) -> Mapping[str, Any]:
        """The tensors, parts and other values of a module, by their names in its state dict."""
        expect_understood_module(module)
        return module.state_dict(keep_vars=True)

    def _names_of(self, module: nn.Module) -> Callable[[str], str]:
        """Returns the renaming of the module's state dict for a checkpoint; called after :meth:`_state_of`."""
        return _Names(module)

    def _slot(self, module: nn.Module, original: str) -> Place:
        """Returns the place of an entry of the module's state dict in the module."""
        return id(module), original

    def _loaded(self, module: nn.Module) -> nn.Module:
        """The part of a module whose own code a load runs."""
        return module

    def _release(self) -> None:
        """Frees what was made of the tensors before a load filled them."""
        for outer in self._wrapped:
            drop_computed(outer)

    def _parameters_of(self, module: nn.Module, state: Mapping[str, Any]) -> Iterable[tuple[str, nn.Parameter | Part]]:
        """The parameters of a module by name, among them those of ``state`` that are parts."""
        return module.named_parameters(remove_duplicate=False)

    def steps(self) -> None:
        return None

    def announce(self, notice: Callable[[str], None]) -> Sequence[torch.Tensor]:
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
        own = {self._places[name] for name in self.parameters if name in self._places}
        return {name: "on request" for name in self._tensors if self._places[name] not in own}

    def makers(self) -> Sequence[tuple[str, str, str, list[str], list[str]]]:
        return ()

    def outline(self) -> Outline | None:
        if (
            self._derived
            or self._values
            or self._saved_versions
            or any(chunks(tensor) is not None for tensor in self._tensors.values())
        ):
            return None
        tensors: list[tuple[Place, Any, Inside | None]] = [
            (self._slot(*self._places[name]), tensor, self._inside.get(name)) for name, tensor in self._tensors.items()
        ]
        constants = {name: self._slot(*self._places[name]) for name in self._constants}
        return outline_of_modules(self._modules, tensors, self._of_parameters, constants, constants_of)

    def masters(self) -> Mapping[str, Any]:
        return {}

    def tensors(self) -> Mapping[str, torch.Tensor | Part]:
        return self._tensors

    def values(self) -> Mapping[str, object]:
        return {**self._values, **self._constants, **self._saved_versions}

    def accepts(self, name: str, *, is_master: bool = False) -> bool:
        return False

    def create(
        self, name: str, dtype: str, shape: Ints, *, layout: str = "", beside: str = "", dry: bool
    ) -> torch.Tensor:
        raise Refused(f"a module has no place for {name!r}")

    def drops(self, name: str) -> bool:
        return False

    def merges(self, name: str) -> bool:
        return False

    def descriptions(self) -> Mapping[str, str]:
        return {name: name.removesuffix(VERSION) for name in self._versions}

    def describes(self, name: str) -> bool:
        return name.rpartition(".")[2] == VERSION and name not in self._places

    def renamed(self, name: str, parameter: Callable[[str], str]) -> str:
        return name

    def restore(
        self,
        created: Mapping[str, torch.Tensor],
        values: Mapping[str, object],
        parameter: Callable[[str], str],
        *,
        strict: bool,
        absent: Sequence[str] = (),
        decisive: Mapping[str, int] = {},
        filled: Collection[str] = (),
    ) -> Restored:
        # What is no parameter or buffer, such as extra state, is loaded by the module's own method.
        entries: dict[int, dict[str, Any]] = {id(module): {} for module in self._modules}
        for name in sorted(values.keys() & self._constants.keys()):
            expect_same_constants(name, self._constants[name], values[name])
        versions = self._versions_of(values, filled)
        values = {name: value for name, value in values.items() if name in self._values}
        unfilled: dict[int, set[str]] = {id(module): set() for module in self._modules}
        for name in self._places.keys() - filled if versions else ():
            module, original = self._places[name]
            unfilled[id(module)].add(original)
        for name, value in {**self._derived, **values}.items():
            module, original = self._places[name]
            entries[id(module)][original] = value

        def install() -> None:
            self._release()
            for module in self._modules:
                of = id(module)
                load_by_hooks(self._loaded(module), entries[of], versions.get(of, {}), unfilled[of])

        return Restored(install)

    def _versions_of(self, values: Mapping[str, object], filled: Collection[str]) -> dict[int, dict[str, Any]]:
        """The saved versions of parts of which something was loaded, by the module's ``id`` and the path."""
        found: dict[int, dict[str, Any]] = {}
        for name, of in self._versions.items():
            saved = values.get(name, 1)
            if type(saved) is not int:
                raise Refused(f"{name} is {saved!r} in the checkpoint: expected the _version of a class, an integer")
            if any(one.startswith(name.removesuffix(VERSION)) for one in filled):
                for module, (path, version) in of.items():
                    # As PyTorch: a class without any version gets none of an old checkpoint.
                    found.setdefault(module, {})[path] = version if version is None and name not in values else saved
        return found
