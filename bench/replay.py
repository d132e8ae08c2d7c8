"""Replayed AdamW beside the same loads and stores without arithmetic, and beside PyTorch's fused AdamW."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import torch
from figures import Figures, median, ratio, spread, summary, table
from ranks import Settings

REPOSITORY = Path(__file__).parent.parent
THREADS = 2
WARM = 2
TIMES = 5


def measure(settings: Settings) -> Figures:
    """Millions of parameters a second, round by round; each round's figure is the best of five."""
    elements = 1_000_000 if settings.quick else 32_000_000
    build = ["cargo", "build", "--quiet", "--release", "--locked", "--package", "shardfast-replay-bench"]
    subprocess.run(build, cwd=REPOSITORY, check=True)
    rates: dict[str, list[float]] = {"replay": [], "loads and stores": [], "PyTorch fused": [], "three gradients": []}
    for _ in range(settings.rounds):
        replayed, moved = best(elements, 1)
        rates["replay"].append(elements / replayed / 1e6)
        rates["loads and stores"].append(elements / moved / 1e6)
        rates["PyTorch fused"].append(elements / fused(elements) / 1e6)
        rates["three gradients"].append(3 * elements / best(elements, 3)[0] / 1e6)
    rows = [[name, f"{median(found):.0f} {spread(found, 0)}", *beside(rates, name)] for name, found in rates.items()]
    columns = ("fp32 AdamW, two threads", "M steps of a parameter/s", "of loads and stores", "of PyTorch")
    table("replay", columns, rows)
    return {name: summary(found) for name, found in rates.items()} | {
        "of loads and stores": summary(ratio(rates["replay"], rates["loads and stores"])),
        "of PyTorch": summary(ratio(rates["replay"], rates["PyTorch fused"])),
    }


def beside(rates: dict[str, list[float]], name: str) -> list[str]:
    found = [ratio(rates[name], rates[other]) for other in ("loads and stores", "PyTorch fused")]
    return [f"{median(values):.2f} {spread(values)}" for values in found]


def best(elements: int, gradients: int) -> tuple[float, float]:
    """Seconds of a replay, and of the loop beside it."""
    program = REPOSITORY / "target" / "release" / "replay"
    arguments = [str(number) for number in (elements, THREADS, gradients, WARM + TIMES)]
    lines = subprocess.run([program, *arguments], check=True, capture_output=True, text=True).stdout.splitlines()
    replayed, moved = zip(*(map(float, line.split()) for line in lines[WARM:]), strict=True)
    return min(replayed), min(moved)


def fused(elements: int) -> float:
    """Seconds of a step of PyTorch's fused AdamW."""
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    parameter = torch.nn.Parameter(torch.rand(elements))
    parameter.grad = torch.rand(elements)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    seconds = []
    for _ in range(WARM + TIMES):
        begun = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - begun)
    torch.set_num_threads(before)
    return min(seconds[WARM:])
