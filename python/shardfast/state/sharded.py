"""Loads values in pieces: each its own under an equal count, units dealt out again under another one.

A piece is the leaf ``NAME.piece.INDEX``. What is dealt out is read before anything else of a load: first the values of
all pieces, whose large tensors lie apart, then those tensors that this rank's units have.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from .. import native
from ..errors import Corrupt, Error, Invalid
from ..native import Tagged
from . import units
from .catalog import Adapter, Refused, SavedAlias, SavedLeaf, SavedObject, SavedTensor
from .entries import PIECE, Entry, ShardedEntry, ValueEntry, Walked
from .load_plan import Options
from .units import REPLICATED, UNITS
from .values import Lowering, Raising, capture, decode, raise_value, reason
from .wants import Want

Alone = Callable[[Callable[[], Any]], Any]


class Made(NamedTuple):
    """Value that a load gives to a piece that was saved as others.

    Attributes:
        entry: The piece.
        leaves: The numbers of the saved leaves from which it is made.
        value: What it gets.
    """

    entry: ShardedEntry
    leaves: Sequence[int]
    value: object = None


@dataclass
class Pieces:
    """The values in pieces of a load.

    Attributes:
        walked: The state, with its own pieces under their saved names.
        options: The options of the load; a value in pieces that ``only`` names means all of its pieces.
        made: Those that were saved in other pieces.
        problems: What prevents the load, the same on every rank.
        otherwise: The numbers of the leaves of values that are pieces in the checkpoint and none here, or the reverse.
        traffic: What each read moved that was made for them.
    """

    walked: Walked
    options: Options
    made: list[Made] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    otherwise: list[int] = field(default_factory=list)
    traffic: list[Mapping[str, int]] = field(default_factory=list)


@dataclass
class _Dealt:
    """A piece to make from those that were saved.

    Attributes:
        entry: It.
        pieces: The saved ones, by number.
        below: The numbers of the tensors inside of them.
        lowered: The saved values, lowered.
        shares: What it gets of their units, in order; ``None`` for all of them, as ``reshard`` takes them.
        split: A line for each unit that was split here: its name, its number, and of its parts a digest and the ids.
        ids: The ids of all saved units, in their order.
    """

    entry: ShardedEntry
    pieces: list[SavedObject]
    below: list[int]
    lowered: list[Any] = field(default_factory=list)
    shares: list[units.Share] | None = None
    split: list[str] = field(default_factory=list)
    ids: list[str | None] = field(default_factory=list)

    @property
    def full(self) -> str:
        return f"{self.entry.key}/{self.entry.name}"

    def wanted(self) -> Any:
        """The lowered value, or values, that this rank makes."""
        if self.shares is None:
            return self.lowered
        every = [unit for state in self.lowered for unit in state[UNITS]]
        return {REPLICATED: self.lowered[0][REPLICATED], UNITS: [every[share.unit] for share in self.shares]}

    def made(self, value: Any, adapters: Sequence[Adapter]) -> object:
        """The piece's state, from what :meth:`wanted` became."""
        sharded, place = self.entry.sharded, self.entry.place

        def note(unit: int, parts: list[object]) -> None:
            encoded = capture(parts, Lowering(place, adapters, pickle=True)).encoded()
            lowered: Any = decode(encoded, place)
            ids = [_said_id(part) for part in lowered]
            self.split.append(json.dumps([self.full, unit, hashlib.sha256(encoded).hexdigest(), ids]))

        try:
            if self.shares is None:
                states = sharded.reshard(value, sharded.count)  # type: ignore[misc]
                kinds = [type(one).__name__ for one in states] if isinstance(states, (list, tuple)) else []
                if not kinds or any(map(callable, states)):
                    made = f"{type(states).__name__} of {', '.join(kinds[:8]) or 'no state'}"
                    raise Refused(f"reshard() made a {made}: expected a list of states, one for each piece")
                if len(states) != sharded.count:
                    raise Refused(f"reshard() made {len(states)} states, expected {sharded.count}, one for each piece")
                return states[sharded.index]
            found = units.taken(self.shares, value[UNITS], self.entry.split, note)
        except Refused as refused:
            raise Invalid(f"{place}: {refused}") from refused
        except (Error, MemoryError):
            raise
        except Exception as error:  # the user's own code
            raise Invalid(f"{place}: its own function raised {reason(error)}") from error
        return {REPLICATED: value[REPLICATED], UNITS: found}

    def deal(self) -> str:
        """Decides which units this rank gets; says what prevents it."""
        sharded = self.entry.sharded
        if sharded.reshard is not None:
            return ""
        try:
            opaque = not all(units.has_units(state) for state in self.lowered)
            if opaque:
                return (
                    f"pieces: {self.full} was saved in {len(self.pieces)} pieces, this job has {sharded.count}, and "
                    f'the state of {self.entry.subject} is opaque: give it "units", or pass reshard= to Sharded'
                )
            shared = self.entry.merged([state[REPLICATED] for state in self.lowered])
            others = [number for number, one in enumerate(shared) if one != shared[0]]
            if others:
                return (
                    f'pieces: {self.full}: "replicated" of piece {others[0]} is not that of piece 0, and all pieces '
                    "share it: save where they agree"
                )
            self.lowered[0][REPLICATED] = shared[0]
            every = [unit for state in self.lowered for unit in state[UNITS]]
            self.ids = [_said_id(unit) for unit in every]
            units.expect_apart([_said(units.id_of(unit)) for unit in every])
            splits = self.entry.split is not None
            dealt = units.dealt([units.weight_of(unit) for unit in every], sharded.count, splits=splits)
        except Refused as refused:
            return f"pieces: {self.full}: {refused}"
        self.shares = dealt[sharded.index]
        return ""


def _said(lowered: Any) -> Any:
    """An id, which is lowered, so that equal ones look the same."""
    if isinstance(lowered, Tagged):
        return lowered.tag, _said(lowered.value)
    if isinstance(lowered, list):
        return [_said(item) for item in lowered]
    return {key: _said(value) for key, value in lowered.items()} if isinstance(lowered, dict) else lowered


def _said_id(lowered: object) -> str | None:
    """The id of a lowered unit as a text; ``None`` if it says none."""
    own = units.id_of(lowered)
    return None if own is None else repr(_said(own))


def pieces_of(saved: Sequence[SavedLeaf]) -> dict[tuple[str, str], dict[int, SavedObject]]:
    """The saved pieces of values by key and name, and by their numbers."""
    found: dict[tuple[str, str], dict[int, SavedObject]] = {}
    for leaf in saved:
        name, mark, number = leaf.name.rpartition(PIECE)
        if mark and isinstance(leaf, SavedObject) and re.fullmatch(r"0|[1-9]\d{0,6}", number):
            found.setdefault((leaf.key, name), {})[int(number)] = leaf
    return found


def load(
    checkpoint: native.Checkpoint,
    walked: Walked,
    saved: Sequence[SavedLeaf],
    options: Options,
    timeout_s: float,
    dry: bool,
    alone: Alone,
) -> Pieces:
    """Finds the values in pieces, and makes those that were saved in other pieces.

    Every rank of the session calls it. With ``dry`` nothing is read. ``alone`` calls a function in which no rank waits
    for another; its failure fails all ranks.
    """
    known = pieces_of(saved)
    otherwise = _declared_otherwise(walked.entries, saved, known, options)
    problems = [problem for problem, _ in otherwise.values()]
    leaves = [number for _, numbers in otherwise.values() for number in numbers]
    walked = Walked([one for one in walked.entries if id(one) not in otherwise], walked.adapters)
    if not known:
        return Pieces(walked, options, problems=problems, otherwise=leaves)
    names = {"/".join(name) for name in known}
    options = replace(options, only=tuple(f"{one}{PIECE}*" if one in names else one for one in options.only))
    entries = [one for one in walked.entries if isinstance(one, ShardedEntry)]
    chosen = [one for one in entries if options.selects(f"{one.key}/{one.leaf}")]
    found = Pieces(walked, options, problems=_disagreements(checkpoint, chosen, timeout_s))
    dealt: list[_Dealt] = []
    kept: list[Entry] = []
    for entry in walked.entries:
        there = known.get((entry.key, entry.name), {}) if isinstance(entry, ShardedEntry) else {}
        if isinstance(entry, ShardedEntry) and entry in chosen and there and len(there) != entry.sharded.count:
            pieces = [there[number] for number in sorted(there)]
            prefixes = tuple(f"{piece.name}." for piece in pieces)
            below = [one.index for one in saved if one.key == entry.key and one.name.startswith(prefixes)]
            dealt.append(_Dealt(entry, pieces, below))
        else:
            kept.append(as_value(entry) if isinstance(entry, ShardedEntry) else entry)
    if dry or found.problems:
        found.made = [Made(one.entry, _leaves(one)) for one in dealt]
    else:
        found.made = _deal(checkpoint, dealt, walked.adapters, saved, found, timeout_s, options, alone)
    found.otherwise = leaves
    found.problems += problems  # a rank's own, which decide nothing before
    found.walked = Walked(kept, walked.adapters)
    return found


def _declared_otherwise(
    entries: Sequence[Entry],
    saved: Sequence[SavedLeaf],
    known: Mapping[tuple[str, str], Mapping[int, SavedObject]],
    options: Options,
) -> dict[int, tuple[str, list[int]]]:
    """Finds values that are pieces in the checkpoint and none here, or the reverse.

    Returns:
        By the ``id`` of an entry, the problem and the numbers of the saved leaves, which are nobody else's.
    """
    there = {(leaf.key, leaf.name) for leaf in saved}
    found = {}
    for entry in entries if options.strict else ():
        name = entry.key, entry.name or ""
        if not options.selects("/".join(name)):
            continue
        if not isinstance(entry, ShardedEntry) and name in known:
            count = len(known[name])
            how = f"in {count} piece{'s' if count > 1 else ''}: load it as shardfast.Sharded(value, index, count)"
        elif isinstance(entry, ShardedEntry) and name in there:
            how = "without shardfast.Sharded: load it without, and save it in Sharded from then on"
        else:
            continue
        below = (name[1], f"{name[1]}.")  # itself, its pieces, the tensors inside of them
        numbers = [
            one.index for one in saved if one.key == name[0] and (one.name == below[0] or one.name.startswith(below[1]))
        ]
        found[id(entry)] = f"pieces: {'/'.join(name)} was saved {how}", numbers
    return found


def as_value(entry: ShardedEntry) -> ValueEntry:
    """A piece as the value that its leaf is."""
    return ValueEntry(entry.key, entry.leaf, entry.value, "job", entry.stateful, entry.put, entry.place)


def _leaves(one: _Dealt) -> list[int]:
    return [*(piece.index for piece in one.pieces), *one.below]


def _disagreements(checkpoint: native.Checkpoint, entries: Sequence[ShardedEntry], timeout_s: float) -> list[str]:
    """Lists what is wrong with the ranks' pieces together: each index below the count is some rank's."""
    said = [f"{one.key}/{one.name}\n{one.sharded.index}\n{one.sharded.count}" for one in entries]
    _, agreed = checkpoint.agree([], said, timeout_s)
    counts: dict[str, dict[int, set[int]]] = {}
    for _, text in agreed:
        name, own, pieces = text.rsplit("\n", 2)
        counts.setdefault(name, {}).setdefault(int(pieces), set()).add(int(own))
    problems = []
    for name, of in sorted(counts.items()):
        if len(of) > 1:
            problems.append(f"pieces: ranks say that {name} has {' and '.join(map(str, sorted(of)))} pieces")
            continue
        ((count, there),) = of.items()
        lacking = [number for number in range(count) if number not in there]
        if lacking:
            more = f" and {len(lacking) - 8} more" if len(lacking) > 8 else ""
            shown = ", ".join(map(str, lacking[:8]))
            problems.append(f"pieces: no rank here has piece {shown}{more} of the {count} of {name}")
    return problems


def _deal(
    checkpoint: native.Checkpoint,
    dealt: Sequence[_Dealt],
    adapters: Sequence[Adapter],
    saved: Sequence[SavedLeaf],
    found: Pieces,
    timeout_s: float,
    options: Options,
    alone: Alone,
) -> list[Made]:
    """Makes this rank's share of pieces that were saved as others; adds what prevents it and reads to ``found``."""
    problems = found.problems
    tensors: dict[tuple[str, str], Any] = {}

    def bind() -> list[Any]:
        values = iter(encoded)
        for one in dealt:
            one.lowered = [decode(next(values), f"{one.full}{PIECE}{number}") for number, _ in enumerate(one.pieces)]
            problem = one.deal()
            if problem:
                problems.append(problem)
        wants = [] if problems else _wants(dealt, adapters[0], saved, tensors)
        bound = []
        for want in wants:
            target = want.destination.target or want.adapter.target(want.tensor, want.leaf.dtype)
            bound += [native for native, _ in want.bound(target)]
        return bound

    def make() -> list[Made]:
        made = []
        for one in dealt:
            how = Raising(one.entry.place, adapters, lambda key, name: tensors[key, name], pickle=options.pickle)
            value = one.made(raise_value(one.wanted(), how), adapters) if not problems else None
            made.append(Made(one.entry, _leaves(one), value))
        return made

    copies = [(piece.index, 0) for one in dealt for piece in one.pieces]
    encoded, traffic = checkpoint.load([], copies, timeout_s, {}, "auto")
    found.traffic.append(traffic)
    _, traffic = checkpoint.load(alone(bind), [], timeout_s, {}, "auto")
    found.traffic.append(traffic)
    made: list[Made] = alone(make)
    _, agreed = checkpoint.agree([], [line for one in dealt for line in one.split], timeout_s)
    parts: dict[str, dict[int, tuple[str, list[str | None]]]] = {}
    for name, unit, digest, ids in map(json.loads, (line for _, line in agreed)):
        if parts.setdefault(name, {}).setdefault(unit, (digest, ids))[0] != digest:
            problems.append(
                f"pieces: {name}: split() made other parts of unit {unit} on another rank: let the parts depend on the "
                "unit and their number alone"
            )
    for one in dealt:
        split = parts.get(one.full, {})
        try:
            rest = [own for number, own in enumerate(one.ids) if number not in split]
            units.expect_apart([*rest, *(own for _, ids in split.values() for own in ids)] if split else [])
        except Refused as refused:
            problems.append(f"pieces: {one.full}: behind split(), {refused}: give each part an id of its own")
    return made


def _wants(
    dealt: Sequence[_Dealt], adapter: Adapter, saved: Sequence[SavedLeaf], tensors: dict[tuple[str, str], Any]
) -> list[Want]:
    """The tensors of this rank's units. Those that several names mean are one, which ``tensors`` has by each name."""
    by_name = {(leaf.key, leaf.name): leaf for leaf in saved}
    wants: dict[int, Want] = {}
    for one in dealt:
        for name in _referred(one.wanted()):
            leaf = by_name.get(name)
            if isinstance(leaf, SavedAlias):
                leaf = by_name.get((leaf.of_key, leaf.of_name))
            if not isinstance(leaf, SavedTensor):
                raise Corrupt(f"{one.full}: it refers to the tensor {'/'.join(name)}, which the checkpoint lacks")
            if leaf.index not in wants:
                tensor = adapter.allocate(leaf.dtype, leaf.shape)
                destination = adapter.destination(tensor, leaf.dtype)
                wants[leaf.index] = Want(leaf, adapter, tensor, destination, "/".join(name))
            tensors[name] = wants[leaf.index].tensor
    return list(wants.values())


def _referred(lowered: Any) -> Iterator[tuple[str, str]]:
    """The tensors to which a lowered value refers."""
    if isinstance(lowered, Tagged):
        if lowered.tag == "tensor_ref":
            yield tuple(lowered.value)
        else:
            yield from _referred(lowered.value)
    elif isinstance(lowered, dict):
        for key, value in lowered.items():
            yield from _referred(key)
            yield from _referred(value)
    elif isinstance(lowered, list):
        for item in lowered:
            yield from _referred(item)
