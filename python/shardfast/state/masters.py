"""The copy in fp32 of a 16-bit parameter, its *master*, which one framework keeps and another does not.

A master is the leaf ``state.<FQN>.master`` of an optimizer's key, whichever framework keeps it. A load needs no
argument for these differences:

======================= ================================== ==========================================================
the state keeps         the checkpoint has                 the state gets
======================= ================================== ==========================================================
fp32 parameter          16-bit parameter and master        the bits of the master as parameter
16-bit parameter,       fp32 parameter                     the bits of the parameter as master, and their rounding,
master                                                     to the nearest even, as parameter
16-bit parameter,       16-bit parameter                   the 16-bit value as both
master
16-bit parameter,       16-bit parameter of another type,  the bits of the master as master, and their rounding as
master                  master                             parameter
16-bit parameter        16-bit parameter and master        the 16-bit parameter; the master is not needed
======================= ================================== ==========================================================

So with the leaf ``loss_scaler``, which optimizers of models in fp16 have: what another precision was trained with has
none, and leaves that of the state as it is; what trains in another precision does not need it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from .catalog import SavedAlias, SavedLeaf, SavedObject, SavedTensor
from .entries import BundleEntry

_HALF = frozenset({"BF16", "F16"})
EXACT = "F32"
"""The element type of masters."""

SCALER = "loss_scaler"
"""The leaf of what scales the loss of a model in fp16."""

_GROUPS = "param_groups"
"""The leaf that each saved optimizer has."""

_Name = tuple[str, str]
"""The key and the name of a leaf."""


class Chosen(NamedTuple):
    """A saved tensor that fills a leaf.

    Attributes:
        saved: The tensor.
        note: The sentence of the plan about a difference that the rule explains; empty if there is none.
        converts: Whether the rule explains that the leaf has another element type.
    """

    saved: SavedTensor
    note: str = ""
    converts: bool = False


class Masters:
    """The masters of a checkpoint and of the state that it is loaded into.

    Attributes:
        indices: Numbers of the masters among the saved leaves.
        rounded: Full names of the parameters here that become, with their masters, the saved 16-bit values.
    """

    def __init__(
        self,
        saved: Sequence[SavedLeaf],
        ours: Mapping[_Name, SavedLeaf],
        entries: Sequence[BundleEntry],
        selects: Callable[[str], bool],
    ) -> None:
        self.rounded: list[str] = []
        self._ours = ours
        self._saved = {(leaf.key, leaf.name): leaf for leaf in saved}
        self._present = {leaf.index: name for name, leaf in ours.items()}
        self._entries = entries
        self._names: dict[int, set[str]] = {}
        for leaf in saved:
            tensor = self._tensor_of(leaf)
            if tensor is not None and tensor.dtype in _HALF:
                self._names.setdefault(tensor.index, set()).add(leaf.name)
        self._halves: dict[str, int] = {}
        for names in self._names.values():
            for name in names:
                self._halves[name] = self._halves.get(name, 0) + 1
        self._by_fqn: dict[str, list[SavedTensor]] = {}
        for fqn, master in _masters(saved, self._saved.keys()):
            self._by_fqn.setdefault(fqn, []).append(master)
        self.indices = frozenset(master.index for of in self._by_fqn.values() for master in of)
        self._taken: dict[int, int] = {}
        """For saved parameters, by number, that of the tensor that fills one here of another type."""

        self._lacking: set[_Name] = set()
        self._filled_from: dict[_Name, _Name] = {}
        for entry in entries:
            groups = entry.prefix + _GROUPS
            if (entry.key, groups) not in ours or not selects(f"{entry.key}/{groups}"):
                continue
            for key, fqn in ((key, fqn) for key, fqns in entry.exact.items() for fqn in fqns):
                own = entry.key, _master_of(entry, fqn)
                if own not in ours and selects("/".join(own)):
                    self._lacking.add((key, fqn))
                    self._filled_from[own] = key, fqn

    def _tensor_of(self, leaf: SavedLeaf | None) -> SavedTensor | None:
        if isinstance(leaf, SavedAlias):
            leaf = self._saved.get((leaf.of_key, leaf.of_name))
        return leaf if isinstance(leaf, SavedTensor) else None

    def of(self, saved: SavedTensor, key: str) -> SavedTensor | None:
        """The saved master of a saved 16-bit parameter that is loaded into ``key``; ``None`` if no single one is.

        Of several optimizers that of which the state has a parameter under ``key`` decides. A master of an optimizer
        that is not in the state counts if it is the only one, and can be of no other parameter.
        """
        names = self._names.get(saved.index, frozenset[str]())
        alone = []
        for master in (one for name in sorted(names) for one in self._by_fqn.get(name, ())):
            owned = self._keys_of(master)
            if master.shape != saved.shape:
                continue
            if key in owned:
                return master
            if not owned and all(self._halves[name] == 1 for name in names):
                alone.append(master)
        return alone[0] if len(alone) == 1 else None

    def _keys_of(self, master: SavedTensor) -> set[str]:
        """The keys of the state with parameters that this rank steps with the optimizer of a saved master."""
        key, name = self._present.get(master.index, ("", ""))
        entries = (one for one in self._entries if one.key == key and name.startswith(f"{one.prefix}state."))
        return {owned for entry in entries for owned in entry.owned}

    def stand_in(self, key: str, name: str) -> SavedLeaf | None:
        """The saved parameter that fills a master of the state, if the checkpoint lacks that."""
        leaf = self._ours.get(self._filled_from.get((key, name), ("", "")))
        return leaf if self._tensor_of(leaf) is not None else None

    def lacks(self, entry: BundleEntry, fqn: str) -> bool:
        """Whether the checkpoint lacks a master that an optimizer of the state has on some rank."""
        return (entry.key, _master_of(entry, fqn)) in self._filled_from

    def choose(self, saved: SavedTensor, key: str, name: str, dtype: str, filled: int | None) -> Chosen:
        """Chooses what fills the leaf ``name`` of ``key``, for which ``saved`` is in the checkpoint.

        Args:
            saved: See above.
            key: See above.
            name: See above.
            dtype: The element type of the leaf in the state.
            filled: The number of the saved leaf that fills the same memory under another name, if one does.
        """
        full, owner = f"{key}/{name}", self._filled_from.get((key, name))
        is_tied = filled is not None and self._taken.get(saved.index) == filled
        if saved.dtype in _HALF and dtype == EXACT:
            master = self.of(saved, owner[0] if owner is not None else key)
            if master is None and is_tied:  # over keys
                return Chosen(next(one for of in self._by_fqn.values() for one in of if one.index == filled))
            if master is None:
                return Chosen(saved, converts=owner is not None)
            self._taken[saved.index] = master.index
            there = f"{master.key}/{master.name}"
            note = f"{full}: {saved.dtype} in the checkpoint with a master; it becomes {there}"
            return Chosen(master, "" if owner is not None else note)
        if dtype not in _HALF:
            return Chosen(saved)
        if (key, name) not in self._lacking:
            master = self.of(saved, key) if saved.dtype in _HALF - {dtype} and self._is_exact(key, name) else None
            if master is None:
                return Chosen(saved, converts=is_tied)
            self._taken[saved.index] = master.index
            note = f"{full}: {saved.dtype} in the checkpoint with a master; it becomes that one's rounding in {dtype}"
            return Chosen(master, note, converts=True)
        if saved.dtype == EXACT:
            note = f"{full}: {EXACT} in the checkpoint; the master here becomes its bits, the parameter their rounding"
            self._taken[saved.index] = saved.index
            return Chosen(saved, note, converts=True)
        if saved.dtype == dtype and self.of(saved, key) is None:
            if full not in self.rounded:
                self.rounded.append(full)
            return Chosen(
                saved,
                f"{full}: {dtype} in the checkpoint without a master (it was trained in {dtype}); master and parameter "
                "here become the 16-bit value",
            )
        return Chosen(saved)

    def _is_exact(self, key: str, name: str) -> bool:
        """Whether a parameter of the state has a master on some rank."""
        return any(name in entry.exact.get(key, ()) for entry in self._entries)

    def leaves_scaler(self, entry: BundleEntry, name: str) -> str:
        """The sentence of the plan about a loss scaler that the checkpoint lacks; empty for another leaf."""
        if name != SCALER or (entry.key, entry.prefix + name) in self._ours:
            return ""
        return (
            f"{entry.key}/{entry.prefix}{name}: not in the checkpoint (it was not trained in fp16); it stays as it is"
        )

    def is_superseded(self, leaf: SavedLeaf, entry: BundleEntry, name: str) -> bool:
        """Whether the leaf ``name`` is one for which the optimizer of the state has no need.

        It is the master of a parameter that has none, or a loss scaler.
        """
        if name == SCALER and entry.owned:
            return isinstance(leaf, SavedObject)
        if leaf.index not in self.indices:
            return False
        fqn = name.removeprefix("state.").rpartition(".")[0]
        return any(
            fqn in fqns and fqn not in entry.exact.get(key, ()) and self._is_half(self._ours.get((key, fqn)))
            for key, fqns in entry.owned.items()
        )

    def _is_half(self, leaf: SavedLeaf | None) -> bool:
        tensor = self._tensor_of(leaf)
        return tensor is not None and tensor.dtype in _HALF

    def warning(self) -> str:
        """Returns the log's warning of parameters that were saved with less precision than the state has for them."""
        first, others = self.rounded[0], len(self.rounded) - 1
        more = f" and {others} more (the plan's masters)" if others else ""
        return (
            f"{first}{more}: saved in 16 bits without a master; master and parameter here become the 16-bit value, so "
            "the training goes on from what the 16 bits held"
        )


def _master_of(entry: BundleEntry, fqn: str) -> str:
    return f"{entry.prefix}state.{fqn}.master"


def _masters(saved: Sequence[SavedLeaf], names: Collection[_Name]) -> Iterator[tuple[str, SavedTensor]]:
    """The saved masters, after the saved FQNs of their parameters."""
    for leaf in saved:
        if not (isinstance(leaf, SavedTensor) and leaf.dtype == EXACT and leaf.name.endswith(".master")):
            continue
        for found in re.finditer(r"(?:^|(?<=\.))state\.", leaf.name):
            if (leaf.key, leaf.name[: found.start()] + _GROUPS) in names:
                yield leaf.name[found.end() :].removesuffix(".master"), leaf
                break
