"""Optimizers that step copies of a model's parameters, or runs of them, as mixed precision and ZeRO do.

What PyTorch's optimizer inside steps is said as parts of the whole parameters. Beside its state,
``state.<FQN>.master`` is the copy in fp32 of a 16-bit parameter.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch

from ...state.catalog import Compared, Flat, Inside, Ints, NamedPart, Outline, Part, Refused, Region, Restored
from ...state.padding import differ_by_padding
from . import accounts
from .groups import equal, groups_value
from .hooks import MEMBER, Place, announces_steps, outline_of_optimizers
from .optimizers import Optimizers
from .wrapped import constants_of

MASTER = "master"
_SCALER = "loss_scaler"


class Run(NamedTuple):
    """Elements of a model's parameter that an optimizer of PyTorch steps: a run of them, or all.

    Attributes:
        fqn: The parameter's name.
        model: The parameter.
        part: Its elements in the whole parameter; within what is stepped.
        there: The same run of the parameter's own elements.
    """

    fqn: str
    model: torch.Tensor
    part: Part
    there: torch.Tensor


def regions_of_run(regions: Sequence[Region | Flat], start: int, stop: int) -> tuple[Region | Flat, ...]:
    """Elements ``[start, stop)`` of those regions, one behind the other, as regions."""
    at, found = 0, list[Region | Flat]()
    for region in regions:
        size = region.stop - region.start if isinstance(region, Flat) else math.prod(region.lengths)
        first, last = max(start - at, 0), min(stop - at, size)
        if first < last and last - first == size:
            found.append(region)
        elif first < last:
            before, box = (region.start, region.box) if isinstance(region, Flat) else (0, region)
            found.append(Flat(before + first, before + last, box))
        at += size
    return tuple(found)


_PIECE = "\0"
"""Between a name and a number in the names by which the pieces of one parameter are told apart inside."""


def _outside(name: str) -> str:
    """The name in a checkpoint of what is called ``name`` inside."""
    head, piece, tail = name.partition(_PIECE)
    return head + tail.partition(".")[1] + tail.partition(".")[2] if piece else name


class MasterOptimizers(Optimizers):
    """Optimizers of PyTorch that step runs of parameters, of which several can be pieces of one, such as experts.

    Args:
        optimizers: Those of PyTorch.
        runs: What they step.
        scaled: What has a loss scaler.
        beside: See :class:`~.optimizers.Optimizers`.
        copied: By FQN the parameters of this rank with a copy in fp32 on some rank, which may be another one.
        models: The parameters of this rank that some rank steps.
    """

    _of_the_layout: Sequence[str] = ()
    """What a framework notes in groups of how it laid them out, beside hyper-parameters."""

    _from_the_model = ""
    """How a user does so: the end of a sentence."""

    def __init__(
        self,
        optimizers: Sequence[Any],
        runs: Iterable[Run],
        scaled: Sequence[Any],
        beside: Collection[int] = (),
        copied: Mapping[str, Any] = {},
        models: Iterable[torch.Tensor] = (),
    ) -> None:
        self._models = list(models)
        self._masters: dict[str, Part] = {}
        self._copied = copied
        self._runs: list[Run] = []
        self._scaled = scaled
        inside: dict[int, list[NamedPart]] = {}
        parameters: dict[str, torch.Tensor] = {}
        for run in runs:
            name, stepped = run.fqn, run.part.within
            for number in itertools.count(1):
                if name not in parameters:
                    break
                name = f"{run.fqn}{_PIECE}{number}"
            inside.setdefault(id(stepped), []).append((name, run.part))
            parameters[name] = run.model
            if stepped.dtype is not run.there.dtype:
                self._masters[name] = run.part
                self._runs.append(run)
        self._pieces: dict[str, list[str]] = {}
        for name in parameters:
            self._pieces.setdefault(_outside(name), []).append(name)
        for stepped in (member for one in optimizers for group in one.param_groups for member in group["params"]):
            if id(stepped) not in inside:
                raise Refused(f"its records name no parameter of which it steps a run of shape {tuple(stepped.shape)}")
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
        self.parameters = parameters

    @staticmethod
    def _scaler(one: Any) -> Any:
        """The loss scaler of one of those that have one, with a ``state_dict()``."""
        raise NotImplementedError

    def _lists(self) -> Sequence[tuple[Any, str]]:
        """Objects and their attributes that list what is stepped and stands in no group between steps."""
        return ()

    def _list(self) -> Iterator[tuple[str, object, Place]]:
        yield from super()._list()
        for name, run in self._masters.items():
            yield f"state.{name}.{MASTER}", run, (id(run.within), MEMBER)

    def _part(self, leaf: str, part: Part, value: torch.Tensor, place: Place) -> torch.Tensor | Part:
        several = self._counters.get(id(value))
        if several is not None:
            whole = (Region((), ()),)
            found = Part(value, (), whole, holders=part.sharers, within=value, several=several, name=_outside(leaf))
            return dataclasses.replace(found, elsewhere=part.elsewhere)
        found_or_plain = super()._part(leaf, part, value, place)
        if not part.elsewhere:
            return found_or_plain
        if isinstance(found_or_plain, Part):
            return dataclasses.replace(found_or_plain, elsewhere=True)
        return Part(value, (), (Region((), ()),), within=value, elsewhere=True)

    def announce(self, notice: Callable[[str], None]) -> Sequence[torch.Tensor]:
        announced = super().announce(notice)
        if not all(map(announces_steps, self._levels)):
            return announced
        # What other ranks step is gathered behind this rank's own steps.
        has_steps = all(any(group["params"] for group in held.holder.param_groups) for held in self._held)
        return [*announced, *(self._models if has_steps else self.parameters.values())]

    def outline(self) -> Outline | None:
        if any(held.outer for held in self._held) or any(map(accounts.says_more, self._levels)):
            return None
        placed: dict[str, list[tuple[Place, Any, Inside | None]]] = {}
        values: dict[str, Place] = {}
        for name, value, place in self._entries():
            if isinstance(value, Part) and value.elsewhere:
                continue
            if isinstance(value, (torch.Tensor, Part)):
                placed.setdefault(_outside(name), []).append((place, value, self._inside.get(name)))
            else:
                values[name] = place
        tensors = list(itertools.chain.from_iterable(placed.values()))
        groups = functools.partial(groups_value, names=self._group_names, classes=self._classes)
        optimizers = [(held.optimizer, held.holder) for held in self._held]
        constants = dict.fromkeys(self._constants, constants_of)
        found = outline_of_optimizers(
            optimizers, tensors, values, constants, groups, with_members=True, lists=self._lists()
        )
        if found is None:
            return None
        of, weak = found.values, [weakref.ref(one) for one in self._scaled]
        as_saved = functools.partial(_as_saved, of_the_layout=self._of_the_layout, scaler=type(self)._scaler)

        def values_of(entries: Sequence[Any]) -> Mapping[str, object]:
            live: list[Any] = [one() for one in weak]
            return as_saved(of(entries), scaled=live)

        return dataclasses.replace(found, values=values_of)

    def masters(self) -> Mapping[str, Any]:
        return self._copied

    def tensors(self) -> Mapping[str, torch.Tensor | Part]:
        pieces: dict[str, list[torch.Tensor | Part]] = {}
        for name, value in super().tensors().items():
            of = pieces.setdefault(_outside(name), [])
            if of and not (isinstance(value, Part) or isinstance(of[0], Part) or torch.equal(of[0], value)):
                raise Refused(f"{_outside(name)} is {of[0]} for one tensor of the parameter and {value} for another")
            of.append(value)
        return {name: _joined(name, of) for name, of in pieces.items()}

    def values(self) -> Mapping[str, object]:
        found = super().values()
        return _as_saved(found, scaled=self._scaled, of_the_layout=self._of_the_layout, scaler=self._scaler)

    def accepts(self, name: str, *, is_master: bool = False) -> bool:
        if name == _SCALER:
            return bool(self._scaled)
        pieces = self._bare(name)
        # A parameter that is stepped itself has no place for a copy that is more exact.
        if _is_master(name) and not self._masters.keys() & pieces:
            return False
        # Of a parameter in several tensors this rank may have elements in any of them.
        return (
            any(not self._owned[piece].is_empty for piece in pieces)
            if pieces
            else super().accepts(name, is_master=is_master)
        )

    def drops(self, name: str) -> bool:
        return name != _SCALER and not _is_master(name) and super().drops(name)

    def _bare(self, name: str) -> set[str]:
        """Returns the names of a leaf's parameter inside."""
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
        """Returns a leaf's names inside, one for each of its pieces."""
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
        filled: Collection[str] = (),
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
        if "param_groups" in values:
            self._expect_masters()

        def install() -> None:
            restored.install()
            if not isinstance(scaler, dict):
                return
            for own in map(self._scaler, self._scaled):
                # Another kind of scaler may have noted less.
                own.load_state_dict(
                    {name: _like(now, scaler[name]) for name, now in own.state_dict().items() if name in scaler}
                )

        missing, unexpected = (
            list(dict.fromkeys(map(_outside, names))) for names in (restored.missing, restored.unexpected)
        )
        return Restored(install, missing, unexpected)

    def _expect_masters(self) -> None:
        """Refuses a copy in fp32 that is not, rounded, what the model has."""
        for run in self._runs:
            if not is_rounded(run.part.tensor, run.there):
                raise Refused(
                    f"state.{run.fqn}.{MASTER} and the model's {run.fqn!r} are of different steps after the load: load "
                    f"both from one checkpoint that has both, or go on from the model alone{self._from_the_model}"
                )


def _as_saved(
    values: Mapping[str, object],
    *,
    scaled: Sequence[Any],
    of_the_layout: Sequence[str],
    scaler: Callable[[Any], Any],
) -> Mapping[str, object]:
    """The values by their names in a checkpoint, with those of loss scalers."""
    out: dict[str, object] = {}
    for name, value in values.items():
        other = out.setdefault(_outside(name), value)
        if not equal(other, value):
            raise Refused(f"{_outside(name)} is {other!r} for one of its tensors and {value!r} for another")
    for group in cast("list[dict[str, object]]", out["param_groups"]):
        for name in of_the_layout:
            group.pop(name, None)
    for one in scaled:
        # Where several have one, all see the same gradients.
        said = {name: _plain(value) for name, value in scaler(one).state_dict().items()}
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


def is_rounded(copy: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a copy in fp32, rounded, is what a model has; no number is one."""
    one, other = copy.reshape(-1).to(weight.dtype), weight.reshape(-1)
    if torch.equal(one.view(torch.int16), other.view(torch.int16)):
        return True
    return bool(((one == other) | (one.isnan() & other.isnan())).all())
