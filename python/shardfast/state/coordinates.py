"""Coordinates of this rank in the meshes of its job, as far as a state shows them: for records of saves and loads."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from .. import adapters as frameworks
from .catalog import Adapter
from .entries import BundleEntry, Entry, TensorEntry, TreeEntry


def coordinates_of(things: Sequence[object], adapters: Sequence[Adapter]) -> list[tuple[str, int]]:
    """Returns this rank's coordinates by the name of the dimension; of two with one name the first.

    A mesh that raises when it is asked is left out: no save fails for it.

    Args:
        things: Bundles, and tensors outside of them.
        adapters: Those of the frameworks whose tensors they are.
    """
    found: dict[str, int] = {}
    for objects in (*frameworks.built_on_others(), *adapters):
        with suppress(Exception):
            for name, at in objects.coordinates(things).items():
                found.setdefault(str(name).encode("utf-8", "replace").decode(), int(at))
    return [(name, at) for name, at in found.items() if at >= 0]


def shown_by(entries: Sequence[Entry]) -> list[object]:
    """Returns the bundles of a state, and the tensors outside of them."""
    things: list[object] = []
    for entry in entries:
        if isinstance(entry, BundleEntry):
            things.append(entry.bundle)
        elif isinstance(entry, (TensorEntry, TreeEntry)):
            things += [entry.tensor] if isinstance(entry, TensorEntry) else [leaf.tensor for leaf in entry.leaves]
    return things
