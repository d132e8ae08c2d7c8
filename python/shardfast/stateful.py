"""State that is read at each save and set at each load: a pair of functions, the random generators.

A value in a state is saved as it stands there. ``{"rng": torch.get_rng_state()}`` holds what the call returned when the
dict was made, for ever; that it has become stale cannot be seen. What changes from step to step stands there as a
:class:`Stateful`, or is an object with ``state_dict`` and ``load_state_dict`` anyway.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

from . import adapters as frameworks
from .catalog import PerRank, Refused
from .errors import Invalid

_log = logging.getLogger("shardfast")


class Stateful:
    """A value that is read by a function at each save, and set by another one at each load.

    Stands where an object with ``state_dict`` may: as a key's value or directly below a key, alone or in
    :class:`PerRank`. Both functions are called in the thread that saves or loads.

    Example::

        state["extra"]["consumed"] = sf.Stateful(lambda: sampler.consumed, sampler.skip_to)
        state["extra"]["position"] = sf.PerRank(sf.Stateful(loader.tell, loader.seek))

    Args:
        get: Is called without arguments by every call of :func:`save`, :func:`save_async` and
            :meth:`Checkpointer.step` that saves; returns the value, of any kind that can be stored. :func:`load` and
            :func:`plan_load` call it, too, to see which tensors they may fill.
        set: Is called with the loaded value at the end of a load, when everything was proven and made on all ranks,
            and everything else was installed.
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
        """Refuses a loaded value before anything is installed; this one accepts all."""


def random_state() -> PerRank:
    """The state of this process's global random generators, read at each save and set at the end of each load.

    They are those of Python's ``random``; of NumPy's ``numpy.random``, if NumPy was imported; and of PyTorch for the
    host and, once CUDA is in use, for each of its devices, if PyTorch was imported. Each rank has its own, as with
    :class:`PerRank`: a load on another number of ranks asks for a choice (``per_rank=``) where they differ.

    Example::

        state = {"model": model, "optimizer": optimizer, "extra": {"random": sf.random_state()}}

    A load raises :class:`Unsupported` where a framework was imported at the save and is not now, and :class:`Invalid`
    where CUDA has another number of devices. What is here and was not at the save stays as it is, with a warning in
    the log. Generators that a program makes itself, such as ``torch.Generator`` and ``numpy.random.default_rng``, are
    not among them: give each a :class:`Stateful`.
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
