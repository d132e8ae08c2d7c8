"""What captures over several steps cost on a host, beside those over one: they are for bits there, not for speed."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import shardfast as sf
import torch
from figures import Figures, median, ratio, spread, summary, table
from footprint import CONSTANT_BYTES, MIB, extra_memory
from ranks import Settings, remove, run
from shardfast import session
from training import Trainer

EVERY, OVER = 12, 4
SAVES = 3
"""Of each way and round; the first one is the rehearsal, and is not counted."""

PARTS = ("copy_ms", "wait_ms", "gradient_ms", "replay_ms", "proof_ms")


def measure(settings: Settings) -> Figures:
    """One process; both ways by turns in each round."""
    budget = 256 * MIB
    found: dict[str, Any] = run(_worker, replace(settings, processes=1), budget)
    rows: list[list[object]] = []
    one = found["ways"]["one step"]
    for name, of in found["ways"].items():
        beside = [f"{median(ratio(of[key], one[key])):.2f} {spread(ratio(of[key], one[key]))}" for key in COLUMNS]
        peak = f"{max(of['peak_bytes']) / MIB:.0f}"
        parts = ", ".join(f"{part.removesuffix('_ms')} {of['parts'][part]:.0f}" for part in of["parts"])
        rows.append([name, *beside, peak, parts])
    title = f"{found['bytes'] / MIB:.0f} MiB of parameters and moments, a save every {EVERY} steps; beside one step"
    table(title, ("captured over", *COLUMNS.values(), "peak MiB", "ms by part"), rows)
    print(f"  peak: resident memory above what the training had; the budget is {budget // MIB} MiB")
    figures = {
        f"{name}, {title}": summary(ratio(of[key], one[key]))
        for name, of in found["ways"].items()
        for key, title in COLUMNS.items()
    }
    peak = max(byte for of in found["ways"].values() for byte in of["peak_bytes"])
    return figures | {"budget_bytes": budget, "peak_bytes": peak, "within": peak <= budget + CONSTANT_BYTES}


COLUMNS = {"steps_s": "time of all steps", "lag_s": "commit after the step", "processor_s": "processor time"}


def _worker(settings: Settings, budget: int) -> dict[str, Any]:
    os.environ[session.STAGING_BYTES] = str(budget)  # before the process's session is made
    trainer = Trainer(settings.total_bytes // 4)
    # The one that can be replayed on a host.
    trainer.optimizer = torch.optim.AdamW(trainer.module.parameters(), lr=1e-6, fused=True)
    trainer.plain_s(3)
    names = {1: "one step", OVER: f"{OVER} steps"}
    ways: dict[str, dict[str, Any]] = {
        name: {"steps_s": [], "lag_s": [], "processor_s": [], "peak_bytes": [], "parts": {}} for name in names.values()
    }
    for number in range(settings.rounds):
        for over, name in list(names.items())[:: 1 if number % 2 else -1]:
            of, place = ways[name], settings.where / "windows"
            of["peak_bytes"].append(
                extra_memory(lambda over=over, of=of, place=place: _train(trainer, over, of, place))
            )
            remove(place)
    return {"bytes": trainer.state_bytes, "ways": ways}


def _train(trainer: Trainer, over: int, of: dict[str, Any], place: Path) -> None:
    state = {"model": trainer.module, "optimizer": trainer.optimizer}
    lags: list[float] = []
    with sf.Checkpointer(str(place), every=sf.steps(EVERY), keep=sf.last(1), over=over) as ckpt:
        for step in range(1, EVERY * SAVES + 1):
            if step == EVERY + 1:
                ckpt.wait()
                began, processor = time.perf_counter(), time.process_time()
            trainer.plain_s(1)
            ckpt.step(step, state)
            if step % EVERY == EVERY - 1 and step > EVERY and ckpt.report is not None:
                lags.append(ckpt.report["phases_ms"]["committed"] / 1e3)
        ckpt.wait()
        of["steps_s"].append(time.perf_counter() - began)
        of["processor_s"].append(time.process_time() - processor)
        lags.append(ckpt.report["phases_ms"]["committed"] / 1e3)
        of["lag_s"].append(median(lags[1:]))
        found = ckpt.capture.figures()
        of["parts"] = {part: found[part] for part in PARTS if part in found}
