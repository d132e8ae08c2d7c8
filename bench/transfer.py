"""Saves and loads that one waits for: durable, cold, warm and into another layout, beside the ceiling and rivals."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import shardfast as sf
import torch.distributed as dist
from ceilings import Disk, Memory, best, expect_room
from figures import OURS, Figures, median, ours_first, ratio, spread, summary, table, timeline
from ranks import (
    ROUNDS_MAX,
    Cost,
    Costs,
    Settings,
    drop_page_cache,
    fill_page_cache,
    in_turn,
    of_all,
    read_from_disk,
    remove,
    run,
    settle,
    timed,
)
from rivals import NOT_MEASURED, Shardfast, System, systems
from states import State, bytes_of, expect_equal, expect_equal_whole, sharded, zero

PARTS = ("durable save", "cold load", "warm load")


@dataclass
class Found:
    """What the ranks measured; rank 0's."""

    bytes: int
    disk: Disk
    memory: dict[str, Costs]
    costs: dict[str, dict[str, Costs]] = field(default_factory=lambda: {part: {} for part in PARTS})
    systems: dict[str, tuple[str, str]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    phases: list[dict[str, float]] = field(default_factory=list)


def measure(settings: Settings) -> Figures:
    found: Found = run(_worker, settings)
    return show(settings, found)


def _worker(settings: Settings) -> Found:
    state = sharded(settings.total_bytes, seed=1)
    other = sharded(settings.total_bytes, seed=1000)
    size = bytes_of(state)
    expect_room(settings.where, 4 * size)
    memory = Memory(size // dist.get_world_size())
    disk = Disk(settings, settings.where / "ceiling", size)
    disk.prepare()
    found = Found(size, disk, memory.costs)
    order, found.failed = systems()

    def before_round() -> None:
        memory.round()
        disk.round()

    def one(system: System, path: Path, is_measured: bool) -> None:
        costs = _one(settings, system, path, state, other)
        if is_measured:
            for part, cost in zip(PARTS, costs, strict=True):
                found.costs[part].setdefault(system.name, Costs()).add(cost)

    in_turn(order, found.failed, settings, one, rounds=settings.rounds, before_round=before_round)
    remove(disk.folder)
    found.systems = {system.name: (system.is_durable, system.note) for system in order}
    for system in order:
        if isinstance(system, Shardfast):
            found.phases = _slowest_rank([report["phases_ms"] for report in system.reports[settings.warm_ups :]])
    return found


def _one(settings: Settings, system: System, path: Path, state: State, other: State) -> list[Cost]:
    settle(settings)
    saved = timed(lambda: system.save(path, state))
    zero(other)
    drop_page_cache(path)
    cold = timed(lambda: system.load(path, other))
    expect_equal(other, state, system.name)
    fill_page_cache(path)
    return [saved, cold, timed(lambda: system.load(path, other))]


def _slowest_rank(phases: list[dict[str, float]]) -> list[dict[str, float]]:
    """By save, when the last rank had ended each phase."""
    by_rank = of_all(phases)
    return [
        {name: max(ranks[save].get(name, 0.0) for ranks in by_rank) for name in by_rank[0][save]}
        for save in range(len(phases))
    ]


def show(settings: Settings, found: Found) -> Figures:
    """Prints the tables; the figures for the file."""
    size = found.bytes
    print(f"\n{size / 1e9:.2f} GB on {settings.processes} processes, {settings.rounds} rounds")
    found.disk.show_sweep()
    figures: dict[str, Any] = {"bytes": size, "sweep_gb_s": found.disk.sweep_gb_s, "refused": found.disk.failed}
    attainable = {name: found.memory[name] for name in Memory.TENSORS}
    for part, methods, more in (
        ("durable save", found.disk.write, {}),
        ("cold load", found.disk.read, {}),
        ("warm load", attainable, {Memory.HUGE: found.memory[Memory.HUGE]}),
    ):
        figures[part] = _part(part, size, methods, more, found)
    figures["timeline_ms"] = timeline(
        "where a durable save of shardfast spends its time (milliseconds after the call, slowest rank, median)",
        found.phases,
    )
    print("\nconfigurations")
    for name, (durable, note) in found.systems.items():
        print(f"  {name}: {note}; durable when its own save returns: {durable}")
    for name, reason in {**found.failed, **NOT_MEASURED}.items():
        print(f"  not in the tables: {name}: {reason}")
    figures["failed"], figures["not measured"] = found.failed, NOT_MEASURED
    return figures


def _part(part: str, size: int, methods: dict[str, Costs], more: dict[str, Costs], found: Found) -> dict[str, Any]:
    top = methods[best(methods)].seconds()
    costs = found.costs[part]
    rivals = {name: cost for name, cost in costs.items() if name != OURS}
    rival = rivals[best(rivals)].seconds() if rivals else []
    rows: list[list[object]] = []
    for name, cost in [*methods.items(), *more.items(), *ours_first(costs)]:
        seconds = cost.seconds()
        rates = [size / one / 1e9 for one in seconds]
        is_system = name in costs
        of_top = ratio(top, seconds)
        row: list[object] = [name, median(rates), spread(rates), median(of_top), spread(of_top)]
        row.append(median(ratio(rival, seconds)) if is_system and rival else "")
        row.append(median([one.cpu_s / size * 1e9 for one in cost.all]) if is_system else "")
        row.append(median([one.machine_cpu_s / size * 1e9 for one in cost.all]) if is_system else "")
        rows.append(row)
    columns = ("GB/s", "(min .. max)", "of ceiling", "(min .. max)", "of best rival", "CPU s/GB", "machine's CPU s/GB")
    table(part, ("", *columns), rows)
    single = size / min(second for cost in methods.values() for second in cost.seconds()) / 1e9
    print(f"  ceiling: {best(methods)}; the best single measurement of any method was {single:.2f} GB/s")
    return {
        "ceiling": best(methods),
        "best_single_gb_s": single,
        "methods": {name: summary(cost.seconds()) for name, cost in {**methods, **more}.items()},
        "systems": {name: [asdict(one) for one in cost.all] for name, cost in costs.items()},
        "of_ceiling": {name: summary(ratio(top, cost.seconds())) for name, cost in costs.items()},
        "of_best_rival": summary(ratio(rival, costs[OURS].seconds())) if rival else {},
    }


def measure_resharding(settings: Settings) -> Figures:
    """Cold loads into another layout, beside those into the layout of the save, and the bytes that they read."""
    found: dict[str, Any] = run(_resharding_worker, settings)
    rows: list[list[object]] = []
    size = found["bytes"]
    fastest = min((median(resharded) for name, (_, resharded) in found["seconds"].items() if name != OURS), default=0.0)
    for name, (same, resharded) in ours_first(found["seconds"]):
        ratios = ratio(same, resharded)
        rates = [size / one / 1e9 for one in resharded]
        row = [name, size / median(same) / 1e9, median(rates), spread(rates), median(ratios), spread(ratios)]
        rows.append([*row, fastest / median(resharded) if fastest else ""])
    columns = ("same layout GB/s", "resharded GB/s", "(min .. max)", "resharded of same", "(min .. max)")
    title = f"cold load, saved as Shard(0), loaded as Shard(1), {settings.processes} processes, {size / 1e9:.2f} GB"
    table(title, ("", *columns, "of best rival"), rows)
    wanted, read, fetched = found["wanted"], found["read"], found["from_disk"]
    print(f"  shardfast read {read:,} bytes for {wanted:,} needed: {read / wanted:.4f}")
    print(f"  the disk was read for {fetched:,}: {fetched / wanted:.4f} (median of the loads)")
    for name, reason in found["failed"].items():
        print(f"  not in the table: {name}: {reason}")
    return {
        "bytes": size,
        "failed": found["failed"],
        "bytes_read_of_needed": read / wanted,
        "bytes_from_disk_of_needed": fetched / wanted,
        "resharded_of_same": {name: summary(ratio(*seconds)) for name, seconds in found["seconds"].items()},
        "seconds": found["seconds"],
    }


def _resharding_worker(settings: Settings) -> dict[str, Any]:
    rows = sharded(settings.total_bytes, seed=1)
    same = sharded(settings.total_bytes, seed=1000)
    columns = sharded(settings.total_bytes, seed=1000, dim=1)
    order, failed = systems(resharding=True)
    seconds: dict[str, tuple[list[float], list[float]]] = {}
    amounts: list[int] = []
    from_disk: list[int] = []

    def one(system: System, path: Path, is_measured: bool) -> None:
        *costs, fetched = _resharded(settings, system, path, rows, same, columns)
        if isinstance(system, Shardfast) and is_measured:
            from_disk.append(fetched)
        if isinstance(system, Shardfast):
            amounts[:] = [sf.plan_load(path, {"model": columns}).bytes_wanted, system.loads[-1].bytes_read]
        if is_measured:
            for times, cost in zip(seconds.setdefault(system.name, ([], [])), costs, strict=True):
                times.append(cost.seconds)

    in_turn(order, failed, settings, one, rounds=min(settings.rounds, ROUNDS_MAX))
    wanted, read = (sum(amount[at] for amount in of_all(amounts)) for at in range(2))
    # A replicated tensor counts once for each rank that holds it: as many bytes as all ranks want.
    size = sum(tensor.numel() * tensor.element_size() for tensor in rows.values())
    fetched = sum(sorted(loads)[len(loads) // 2] for loads in of_all(from_disk))
    return {
        "bytes": size,
        "seconds": seconds,
        "failed": failed,
        "wanted": wanted,
        "read": read,
        "from_disk": fetched,
    }


def _resharded(
    settings: Settings, system: System, path: Path, rows: State, same: State, columns: State
) -> tuple[Cost, Cost, int]:
    system.save(path, rows)
    settle(settings)
    zero(same)
    drop_page_cache(path)
    straight = timed(lambda: system.load(path, same))
    expect_equal(same, rows, system.name)
    zero(columns)
    drop_page_cache(path)
    before = read_from_disk()
    resharded = timed(lambda: system.load(path, columns))
    fetched = read_from_disk() - before
    expect_equal_whole(columns, rows, system.name)
    return straight, resharded, fetched
