"""The first large load of a process, as after a restart, beside the next ones: all from the page cache."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from figures import OURS, Figures, median, ratio, spread, summary, table
from ranks import ROUNDS_MAX, Settings, fill_page_cache, of_all, run, settle, timed
from states import bytes_of, expect_equal, sharded, zero
from systems import Dcp, Shardfast, System

LOADS = 3
THREADS = 2


def measure(settings: Settings) -> Figures:
    shutil.rmtree(settings.where / "restart", ignore_errors=True)  # what a run that was cut off left
    found: dict[str, list[list[float]]] = {system.name: [] for system in _systems()}
    size = run(_save, settings)
    for _ in range(1 if settings.quick else 2 * ROUNDS_MAX):
        for name in found:
            found[name].append(run(_load, settings, name))
    shutil.rmtree(settings.where / "restart", ignore_errors=True)
    figures: dict[str, Any] = {"bytes": size}
    rows: list[list[object]] = []
    for name, loads in found.items():
        first, *others = ([load[at] for load in loads] for at in range(LOADS))
        slower = [one - other for one, other in zip(first, others[-1], strict=True)]
        of_ours = ratio([load[0] for load in found[OURS]], first)
        rows.append([
            name, median(first), spread(first), *map(median, others), median(slower), median(of_ours), spread(of_ours)
        ])  # fmt: skip
        figures[name] = {"s": loads, "slower_s": summary(slower)}
    columns = ("first s", "(min .. max)", "second s", "third s", "first - third", "ours/first", "(min .. max)")
    title = (
        f"loads of fresh processes, {size / 1e9:.2f} GB on {settings.processes} processes, warm, into tensors in use"
    )
    table(title, ("", *columns), rows)
    return figures


def _systems() -> list[System]:
    return [Shardfast(), Dcp(THREADS)]


def _path(settings: Settings, system: System) -> Path:
    return settings.where / "restart" / system.name.replace(" ", "-")


def _save(settings: Settings) -> int:
    state = sharded(settings.total_bytes, seed=1)
    for system in _systems():
        settle(settings)
        system.save(_path(settings, system), state)
    return bytes_of(state)


def _load(settings: Settings, name: str) -> list[float]:
    """Seconds of each load, of the slowest rank."""
    saved = sharded(settings.total_bytes, seed=1)
    state = sharded(settings.total_bytes, seed=1000)
    system = next(system for system in _systems() if system.name == name)
    path = _path(settings, system)
    fill_page_cache(path)
    seconds: list[float] = []
    for _ in range(LOADS):
        zero(state)
        seconds.append(max(of_all(timed(lambda: system.load(path, state)).seconds)))
        expect_equal(state, saved, name)
    return seconds
