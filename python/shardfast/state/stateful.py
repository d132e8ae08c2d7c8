"""Words for values: what belongs to one rank or one piece of the data; what is read at saves and set at loads.

A value in a state is saved as it is in the dict. ``{"rng": torch.get_rng_state()}`` holds what the call returned when
the dict was made; that it is stale cannot be detected. For what changes from step to step use a :class:`Stateful`, or
an object with ``state_dict`` and ``load_state_dict``.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from .. import adapters as frameworks
from ..errors import Invalid
from .catalog import Refused
from .units import expect_no_loader

_log = logging.getLogger("shardfast")

PIECES_MAX = 1 << 20
"""Most pieces of a :class:`Sharded`."""

looks_ahead: ContextVar[bool] = ContextVar("looks_ahead", default=False)
"""Whether states are asked for to know what there is: nothing of them is saved."""


@contextmanager
def looking_ahead() -> Iterator[None]:
    """Inside, :data:`looks_ahead` is set."""
    token = looks_ahead.set(True)
    try:
        yield
    finally:
        looks_ahead.reset(token)


class PerRank:
    """Declares that a value belongs to this rank alone: a data loader's position, a buffer.

    It may stand as a key's value or directly below a key, and holds any value or an object with ``state_dict``. A load
    replaces :attr:`value`, or calls its ``load_state_dict``. If the number of ranks has changed since the save, a load
    needs ``per_rank=``: see :func:`shardfast.load`.

    The value is saved as it stands here. If it changes from step to step, use an object with ``state_dict``, such as
    :class:`Stateful`. For random states use :func:`random_state`.

    Example::

        state["extra"]["shard"] = sf.PerRank({"files": files, "position": 0})
        state["extra"]["buffer"] = sf.PerRank(sf.Stateful(buffer.export, buffer.restore))

    Attributes:
        value: The value.
    """

    def __init__(self, value: object) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"


class Sharded:
    """Declares that a value is one of ``count`` pieces, such as a data rank's loader, whatever the ranks are otherwise.

    It stands where a :class:`PerRank` may. All ranks of one ``index`` have the same piece, which is stored once. A load
    gives each its piece back by its index, under an equal ``count``, whatever the other axes of the layout became.

    Under another ``count`` there are two ways. Where each piece's state is ``{"replicated": …, "units": […]}``, the
    units are dealt out again, in order and evenly by weight: each goes to exactly one piece. ``"replicated"`` is what
    all pieces share. A unit is any value; a dict may have a ``"weight"``, a whole number, which is 1 otherwise, and an
    ``"id"``, of which there is one. Where there are fewer units than pieces, ``value.split(unit, n)`` returns up to
    ``n`` units of the same weight together, if the value has such a method. Any other state needs ``reshard``.

    Example::

        state["dataloader"] = sf.Sharded(loader, index=data_rank, count=data_ranks)

    Args:
        value: Any value, or an object with ``state_dict``.
        index: This rank's piece, from 0.
        count: The number of pieces.
        reshard: Makes ``count`` states of those of all saved pieces: ``reshard(states, count)``. Every rank calls it.

    Attributes:
        value: The value. A load replaces it, or calls its ``load_state_dict``.

    Raises:
        Invalid: ``index`` is no piece of ``count``.
    """

    def __init__(
        self,
        value: object,
        index: int,
        count: int,
        *,
        reshard: Callable[[list[Any], int], Sequence[Any]] | None = None,
    ) -> None:
        whole = all(isinstance(one, int) and not isinstance(one, bool) for one in (index, count))
        if not whole or not 0 <= index < count <= PIECES_MAX:
            raise Invalid(
                f"Sharded(index={index!r}, count={count!r}): expected a number of pieces from 1 to {PIECES_MAX:,}, and "
                "one of them, from 0"
            )
        if reshard is not None and not callable(reshard):
            raise Invalid(f"Sharded(reshard={reshard!r}): expected a function of all pieces' states and their number")
        self.value = value
        self.index = index
        self.count = count
        self.reshard = reshard

    def __repr__(self) -> str:
        return f"Sharded({self.value!r}, index={self.index}, count={self.count})"


def expect_own_piece(place: str, declared: object, stateful: object) -> None:
    """Refuses a piece that is not that of the reader in it: a loader's dataset or sampler may know its data rank.

    Raises:
        Invalid: It is another one.
    """
    if not isinstance(declared, Sharded):
        return
    value: Any = getattr(stateful, "value", stateful)
    readers = [value, *(getattr(value, name, None) for name in ("dataset", "sampler", "batch_sampler"))]
    for own in (getattr(one, "own_piece", None) for one in (*readers, getattr(readers[-1], "sampler", None))):
        if isinstance(own, tuple) and own != (declared.index, declared.count):
            raise Invalid(
                f"{place}: expected Sharded(index={own[0]}, count={own[1]}), the rank and the number of ranks of what "
                f"it holds, found index={declared.index}, count={declared.count}: give both the same"
            )


class Stateful:
    """A value that one function reads at each save, and another one sets at each load.

    It may stand where an object with ``state_dict`` may: as a key's value or directly below a key, alone or in
    :class:`PerRank`. Both functions run in the thread that saves or loads.

    Example::

        state["extra"]["consumed"] = sf.Stateful(lambda: sampler.consumed, sampler.skip_to)
        state["extra"]["position"] = sf.PerRank(sf.Stateful(loader.tell, loader.seek))

    Args:
        get: Returns the value, of any kind that can be stored. Every call that saves calls it, without arguments.
            :func:`load` and :func:`plan_load` call it, too, to see which tensors they may fill, and so does the first
            :meth:`Checkpointer.step`, which looks at the whole state.
        set: Takes the loaded value. A load calls it at its end, after it verified all bytes on all ranks and set
            everything else.
    """

    def __init__(self, get: Callable[[], Any], set: Callable[[Any], object]) -> None:
        if not callable(get) or not callable(set):
            raise Invalid(
                f"Stateful({get!r}, {set!r}): expected two functions: one that reads the value, one that sets it"
            )
        self._get = get
        self._set = set

    def __repr__(self) -> str:
        return f"Stateful({self._get!r}, {self._set!r})"

    def state_dict(self) -> Any:
        """The value now."""
        return self._get()

    def load_state_dict(self, state: Any) -> None:
        """Sets the value."""
        self._set(state)

    def check(self, state: Any) -> None:
        """Refuses a loaded value before anything is installed; this one accepts all but a data loader's."""
        expect_no_loader(state)


def random_state() -> PerRank:
    """The state of this process's global random generators, read at each save and set at the end of each load.

    The generators are Python's ``random``; ``numpy.random``, if NumPy was imported; and, if PyTorch was imported, its
    generators for the host and, once CUDA is in use, for each of its devices. Each rank has its own, as with
    :class:`PerRank`: if they differ, a load on another number of ranks needs ``per_rank=``.

    Example::

        state = {"model": model, "optimizer": optimizer, "extra": {"random": sf.random_state()}}

    A load raises :class:`Unsupported` if a framework was imported at the save and is not now, and :class:`Invalid` if
    CUDA has another number of devices. Generators that the checkpoint does not have stay as they are, with a warning in
    the log. Generators that your program makes, such as ``torch.Generator`` and ``numpy.random.default_rng``, are not
    included: give each a :class:`Stateful`.
    """
    return PerRank(_RandomState())


class _RandomState(Stateful):
    def __init__(self) -> None:
        super().__init__(_read, _write)

    def __repr__(self) -> str:
        return "random_state()"

    def check(self, state: Any) -> None:
        if not isinstance(state, dict) or "python" not in state:
            raise Refused("what is stored is no random_state()")
        random.Random().setstate(state["python"])
        for framework, generators in frameworks.random_generators().items():
            if framework in state:
                generators.check(state[framework])
        unknown = sorted(state.keys() - {"python", *frameworks.random_generators()})
        if unknown:
            raise Refused(
                f"it holds the random state of {unknown}, which this process has not imported: import it first"
            )


def _read() -> dict[str, object]:
    read = {framework: generators.read() for framework, generators in frameworks.random_generators().items()}
    return {"python": random.getstate(), **read}


def _write(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    for framework, generators in frameworks.random_generators().items():
        left = generators.write(state[framework]) if framework in state else framework
        if left is not None:
            _log.warning(
                "random_state(): the checkpoint has no state of the generators of %s; they stay as they are", left
            )
