"""A real training that is killed now and then: fixed intervals between saves, beside the one that wastes least.

One process trains a small network on the processor. It is killed (SIGKILL) at moments that a seed draws, the same for
all intervals of a round, and started again, until it has made all steps. The time counts in which the training runs,
from the end of a restore; starting Python and importing PyTorch would take longer than everything else here.
"""

from __future__ import annotations

import math
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import shardfast as sf
import torch
from figures import Figures, median, ratio, spread, summary, table
from ranks import ROUNDS_MAX, Settings

INTERVALS = ("10", "50", "200", "optimal")
NONE = "none"
"""No saves and no crashes: what the steps themselves take."""

TRIED = 100
"""Steps that show what a step takes here."""

STEPS_TO_CRASH = 400
"""The mean number of steps from one crash to the next."""

WIDTH = 768
READY, DONE = "ready", "done"


def measure(settings: Settings) -> Figures:
    steps = 200 if settings.quick else 2000
    # So that a machine that is slow now sees as many crashes as a fast one.
    plain_s = trained(settings.where / "crashes", NONE, TRIED, math.inf, iter(()))[0]
    mtbf_s = plain_s / TRIED * STEPS_TO_CRASH
    rounds = min(settings.rounds, ROUNDS_MAX)
    seconds: dict[str, list[float]] = {name: [] for name in (NONE, *INTERVALS)}
    crashes: dict[str, list[int]] = {name: [] for name in seconds}
    said: list[str] = []
    for number in range(rounds):
        order = [NONE, *INTERVALS]
        for name in order[number % len(order) :] + order[: number % len(order)]:
            place = settings.where / f"crashes-{name}"
            shutil.rmtree(place, ignore_errors=True)
            took, killed, words = trained(place, name, steps, mtbf_s, gaps(number, mtbf_s))
            seconds[name].append(took)
            crashes[name].append(killed)
            said += [words] if name == "optimal" else []
            shutil.rmtree(place, ignore_errors=True)
    rows: list[list[object]] = []
    for name in seconds:
        wasted = [beside - 1 for beside in ratio(seconds[name], seconds[NONE])]
        beside = ratio(seconds[name], seconds["optimal"])
        row: list[object] = [name, median(seconds[name]), spread(seconds[name]), median(crashes[name])]
        rows.append([*row, median(wasted), spread(wasted), median(beside), spread(beside)])
    columns = ("s", "(min .. max)", "crashes", "waste", "(min .. max)", "beside optimal", "(min .. max)")
    table(f"{steps} steps, one crash in {mtbf_s:.1f} s, a save every ... steps", ("", *columns), rows)
    for words in said:
        print(f"  optimal, at the end of a round: {words}")
    return {name: summary(found) for name, found in seconds.items()} | {"crashes": crashes, "schedules": said}


def gaps(number: int, mtbf_s: float) -> Iterator[float]:
    """Seconds of training between crashes, the same for each interval of a round."""
    dice = random.Random(number)
    while True:
        yield dice.expovariate(1 / mtbf_s)


def trained(place: Path, every: str, steps: int, mtbf_s: float, until_crash: Iterator[float]) -> tuple[float, int, str]:
    """Trains until all steps are made; the seconds in which the training ran, how often it was killed, its last words.

    A run without saves is not killed either.
    """
    total, killed = 0.0, 0
    while True:
        command = [sys.executable, __file__, str(place), every, str(steps), str(mtbf_s)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        line = process.stdout.readline()
        if line.strip() != READY:
            raise RuntimeError(f"expected {READY!r} of a training that starts, found {line!r}")
        began = time.perf_counter()
        try:
            process.wait(None if every == NONE else next(until_crash))
        except subprocess.TimeoutExpired:
            process.kill()
        total += time.perf_counter() - began
        rest = process.communicate()[0]
        if DONE in rest:
            return total, killed, rest.partition(DONE)[2].strip()
        killed += 1


def train(place: str, every: str, steps: int, mtbf_s: float) -> None:
    """What the process does that is killed."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.GELU(), torch.nn.Linear(2 * WIDTH, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = torch.randn(64, WIDTH)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # makes the optimizer's state, and what PyTorch makes once
    schedule = None if every == NONE else sf.optimal(mtbf=mtbf_s) if every == "optimal" else sf.steps(int(every))
    ckpt = sf.Checkpointer(place, every=schedule, keep=sf.last(1))
    state = {"model": model, "optimizer": optimizer}
    start = ckpt.restore(state)
    print(READY, flush=True)
    for number in range(start, steps):
        step()
        ckpt.step(number + 1, state)
    print(DONE, ckpt.every, flush=True)
    ckpt.close()


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
