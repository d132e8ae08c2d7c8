"""Time for which the call of an asynchronous save holds up the training, by number and size of tensors and by values.

Every save is waited for before the next one begins, and the optimizer steps in between: what is measured is the call
alone, on an otherwise idle machine, with the plan cached. The first save of a process is measured apart, in processes
of its own.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import shardfast as sf
import torch
import torch.distributed as dist
from figures import OURS, Figures, median, ours_first, spread, summary, table
from ranks import Settings, attempt, of_all, remove, run, turned
from rivals import AsyncSystem, DcpAsync, ShardfastAsync, asynchronous_systems, show_notes
from states import counted, values

KIB, MIB, MB = 1 << 10, 1 << 20, 1_000_000
WARM_UPS = 2
RIVAL_SAVES = 5
FIRST_ROUNDS = 7
FIRST_RIVAL = "DCP async, thread"
RESTARTED = f"{OURS}, restarted"
NO_SAVE = f"{OURS}, the step before, which does not save"


@dataclass(frozen=True)
class Case:
    """A state: so many tensors in all (parameters, moments, step counters), of so many bytes, and Python values.

    Each save is a call on every rank, so that 50 saves on two processes are 100 calls.
    """

    tensors: int
    bytes_each: int
    value_bytes: int = 0
    as_bytes: bool = False
    rivals: bool = False
    saves: int = 50

    @property
    def name(self) -> str:
        size = f"{self.bytes_each // MIB} MiB" if self.bytes_each >= MIB else f"{self.bytes_each // KIB} KiB"
        kind = "one buffer" if self.as_bytes else "numbers and texts"
        extra = f", {self.value_bytes / MB:g} MB of values ({kind})" if self.value_bytes else ""
        return f"{self.tensors} tensors of {size}{extra}"


BASE = Case(1000, 4 * KIB, rivals=True, saves=100)
CASES = (
    Case(100, 4 * KIB),
    BASE,
    Case(2000, 4 * KIB),
    Case(8000, 4 * KIB, saves=30),
    Case(100, MIB),
    Case(1000, 256 * KIB, rivals=True),
    Case(1000, 4 * KIB, MB, saves=100),
    Case(1000, 4 * KIB, MB, as_bytes=True),
)
QUICK = (Case(100, 4 * KIB, rivals=True, saves=2), Case(1000, 4 * KIB, MB, saves=2))

Times = dict[str, tuple[list[float], list[float]]]
"""By system, in milliseconds and over all ranks: the call, and the wait of a step that comes at once."""


def measure(settings: Settings) -> Figures:
    cases = QUICK if settings.quick else CASES
    found: dict[str, Any] = run(_worker, settings, cases)
    times: dict[Case, Times] = found["times"]
    rows: list[list[object]] = []
    for case in cases:
        for name, (calls, waits) in ours_first(times[case]):
            low, high = f"{median(calls):.3f}", f"{max(calls):.2f}"
            rows.append([case.name, name, len(calls), low, high, spread(calls, 3), f"{median(waits):.2f}"])
    columns = ("system", "calls", "median ms", "worst ms", "(min .. max)", "a step at once waits ms")
    table(f"stall of the call, {settings.processes} processes, each save waited for", ("state", *columns), rows)
    figures: dict[str, Any] = {
        "stall_ms": {case.name: {name: summary(both[0]) for name, both in times[case].items()} for case in cases},
        "step_at_once_ms": {
            case.name: {name: summary(both[1]) for name, both in times[case].items()} for case in cases
        },
        "failed": found["failed"],
    }
    figures["first_ms"] = _first(settings, found["failed"])
    show_notes(found["notes"], found["failed"])
    return figures


def _first(settings: Settings, failed: dict[str, str]) -> dict[str, Any]:
    """The first save of a process, by state and system; each in fresh processes."""
    figures: dict[str, Any] = {}
    rows: list[list[object]] = []
    for case in QUICK[:1] if settings.quick else (CASES[0], BASE):
        systems = [name for name in (OURS, RESTARTED, FIRST_RIVAL) if name == RESTARTED or name not in failed]
        calls: dict[str, list[float]] = {name: [] for name in systems}
        for _ in range(1 if settings.quick else FIRST_ROUNDS):
            for name in systems:
                if name == RESTARTED:
                    run(_save_worker, settings, case)
                before, took = run(_first_worker, settings, case, name)
                calls[name] += took
                if name == OURS:
                    calls.setdefault(NO_SAVE, []).extend(before)
        figures[case.name] = {name: summary(of) for name, of in calls.items()}
        for name, of in calls.items():
            rows.append([case.name, name, len(of), f"{median(of):.1f}", f"{max(of):.1f}", spread(of, 1)])
    title = (
        f"first save of a process, {settings.processes} processes, after the making of a Checkpointer and its restore, "
        "which finds a checkpoint where restarted"
    )
    table(title, ("state", "system", "calls", "median ms", "worst ms", "(min .. max)"), rows)
    return figures


def _save_worker(settings: Settings, case: Case) -> None:
    with sf.Checkpointer(settings.where / "first") as ckpt:
        ckpt.save(1, _state(case))


def _first_worker(settings: Settings, case: Case, name: str) -> tuple[list[float], list[float]]:
    """The calls of the first step, which does not save, and of the first save, of all ranks in ms."""
    state = _state(case)
    path = settings.where / "first"
    if name == FIRST_RIVAL:
        rival = DcpAsync(process=False)
    else:
        ckpt = sf.Checkpointer(path, every=sf.steps(3))
        restored = ckpt.restore(state)
        assert restored == (1 if name == RESTARTED else 0), restored
    state["optimizer"].step()
    dist.barrier()
    began = time.perf_counter()
    if name != FIRST_RIVAL:
        ckpt.step(2, state)
    before = (time.perf_counter() - began) * 1e3
    state["optimizer"].step()
    dist.barrier()
    began = time.perf_counter()
    if name == FIRST_RIVAL:
        rival.begin(path, state["model"], state["optimizer"], state["extra"])
    else:
        ckpt.step(3, state)
    took = (time.perf_counter() - began) * 1e3
    if name == FIRST_RIVAL:
        rival.finish()
        rival.close()
    else:
        ckpt.close()
    remove(path)
    return of_all(before), of_all(took)


def _state(case: Case) -> dict[str, Any]:
    module, optimizer = counted(case.tensors, case.bytes_each)
    return {"model": module, "optimizer": optimizer, "extra": {"step": 1}}


def _worker(settings: Settings, cases: tuple[Case, ...]) -> dict[str, Any]:
    order, failed = asynchronous_systems()
    notes = {system.name: system.note for system in order}
    times: dict[Case, Times] = {}
    for case in cases:
        pooled = of_all(_case(settings, case, order, failed))
        times[case] = {
            name: ([t for rank in pooled for t in rank[name][0]], [t for rank in pooled for t in rank[name][1]])
            for name in pooled[0]
        }
        if dist.get_rank() == 0:
            print(f"{case.name} done", flush=True)
    for system in order:
        system.close()
    return {"times": times, "failed": failed, "notes": notes}


def _case(settings: Settings, case: Case, order: list[AsyncSystem], failed: dict[str, str]) -> Times:
    module, optimizer = counted(case.tensors, case.bytes_each)
    extra = values(case.value_bytes, as_bytes=case.as_bytes) if case.value_bytes else {"step": 1}
    rival_saves = WARM_UPS + (1 if settings.quick else RIVAL_SAVES)
    times: Times = {}
    for number in range(WARM_UPS + case.saves):
        due = [one for one in order if isinstance(one, ShardfastAsync) or (case.rivals and number < rival_saves)]
        for system in turned(due, number):
            path = settings.where / f"stall-{number}"
            took: list[float] = []
            reason = attempt(_one, system, path, module, optimizer, extra, took)
            remove(path)
            if reason is not None:
                failed[system.name] = f"{case.name}: {reason}"
                order.remove(system)
                times.pop(system.name, None)
            elif number >= WARM_UPS:
                for all_times, one_time in zip(times.setdefault(system.name, ([], [])), took, strict=True):
                    all_times.append(one_time)
    return times


def _one(
    system: AsyncSystem,
    path: Path,
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    extra: dict[str, Any],
    took: list[float],
) -> None:
    dist.barrier()
    began = time.perf_counter()
    system.begin(path, module, optimizer, extra)
    returned = time.perf_counter()
    system.before_step()
    waited = time.perf_counter()
    system.finish()
    optimizer.step()
    took += [(returned - began) * 1e3, (waited - returned) * 1e3]
