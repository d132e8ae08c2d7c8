"""PyTorch's optimizers as named tensors and values."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch

from ...state.catalog import Compared, Inside, Ints, NamedPart, Outline, Part, Refused, Region, Restored
from . import accounts
from .accounts import class_of
from .groups import (
    empty_as_saved,
    equal,
    expect_same,
    groups_value,
    hyperparameter_names,
    hyperparameters,
    put_into,
    saved_by_parameter,
    saved_class,
)
from .hooks import Place, announce_steps, announces_steps, is_dtensor, outline_of_optimizers
from .memory import dtype_of, expect_fill, zero_rest
from .placement import chunks, empty_beside, empty_like, everyone, is_flat, mesh_covers_job
from .refused import expect_understood_owner
from .steps import TorchSteps
from .wrapped import CONSTANTS, constants_of, expect_same_constants, inner_tensors, joined, unwrapped, wraps


class _Held(NamedTuple):
    """An optimizer that steps parameters, and the optimizers that wrap it.

    Attributes:
        outer: The optimizers that wrap it, the outermost first.
        optimizer: Itself.
        holder: The object that holds its state: itself, or the optimizer inside of a ``ZeroRedundancyOptimizer``.
    """

    outer: tuple[Any, ...]
    optimizer: Any
    holder: Any


class _Owned(NamedTuple):
    """A parameter that an optimizer steps, or a part of it that has a name of its own.

    Attributes:
        state: What holds its state, by parameter.
        parameter: What the optimizer steps.
        group: Its group.
        part: Which of its elements have the name; ``None`` if it is a tensor of that name itself.
    """

    state: Any
    parameter: torch.Tensor
    group: dict[str, Any]
    part: Part | None

    @property
    def is_empty(self) -> bool:
        """Whether this rank holds nothing of it, so that its optimizer has nothing to step here."""
        return self.part is not None and not self.part.regions


class Optimizers:
    """One optimizer, or several (pipeline stages), in terms of parameters' names, never of their positions.

    Of wrapped optimizers the inner ones count. Leaves: ``state.<FQN>.<name>``, ``global.<name>`` for state of no
    parameter, ``param_groups``, a list of the groups with their parameters' names, and ``own.<class>``, what a class
    says beside that and takes back by its own ``load_state_dict()``.
    """

    def __init__(
        self, optimizers: Sequence[Any], names: Mapping[int, Sequence[NamedPart]], beside: Collection[int] = ()
    ) -> None:
        self._groups: list[dict[str, Any]] = []
        self._group_names: list[list[str]] = []
        self._classes: list[str] = []
        self._owned: dict[str, _Owned] = {}
        self._several: dict[Place, list[str]] = {}
        self._constants: dict[str, dict[str, object]] = {}
        self._inside: dict[str, Inside] = {}
        self._buffers: dict[Place, torch.Tensor] = {}
        self._listed: Sequence[tuple[str, object, Place]] | None = None
        self._states: list[Any] = []
        self._by_shape: dict[int, str] = {}
        self._whole: set[int] = set()
        # One that is reached in several ways counts once.
        self._held = list({id(held.holder): held for one in optimizers for held in _held(one, ())}.values())
        # A ZeroRedundancyOptimizer is not one of them: its state dict is not this rank's, but gathered of all.
        self._levels = list({id(one): one for held in self._held for one in (*held.outer, held.holder)}.values())
        self.parameters: dict[str, torch.Tensor] = {}
        for _, optimizer, holder in self._held:
            named = [self._name(number, group, names) for number, group in enumerate(optimizer.param_groups)]
            self._groups += optimizer.param_groups
            self._group_names += named
            self._classes += [class_of(holder)] * len(named)
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self.parameters.update(dict.fromkeys((fqn for fqn, _ in names[id(parameter)]), parameter))
            self._states.append(holder.state)
            if accounts.makes_factors_whole(holder):
                self._whole.add(id(holder.state))
            if accounts.makes_state_by_shape(holder):
                self._by_shape[id(holder.state)] = class_of(holder)
            for group in holder.param_groups:
                for parameter in group["params"]:
                    for fqn, part in names[id(parameter)]:
                        owned = self._owned.setdefault(fqn, _Owned(holder.state, parameter, group, part))
                        if owned.parameter is not parameter:
                            raise Refused(
                                f"two of its parameters are called {fqn!r}: hold their modules under one key of the "
                                "state, in one nn.ModuleDict"
                            )
                        if owned.group is not group:
                            raise Refused(_owned_twice(fqn, [held.holder for held in self._held], owned, holder))
        self._own = self._accounted(names, beside)

    def _accounted(self, names: Mapping[int, Sequence[NamedPart]], beside: Collection[int]) -> dict[str, object]:
        """Returns the values of optimizers beside their state and groups, by leaf name.

        Raises:
            Refused: If one says, or holds, more than a save takes.
        """
        holders = [held.holder for held in self._held]
        accounts.expect_entries(holders)
        for holder in holders:
            accounts.expect_apart(holder)
            accounts.expect_where_parameters_are(holder)
        own: dict[str, object] = {}
        for optimizer in reversed(self._levels):  # an error names the innermost one
            accounts.expect_no_more(optimizer, beside, names, [*self._levels, *holders])
            if accounts.says_more(optimizer):
                said = accounts.own_values(optimizer, holders, self.parameters.values())
                leaf = f"{_OWN}{class_of(optimizer)}"
                if said and not equal(own.setdefault(leaf, said), said):
                    raise Refused(
                        f"two of its optimizers are a {class_of(optimizer)}, and their state_dict()s differ beside the "
                        f"state of parameters: {own[leaf]} and {said}: put each into the state under a key of its own"
                    )
        return own

    def _name(self, number: int, group: dict[str, Any], names: Mapping[int, Sequence[NamedPart]]) -> list[str]:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise Refused(
                    f"a parameter of shape {tuple(parameter.shape)} in param_groups[{number}] belongs to no module of "
                    "the state, so it has no name: put its module, or a dict of the parameters themselves (those of "
                    "a state_dict() are others), into the state, beside the optimizer"
                )
        return [fqn for parameter in group["params"] for fqn, _ in names[id(parameter)]]

    def _entries(self) -> Sequence[tuple[str, object, Place]]:
        """All entries of state by leaf name, until a load changes them."""
        if self._listed is None:
            self._listed = list(self._list())
        return self._listed

    def _list(self) -> Iterator[tuple[str, object, Place]]:
        for fqn, owned in self._owned.items():
            if owned.is_empty:
                continue
            state, parameter, _, part = owned
            for name, value in state.get(parameter, {}).items():
                leaf, place = _leaf(fqn, name), (id(parameter), name)
                if wraps(value):
                    yield from self._unwrap(leaf, owned, value, place)
                elif not isinstance(value, torch.Tensor):
                    accounts.expect_whole(leaf, parameter, value, is_part=part is not None)
                    yield leaf, value, place
                else:
                    yield leaf, value if part is None else self._part(leaf, part, value, place), place
        for _, _, holder in self._held:
            for name, value in holder.state.items():
                if not isinstance(name, torch.Tensor):
                    yield f"{_GLOBAL}{_quoted(name)}", value, (id(holder), name)

    def _unwrap(
        self, leaf: str, owned: _Owned, outer: torch.Tensor, place: Place
    ) -> Iterator[tuple[str, object, Place]]:
        """The tensors inside of one that wraps them, and what it was made with."""
        if owned.part is not None:
            raise Refused(
                f"{leaf} is a {type(outer).__name__}, which wraps other tensors, and its parameter is a run of a flat "
                "one, in which blocks end elsewhere than parameters: shard with FSDP2 (fully_shard)"
            )
        try:
            inside = unwrapped(outer)
        except Refused as refused:
            raise Refused(f"{leaf}: {refused}") from refused
        for name, tensor in inside.tensors.items():
            self._inside[joined(leaf, name)] = inside.inside[name]
            yield joined(leaf, name), tensor, place
        if inside.constants:
            self._constants[f"{leaf}.{CONSTANTS}"] = inside.constants
            yield f"{leaf}.{CONSTANTS}", inside.constants, place

    def _part(self, leaf: str, part: Part, value: torch.Tensor, place: Place) -> torch.Tensor | Part:
        """The part of a state that belongs to a part of a parameter."""
        if not value.ndim:
            if not part.length:
                return value
            whole, several = (Region((), ()),), self._several.setdefault(place, [])
            return Part(value, (), whole, holders=part.sharers, within=value, several=several, name=leaf)
        if tuple(value.shape) != ((part.length,) if part.length else tuple(part.tensor.shape)):
            raise Refused(
                f"{leaf} has shape {tuple(value.shape)}, and this rank holds {part.tensor.numel()} elements of "
                f"a {'flat ' if part.length else ''}parameter: state of that is understood where it has a number for "
                "each element, or one in all"
            )
        mine = value.detach()[part.start : part.start + part.tensor.numel()] if part.length else value.detach()
        cut = (part.shape, part.regions, part.text, part.holders, part.sharers)
        return Part(mine, *cut, within=value, elsewhere=part.elsewhere)

    def announce(self, notice: Callable[[str], None]) -> Sequence[torch.Tensor]:
        announce_steps(notice)
        announced = []
        for outer, optimizer, holder in self._held:
            if all(map(announces_steps, (*outer, optimizer, holder))):
                announced += [parameter for group in optimizer.param_groups for parameter in group["params"]]
                for entries in holder.state.values():
                    announced += entries.values() if isinstance(entries, dict) else ()
        announced += [inner for outer in announced if wraps(outer) for inner in inner_tensors(outer)]
        return [tensor for tensor in announced if isinstance(tensor, torch.Tensor) and not tensor.is_inference()]

    def steps(self) -> TorchSteps:
        holders = []
        for outer, optimizer, holder in self._held:
            holders.append((holder, all(map(announces_steps, (*outer, optimizer, holder)))))
        return TorchSteps(holders)

    def holders(self, of: Mapping[int, Ints]) -> Mapping[str, Ints]:
        known: dict[str, Ints] = {}
        for fqn, (state, parameter, _, part) in self._owned.items():
            if any(held.holder is not held.optimizer for held in self._held):
                break
            whole = of.get(id(parameter)) if part is None else part.sharers
            if whole is None and is_dtensor(parameter) and mesh_covers_job(parameter):
                whole = everyone()
            if whole is not None:
                # State that is not sharded with its parameter (a step counter) is the same on all ranks that hold the
                # parameter.
                known |= {_leaf(fqn, name): whole for name in state.get(parameter, {})}
        return known

    def compared(self) -> Mapping[str, Compared]:
        # State computed from a shard, such as a norm, may be equal on all ranks at first. A step counter is equal for
        # all shards.
        return {
            _leaf(fqn, name): "every save"
            for fqn, (state, parameter, _, part) in self._owned.items()
            if is_dtensor(parameter) or part is not None
            for name, value in state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor) and not is_dtensor(value)
            if name != "step" and value.shape != parameter.shape
        }

    def makers(self) -> Sequence[tuple[str, str, str, list[str], list[str]]]:
        found = []
        for group, names, kind in zip(self._groups, self._group_names, self._classes, strict=True):
            owned = {fqn: self._owned[fqn] for fqn in names if fqn in self._owned}
            made = {fqn for fqn, one in owned.items() if one.state.get(one.parameter)}
            alike = " ".join(sorted(hyperparameter_names(group)))
            found.append(("param_groups", kind, alike, sorted(made), sorted(set(names) - made)))
        return found

    def outline(self) -> Outline | None:
        if any(held.outer for held in self._held) or any(map(accounts.says_more, self._levels)):
            return None
        tensors: list[tuple[Place, Any, Inside | None]] = []
        values: dict[str, Place] = {}
        for name, value, place in self._entries():
            if not isinstance(value, (torch.Tensor, Part)):
                values[name] = place
            elif chunks(value) is None:
                tensors.append((place, value, self._inside.get(name)))
            else:
                return None
        groups = functools.partial(groups_value, names=self._group_names, classes=self._classes)
        optimizers = [(held.optimizer, held.holder) for held in self._held]
        return outline_of_optimizers(optimizers, tensors, values, dict.fromkeys(self._constants, constants_of), groups)

    def masters(self) -> Mapping[str, Any]:
        return {}

    def tensors(self) -> Mapping[str, torch.Tensor | Part]:
        return {name: value for name, value, _ in self._entries() if isinstance(value, (torch.Tensor, Part))}

    def values(self) -> Mapping[str, object]:
        values = {name: value for name, value, _ in self._entries() if not isinstance(value, (torch.Tensor, Part))}
        return {**values, **groups_value(self._groups, self._group_names, self._classes), **self._own}

    def _split(self, name: str) -> tuple[str, str] | None:
        """The owned parameter and the name of its state in ``state.<FQN>.<name>``."""
        path = name.removeprefix("state.") if name.startswith("state.") else ""
        end = path.rfind(".")
        while end > 0:
            if path[:end] in self._owned:
                return path[:end], path[end + 1 :]
            end = path.rfind(".", 0, end)
        return None

    def accepts(self, name: str, *, is_master: bool = False) -> bool:
        place = self._split(name)
        if place is not None:
            owned = self._owned[place[0]]
            return not owned.is_empty and not (is_master and self._is_of_torch(owned))
        if name.startswith(_OWN):
            return any(class_of(optimizer) == name.removeprefix(_OWN) for optimizer in self._levels)
        return name.startswith(_GLOBAL) and bool(self._states)

    def _is_of_torch(self, owned: _Owned) -> bool:
        """Whether one of PyTorch's own optimizers steps it, of which none keeps a more exact copy."""
        holders = (held.holder for held in self._held if held.holder.state is owned.state)
        return all(type(holder).__module__.startswith("torch.") for holder in holders)

    def create(self, name: str, dtype: str, shape: Ints, *, layout: str = "", beside: str = "", dry: bool) -> Any:
        place = self._split(name)
        kind = dtype_of(dtype)
        # Made in inference mode, it could not be trained with afterwards.
        with torch.inference_mode(False), torch.no_grad():
            if place is None:
                return torch.empty(shape, dtype=kind, device="meta" if dry else "cpu")
            state, parameter, group, part = self._owned[place[0]]
            if "." in place[1]:
                raise Refused(_no_wrapping(state.get(parameter, {}).get(_unquoted(place[1].partition(".")[0]))))
            if shape:
                self._expect_made_here(self._owned[place[0]], layout)
            is_step = place[1] == "step"
            on_host = is_step and not (group.get("fused") or group.get("capturable"))
            at = parameter if part is None else part.tensor
            device = torch.device("meta" if dry else "cpu" if on_host else at.device)
            if part is not None:
                return self._create_part(name, (id(parameter), _unquoted(place[1])), part, shape, kind, device)
            was_replicated = bool(layout) and "Shard" in beside and "Shard" not in layout
            if shape == tuple(parameter.shape) and not is_step and not was_replicated:
                made = empty_like(parameter, kind, device)
                if wraps(made):  # as its parameter does; optimizers begin with zeros, which are often plain
                    made = torch.zeros_like(parameter, dtype=kind, device=device, requires_grad=False)
                if wraps(made):
                    raise Refused(f"its parameter is a {type(parameter).__name__}, which wraps others. {_STEP}")
                return made
            # State of another shape than its parameter (row-wise, factored) is sharded if it was, or if the saving job
            # did not shard the parameter: there its optimizer computed it from plain gradients.
            if is_dtensor(parameter) and shape and (layout or not beside):
                is_whole = was_replicated or id(state) in self._whole
                return empty_beside(parameter, shape, kind, device, is_replicated=is_whole)
            return torch.empty(shape, dtype=kind, device=device)

    def _expect_made_here(self, owned: _Owned, layout: str) -> None:
        """Refuses state of a flat parameter for a whole one, or the reverse, if the class may make another one here."""
        was_flat = is_flat(layout)
        if was_flat != (owned.part is not None and is_flat(owned.part.text)) and id(owned.state) in self._by_shape:
            shape = "a run of a flat parameter" if was_flat else "a whole parameter"
            raise Refused(
                f"a {self._by_shape[id(owned.state)]} made it for {shape}, and here it steps one of shape "
                f"{tuple(owned.parameter.shape)}, for which it may make other state: step the optimizer once before "
                "the load, which shows what it makes; if it makes other state, load only='model'"
            )

    def _create_part(
        self, leaf: str, place: Place, part: Part, shape: Ints, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor | Part:
        """A new state that belongs to a part of a parameter; parts of one buffer have one buffer of state."""
        if shape and shape != part.shape:
            raise Refused(
                f"it has shape {list(shape)} in the checkpoint, and this rank holds a run of elements of a parameter "
                f"of shape {list(part.shape)}: its state has a number for each element, or one in all"
            )
        size = () if not shape else (part.length,) if part.length else tuple(part.tensor.shape)
        made = self._buffers.get(place)
        if made is None:
            made = torch.empty(size, dtype=dtype, device=device)
            if part.length:
                self._buffers[place] = made
        return self._part(leaf, part, made, place)

    def drops(self, name: str) -> bool:
        return name != "param_groups" and not name.startswith(_OWN)

    def merges(self, name: str) -> bool:
        return name == "param_groups"

    def descriptions(self) -> Mapping[str, str]:
        return {}

    def describes(self, name: str) -> bool:
        return False

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
        absent: Sequence[str] = (),
        decisive: Mapping[str, int] = {},
        filled: Collection[str] = (),
    ) -> Restored:
        self._expect_no_pre_hooks()
        zero_rest(self._buffers.values(), [part.tensor for part in created.values() if isinstance(part, Part)])
        mine = [name for name in values if name.startswith(_OWN)]
        own = {name.removeprefix(_OWN): cast(accounts.OwnState, values[name]) for name in mine}
        copies = values.get("param_groups", ())
        saved = saved_by_parameter(copies, decisive.get("param_groups", 0), parameter)
        foreign = self._of_another_class(saved, strict)
        groups = self._restored_groups(
            {fqn: of for fqn, of in saved.items() if fqn not in foreign}, strict and bool(saved)
        )
        groups += empty_as_saved(copies, self._groups)
        entries: dict[str, object] = {}
        unexpected = []
        for name, value in {**created, **values}.items():
            if name in self._constants:
                expect_same_constants(name, self._constants[name], value)
            elif self._parameter_of(name) in foreign:
                unexpected.append(name)
            elif name != "param_groups" and not name.startswith(_OWN):
                entries[name] = value
        self._expect_one_value_each(entries)
        if strict and saved:
            self._expect_state_of_all({*self.tensors(), *self.values(), *created, *values} - {*absent})
        # The checkpoint holds all of a parameter's state: any other state is of a later step.
        spoken_of = saved.keys() - foreign
        owners = {name: self._parameter_of(name) for name in absent}
        gone = {name for name, owner in owners.items() if saved and (owner is None or owner in spoken_of)}

        def install() -> None:
            self._listed = None
            for name in gone:
                self._drop(name, gone)
            for name, value in entries.items():
                place = self._split(name)
                if place is not None:
                    owned = self._owned[place[0]]
                    owned.state[owned.parameter][_unquoted(place[1])] = (
                        value.within if isinstance(value, Part) else value
                    )
                else:
                    self._states[0][_unquoted(name.removeprefix(_GLOBAL))] = value
            put_into(groups)
            self._load_by_themselves(own, strict)

        missing = [name for name in absent if name not in gone]
        return Restored(install, missing, unexpected)

    def _load_by_themselves(self, own: Mapping[str, accounts.OwnState], strict: bool) -> None:
        """Does the rest of a load of a state dict, when state and groups are filled: own methods, then hooks."""
        holders = [held.holder for held in self._held]
        loaded: set[int] = set()  # those whose hooks ran in the load of one that wraps them
        every = (one for held in self._held for one in (*held.outer, held.optimizer, held.holder))
        for optimizer in dict.fromkeys(every):
            if id(optimizer) in loaded:
                continue
            if any(optimizer is level for level in self._levels) and accounts.loads_by_itself(optimizer):
                with accounts.loads_noticed(self._levels, loaded):
                    given = own.get(class_of(optimizer), [])
                    accounts.load_by_itself(optimizer, given, holders)
            if id(optimizer) not in loaded:
                for hook in accounts.hooks(optimizer, accounts.AFTER_LOADS):
                    hook(optimizer)
        for optimizer in filter(accounts.says_more, self._levels if strict else ()):
            said = (accounts.own_values(optimizer, holders, self.parameters.values()), own.get(class_of(optimizer), []))
            now, saved = ({".".join(map(str, path)): value for path, value in one} for one in said)
            if not equal(now, saved):
                raise Refused(
                    f"a {class_of(optimizer)} says {now} beside its state after the load, and {saved} in the checkpoint"
                )

    def _expect_one_value_each(self, entries: Mapping[str, object]) -> None:
        """Refuses values that differ for parameters of one flat parameter, which has one of each."""
        first: dict[Place, tuple[str, object]] = {}
        for name, value in entries.items():
            place = self._split(name)
            if place is None or isinstance(value, (torch.Tensor, Part)):
                continue
            _, parameter, _, part = self._owned[place[0]]
            if part is None or not part.length:
                continue
            other, its_value = first.setdefault((id(parameter), place[1]), (name, value))
            if not equal(its_value, value):
                raise Refused(
                    f"{name} is {value!r} and {other} is {its_value!r} in the checkpoint, and here both belong to one "
                    "flat parameter: load into a layout that keeps them apart"
                )

    def _expect_state_of_all(self, loaded: Collection[str]) -> None:
        """Refuses a checkpoint that has state for some parameters of a flat parameter, whose steps count as one."""
        names: dict[int, dict[str, str]] = {}  # by flat parameter a leaf, or none, of each of its parameters
        for fqn, owned in self._owned.items():
            if owned.part is not None and owned.part.length and not owned.is_empty:
                names.setdefault(id(owned.parameter), {})[fqn] = ""
        for name in sorted(loaded) if names else ():
            place = self._split(name)
            if place is not None and place[0] in names.get(id(self._owned[place[0]].parameter), {}):
                names[id(self._owned[place[0]].parameter)][place[0]] = name
        for of_one in names.values():
            without = next((fqn for fqn, name in of_one.items() if not name), None)
            found = next(filter(None, of_one.values()), None)
            if without is not None and found is not None:
                raise Refused(
                    f"the checkpoint has no state for {without!r}, which was not stepped, and it has {found}; here "
                    "both belong to one flat parameter, which is stepped as one: load into a layout that keeps them "
                    "apart, or with strict=False, which gives zeros and the others' counters to what was not stepped"
                )

    def _parameter_of(self, name: str) -> str | None:
        place = self._split(name)
        return None if place is None else place[0]

    def _drop(self, name: str, gone: Collection[str]) -> None:
        place = self._split(name)
        if place is None:
            for state in self._states:
                state.pop(_unquoted(name.removeprefix(_GLOBAL)), None)
            return
        state, owner, _, part = self._owned[place[0]]
        if part is not None and part.length:
            here = (fqn for fqn, owned in self._owned.items() if owned.parameter is owner and not owned.is_empty)
            if not all(f"state.{fqn}.{place[1]}" in gone for fqn in here):
                value = state[owner][_unquoted(place[1])]
                if isinstance(value, torch.Tensor) and value.ndim:  # of an element that never was stepped
                    value.detach()[part.start : part.start + part.tensor.numel()].zero_()
                return
        state[owner].pop(_unquoted(place[1].partition(".")[0]), None)  # of one that wraps others, all of it
        if not state[owner]:
            del state[owner]  # optimizers make the state of a parameter that has none

    def _expect_no_pre_hooks(self) -> None:
        for held in self._held:
            for optimizer in (*held.outer, held.optimizer):
                for hook in accounts.hooks(optimizer, accounts.BEFORE_LOADS):
                    raise Refused(
                        f"its hook {getattr(hook, '__qualname__', hook)!r} (register_load_state_dict_pre_hook) "
                        "needs the whole state dict, which no rank has: register a post-hook instead"
                    )

    def _of_another_class(self, saved: Mapping[str, dict[str, Any]], strict: bool) -> frozenset[str]:
        """The parameters with state that another class of optimizer saved, which this one cannot use.

        Classes of different names that have the same hyper-parameters are taken for one: ``Adam`` and ``AdamW``.
        """
        foreign: set[str] = set()
        for group, names, ours in zip(self._groups, self._group_names, self._classes, strict=True):
            for fqn in names:
                theirs = saved_class(saved.get(fqn, {}))
                if theirs in (None, ours) or hyperparameter_names(saved[fqn]) == hyperparameter_names(group):
                    continue
                if strict:
                    raise Refused(
                        f"unexpected: the state of {fqn!r} was saved by {theirs}, and here {ours} owns it, "
                        "another class of optimizer; strict=False leaves this optimizer as it is"
                    )
                foreign.add(fqn)
        return frozenset(foreign)

    def _restored_groups(
        self, of_parameter: Mapping[str, dict[str, Any]], strict: bool
    ) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """The groups of this rank with the hyper-parameters that their parameters were saved with."""
        out = []
        for group, names in zip(self._groups, self._group_names, strict=True):
            found = [(fqn, of_parameter[fqn]) for fqn in names if fqn in of_parameter]
            if strict and len(found) < len(names):
                unknown = next(fqn for fqn in names if fqn not in of_parameter)
                raise Refused(
                    f"no saved parameter group has {unknown!r}: strict=False leaves it as it is (a checkpoint of tied "
                    "weights names only the first of them)"
                )
            for fqn, saved in found[1:]:
                expect_same(found[0][1], saved, f"parameters {found[0][0]!r} and {fqn!r} of one group here were saved")
            if found:
                said = hyperparameters(found[0][1])
                for name, value in said.items():
                    now = group.get(name)
                    if isinstance(now, torch.Tensor):
                        expect_fill(now, value)
                out.append((group, said))
        return out


def _leaf(fqn: str, name: str) -> str:
    """The leaf of a state called ``name``, whose dots are not those before the parts of one that wraps others."""
    return f"state.{fqn}.{_quoted(name)}"


@functools.lru_cache(maxsize=1024)
def _quoted(name: str) -> str:
    return name.replace("%", "%25").replace(".", "%2E") if "." in name or "%" in name else name


def _unquoted(name: str) -> str:
    return name.replace("%2E", ".").replace("%25", "%") if "%" in name else name


_STEP = "A load fills such tensors, it makes none: step the optimizer once before the load, which replaces what it did"


def _no_wrapping(now: object) -> str:
    """Why a load cannot fill a part of a state that wraps others; ``now`` is that state here, if there is any."""
    if now is None:
        return f"it is part of a tensor that wraps others, and here there is no such state yet. {_STEP}"
    shape = f"of shape {tuple(now.shape)}" if isinstance(now, torch.Tensor) else f"a {type(now).__name__}"
    return (
        "it is part of a tensor that wraps others, such as quantised state, and here that state is "
        f"{'another' if wraps(now) else 'a plain'} one, {shape}: use the optimizer that saved it, and a layout that "
        "leaves shards as large as its quantisation needs"
    )


_OWN = "own."
_GLOBAL = "global."
_DEPTH_MAX = 3  # of containers in an attribute: some hold a list of optimizers for each part of a model


def _held(optimizer: Any, outer: tuple[Any, ...]) -> Iterator[_Held]:
    """The innermost optimizers: those in ``optimizer``, or itself.

    Raises:
        Refused: If a wrapping optimizer holds more than those inside.
    """
    # ZeRO stage 1 shards whole parameters: the inner optimizer has this rank's part.
    if _is_zero_redundancy(optimizer):
        yield _Held(outer, optimizer, optimizer.optim)
        return
    inside = _inside(optimizer)
    if not inside:
        yield _Held(outer, optimizer, optimizer)
        return
    if any(one is optimizer or any(one is other for other in outer) for one in inside):
        raise Refused(f"a {class_of(optimizer)} that holds itself: put the optimizer inside into the state instead")
    found = [held for one in inside for held in _held(one, (*outer, optimizer))]
    known = {id(p) for held in found for group in held.optimizer.param_groups for p in group["params"]}
    shared = any(optimizer.state is held.optimizer.state for held in found)
    is_more = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
    if is_more or (optimizer.state and not shared):
        what = f"owns a parameter of shape {tuple(is_more[0].shape)} that" if is_more else "has state of its own that"
        raise Refused(
            f"a {class_of(optimizer)} {what} the optimizers inside it ({', '.join(map(class_of, inside))}) do not "
            "have: put these optimizers into the state instead, and beside them what it holds itself"
        )
    yield from found


def _inside(optimizer: Any) -> list[Any]:
    """The optimizers that are attributes of ``optimizer``, or stand in containers that are.

    Raises:
        Refused: If something else there owns parameters, or holds a partition: what the wrapper shows of it is not all.
    """
    attributes = [value for name, value in vars(optimizer).items() if name not in accounts.LISTED]
    found = {id(item): item for value in attributes for item in _optimizers_in(value, _DEPTH_MAX)}
    return list(found.values())


def _optimizers_in(value: Any, depth: int) -> Iterator[Any]:
    if isinstance(value, weakref.ProxyTypes):
        return  # to what holds the wrapper, such as a trainer; it may be gone
    if isinstance(value, torch.optim.Optimizer):
        yield value
    elif isinstance(value, (dict, list, tuple, set, frozenset)):
        for item in (value.values() if isinstance(value, dict) else value) if depth else ():
            yield from _optimizers_in(item, depth - 1)
    else:
        expect_understood_owner(value)


def _owned_twice(fqn: str, holders: Sequence[Any], first: _Owned, second: Any) -> str:
    """Why two owners of a parameter cannot be saved as one."""
    one = next(holder for holder in holders if any(group is first.group for group in holder.param_groups))
    return (
        f"{fqn!r} belongs to two of its optimizers, a {class_of(one)} and a {class_of(second)}, whose states have "
        "one name: put each of these optimizers into the state itself, under a key of its own"
    )


def _is_zero_redundancy(optimizer: object) -> bool:
    module = sys.modules.get("torch.distributed.optim")
    kind = getattr(module, "ZeroRedundancyOptimizer", None)
    return kind is not None and isinstance(optimizer, kind)
