"""Inspection of a checkpoint on a host, with its tensors mapped into memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

from . import adapters as frameworks
from . import native, session
from .errors import Invalid
from .state.catalog import Adapter, Ints, Refused
from .state.values import Raising, decode, raise_value
from .verbs import Url, expect_url


def mapped(url: Url, *, timeout_s: float = session.TIMEOUT_S) -> Mapped:
    """Opens the checkpoint at ``url`` to look at it. Any process may do so by itself, whatever job it belongs to.

    Reads the manifest, and of the data only what you look up::

        with sf.mapped("runs/gpt/step-00001000") as checkpoint:
            print(checkpoint["model/layers.0.weight"].norm(), checkpoint.value("extra/args"))

    Tensors are PyTorch's if this process has imported PyTorch, otherwise NumPy's arrays.

    Args:
        url: The checkpoint.
        timeout_s: How long a request to the storage is tried, in seconds: here, and at each lookup.

    Raises:
        NotFound: No checkpoint is committed there. (For a run, name one of its steps.)
        Invalid: No framework was imported.
        Unavailable: The storage does not answer within ``timeout_s``.
        Unsupported: The format is newer.
    """
    timeout_s = session.expect_timeout(timeout_s)
    active = frameworks.active()
    place = expect_url(url)
    if not active:
        raise Invalid(f"{place}: import the framework to show the tensors with before mapping the checkpoint")
    return Mapped(native.open(session.alone(), place, timeout_s=timeout_s), active, timeout_s)


class Mapped(Mapping[str, Any]):
    """The tensors of a checkpoint, aliases too, by ``"key/name"``. Made by :func:`mapped`.

    The first lookup of a tensor verifies its bytes. It copies nothing if the tensor was saved in one part. A tensor
    that was saved in several parts is assembled in new memory at each lookup; :meth:`parts` shows them without a copy.
    Nothing else is read, so damage elsewhere does not matter.

    Tensors stay valid after :meth:`close`, which the end of a ``with`` block calls, and after the checkpoint is
    deleted: each keeps its file mapped. If another program truncates a file of the checkpoint, the kernel ends this
    process when it looks there. Writing into a tensor changes this process's copy of the page, which all tensors of
    this object on that page share, and never the file.

    A lookup raises ``KeyError`` for a name that the checkpoint does not have, :class:`Corrupt` for damage,
    :class:`Unsupported` for a storage that cannot be mapped (``memory://`` and object stores), and :class:`Invalid`
    for an element type that the framework does not have, or after :meth:`close`.
    """

    def __init__(self, checkpoint: native.Checkpoint, active: list[Adapter], timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._url = checkpoint.url
        self._open: tuple[native.Checkpoint, native.Mapped] | None = (checkpoint, native.Mapped(checkpoint))
        self._adapters = active
        self._tensors: dict[str, tuple[int, str, Ints]] = {}
        self._values: dict[str, tuple[int, list[list[tuple[int, int]]]]] = {}
        aliases: dict[str, str] = {}
        for index, (kind, key, name, _, *more) in enumerate(checkpoint.leaves):
            full = f"{key}/{name}"
            if kind == "tensor":
                self._tensors[full] = (index, more[0], tuple(more[1]))
            elif kind == "alias":
                aliases[full] = "/".join(more)
            else:
                self._values[full] = (index, [ranks for ranks, _ in more[0]])
        self._tensors |= {name: self._tensors[of] for name, of in aliases.items()}

    def __repr__(self) -> str:
        is_closed = ", closed" if self._open is None else ""
        return f"<mapped {self._url}: {len(self._tensors)} tensors, {len(self._values)} values{is_closed}>"

    def __len__(self) -> int:
        return len(self._tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> Any:
        parts = self.parts(name)
        if len(parts) == 1:
            return parts[0][1]
        _, dtype, shape = self._tensors[name]
        try:
            tensor = self._adapters[0].allocate(dtype, shape)
        except Refused as refused:  # a tensor without elements, which has no part
            raise self._has_no_type(name, refused) from refused
        for offsets, part in parts:
            box = zip(offsets, part.shape, strict=True)
            tensor[tuple(slice(offset, offset + length) for offset, length in box)] = part
        return tensor

    def parts(self, name: str) -> list[tuple[Ints, Any]]:
        """Returns a tensor's saved parts without a copy: for each its offsets in the global shape, and the part."""
        (index, dtype, _), (_, mapped) = self._tensor(name), self._opened()
        view = self._adapters[0].view
        try:
            return [(part.offsets, view(dtype, part.lengths, _buffer(part))) for part in mapped.parts(index)]
        except Refused as refused:
            raise self._has_no_type(name, refused) from refused

    def value_names(self) -> list[str]:
        """Returns the names of the values: everything that is no tensor."""
        return list(self._values)

    def value(self, name: str, *, rank: int = 0, pickle: bool = False) -> Any:
        """Returns a Python value; tensors in it are as in the mapping.

        Args:
            name: The value's name: ``"key/name"``.
            rank: Whose value, if it differed between the ranks that saved.
            pickle: Load pickles, which can run any code.
        """
        if name not in self._values:
            hint = ", which is a tensor" if name in self._tensors else ""
            raise KeyError(f"{self._url} has no value {name!r}{hint}")
        index, copies = self._values[name]
        held = [number for number, of in enumerate(copies) if any(start <= rank < stop for start, stop in of)]
        if not held:
            raise Invalid(f"rank={rank}: expected one that saved {name}: {_text(copies)}")
        (data,), _ = self._opened()[0].load([], [(index, held[0])], self._timeout_s)
        how = Raising(name, self._adapters, lambda key, below: self[f"{key}/{below}"], pickle=pickle)
        return raise_value(decode(data, name), how)

    def close(self) -> None:
        """Closes the checkpoint. Tensors that were looked up stay valid."""
        self._open = None

    def __enter__(self) -> Mapped:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _opened(self) -> tuple[native.Checkpoint, native.Mapped]:
        if self._open is None:
            raise Invalid(f"{self._url}: this mapped checkpoint was closed: call sf.mapped again")
        return self._open

    def _tensor(self, name: str) -> tuple[int, str, Ints]:
        if name not in self._tensors:
            hint = ", which is a value: value() has it" if name in self._values else ""
            raise KeyError(f"{self._url} has no tensor {name!r}{hint}")
        return self._tensors[name]

    def _has_no_type(self, name: str, refused: Refused) -> Invalid:
        return Invalid(f"{self._url}: {name}: {refused}: import a framework that has it before mapping the checkpoint")


def _buffer(part: native.Part) -> Any:
    """The memory of a part, which keeps it there."""
    buffer = (ctypes.c_char * part.bytes).from_address(part.address)
    buffer.part = part  # type: ignore[attr-defined]
    return buffer


def _text(copies: list[list[tuple[int, int]]]) -> str:
    ranges = sorted(of for ranks in copies for of in ranks)
    return ", ".join(str(start) if stop == start + 1 else f"{start} to {stop - 1}" for start, stop in ranges)
