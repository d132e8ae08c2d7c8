"""What saves to S3 cost the process that saves: processor time, memory, and the time that the training waits."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import shardfast as sf
import torch.distributed as dist
from figures import OURS, Figures, median, ratio, spread, summary, table
from footprint import CONSTANT_BYTES, MIB, extra_memory
from ranks import (
    ROUNDS_MAX,
    Cost,
    Costs,
    Settings,
    attempt,
    made,
    of_all,
    on_rank_0,
    remove,
    run,
    timed,
    turned,
)
from shardfast import session
from stall import KIB, WARM_UPS, Case
from states import State, bytes_of, counted, expect_equal, sharded, zero
from store_rivals import CHECKSUM, Crt, Obstore, StoreSystem, delete, store_systems
from store_server import Server, discarding

TIMES_BUDGET = 20
PART_BYTES, DEPTH, TARGET_GBPS = 8 * MIB, 8, 10.0
WARM_SAVES = 6
"""After so many saves all staging memory that they use has been touched."""

LOCAL, FAR = "local disk", "S3"
CASES = (Case(1000, 4 * KIB, saves=50), Case(1000, 256 * KIB, saves=10))
QUICK = (Case(100, 4 * KIB, saves=2),)


def measure(settings: Settings, server: Server) -> Figures:
    with discarding() as discard:
        thrift = _thrift(settings, discard)
    return {"processor": thrift, "memory": _memory(settings, server), "stall": _stall(settings, server)}


def _thrift(settings: Settings, server: Server) -> Figures:
    """Processor time of uploads to a server that discards them."""
    few = replace(settings, rounds=min(settings.rounds, ROUNDS_MAX), gigabytes=settings.gigabytes / 2)
    found: dict[str, Any] = run(_thrift_worker, few, server, environment=server.environment)
    costs: dict[str, Costs] = found["costs"]
    gigabytes = found["bytes"] / 1e9
    bare = min(found["bare"], key=lambda name: median([one.cpu_s for one in costs[name].all]))
    cpu = {name: [one.cpu_s / gigabytes for one in of.all] for name, of in costs.items()}
    rows: list[list[object]] = []
    for name, of in costs.items():
        rates = [gigabytes / one for one in of.seconds()]
        of_bare = ratio(cpu[name], cpu[bare])
        row: list[object] = [name, median(rates), spread(rates), f"{median(cpu[name]):.3f}", spread(cpu[name], 3)]
        rows.append([*row, median(of_bare), spread(of_bare)])
    columns = ("GB/s", "(min .. max)", "client's CPU s/GB", "(min .. max)", "of the thriftiest bare", "(min .. max)")
    table(f"uploads to a server that discards them, {gigabytes:.2f} GB", ("", *columns), rows)
    for name, reason in found["failed"].items():
        print(f"  not in the table: {name}: {reason}")
    return {
        "bytes": found["bytes"],
        "bare": bare,
        "cpu_s_per_gb": {name: summary(of) for name, of in cpu.items()},
        "gb_s": {name: summary([gigabytes / one for one in of.seconds()]) for name, of in costs.items()},
        "of_bare": summary(ratio(cpu[OURS], cpu[bare])),
        "of_rival": {name: summary(ratio(cpu[OURS], of)) for name, of in cpu.items() if name in found["rivals"]},
        "failed": found["failed"],
    }


def _thrift_worker(settings: Settings, server: Server) -> dict[str, Any]:
    state = sharded(settings.total_bytes, seed=1)
    share = bytes_of(state) // dist.get_world_size()
    data = os.urandom(share)
    systems, failed = store_systems(server)
    bare, missing = made({
        "obstore": lambda: Obstore(server, PART_BYTES, DEPTH),
        "obstore, checksums": lambda: Obstore(server, PART_BYTES, DEPTH, CHECKSUM),
        "AWS CRT": lambda: Crt(server, PART_BYTES, TARGET_GBPS),
    })  # fmt: skip
    failed |= missing
    uploads: dict[str, Callable[[str], object]] = {
        one.name: lambda prefix, one=one: one.save(prefix, state) for one in systems
    }
    uploads |= {one.name: lambda prefix, one=one: one.put(f"{prefix}-{dist.get_rank()}", data) for one in bare}
    costs: dict[str, Costs] = {name: Costs() for name in uploads}
    for number in range(WARM_SAVES):
        uploads[OURS](f"warm-{number}")
    for number in range(settings.warm_ups + settings.rounds):
        for at, name in enumerate(turned(list(uploads), number)):
            found: list[Cost] = []
            reason = attempt(_upload, uploads[name], f"thrift-{number}-{at}", found)
            if reason is not None:
                failed[name] = reason
                del costs[name], uploads[name]
            elif number >= settings.warm_ups:
                costs[name].add(found[0])
    return {
        "bytes": bytes_of(state),
        "costs": costs,
        "bare": [one.name for one in bare if one.name in costs],
        "rivals": [one.name for one in systems if one.name in costs and one.name != OURS],
        "failed": failed,
    }


def _upload(upload: Callable[[str], object], prefix: str, found: list[Cost]) -> None:
    found.append(timed(lambda: upload(prefix)))


def _memory(settings: Settings, server: Server) -> Figures:
    """One process, whose state is 20 times the staging budget."""
    budget = (16 if settings.quick else 64) * MIB
    alone = replace(settings, processes=1)
    found: dict[str, Any] = run(_memory_worker, alone, server, budget, environment=server.environment)
    rows: list[list[object]] = []
    for name, (save, load) in found["extra"].items():
        beyond = f"{(max(save, load) - budget) / MIB:.0f}" if name == OURS else ""
        rows.append([name, f"{save / MIB:.0f}", f"{load / MIB:.0f}", beyond])
    title = (
        f"S3: peak memory above what was there before; a state of {found['bytes'] / MIB:.0f} MiB, "
        f"shardfast's budget is {budget // MIB} MiB; one process"
    )
    table(title, ("", "save MiB", "load MiB", "beyond the budget MiB"), rows)
    for name, reason in found["failed"].items():
        print(f"  not in the table: {name}: {reason}")
    ours = found["extra"].get(OURS)
    return {**found, "budget_bytes": budget, "within": ours is not None and max(ours) <= budget + CONSTANT_BYTES}


def _memory_worker(settings: Settings, server: Server, budget: int) -> dict[str, Any]:
    os.environ[session.STAGING_BYTES] = str(budget)  # before the process's session is made
    if session.current().staging_bytes != budget:
        raise RuntimeError("the budget is not the one to be measured")
    total = TIMES_BUDGET * budget
    state, other = sharded(total, seed=1), sharded(total, seed=1000)
    systems, failed = store_systems(server)
    extra: dict[str, tuple[int, int]] = {}
    for number, system in enumerate(systems):
        peaks: list[int] = []
        prefix = f"memory-{number}"
        reason = attempt(_peaks, system, prefix, state, other, peaks)
        delete(server, prefix)
        if reason is not None:
            failed[system.name] = reason
        else:
            extra[system.name] = (peaks[0], peaks[1])
    return {"bytes": bytes_of(state), "extra": extra, "failed": failed}


def _peaks(system: StoreSystem, prefix: str, state: State, other: State, peaks: list[int]) -> None:
    peaks.append(extra_memory(lambda: system.save(prefix, state)))
    zero(other)
    peaks.append(extra_memory(lambda: system.load(prefix, other)))
    expect_equal(other, state, system.name)


def _stall(settings: Settings, server: Server) -> Figures:
    cases = QUICK if settings.quick else CASES
    found: dict[str, dict[str, tuple[list[float], ...]]] = run(
        _stall_worker, settings, server, cases, environment=server.environment
    )
    rows: list[list[object]] = []
    figures: dict[str, Any] = {}
    for case, places in found.items():
        figures[case] = {}
        for place, (calls, waits, ends) in places.items():
            low, high = f"{median(calls):.3f}", f"{max(calls):.2f}"
            rows.append([
                case, place, len(calls), low, high, spread(calls, 3), median(waits), spread(waits), median(ends),
            ])  # fmt: skip
            names = ("call_ms", "step_at_once_ms", "committed_ms")
            figures[case][place] = dict(zip(names, map(summary, (calls, waits, ends)), strict=True))
    columns = ("", "calls", "median ms", "worst ms", "(min .. max)", "a step at once waits ms", "", "committed ms")
    title = f"sf.save_async to a local disk and to S3 by turns, {settings.processes} processes, each save waited for"
    table(title, ("state", *columns), rows)
    return figures


def _stall_worker(settings: Settings, server: Server, cases: tuple[Case, ...]) -> dict[str, Any]:
    places: dict[str, Callable[[int], str]] = {
        LOCAL: lambda number: str(settings.where / f"stall-{number}"),
        FAR: lambda number: server.url(f"stall-{number}"),
    }
    times: dict[str, dict[str, tuple[list[float], ...]]] = {}
    for case in cases:
        module, optimizer = counted(case.tensors, case.bytes_each)
        state = {"model": module, "optimizer": optimizer, "extra": {"step": 1}}
        own: dict[str, tuple[list[float], ...]] = {place: ([], [], []) for place in places}
        for number in range(WARM_UPS + case.saves):
            for place in turned(list(places), number):
                dist.barrier()
                began = time.perf_counter()
                pending = sf.save_async(places[place](number), state)
                called = time.perf_counter()
                pending.staged()
                staged = time.perf_counter()
                pending.committed()
                ended = time.perf_counter()
                optimizer.step()
                if number >= WARM_UPS:
                    took = (called - began, staged - called, ended - began)
                    for values, one in zip(own[place], took, strict=True):
                        values.append(one * 1e3)
            remove(settings.where / f"stall-{number}")
            on_rank_0(lambda number=number: delete(server, f"stall-{number}"))
        ranks = of_all(own)
        times[case.name] = {
            place: tuple([one for rank in ranks for one in rank[place][kind]] for kind in range(3)) for place in places
        }
    return times
