"""Units of work of a data loader, dealt out to another number of pieces.

A *piece* is one reader's part of the data: that of a data rank, or of one of its workers. A *unit* belongs to exactly
one piece: a source with its offset, a buffered sample, a partly filled token buffer. Units keep their order, and
weights are whole numbers, so that sums of them are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .catalog import Refused

REPLICATED, UNITS, OWN = "replicated", "units", "own"
"""The keys of a state with units. ``"own"``, which it may lack, comes back under an equal number of pieces only."""

LOADER = "shardfast_loader"
"""A key in the state of a data loader, or in what its pieces share: the name of its class."""

_KEYS = {REPLICATED, UNITS}


class Share(NamedTuple):
    """Share of a piece in a unit.

    Attributes:
        unit: The unit's number, of all pieces' units in their order.
        part: Which part of it.
        parts: Into how many parts it is split; 1 if it is not.
    """

    unit: int
    part: int
    parts: int


def has_units(state: object) -> bool:
    """Whether a state says its units: ``{"replicated": …, "units": […]}``.

    Raises:
        Refused: It has these keys and is of another form.
    """
    if not isinstance(state, Mapping) or UNITS not in state:
        return False
    if set(state) - {OWN} != _KEYS or not isinstance(state[UNITS], list):
        others = sorted(map(str, set(state) - _KEYS - {OWN}))
        found = f"{type(state[UNITS]).__name__} as units, and {others or 'no other key'}"
        lacks = "" if REPLICATED in state else ': it lacks "replicated", which is {} if pieces share nothing'
        raise Refused(f'a state with "units": expected {{"replicated": …, "units": [...]}}, found a {found}{lacks}')
    return True


def loader_of(state: object) -> str | None:
    """The name of the class of the data loader whose state it is; ``None`` for other states."""
    named = (
        [of for of in (state, state.get(REPLICATED)) if isinstance(of, Mapping)] if isinstance(state, Mapping) else []
    )
    return next((of[LOADER] for of in named if LOADER in of), None)


def expect_no_loader(state: object) -> None:
    """Refuses the state of a data loader, for an object that is none.

    Raises:
        Refused: It is one.
    """
    loader = loader_of(state)
    if loader is not None:
        raise Refused(
            f"it was saved from a {loader}: load it into a {loader} over this object, or save the object itself"
        )


def expect_units(state: object) -> None:
    """Refuses a state whose units cannot be dealt out later.

    Raises:
        Refused: As :func:`has_units`, :func:`weight_of` and :func:`expect_apart`.
    """
    if has_units(state):
        units = state[UNITS]  # type: ignore[index]
        for unit in units:
            weight_of(unit)
        expect_apart([id_of(unit) for unit in units])


def id_of(unit: object) -> object:
    """A unit's id; ``None`` if it says none."""
    return unit.get("id") if isinstance(unit, Mapping) else None


def weight_of(unit: object) -> int:
    """A unit's weight; 1 if it says none.

    Raises:
        Refused: It is no whole number from 0 on.
    """
    weight = unit.get("weight", 1) if isinstance(unit, Mapping) else 1
    if isinstance(weight, bool) or not isinstance(weight, int) or weight < 0:
        raise Refused(f"a unit's weight is {weight!r}: expected a whole number from 0 on")
    return weight


def expect_apart(ids: Sequence[object]) -> None:
    """Refuses two units of one id. ``None`` is no id.

    Raises:
        Refused: Naming the first that is there twice.
    """
    seen: dict[str, int] = {}
    for number, one in enumerate(map(repr, ids)):  # an id is any value, which may have no hash
        if one == "None":
            continue
        other = seen.setdefault(one, number)
        if other != number:
            raise Refused(f"units {other} and {number} have one id, {one}: each sample would come twice")


def dealt(weights: Sequence[int], count: int, *, splits: bool) -> list[list[Share]]:
    """Which units, or parts of units, each of ``count`` pieces gets.

    In order and evenly by weight: a piece's sum differs from the mean by less than the heaviest unit on either side.
    Units are split only where there are fewer than pieces.

    Args:
        weights: Of all units, in their order.
        count: Number of pieces.
        splits: Whether units can be split.

    Returns:
        By piece its shares, in order. Each part of each unit is in exactly one.
    """
    if splits and 0 < len(weights) < count:
        parts = _parts(weights, count)
        shares = [Share(unit, part, of) for unit, of in enumerate(parts) for part in range(of)]
        return [[share] for share in shares] + [[] for _ in range(count - len(shares))]
    total, before = sum(weights), 0
    found: list[list[Share]] = [[] for _ in range(count)]
    for unit, weight in enumerate(weights):
        # Where the unit's middle lies; units without weight are spread by their number.
        middle, whole = (2 * before + weight, 2 * total) if total else (2 * unit + 1, 2 * len(weights))
        found[min(count - 1, middle * count // whole)].append(Share(unit, 0, 1))
        before += weight
    return found


def _parts(weights: Sequence[int], count: int) -> list[int]:
    """Into how many parts each unit is split, so that there are ``count`` of them; each unit into at least one.

    The next part goes to the unit whose parts are heaviest.
    """
    parts = [1] * len(weights)
    for _ in range(count - len(weights)):
        # Compared by cross products, in whole numbers.
        heaviest = 0
        for unit in range(1, len(weights)):
            if weights[unit] * parts[heaviest] > weights[heaviest] * parts[unit]:
                heaviest = unit
        if weights[heaviest] <= parts[heaviest]:
            break  # nothing is left to split
        parts[heaviest] += 1
    return parts


def split(unit: object, parts: int, by: Callable[[Any, int], Sequence[Any]]) -> list[object]:
    """The parts of a unit, as its dataset makes them.

    Raises:
        Refused: There are more than were asked for, two have one id, or their weights have another sum.
    """
    made = list(by(unit, parts))
    weight, found = weight_of(unit), sum(map(weight_of, made))
    if len(made) > parts:
        raise Refused(f"split(unit, {parts}) made {len(made)} units: expected at most as many as were asked for")
    if weight != found:
        raise Refused(f"split(unit, {parts}) made units of weight {found} of one of weight {weight}: samples change")
    try:
        expect_apart([id_of(part) for part in made])
    except Refused as refused:
        raise Refused(f"split(unit, {parts}): of the parts, {refused}: give each an id of its own") from refused
    return made


def taken(
    shares: Sequence[Share],
    given: Sequence[object],
    by: Callable[[Any, int], Sequence[Any]] | None,
    note: Callable[[int, list[object]], None] = lambda unit, parts: None,
) -> list[object]:
    """The units of a piece: those ``given`` for its shares, or the parts of them that it gets.

    Args:
        shares: What it gets.
        given: By share the unit.
        by: Splits a unit.
        note: Called with the number of a unit that was split, and all of its parts.

    Raises:
        Refused: As :func:`split`.
    """
    found: list[object] = []
    for share, unit in zip(shares, given, strict=True):
        if share.parts == 1 or by is None:
            found.append(unit)
        else:
            parts = split(unit, share.parts, by)
            note(share.unit, parts)
            found += parts[share.part : share.part + 1]
    return found
