"""The options of a load, and what it takes from a checkpoint."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import Invalid
from .catalog import SavedLeaf, SavedObject, SavedTensor

Rename = Mapping[str, str] | Callable[[str], str]

_REMEDIES = {
    "missing": "missing: rename= maps saved names to those here, only= loads a part, strict=False allows it",
    "unexpected": "unexpected: only= loads a part, strict=False allows it",
    "dtype": "dtype: cast=True converts",
    "shape": "shape: make it here with the shape it was saved with, or load the rest with only=",
    "tied": "tied: strict=False takes the one that is named second",
    "arguments": "arguments: all ranks must pass the same strict=, cast=, only=, per_rank= and pickle=",
    "overlap": "overlap: give each memory of its own before the load (clone() one of them)",
    "per rank": (
        'per rank: per_rank="rank0" takes what rank 0 saved, per_rank="index" what the rank of the same number saved, '
        "modulo the number of saving ranks"
    ),
}


ARGUMENTS = "arguments: "
"""How a problem begins that is one only if not all ranks have it."""


@dataclass(frozen=True)
class Options:
    """The options of a load; see :func:`shardfast.load`."""

    strict: bool = True
    rename: Rename | None = None
    cast: bool = False
    only: tuple[str, ...] = ()
    per_rank: str = "error"
    pickle: bool = False
    exact: frozenset[str] = frozenset()
    """Those of ``only`` that are names in the checkpoint: they mean themselves, whatever they are as patterns."""

    def __post_init__(self) -> None:
        if self.per_rank not in ("error", "rank0", "index"):
            raise Invalid(f'per_rank={self.per_rank!r}: expected "error", "rank0" or "index"')
        if self.rename is not None and not callable(self.rename) and not isinstance(self.rename, Mapping):
            raise Invalid(f"rename={self.rename!r}: expected a dict from saved names to yours, or a function")

    def asked(self) -> list[str]:
        """Returns what it asks for other than by default, as a problem that is none if all ranks have it."""
        default = Options()
        said = {name: getattr(self, name) for name in ("strict", "cast", "per_rank", "pickle")}
        words = [f"{name}={value!r}" for name, value in said.items() if value != getattr(default, name)]
        words += [f"only={sorted(set(self.only))!r}"] if self.only else []
        return [f"{ARGUMENTS}{', '.join(words)}"] if words else []

    def selects(self, name: str) -> bool:
        """Whether ``only`` selects the leaf ``key/name``."""
        if not self.only:
            return True
        key = name.partition("/")[0]
        return any(
            pattern == whole if pattern in self.exact else fnmatch.fnmatchcase(whole, pattern)
            for pattern in self.only
            for whole in [name if "/" in pattern else key]
        )

    def copy_for(self, leaf: SavedObject, rank: int, world: int, saved_world: int) -> int | None:
        """The copy of a value that a rank takes: its own, or by the user's choice when there is none."""
        own = copy_of_rank(leaf, rank) if world == saved_world else None
        if own is not None or self.per_rank == "error":
            return own
        return copy_of_rank(leaf, rank % saved_world if self.per_rank == "index" else 0)

    def ranked(self, leaf: SavedObject, first: int | None) -> tuple[list[int], int]:
        """All copies of a value that merges: ``first``, which :meth:`copy_for` gives, then by their lowest ranks.

        Returns:
            The copies, and how many of them decide, each over those behind it. The others must agree.
        """
        order = sorted(range(len(leaf.copies)), key=lambda copy: (copy != first, leaf.copies[copy][0][0][0]))
        return order, len(order) if self.per_rank != "error" else int(first is not None)


_MESH = re.compile(r"mesh\((.*?)\) \[")


def moved(saved: Iterable[SavedLeaf], here: Collection[str]) -> str:
    """Says how the meshes of ranks differ by the layouts of a checkpoint's tensors and of those here; empty if they
    do not.

    A number of a rank means another place then: that of a rank of tensor parallelism, say, in place of a data rank's.
    Ranks in one row are that without a mesh, too, and whatever the axis is called where it has no name.
    """
    if not here:  # no tensor is loaded
        return ""
    was = [leaf.layout for leaf in saved if isinstance(leaf, SavedTensor)]
    meshes = [sorted({axes for layout in layouts if (axes := _axes(layout))}) for layouts in (was, here)]
    if meshes[0] == meshes[1]:
        return ""
    is_row = all(len(axes) == 1 for axes in (*meshes[0], *meshes[1]))
    names = [{name for ((name, _),) in of if name} for of in meshes] if is_row else []
    if is_row and (names[0] == names[1] or not all(names)):
        return ""
    before, now = (
        " and ".join(", ".join(f"{name}={size}".lstrip("=") for name, size in one) for one in of) for of in meshes
    )
    return f"a mesh of {before or 'no axes'} in the checkpoint, of {now or 'no axes'} here"


def _axes(layout: str) -> tuple[tuple[str, str], ...]:
    """The axes of a layout's mesh that have several ranks, each with its name, or an empty one."""
    found = _MESH.match(layout)
    axes = [axis.rpartition("=")[::2] for axis in found[1].split(", ")] if found is not None else []
    return tuple((name, size.rstrip(",")) for name, size in axes if size.rstrip(",") not in ("1", ""))


def copy_of_rank(leaf: SavedObject, rank: int) -> int | None:
    """The copy that a rank saved."""
    for index, (ranks, _) in enumerate(leaf.copies):
        if any(start <= rank < stop for start, stop in ranks):
            return index
    return None


@dataclass
class LoadPlan:
    """Plan of a load from a checkpoint into a state, on this rank. ``print`` shows it for people.

    Attributes:
        url: The checkpoint.
        step: The training step that the checkpoint records; ``None`` if it records none.
        tensors: Names (``key/name``, as in the state) of the tensors that are loaded.
        values: Names of the Python values that are loaded.
        renamed: From names in the checkpoint to names in the state, where they differ.
        cast: From names of tensors whose dtype changes to the saved dtype and the state's.
        missing: Names that the state has and the checkpoint does not have.
        unexpected: Names that the checkpoint has and no rank's state has.
        dropped: Optimizer state that the checkpoint does not have: a load removes it.
        padded: Of tensors whose padding has another length here, which rows become 0 and which are left.
        masters: Of 16-bit parameters with a copy in fp32 in the checkpoint or here, and none in the other, what each
            becomes.
        problems: Everything that prevents the load, of all ranks; empty after a load.
        bytes_wanted: Bytes that this rank needs. Only :func:`shardfast.plan_load` sets it.
        bytes_read: Bytes that this rank will read; after a load, bytes that it read from storage.
        reads: Number of reads. Only :func:`shardfast.plan_load` sets it.
        files: Number of files that this rank opens. Only :func:`shardfast.plan_load` sets it.
        bytes_received: After a load, bytes that other ranks read and sent to this one.
        bytes_sent: After a load, bytes that this rank read and sent to others.
        is_shared: After a load, whether the ranks read for each other.
        sources: After a load, bytes that this rank read from each place where the checkpoint lies: ``"local"``, the
            directory of ``local=``; ``"memory"``, that of this machine's keeper; ``"peer 10.0.0.7"``, the memory of
            another machine; and ``"url"``.
    """

    url: str
    step: int | None
    tensors: list[str] = field(default_factory=list)
    values: list[str] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)
    cast: dict[str, tuple[str, str]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    padded: list[str] = field(default_factory=list)
    masters: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    bytes_wanted: int = 0
    bytes_read: int = 0
    reads: int = 0
    files: int = 0
    bytes_received: int = 0
    bytes_sent: int = 0
    is_shared: bool = False
    sources: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        at = "" if self.step is None else f" (step {self.step})"
        lines = [f"{self.url}{at}: {len(self.tensors)} tensors, {len(self.values)} values", f"  {self._traffic()}"]
        lists = {
            "renamed": [f"{old} -> {new}" for old, new in self.renamed.items()],
            "cast": [f"{name}: {saved} -> {ours}" for name, (saved, ours) in self.cast.items()],
            "missing in the checkpoint": self.missing,
            "unexpected in the checkpoint": self.unexpected,
            "dropped here": self.dropped,
            "padding of another length": self.padded,
            "masters, or none, here or there": self.masters,
            "problems": self.problems,
            "tensors": self.tensors,
            "values": self.values,
        }
        for title, names in lists.items():
            if names:
                lines += [f"  {title} ({len(names)}):", *(f"    {name}" for name in names)]
        return "\n".join(lines)

    def _traffic(self) -> str:
        if self.reads or not self.bytes_read:
            return (
                f"{self.bytes_wanted:,} bytes wanted, {self.bytes_read:,} read: "
                f"{self.reads} reads of {self.files} files"
            )
        exchanged = f", {self.bytes_received:,} received from other ranks, {self.bytes_sent:,} sent to them"
        named = ", ".join(f"{bytes_read:,} from {name}" for name, bytes_read in self.sources.items())
        places = f" ({named})" if len(self.sources) > 1 or "local" in self.sources else ""
        return f"{self.bytes_read:,} bytes read{places}{exchanged if self.is_shared else ''}"

    def add(self, traffic: Mapping[str, int]) -> None:
        """Adds what a read has moved; a load may make several."""
        self.bytes_read += traffic["bytes_read"]
        self.bytes_received += traffic["bytes_received"]
        self.bytes_sent += traffic["bytes_sent"]
        self.is_shared = self.is_shared or bool(traffic["is_shared"])

    def expect_no_problems(self) -> None:
        """Raises one error with every problem, the same on every rank."""
        problems = self.problems
        if problems:
            count = f"{len(problems)} problems" if len(problems) > 1 else "one problem"
            kinds = {problem.partition(":")[0] for problem in problems}
            remedies = [text for kind, text in _REMEDIES.items() if kind in kinds]
            lines = [f"  {problem}" for problem in problems]
            raise Invalid("\n".join([f"{self.url} does not fit the state ({count}):", *lines, *remedies]))


def by_ranks(ranks: Sequence[int], problem: str, world: int) -> str:
    """A problem with the ranks that have it, if not all do."""
    if len(ranks) == world:
        return problem
    return f"{problem} ({'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))})"
