"""Cost of a save in the background for the training: a real network, AdamW, on the processor.

Each rank trains a pipeline stage of its own, so that no message of the training meets one of a save. A save begins with
a step; steps go on until it has ended. Its price is all time beyond that of as many steps without one: the call, the
wait before the first optimizer step, and whatever the copy and the writing take away.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from figures import Figures, median, ours_first, spread, summary, table
from ranks import ROUNDS_MAX, Settings, in_turn, of_all, run, settle
from rivals import AsyncSystem, asynchronous_systems, show_notes
from states import trainable

PLAIN_STEPS = 3
"""Steps without a save, before each save and after it."""

STEPS_MAX = 200
COPIES_PER_PASS = 4.0
"""Forward and backward take at least so many times as long as a copy of the state."""


@dataclass
class Times:
    """Of one system, over ranks and rounds."""

    call_ms: list[float] = field(default_factory=list)
    wait_ms: list[float] = field(default_factory=list)
    lost_s: list[float] = field(default_factory=list)
    slowdown: list[float] = field(default_factory=list)
    save_s: list[float] = field(default_factory=list)


class Trainer:
    """A rank's training."""

    def __init__(self, total_bytes: int) -> None:
        self.module, self.optimizer, one = trainable(total_bytes)
        self.state_bytes = 3 * sum(parameter.numel() * 4 for parameter in self.module.parameters())
        self.copy_s = self._copy_s()
        self.batch = one
        while max(of_all(self._pass_s())) < COPIES_PER_PASS * max(of_all(self.copy_s)):
            self.batch = torch.cat([self.batch, self.batch])
        self.pass_s = self._pass_s()

    def _copy_s(self) -> float:
        copies = [torch.zeros_like(parameter) for parameter in self.module.parameters()]
        dist.barrier()
        began = time.perf_counter()
        for copy, parameter in zip(copies, self.module.parameters(), strict=True):
            copy.copy_(parameter.detach())
        return 3 * (time.perf_counter() - began)  # and both moments

    def _pass_s(self) -> float:
        dist.barrier()
        began = time.perf_counter()
        self.forward_backward()
        return time.perf_counter() - began

    def forward_backward(self) -> None:
        self.module(self.batch).square().mean().backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def plain_s(self, steps: int) -> list[float]:
        """Seconds of each of so many steps without a save."""
        seconds = []
        for _ in range(steps):
            began = time.perf_counter()
            self.forward_backward()
            self.step()
            seconds.append(time.perf_counter() - began)
        return seconds


def measure(settings: Settings) -> Figures:
    found: dict[str, Any] = run(_worker, settings)
    times: dict[str, Times] = found["times"]
    size = found["state_bytes"] * settings.processes
    print(
        f"\na state of {size / 1e9:.2f} GB on {settings.processes} processes; a step takes {found['step_s']:.2f} s, "
        f"forward and backward {found['pass_s']:.2f} s, a copy of the state {found['copy_s']:.2f} s (all ranks at once)"
    )
    rows: list[list[object]] = []
    for name, own in ours_first(times):
        row: list[object] = [
            name,
            f"{median(own.call_ms):.2f}",
            f"{median(own.wait_ms):.2f}",
            f"{max(own.wait_ms):.2f}",
        ]
        row += [median(own.lost_s), spread(own.lost_s), median(own.slowdown), spread(own.slowdown), median(own.save_s)]
        rows.append(row)
    columns = ("call ms", "wait before the step ms", "worst ms", "price of a save, s of training", "(min .. max)")
    more = ("step with / without", "(min .. max)", "save took s")
    table("training with a save in the background", ("", *columns, *more), rows)
    show_notes(found["notes"], found["failed"])
    return {
        **found,
        "times": {name: {what: summary(n) for what, n in vars(own).items()} for name, own in times.items()},
    }


def _worker(settings: Settings) -> dict[str, Any]:
    trainer = Trainer(settings.total_bytes // 2)
    order, failed = asynchronous_systems(own_processes=not settings.quick)
    notes = {system.name: system.note for system in order}
    times: dict[str, Times] = {}
    plain: list[float] = []
    trainer.plain_s(2)  # warms up

    def one(system: AsyncSystem, path: Path, is_measured: bool) -> None:
        own = times.setdefault(system.name, Times()) if is_measured else Times()
        settle(settings)
        before = trainer.plain_s(PLAIN_STEPS)
        steps, seconds = _one(system, path, trainer, own)
        beside = [*before, *trainer.plain_s(PLAIN_STEPS)]
        plain.extend(beside)
        own.lost_s.append(seconds - steps * median(beside))
        own.slowdown.append(seconds / (steps * median(beside)))

    in_turn(order, failed, settings, one, rounds=min(settings.rounds, ROUNDS_MAX))
    times = {name: own for name, own in times.items() if name not in failed}
    for system in order:
        system.close()
    pooled = of_all(times)
    together = {
        name: Times(*([one for rank in pooled for one in getattr(rank[name], what)] for what in vars(Times())))
        for name in times
    }
    return {
        "times": together,
        "failed": failed,
        "notes": notes,
        "state_bytes": trainer.state_bytes,
        "step_s": median(plain),
        "pass_s": trainer.pass_s,
        "copy_s": trainer.copy_s,
    }


def _one(system: AsyncSystem, path: Path, trainer: Trainer, times: Times) -> tuple[int, float]:
    """One save beside the training; the number of steps until it had ended, and what they took."""
    dist.barrier()
    began = time.perf_counter()
    system.begin(path, trainer.module, trainer.optimizer, {"step": 1})
    returned = time.perf_counter()
    trainer.forward_backward()
    passed = time.perf_counter()
    system.before_step()
    waited = time.perf_counter()
    trainer.step()
    steps = 1
    while not system.is_done() and steps < STEPS_MAX:
        trainer.forward_backward()
        trainer.step()
        steps += 1
    ended = time.perf_counter()
    system.finish()
    times.call_ms.append((returned - began) * 1e3)
    times.wait_ms.append((waited - passed) * 1e3)
    times.save_s.append(time.perf_counter() - began)
    return steps, ended - began
