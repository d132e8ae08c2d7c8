"""Workers of a ``StatefulDataLoader`` that send their states with the batches before a save, and with no others.

For loaders with ``snapshot_every_n_steps=0`` in the state of a ``Checkpointer``, which tells when the next save is due.
By itself such a loader never sends a state. Tried with torchdata 0.11; private names of its iterator in use:
``_snapshot_interval``, a number of batches of which workers send their states around each multiple; ``_num_yielded``,
``_send_idx``, ``_rcvd_idx`` and ``_num_workers``.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any


@dataclass
class _Pace:
    """How far an iterator was after the last step, and how many batches that step took."""

    iterator: weakref.ref[Any]
    batches: int
    a_step: int = 0

    def is_of(self, iterator: object) -> bool:
        return self.iterator() is iterator


_paces: weakref.WeakKeyDictionary[Any, _Pace] = weakref.WeakKeyDictionary()


def expect_save(loader: Any, steps: int) -> None:
    """Lets workers send their states with the batches before a save that is due so many steps from now.

    Called after each step. Nothing is sent for a save before the third step of an iterator, or one for which workers
    have read ahead already.

    Args:
        loader: A ``StatefulDataLoader``.
        steps: At least 1.
    """
    iterator: Any = loader._iterator
    if loader.snapshot_every_n_steps or not hasattr(iterator, "_snapshot_interval"):
        return
    batches, pace = iterator._num_yielded, _paces.get(loader)
    if pace is None or not pace.is_of(iterator):
        _paces[loader] = _Pace(weakref.ref(iterator), batches)
        return
    pace.batches, pace.a_step = batches, batches - pace.batches
    due = batches + steps * pace.a_step
    requested = batches + iterator._send_idx - iterator._rcvd_idx
    # Each worker's last batch before the save must still be asked for, with its state.
    if pace.a_step and due - iterator._num_workers >= requested:
        iterator._snapshot_interval = due
