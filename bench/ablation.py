"""Each optimization off in turn, as in the papers' tables: what each is worth on this machine.

The switches are no options of the product: only a build with the cargo feature ``ablation`` reads them, and says so by
``shardfast._native.ABLATIONS``.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import shardfast as sf
import torch.distributed as dist
from figures import Figures, median, ratio, spread, summary, table, timeline
from ranks import ROUNDS_MAX, Settings, drop_page_cache, of_all, remove, run, settle
from shardfast import _native
from states import trainable, values

SWITCH = "SHARDFAST_ABLATE"
FULL = "nothing off"
NAMES = {
    "lazy-capture": "tensors are copied before the call returns",
    "providers": "values are encoded before the first tensor byte flows",
    "direct-io": "buffered writes and reads",
    "io-uring": "threads with positioned requests",
    "parallel-files": "one file at a time on each rank",
    "checksum-overlap": "checksums in a pass of their own before the write and after the read",
}
VALUE_BYTES = 2_000_000


def measure(settings: Settings) -> Figures:
    """A fresh set of processes for each, so that nothing that was found out under one switch serves the next."""
    offered = [name for name in NAMES if name in getattr(_native, "ABLATIONS", ())]
    order = [FULL, *offered]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in order}
    rounds = min(settings.rounds, ROUNDS_MAX)
    for round_ in range(rounds):
        for name in order[round_ % len(order) :] + order[: round_ % len(order)]:
            environment = {} if name == FULL else {SWITCH: name}
            found[name].append(run(_worker, settings, environment=environment))
    rows: list[list[object]] = []
    figures: dict[str, Any] = {"not offered": [name for name in NAMES if name not in offered]}
    full = {what: [one[what] for one in found[FULL]] for what in ("stall_ms", "save_s", "load_s")}
    for name in order:
        own = {what: [one[what] for one in found[name]] for what in full}
        row: list[object] = [name, f"{median(own['stall_ms']):.2f}"]
        for what in ("save_s", "load_s"):
            rates = [found[name][at]["bytes"] / seconds / 1e9 for at, seconds in enumerate(own[what])]
            row += [median(rates), spread(rates), median(ratio(full[what], own[what]))]
        rows.append([*row, NAMES.get(name, "")])
        figures[name] = {what: summary(numbers) for what, numbers in own.items()}
    rows += [
        [name, "not offered by this build", *[""] * 6, what] for name, what in NAMES.items() if name not in offered
    ]
    columns = (
        "stall ms",
        "save GB/s",
        "(min .. max)",
        "of full",
        "cold load GB/s",
        "(min .. max)",
        "of full",
        "instead",
    )
    table("ablation: module, AdamW and 2 MB of values, durable save and cold load", ("off", *columns), rows)
    for name in order:
        timeline(f"phases with {name} off" if name != FULL else "phases", [one["phases_ms"] for one in found[name]])
    return figures


def _worker(settings: Settings) -> dict[str, Any]:
    module, optimizer, _ = trainable(settings.total_bytes // 2)
    state = {"model": module, "optimizer": optimizer, "extra": values(VALUE_BYTES, as_bytes=False)}
    size = 3 * sum(parameter.numel() * 4 for parameter in module.parameters())
    warm, path = settings.where / "ablation-warm", settings.where / "ablation"
    sf.save(warm, state)
    remove(warm)
    stall_s, save_s, phases = _save(settings, path, state)
    drop_page_cache(path)
    dist.barrier()
    began = time.perf_counter()
    sf.load(path, state)
    load_s = time.perf_counter() - began
    remove(path)
    own: dict[str, Any] = {"stall_ms": stall_s * 1e3, "save_s": save_s, "load_s": load_s, "bytes": size}
    everyone = of_all({**own, "phases_ms": phases})
    worst = {what: max(one[what] for one in everyone) for what in ("stall_ms", "save_s", "load_s")}
    return {**everyone[0], **worst, "bytes": sum(one["bytes"] for one in everyone)}


def _save(settings: Settings, path: Path, state: dict[str, Any]) -> tuple[float, float, dict[str, float]]:
    """Seconds of the call, seconds until durable, and when each phase ended."""
    settle(settings)
    dist.barrier()
    began = time.perf_counter()
    pending = sf.save_async(path, state)
    returned = time.perf_counter()
    pending.committed()
    phases: dict[str, float] = pending.report["phases_ms"]
    return returned - began, time.perf_counter() - began, phases
