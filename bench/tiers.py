"""Memory and a local disk in front of a run: what saves cost there, and what a sending costs the training beside it.

In each round the same state is saved to a directory by itself, with ``local=`` beside it on the same disk, and into
memory; the last is restored, too. Beside these all ranks copy their parts from memory to memory at once. While the
local disk is sent at its limit, the ranks train; then they train the same steps with nothing beside.
"""

from __future__ import annotations

import time
from pathlib import Path

import shardfast as sf
import torch
from figures import Figures, median, ratio, spread, summary, table
from ranks import Settings, of_all, remove, run, settle, turned

PLAIN, LOCAL, MEMORY = "directory", "local=", "memory="
COPY, BACK = "memory copies", "restore from memory"
QUIET, BESIDE = "nothing beside", "beside a sending"
RATE, RATE_BYTES = "100MB/s", 100e6
STEP_ELEMENTS = 1200


def measure(settings: Settings) -> Figures:
    saves, steps = run(_worker, settings)
    kept, back = ratio(saves[COPY], saves[MEMORY]), ratio(saves[COPY], saves[BACK])
    durable, step = ratio(saves[LOCAL], saves[PLAIN]), ratio(steps[BESIDE], steps[QUIET])
    rows = [
        ["durable save, directory", f"{median(saves[PLAIN]):.2f} s {spread(saves[PLAIN])}"],
        ["with local=, of that", f"{median(durable):.2f} {spread(durable)}"],
        ["memory copies of all processes at once", f"{1e3 * median(saves[COPY]):.0f} ms"],
        ["these, of a save into memory", f"{median(kept):.2f} {spread(kept)}"],
        ["these, of a restore from memory", f"{median(back):.2f} {spread(back)}"],
        ["a step, nothing beside", f"{1e3 * median(steps[QUIET]):.1f} ms"],
        [f"beside a sending of {RATE}, of that", f"{median(step):.3f} {spread(step, 3)}"],
    ]
    size = f"{settings.gigabytes:g} GB on {settings.processes} processes"
    table(f"memory and a local disk in front, {size}, {len(durable)} rounds", ("", ""), rows)
    return {
        "durable_of_directory": summary(durable),
        "copies_of_memory_save": summary(kept),
        "copies_of_memory_restore": summary(back),
        "step_of_quiet": summary(step),
    }


def _worker(settings: Settings) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    count = max(int(settings.gigabytes * 1e9) // (4 << 20), 1)
    state = {"model": {f"w{index}": torch.full((1 << 20,), float(index)) for index in range(count)}}
    place = settings.where / "tiers"
    saves: dict[str, list[float]] = {mode: [] for mode in (PLAIN, LOCAL, MEMORY, COPY, BACK)}
    steps: dict[str, list[float]] = {QUIET: [], BESIDE: []}
    kept = {
        PLAIN: sf.Checkpointer(place / "plain", keep=sf.last(1)),
        LOCAL: sf.Checkpointer(place / "far", local=place / "near", drain=RATE, keep=sf.last(1)),
        MEMORY: sf.Checkpointer(place / "kept", memory=sf.steps(1)),
    }
    train_s = 0.6 * settings.total_bytes / RATE_BYTES
    for number in range(1, settings.rounds + 2):
        for mode in turned([PLAIN, LOCAL, MEMORY], number):
            settle(settings)
            saves[mode].append(_saved(kept[mode], number, state))
            if mode == MEMORY:
                saves[COPY].append(_copied(state, settings))
                saves[BACK].append(_restored(place / "kept", number, state))
            if mode == LOCAL:
                steps[BESIDE].append(_step(train_s))
                while max(of_all(kept[LOCAL].drained or 0)) < number:
                    time.sleep(0.1)
                steps[QUIET].append(_step(train_s))
    for ckpt in kept.values():
        ckpt.close()
    remove(place)
    return {mode: of[1:] for mode, of in saves.items()}, {mode: of[1:] for mode, of in steps.items()}


def _saved(ckpt: sf.Checkpointer, step: int, state: dict[str, object]) -> float:
    """Seconds until the slowest rank knows that a save is durable."""
    torch.distributed.barrier()
    began = time.perf_counter()
    ckpt.save(step, state)
    ckpt.wait()
    return max(of_all(time.perf_counter() - began))


def _copied(state: dict[str, dict[str, torch.Tensor]], settings: Settings) -> float:
    """Seconds in which the slowest rank copies its part to memory that it has written before."""
    mine = list(state["model"].values())[torch.distributed.get_rank() :: settings.processes]
    targets = [torch.ones_like(tensor) for tensor in mine]
    torch.distributed.barrier()
    began = time.perf_counter()
    for source, target in zip(mine, targets, strict=True):
        target.copy_(source)
    return max(of_all(time.perf_counter() - began))


def _restored(url: Path, number: int, state: dict[str, object]) -> float:
    """Seconds until the slowest rank has its state back from memory."""
    ckpt = sf.Checkpointer(url, memory=sf.steps(1))
    torch.distributed.barrier()
    began = time.perf_counter()
    assert ckpt.restore(state) == number
    took = time.perf_counter() - began
    assert ckpt.restored is not None and set(ckpt.restored.sources) == {"memory"}
    return max(of_all(took))


def _step(seconds: float) -> float:
    """Seconds of a step, the median of those within that time."""
    weights = torch.ones(STEP_ELEMENTS, STEP_ELEMENTS)
    took: list[float] = []
    until = time.perf_counter() + seconds
    goes_on = True
    while goes_on:
        began = time.perf_counter()
        torch.distributed.all_reduce(weights @ weights)
        took.append(time.perf_counter() - began)
        goes_on = all(of_all(time.perf_counter() < until))
    return median(took)
