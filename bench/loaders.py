"""Data loaders in a state: the call of a save, bytes and memory of a load, the dealing of units, a resumed epoch.

Its ranks run in an environment of their own (`loader_ranks.py`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from environments import measured_by, missing
from figures import OURS, Figures, median, ours_first, ratio, spread, summary, table
from ranks import ROUNDS_MAX, Settings

RANKS = Path(__file__).with_name("loader_ranks.py")
GIGABYTES = 1.0
PIECES, PIECES_THEN, WORLD_THEN, UNITS = 8, 6, 2, 100_000
"""Pieces of a save; those of a load of buffers, and of a load of so many units, of which a core each has one."""

ACCELERATE = "accelerate"
INDEX, STREAM = "with an index", "a stream"
NOTES = {
    OURS: "sf.load into a StatefulDataLoader, with shardfast.data.DistributedSampler where there is an index",
    ACCELERATE: "skip_first_batches of a plain DataLoader, which transformers' Trainer calls, too",
}


def measure(settings: Settings) -> Figures:
    settings = replace(settings, gigabytes=min(settings.gigabytes, GIGABYTES), rounds=min(settings.rounds, ROUNDS_MAX))
    found = measured_by(RANKS, "torchdata", "torchdata", "frameworks", settings)
    if found is None:
        return {"not measured": missing("torchdata", "frameworks")}
    return {
        "saves": _show_saves(found["saves"]),
        "buffers": _show_buffers(found["buffers"], found["bytes"], found["budget_bytes"]),
        "units": _show_units(found["units"]),
        "resumed": _show_resumed(found["resumed"], found["behind"]),
    }


def _show_saves(found: dict[str, Any]) -> Figures:
    calls = found["calls_ms"]
    beyond = [one - other for one, other in zip(calls["with"], calls["without"], strict=True)]
    rows: list[list[object]] = [[f"{name} the loader", median(of), spread(of)] for name, of in calls.items()]
    rows.append(["the difference, save by save", median(beyond), spread(beyond)])
    for every, of in found["loop_ms"].items():
        rows.append([f"between two batches, snapshot_every_n_steps={every}", median(of), spread(of)])
    title = f"the call of a save, ms, {found['tensors']} tensors, a loader whose workers need {found['state_s']:.0f} s"
    table(f"{title} for their state", ("", "median", "(min .. max)"), rows)
    loops = {every: summary(of) for every, of in found["loop_ms"].items()}
    return {"calls_ms": {name: summary(of) for name, of in calls.items()}, "beyond_ms": summary(beyond), "loop": loops}


def _show_buffers(found: dict[str, Any], size: int, budget_bytes: int) -> Figures:
    needed = median(found["needed"])
    of_needed = {name: [one / needed for one in found[name]] for name in ("read", "from_storage")}
    extra = [one / (1 << 20) for one in found["extra"]]
    rows: list[list[object]] = [
        ["seconds", median(found["seconds"]), spread(found["seconds"])],
        ["asked for, of the bytes needed", f"{median(of_needed['read']):.4f}", spread(of_needed["read"], 4)],
        ["from storage", f"{median(of_needed['from_storage']):.4f}", spread(of_needed["from_storage"], 4)],
        ["memory beyond the buffers, MiB", f"{median(extra):.0f}", spread(extra, 0)],
    ]
    title = f"cold loads of {size / 1e9:.2f} GB of token buffers from {PIECES} pieces into {PIECES_THEN}"
    table(f"{title}; the budget is {budget_bytes >> 20} MiB", ("", "median", "(min .. max)"), rows)
    return {
        "bytes": size,
        "budget_bytes": budget_bytes,
        "seconds": summary(found["seconds"]),
        "read_of_needed": summary(of_needed["read"]),
        "from_storage_of_needed": summary(of_needed["from_storage"]),
        "extra_bytes": summary(found["extra"]),
    }


def _show_units(found: dict[str, list[float]]) -> Figures:
    names = {"dealt_s": "dealing, s", "load_s": "the load, s", "save_ms": "the call of a save, ms"}
    rows = [[names[name], median(of), spread(of)] for name, of in found.items()]
    title = f"{UNITS:,} units from {PIECES} pieces into {WORLD_THEN}, of the slowest rank"
    table(title, ("", "median", "(min .. max)"), rows)
    return {name: summary(of) for name, of in found.items()}


def _show_resumed(found: dict[str, Any], behind: int) -> Figures:
    rows: list[list[object]] = []
    figures: dict[str, Any] = {}
    for kind, systems in found.items():
        figures[kind] = {}
        for name, of in ours_first(systems):
            times, milliseconds = ratio(of["seconds"], systems[OURS]["seconds"]), [one * 1e3 for one in of["seconds"]]
            rows.append([
                kind, name, f"{median(milliseconds):.1f}", spread(milliseconds, 1), f"{median(times):.1f}",
                spread(times, 1), max(of["old"]),
            ])  # fmt: skip
            figures[kind][name] = {"ms": summary(milliseconds), "of_ours": summary(times), "old": max(of["old"])}
    columns = ("ms", "(min .. max)", f"of {OURS}'s", "(min .. max)", "old samples read")
    table(f"from a new loader to the batch behind {behind:,} samples", ("", "", *columns), rows)
    for name, note in NOTES.items():
        print(f"  {name}: {note}")
    return figures
