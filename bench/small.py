"""Thousands of small tensors: what each costs beside its bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from figures import OURS, Figures, median, ours_first, ratio, spread, summary, table
from ranks import ROUNDS_MAX, Cost, Settings, drop_page_cache, in_turn, run, settle, timed
from states import State, expect_equal, small, zero
from systems import System, systems

COUNT, BYTES_EACH = 5000, 1024
PARTS = ("durable save", "cold load")


def measure(settings: Settings) -> Figures:
    count = 200 if settings.quick else COUNT
    found: dict[str, Any] = run(_worker, settings, count)
    seconds: dict[str, tuple[list[float], ...]] = found["seconds"]
    ours = seconds[OURS]
    figures: dict[str, Any] = {"count": count, "bytes_each": BYTES_EACH, "failed": found["failed"], "seconds": seconds}
    rows: list[list[object]] = []
    for name, parts in ours_first(seconds):
        row: list[object] = [name]
        for part, own, times in zip(PARTS, ours, parts, strict=True):
            times_slower = ratio(times, own)
            row += [median(times) * 1e3, spread([one * 1e3 for one in times], 0), median(times_slower)]
            figures.setdefault(f"{part}, times ours", {})[name] = summary(times_slower)
        rows.append(row)
    columns = [column for part in PARTS for column in (f"{part} ms", "(min .. max)", "times ours")]
    title = f"{count} tensors of {BYTES_EACH} bytes on each of {settings.processes} processes"
    table(title, ("", *columns), rows)
    for name, reason in found["failed"].items():
        print(f"  not in the table: {name}: {reason}")
    return figures


def _worker(settings: Settings, count: int) -> dict[str, Any]:
    state, other = small(count, BYTES_EACH), small(count, BYTES_EACH)
    order, failed = systems()
    seconds: dict[str, tuple[list[float], ...]] = {}

    def one(system: System, path: Path, is_measured: bool) -> None:
        costs = _one(settings, system, path, state, other)
        if is_measured:
            for times, cost in zip(seconds.setdefault(system.name, ([], [])), costs, strict=True):
                times.append(cost.seconds)

    in_turn(order, failed, settings, one, rounds=min(settings.rounds, ROUNDS_MAX))
    return {"seconds": seconds, "failed": failed}


def _one(settings: Settings, system: System, path: Path, state: State, other: State) -> list[Cost]:
    settle(settings)
    saved = timed(lambda: system.save(path, state))
    zero(other)
    drop_page_cache(path)
    cold = timed(lambda: system.load(path, other))
    expect_equal(other, state, system.name)
    return [saved, cold]
