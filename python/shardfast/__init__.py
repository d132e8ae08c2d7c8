"""Shardfast: checkpoints for large training runs, saved without stopping and loaded under any layout.

Example::

    import shardfast as sf

    ckpt = sf.Checkpointer("runs/gpt", every=sf.steps(200), keep=sf.last(3) | sf.every(10_000))
    state = {"model": model, "optimizer": optimizer, "extra": {"args": args, "random": sf.random_state()}}
    start = ckpt.restore(state)                # the newest committed checkpoint, or 0
    for step in range(start, total):
        ...
        ckpt.step(step + 1, state)             # saves when due
    ckpt.close()                               # waits until the last save is durable

A *state* is a dict whose keys you choose; each becomes a directory of the checkpoint. Its values may be modules,
optimizers, anything with ``state_dict`` and ``load_state_dict``, tensors and arrays, and dicts of these and of plain
Python values. :func:`save` and :func:`load` handle one checkpoint; a :class:`Checkpointer` handles a whole run.
"""

import importlib

TYPE_CHECKING = False  # as typing's, without its import
if TYPE_CHECKING:
    from .capture.in_flight import Pending
    from .checkpointer import Checkpointer
    from .errors import (
        Cancelled,
        Conflict,
        Corrupt,
        Error,
        Exhausted,
        Internal,
        Invalid,
        NotFound,
        Unavailable,
        Unsupported,
    )
    from .inspection import Mapped, mapped
    from .memory import copies
    from .schedule import best, every, last, optimal, steps
    from .state.load_plan import LoadPlan
    from .state.stateful import PerRank, Sharded, Stateful, random_state
    from .stopping import Stopping, outlive_signals
    from .verbs import load, plan_load, save, save_async

    __version__: str

__all__ = [
    "Cancelled",
    "Checkpointer",
    "Conflict",
    "Corrupt",
    "Error",
    "Exhausted",
    "Internal",
    "Invalid",
    "LoadPlan",
    "Mapped",
    "NotFound",
    "Pending",
    "PerRank",
    "Sharded",
    "Stateful",
    "Stopping",
    "Unavailable",
    "Unsupported",
    "__version__",
    "best",
    "copies",
    "every",
    "last",
    "load",
    "mapped",
    "optimal",
    "outlive_signals",
    "plan_load",
    "random_state",
    "save",
    "save_async",
    "steps",
]

_HOMES = {
    "Checkpointer": "checkpointer",
    "LoadPlan": "state.load_plan",
    "Mapped": "inspection",
    "Pending": "capture.in_flight",
    "PerRank": "state.stateful",
    "Sharded": "state.stateful",
    "Stateful": "state.stateful",
    "Stopping": "stopping",
    "best": "schedule",
    "copies": "memory",
    "every": "schedule",
    "last": "schedule",
    "load": "verbs",
    "mapped": "inspection",
    "optimal": "schedule",
    "outlive_signals": "stopping",
    "plan_load": "verbs",
    "random_state": "state.stateful",
    "save": "verbs",
    "save_async": "verbs",
    "steps": "schedule",
}


def __getattr__(name: str) -> object:
    # Imported on first use: `import shardfast` costs next to nothing and loads no framework.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "__version__":
        value: object = importlib.import_module("importlib.metadata").version(__name__)
    else:
        value = getattr(importlib.import_module(f".{_HOMES.get(name, 'errors')}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
