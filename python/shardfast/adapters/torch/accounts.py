"""Accounts of optimizers' state dicts: a save takes each entry, or says why it does not.

A save reads the state of the innermost optimizers and their groups. An optimizer may say more in its ``state_dict()``,
hold other objects that have state, and do more in ``load_state_dict()`` than to fill its state. All of that is either
what the save takes anyway, or plain values that the optimizer's own ``load_state_dict()`` takes back, or refused.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ...state.catalog import Refused
from .groups import equal
from .hooks import SAYING, is_dtensor
from .placement import is_strided, placements_of

OwnState = list[tuple[list[str | int], object]]
"""Plain values of a state dict, each with the keys and positions that lead to it."""

BEFORE_LOADS, AFTER_LOADS = "_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"

LISTED = ("param_groups", "state", "defaults")
"""Attributes of optimizers that are long, and of which it is known what is there."""

_CHANGING = (list, dict, set, bytearray)
"""Containers whose changes are seen wherever they stand."""

_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def class_of(value: object) -> str:
    """The module and name of its class."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def hooks(optimizer: Any, kind: str) -> list[Callable[..., object]]:
    """Its own hooks: wrappers that pass on what they do not have would name those of the optimizer inside."""
    return list(vars(optimizer).get(kind, {}).values())


def _has_own(optimizer: Any, method: str) -> bool:
    return method in vars(optimizer) or getattr(type(optimizer), method) is not getattr(torch.optim.Optimizer, method)


def says_more(optimizer: Any) -> bool:
    """Whether its state dict may be other than that of PyTorch: the state and the groups."""
    return _has_own(optimizer, "state_dict") or any(hooks(optimizer, kind) for kind in SAYING)


def loads_by_itself(optimizer: Any) -> bool:
    """Whether a load of a state dict may do more than to put its entries into the state and the groups."""
    own_setstate = not type(optimizer).__setstate__.__module__.startswith("torch.")
    return own_setstate or _has_own(optimizer, "load_state_dict")


def makes_state_by_shape(optimizer: Any) -> bool:
    """Whether its class may make other state for a parameter of another shape, such as factored moments of matrices."""
    return not _maker(optimizer).__module__.startswith("torch.") or makes_factors_whole(optimizer)


def makes_factors_whole(optimizer: Any) -> bool:
    """Whether state of another shape than its DTensor is made on each rank whole, as ``new_zeros()`` does."""
    return _maker(optimizer) is torch.optim.Adafactor


def _maker(optimizer: Any) -> type:
    """The class whose code makes its state."""
    makers = (kind for kind in type(optimizer).__mro__ if vars(kind).keys() & {"step", "_init_group"})
    return next(makers, torch.optim.Optimizer)


class Taken:
    """Tensors and values that a save takes of optimizers: entries of their state, groups and parameters."""

    def __init__(self, holders: Sequence[Any], parameters: Collection[Any]) -> None:
        self._groups = [group for holder in holders for group in holder.param_groups]
        self._entries: dict[int, Any] = {}
        self._tensors = {_memory(parameter) for parameter in parameters}
        self._of_tensor: dict[object, list[dict[Any, Any]]] = {}
        self._small: list[torch.Tensor] = []
        self._objects: set[object] = set()
        self._of_none: dict[object, list[object]] = {}
        for holder in holders:
            for key, entries in holder.state.items():
                for name, item in entries.items() if isinstance(key, torch.Tensor) else [(key, entries)]:
                    if not isinstance(item, (torch.Tensor, dict, list, tuple, *_PLAIN)):
                        self._objects.add(name)
                    for tensor in tensors_in(item):
                        self._tensors.add(_memory(tensor))
                        if not tensor.ndim:
                            self._small.append(tensor)
                        if isinstance(entries, dict):
                            self._of_tensor.setdefault(_memory(tensor), []).append(entries)
                if not isinstance(key, torch.Tensor):
                    self._of_none.setdefault(key, []).append(entries)
                if isinstance(entries, (dict, list, torch.Tensor)):  # equal plain values may be one object
                    self._entries[id(entries)] = entries

    def rest(self, said: object, path: tuple[Any, ...], of: str) -> Iterator[tuple[list[str | int], object]]:
        """The plain values of a state dict that a save does not take, with what leads there.

        Raises:
            Refused: If it has something else that a save does not take; ``of`` names whose state dict it is.
        """
        if id(said) in self._entries or (isinstance(said, (list, tuple)) and not said):
            return
        if path and path[-1] in self._objects:
            return  # an object of a class of its own in the state, which is saved as a value or refused by its name
        if isinstance(said, torch.Tensor):
            if _memory(said) not in self._tensors and not self._is_copy(said):
                raise Refused(_left_out(of, path, f"a tensor of shape {tuple(said.shape)}"))
        elif isinstance(said, Mapping):
            if self._has(said):
                return
            if "params" in said:
                raise Refused(_left_out(of, path, "a parameter group that is not one of its param_groups"))
            for key, value in said.items():
                if type(key) not in (str, int):
                    raise Refused(_left_out(of, path, f"the key {key!r}, no text or whole number"))
                yield from self.rest(value, (*path, key), of)
        elif _is_plain(said):
            is_taken = path[-2:-1] == ("state",) and any(equal(said, one) for one in self._of_none.get(path[-1], []))
            if not is_taken:
                yield list(path), said
        elif isinstance(said, (list, tuple)):
            for number, value in enumerate(said):
                yield from self.rest(value, (*path, number), of)
        else:
            raise Refused(_left_out(of, path, f"a {class_of(said)}"))

    def _is_copy(self, said: torch.Tensor) -> bool:
        """Whether it is a number, such as a count of steps, that the state has, too; each save looks again."""
        return not said.ndim and any(said.dtype == one.dtype and torch.equal(said, one) for one in self._small)

    def _has(self, said: Mapping[Any, Any]) -> bool:
        """Whether it is the state of a parameter, or a group, made anew."""
        if "params" in said:
            return any(_same(_without_params(said), _without_params(group)) for group in self._groups)
        tensor = next((value for value in said.values() if isinstance(value, torch.Tensor)), None)
        return tensor is not None and any(_same(said, one) for one in self._of_tensor.get(_memory(tensor), []))


def own_values(optimizer: Any, holders: Sequence[Any], parameters: Collection[Any]) -> OwnState:
    """Returns the rest of its state dict, which is not taken of these, for its own ``load_state_dict()``.

    Raises:
        Refused: If that is more than plain values, or nothing would take them back.
    """
    if not says_more(optimizer):
        return []
    said = _said(optimizer)
    if not isinstance(said, Mapping):
        raise Refused(f"the state_dict() of a {class_of(optimizer)} is a {type(said).__name__}, no dict")
    taken = Taken(holders, parameters)  # not before: some make the state of new optimizers when they are asked for it
    found = list(taken.rest(said, (), class_of(optimizer)))
    if found and not loads_by_itself(optimizer):
        path, value = found[0]
        raise Refused(_left_out(class_of(optimizer), path, f"{value!r}, which its load_state_dict() ignores"))
    return found


def expect_entries(holders: Sequence[Any]) -> None:
    """Refuses state that has no name: of tensors in no group, under keys that are no texts, or in no dict.

    Raises:
        Refused: Naming the class and the key.
    """
    for holder in holders:
        known = {id(parameter) for group in holder.param_groups for parameter in group["params"]}
        for key, entries in holder.state.items():
            if not isinstance(key, torch.Tensor):
                names: Collection[object] = (key,)
            elif entries == {}:
                continue  # made by asking for it
            elif id(key) not in known:
                raise Refused(
                    f"a {class_of(holder)} has state of a tensor of shape {tuple(key.shape)} that is in none of its "
                    "groups, so it has no name: keep that state under a text, or add the tensor to a group"
                )
            elif isinstance(entries, dict):
                names = entries
            else:
                raise Refused(
                    f"a {class_of(holder)} has a {type(entries).__name__} as the state of a parameter of shape "
                    f"{tuple(key.shape)}: expected a dict from names to its parts"
                )
            for odd in (name for name in names if type(name) is not str):
                raise Refused(
                    f"a {class_of(holder)} has state under {odd!r}, which is no text, and the names of a checkpoint "
                    f"are texts: keep it under {str(odd)!r}"
                )


def expect_whole(leaf: str, parameter: Any, value: object, *, is_part: bool) -> None:
    """Refuses tensors in a container whose parameter is sharded: which part of what they are, nothing says.

    Args:
        leaf: Its name.
        parameter: What the optimizer steps.
        value: The container.
        is_part: Whether ``parameter`` is a part of others.

    Raises:
        Refused: Naming the leaf.
    """
    found = list(tensors_in(value))
    placements = placements_of(parameter) if is_dtensor(parameter) else ()
    is_sharded = is_part or not all(placement.is_replicate() for placement in placements)
    if found and (is_sharded or any(map(is_dtensor, found))):
        raise Refused(
            f"{leaf} is a {type(value).__name__} that holds tensors, and its parameter is sharded: keep each tensor "
            "directly in state[parameter], under a name of its own, where it is sharded like the parameter"
        )


def expect_no_more(optimizer: Any, beside: Collection[int], names: Mapping[int, object], known: Sequence[Any]) -> None:
    """Refuses an optimizer that holds other objects with state, of which neither it nor the user's state tells.

    Args:
        optimizer: One of ``known``.
        beside: ``id`` of what stands in the user's state.
        names: Of the parameters in it, by ``id``.
        known: The optimizers that are accounted for.
    """
    for attribute, value in vars(optimizer).items():
        if attribute in LISTED:
            continue
        for hidden in _optimizers_below(value, 2):
            owned = {id(one) for group in hidden.param_groups for one in group["params"]}
            shares = any(id(one) in owned for group in optimizer.param_groups for one in group["params"])
            if _has_state(hidden) and shares and not any(hidden is one or _leads_to(hidden, one) for one in known):
                raise Refused(
                    f"a {class_of(optimizer)} holds a {class_of(hidden)} that steps the same parameters in an object "
                    f"that is its .{attribute}, where a save does not look: put that optimizer into the state instead"
                )
        for held in _stateful_in(value, 2):
            if id(held) in beside:
                continue
            if isinstance(held, nn.Module):
                is_known = all(id(parameter) in names for parameter in held.parameters())
            else:
                said = held.state_dict()
                is_known = not said or any(_same(said, one) for one in _values_of(_said(optimizer)))
            if not is_known:
                raise Refused(
                    f"a {class_of(optimizer)} holds a {class_of(held)} as .{attribute}, whose state its state_dict() "
                    "does not have: put that object itself into the state, too, under a key of its own"
                )


@contextlib.contextmanager
def loads_noticed(optimizers: Sequence[Any], loaded: set[int]) -> Iterator[None]:
    """Adds the ``id`` of those to ``loaded`` of which PyTorch's own ``load_state_dict()`` runs meanwhile."""
    handles = [
        one.register_load_state_dict_post_hook(lambda optimizer: loaded.add(id(optimizer)))
        for one in optimizers
        if AFTER_LOADS in vars(one)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def load_by_itself(optimizer: Any, given: OwnState, holders: Sequence[Any]) -> None:
    """Has ``load_state_dict()`` take what the optimizer itself says now, with ``given`` in its places.

    Its state and its groups are filled already, and stay what was loaded: PyTorch's own method casts state to the type
    of a parameter, and others may put their own values over it.

    Raises:
        Refused: If the method does not take something.
    """
    of = class_of(optimizer)
    before = [
        (holder, at, value)
        for holder in holders
        for key, entries in holder.state.items()
        for at, value in (
            [((key, name), value) for name, value in entries.items()]
            if isinstance(key, torch.Tensor)
            else [((key,), entries)]
        )
    ]
    groups = [[dict(group) for group in holder.param_groups] for holder in holders]
    said = _said(optimizer)
    for path, value in given:
        _put(said, path, value, of)
    try:
        optimizer.load_state_dict(said)
    except Exception as error:
        raise Refused(f"the load_state_dict() of a {of} raised {type(error).__name__}: {error}") from error
    for holder, at, value in before:
        now = _get(holder.state, at)
        if now is not value and not equal(now, value):
            (holder.state if len(at) == 1 else holder.state[at[0]])[at[-1]] = value
    for holder, filled in zip(holders, groups, strict=True):
        for group, values in zip(holder.param_groups, filled, strict=True):
            for name, value in values.items():
                if name != "params" and (name not in group or not equal(group[name], value)):
                    group[name] = value
    of_none = {(id(holder), at[0]) for holder, at, _ in before if len(at) == 1}
    for holder in holders:
        # What the optimizer says in the place of its state, PyTorch's own method takes for state.
        for key in [key for key in holder.state if not isinstance(key, torch.Tensor)]:
            if (id(holder), key) not in of_none:
                del holder.state[key]
    now = _said(optimizer) if given else {}
    for path, value in given:
        if not equal(_get(now, path), value):
            raise Refused(
                f"the load_state_dict() of a {of} does not take {_shown(path)}: it is {_get(now, path)!r} afterwards, "
                f"and {value!r} in the checkpoint"
            )


def _is_plain(said: object) -> bool:
    """Whether it is a plain value, or a list or tuple of such."""
    return all(map(_is_plain, said)) if isinstance(said, (list, tuple)) else isinstance(said, _PLAIN)


def _said(optimizer: Any) -> Any:
    try:
        return optimizer.state_dict()
    except Exception as error:
        raise Refused(f"the state_dict() of a {class_of(optimizer)} raised {type(error).__name__}: {error}") from error


def _left_out(of: str, path: Sequence[Any], what: str) -> str:
    return (
        f"the state_dict() of a {of} has {what}{f' under {_shown(path)}' if path else ''}, and it is not in the state "
        "of its parameters or in its groups, so a save would leave it out: keep it in state[parameter] under a text, "
        "or out of the state dict and in the state under a key of its own"
    )


def _shown(path: Sequence[Any]) -> str:
    return ".".join(map(str, path))


def _memory(tensor: torch.Tensor) -> object:
    """Equal for tensors of the same elements in the same memory."""
    inner = _plain(tensor)
    if inner is None:
        return id(getattr(tensor, "_local_tensor", tensor) if is_dtensor(tensor) else tensor)
    return inner.data_ptr(), inner.dtype, inner.shape, inner.stride()


def _plain(tensor: torch.Tensor) -> torch.Tensor | None:
    """The plain tensor with its elements here, if there is one."""
    inner = getattr(tensor, "_local_tensor", tensor) if is_dtensor(tensor) else tensor
    return None if type(inner) not in (torch.Tensor, nn.Parameter) or inner.is_meta else inner


def expect_apart(optimizer: Any) -> None:
    """Refuses tensors of its state that share a part of their memory: a load makes one of each, which share none.

    One that stands there several times is left: it comes back as one. A list or dict that does would not.

    Raises:
        Refused: Naming the class and both.
    """
    if not _may_share(optimizer):
        return
    spans: list[_Span] = []
    groups = (entry for group in optimizer.param_groups for entry in group.items() if entry[0] != "params")
    containers: dict[int, object] = {id(value): name for name, value in groups if isinstance(value, _CHANGING)}
    for key, entries in optimizer.state.items():
        of_parameter = isinstance(key, torch.Tensor) and isinstance(entries, dict)
        for name, value in entries.items() if of_parameter else [(key, entries)]:
            place = id(key), name
            if isinstance(value, _CHANGING) and containers.setdefault(id(value), place) != place:
                raise Refused(
                    f"a {class_of(optimizer)} has {name!r} in its state, a {type(value).__name__} that stands "
                    "elsewhere in its state or groups, too, and a load would make two of it: keep it in one place"
                )
            is_entry = isinstance(value, torch.Tensor) and type(key).__name__ != "FlatParameter"
            for outer in (value,) if isinstance(value, torch.Tensor) else tensors_in(value):
                tensor = outer if type(outer) is torch.Tensor else _plain(outer)
                start = tensor.data_ptr() if tensor is not None and tensor.layout is torch.strided else 0
                if start and tensor is not None:  # what has no elements begins at 0
                    spans.append(_Span(start, start + _span(tensor), name, tensor, is_entry))
    spans.sort(key=operator.itemgetter(0))
    if all(before.stop <= behind.start for before, behind in itertools.pairwise(spans)):
        return
    open_: list[_Span] = []
    for span in spans:
        open_ = [one for one in open_ if one.stop > span.start]
        for one in open_:
            is_one = _memory(one.tensor) == _memory(span.tensor)
            if not (one.is_entry and span.is_entry) if is_one else _share(one.tensor, span.tensor):
                raise Refused(
                    f"a {class_of(optimizer)} has {one.name!r} and {span.name!r} in its state, which share memory, and "
                    "a load would make two tensors of their own: keep one of them, and make views of it in each step"
                )
        open_.append(span)


def _may_share(optimizer: Any) -> bool:
    """Whether anything in its state may share memory: most hold contiguous tensors that lie apart, and numbers."""
    spans: list[tuple[int, int]] = []
    for entries in optimizer.state.values():
        for value in entries.values() if isinstance(entries, dict) else (entries,):
            if type(value) is torch.Tensor and value.layout is torch.strided and value.is_contiguous():
                start = value.data_ptr()
                spans.append((start, start + value.nbytes))
            elif not isinstance(value, (int, float, str, type(None))):
                return True
    spans.sort()
    return any(stop > start for (_, stop), (start, _) in itertools.pairwise(spans))


class _Span(NamedTuple):
    """Memory of a tensor in an optimizer's state.

    Attributes:
        start: Address of its first element.
        stop: The end of its last one.
        name: Of the entry of the state.
        tensor: Itself.
        is_entry: Whether it is the entry of a parameter, not in a list there or of a flat one: a load may make it one
            with another.
    """

    start: int
    stop: int
    name: object
    tensor: torch.Tensor
    is_entry: bool


def expect_where_parameters_are(optimizer: Any) -> None:
    """Refuses state that says that it lies otherwise than its parameter, which FSDP2 cut below tensor parallelism.

    In PyTorch 2.7 an operation with ``out=``, such as Adam's with ``amsgrad=True``, writes ``Shard`` for
    ``_StridedShard`` into its result, whose elements stay where the parameter's are.

    Raises:
        Refused: Naming the class and the state.
    """
    for parameter, entries in optimizer.state.items():
        if not is_dtensor(parameter) or not any(map(is_strided, parameter.placements)):
            continue
        for name, value in entries.items() if isinstance(entries, dict) else ():
            if not is_dtensor(value) or value.shape != parameter.shape or value.device_mesh != parameter.device_mesh:
                continue
            both = zip(parameter.placements, value.placements, strict=True)
            plain = torch.distributed.tensor.Shard
            if any(is_strided(one) and type(other) is plain and other.dim == one.dim for one, other in both):
                raise Refused(
                    f"a {class_of(optimizer)} has {name!r} in its state, which says {value.placements!r} and is of a "
                    f"parameter in {parameter.placements!r}: PyTorch {torch.__version__} has lost where its elements "
                    "are, as 2.7 does for Adam with amsgrad=True: use a newer PyTorch, or an optimizer without it"
                )


def _span(tensor: torch.Tensor) -> int:
    """Bytes from its first element to the end of its last one."""
    if tensor.is_contiguous():
        return tensor.nbytes
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (sum((length - 1) * stride for length, stride in steps) + 1) * tensor.element_size()


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors whose spans meet, the first of which begins first, have elements in common."""
    item = one.element_size()
    first, odd = divmod(other.data_ptr() - one.data_ptr(), item)
    if odd or other.element_size() != item or (one.is_contiguous() and other.is_contiguous()):
        return True
    taken = torch.zeros(max(_span(one), first * item + _span(other)) // item, dtype=torch.bool)
    taken.as_strided(one.shape, one.stride(), 0).fill_(True)
    return bool(taken.as_strided(other.shape, other.stride(), first).any())


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yields the value if it is a tensor, or the tensors in containers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def _same(one: object, other: object) -> bool:
    """Whether two state dicts, or parts of them, hold the same tensors and equal plain values."""
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return _memory(one) == _memory(other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return isinstance(one, _PLAIN) and equal(one, other)


def _without_params(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _stateful_in(value: Any, depth: int) -> Iterator[Any]:
    """Objects with a state dict that are no optimizers, in containers, too."""
    if isinstance(value, (weakref.ProxyTypes, type, torch.Tensor, torch.optim.Optimizer)):
        return
    if isinstance(value, (dict, list, tuple, set, frozenset)):
        for item in (value.values() if isinstance(value, dict) else value) if depth else ():
            yield from _stateful_in(item, depth - 1)
    elif all(callable(getattr(type(value), name, None)) for name in ("state_dict", "load_state_dict")):
        yield value


def _optimizers_below(value: Any, depth: int) -> Iterator[Any]:
    """Optimizers in attributes of objects, which are in containers, too."""
    if isinstance(value, (weakref.ProxyTypes, type, torch.Tensor, nn.Module, torch.optim.Optimizer)):
        return
    if isinstance(value, (dict, list, tuple, set, frozenset)):
        for item in (value.values() if isinstance(value, dict) else value) if depth else ():
            yield from _optimizers_below(item, depth - 1)
    elif not callable(value):
        for item in list(getattr(value, "__dict__", {}).values()) if depth else ():
            if isinstance(item, torch.optim.Optimizer):
                yield item
            else:
                yield from _optimizers_below(item, depth - 1)


def _has_state(optimizer: Any) -> bool:
    """Whether it, or an optimizer that it holds, in an object, too, has state."""
    found = [optimizer]
    for one in found:  # which grows meanwhile
        attributes = [value for name, value in vars(one).items() if name not in LISTED]
        below = [*_held_by(one), *_optimizers_below(attributes, 3)]
        found += [held for held in below if not any(held is other for other in found)]
    return any(one.state for one in found)


def _leads_to(outer: Any, optimizer: Any) -> bool:
    """Whether an optimizer holds another one, in a container, too."""
    return any(held is optimizer for held in _held_by(outer))


def _held_by(optimizer: Any) -> Iterator[Any]:
    """The optimizers that are its attributes, or stand in containers that are."""
    for name, value in vars(optimizer).items():
        if name not in LISTED:
            yield from _optimizers_in(value, 3)


def _optimizers_in(value: Any, depth: int) -> Iterator[Any]:
    if isinstance(value, torch.optim.Optimizer) and not isinstance(value, weakref.ProxyTypes):
        yield value
    elif depth and isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _optimizers_in(item, depth - 1)


def _values_of(said: object) -> Iterator[object]:
    yield said
    for value in said.values() if isinstance(said, Mapping) else said if isinstance(said, (list, tuple)) else ():
        yield from _values_of(value)


def _put(said: Any, path: Sequence[str | int], value: object, of: str) -> None:
    *before, last = path
    within = _get(said, before)
    if isinstance(within, dict) or (isinstance(within, list) and isinstance(last, int) and last < len(within)):
        within[last] = value  # type: ignore[index]  # a list has a whole number here
        return
    raise Refused(f"the state_dict() of a {of} has no place for {_shown(path)}, which the checkpoint has")


def _get(said: Any, path: Sequence[Any]) -> Any:
    for key in path:
        try:
            said = said[key]
        except (LookupError, TypeError):
            return None
    return said
