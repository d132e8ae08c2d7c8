"""Memory that a save or a load takes beside the state, at states of ten and twenty times the staging budget."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from figures import OURS, Figures, table
from ranks import Settings, attempt, drop_page_cache, remove, run
from shardfast import session
from states import State, bytes_of, expect_equal, sharded, zero
from systems import System, systems

MIB = 1 << 20
CONSTANT_BYTES = 64 * MIB


def measure(settings: Settings) -> Figures:
    """One process, a fresh one for each size."""
    alone = replace(settings, processes=1)
    budget = (16 if settings.quick else 64) * MIB
    times = (10,) if settings.quick else (10, 20)
    figures: dict[str, Any] = {"budget_bytes": budget}
    rows: list[list[object]] = []
    for factor in times:
        found: dict[str, Any] = run(_worker, alone, budget, factor * budget)
        for name, (save, load) in found["extra"].items():
            row: list[object] = [f"{found['bytes'] / MIB:.0f} MiB", name, f"{save / MIB:.0f}", f"{load / MIB:.0f}"]
            is_ours = name == OURS
            rows.append([*row, f"{(max(save, load) - budget) / MIB:.0f}" if is_ours else ""])
            if is_ours:
                figures[f"within budget at {factor} times"] = max(save, load) <= budget + CONSTANT_BYTES
        figures[f"{factor} times the budget"] = found
    columns = ("system", "save MiB", "load MiB", "beyond the budget MiB")
    title = f"peak memory above what was there before; shardfast's budget is {budget // MIB} MiB; one process"
    table(title, ("state", *columns), rows)
    print(f"  the goal of shardfast is at most {CONSTANT_BYTES // MIB} MiB beyond its budget")
    print("  files mapped into memory count, though the kernel could take those pages back")
    for name, reason in found["failed"].items():
        print(f"  not in the table: {name}: {reason}")
    return figures


def _worker(settings: Settings, budget: int, total: int) -> dict[str, Any]:
    os.environ[session.STAGING_BYTES] = str(budget)  # before the process's session is made
    if session.current().staging_bytes != budget:
        raise RuntimeError("the budget is not the one to be measured")
    state, other = sharded(total, seed=1), sharded(total, seed=1000)
    made, failed = systems()
    extra: dict[str, tuple[int, int]] = {}
    for system in made:
        path = settings.where / "footprint"
        peaks: list[int] = []
        reason = attempt(_one, system, path, state, other, peaks)
        remove(path)
        if reason is not None:
            failed[system.name] = reason
        else:
            extra[system.name] = (peaks[0], peaks[1])
    return {"bytes": bytes_of(state), "extra": extra, "failed": failed}


def _one(system: System, path: Path, state: State, other: State, peaks: list[int]) -> None:
    peaks.append(extra_memory(lambda: system.save(path, state)))
    drop_page_cache(path)
    zero(other)
    peaks.append(extra_memory(lambda: system.load(path, other)))
    expect_equal(other, state, system.name)


def extra_memory(action: Callable[[], object]) -> int:
    """Bytes of resident memory at the peak of ``action`` above those before it."""
    gc.collect()
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5\n")  # the high-water mark starts anew
    action()
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")
