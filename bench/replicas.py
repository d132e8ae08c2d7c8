"""What it costs to prove replicas at the first save of a layout, beside the same save without proof: 2 and 8 ranks."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import shardfast as sf
import torch
from figures import Figures, median, ratio, spread, summary, table
from ranks import ROUNDS_MAX, Settings, in_turn, of_all, run, settle, timed
from states import KINDS

WORLDS = (2, 8)
WIDTH = 1024
PROVEN, UNPROVEN = "first save", "first save, prove=False"
NEXT, AGAIN = "next save", "next save, prove=True"


@dataclass
class Found:
    """Of one way to save, by round; calls and waits are those of the slowest rank."""

    cpu_s: list[float] = field(default_factory=list)
    call_ms: list[float] = field(default_factory=list)
    staged_ms: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


class Way:
    """A save of replicas. What was never saved under its key, in any way, is a new layout."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._saves = 0

    def key(self) -> str:
        self._saves += 1
        return "model" if self.name in (NEXT, AGAIN) else f"{self.name} {self._saves}"

    def save(self, path: Path, key: str, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> sf.Pending:
        prove = {UNPROVEN: False, AGAIN: True}.get(self.name)
        return sf.save_async(path, {key: module, "optimizer": optimizer}, prove=prove)


def measure(settings: Settings) -> Figures:
    figures: dict[str, Any] = {}
    for world in WORLDS[:1] if settings.quick else WORLDS:
        of_world = replace(settings, processes=world)
        found: dict[str, Any] = run(_worker, of_world)
        held = found["bytes"] * world
        ways: dict[str, Found] = found["ways"]
        rows: list[list[object]] = []
        for name, way in ways.items():
            of_unproven = ratio(way.cpu_s, ways[UNPROVEN].cpu_s)
            rows.append([
                name,
                f"{median(way.call_ms):.2f}",
                median(way.staged_ms),
                spread(way.staged_ms),
                median(way.seconds),
                median(way.cpu_s),
                median(of_unproven),
                spread(of_unproven),
            ])  # fmt: skip
        columns = ("call ms", "staged ms", "(min .. max)", "seconds", "CPU s", "of prove=False", "(min .. max)")
        title = f"replicas on {world} processes, {found['bytes'] / 1e9:.2f} GB on each, all of them one"
        table(title, ("", *columns), rows)
        prices = [(one - other) / held * 1e9 for one, other in zip(ways[AGAIN].cpu_s, ways[NEXT].cpu_s, strict=True)]
        print(f"  the proof: {median(prices):.3f} {spread(prices, 3)} s of processor time per GB that a rank holds")
        figures[str(world)] = {
            "bytes": found["bytes"],
            "cpu_s_per_gb": summary(prices),
            "of_unproven": {name: summary(ratio(way.cpu_s, ways[UNPROVEN].cpu_s)) for name, way in ways.items()},
            "ways": {name: vars(way) for name, way in ways.items()},
        }
    return figures


def _worker(settings: Settings) -> dict[str, Any]:
    torch.manual_seed(1)
    layer_bytes = len(KINDS) * 4 * WIDTH * WIDTH
    layers = max(1, round(settings.total_bytes / settings.processes / layer_bytes))
    inner = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    module = torch.nn.parallel.DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-6)
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    ways: dict[str, Found] = {}

    def one(way: Way, path: Path, is_measured: bool) -> None:
        optimizer.step()
        key = way.key()
        if way.name in (NEXT, AGAIN):
            # What is described and planned in the save before is remembered.
            way.save(path / "before", key, module, optimizer).committed()
        settle(settings)
        times: list[float] = []

        def save() -> None:
            began = time.perf_counter()
            pending = way.save(path / "measured", key, module, optimizer)
            times.append((time.perf_counter() - began) * 1e3)
            pending.staged()
            times.append((time.perf_counter() - began) * 1e3)
            pending.committed()

        cost = timed(save)
        call_ms, staged_ms = (max(of_rank) for of_rank in zip(*of_all(times), strict=True))
        if is_measured:
            found = ways.setdefault(way.name, Found())
            found.cpu_s.append(cost.cpu_s)
            found.call_ms.append(call_ms)
            found.staged_ms.append(staged_ms)
            found.seconds.append(cost.seconds)

    failed: dict[str, str] = {}
    order = [Way(name) for name in (PROVEN, UNPROVEN, NEXT, AGAIN)]
    in_turn(order, failed, settings, one, rounds=max(settings.rounds, ROUNDS_MAX))
    if failed:
        raise RuntimeError(f"not measured: {failed}")
    size = sum(tensor.numel() * tensor.element_size() * len(KINDS) for tensor in module.parameters())
    return {"bytes": size, "ways": {name: ways[name] for name in (PROVEN, UNPROVEN, NEXT, AGAIN)}}
