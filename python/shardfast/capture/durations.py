"""Notices a save of this rank that takes far longer than those before it."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping

KEPT = 100
BEFORE_MIN = 5
"""Saves before one that it is compared with: the newest, and at least so many."""

STALL, STALL_MIN_MS = 10, 5000
"""A stall is noticed that is longer than so many median ones, and than so many milliseconds."""

DURABLE, DURABLE_MIN_MS = 3, 1000
"""A save is noticed that becomes durable after so many median times, and so many milliseconds later than in one."""


class Durations:
    """Times of saves until they were staged, and until they were committed, in milliseconds."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, float]] = deque(maxlen=KEPT)
        self._has_noticed = False

    def noticed(self, phases_ms: Mapping[str, float]) -> str | None:
        """Takes the next committed save; returns what is unusual about it, of the first one that is."""
        staged, committed = phases_ms.get("staged", 0.0), phases_ms.get("committed", 0.0)
        found = None
        if len(self._kept) >= BEFORE_MIN and not self._has_noticed:
            stall, durable = (statistics.median(times) for times in zip(*self._kept, strict=True))
            if staged > max(STALL * stall, STALL_MIN_MS):
                found = _said("the state could change", staged, stall)
            elif committed > max(DURABLE * durable, durable + DURABLE_MIN_MS):
                found = _said("it was durable", committed, durable)
        self._kept.append((staged, committed))
        self._has_noticed = self._has_noticed or found is not None
        return found


def _said(what: str, ms: float, usual_ms: float) -> str:
    return f"{what} after {ms / 1000:.1f} s, in the median of the saves before after {usual_ms / 1000:.1f} s"
