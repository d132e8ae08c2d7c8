"""A load into another layout, cold, beside the load into the layout of the save; and how much it reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import shardfast as sf
from figures import OURS, Figures, median, ours_first, ratio, spread, summary, table
from ranks import ROUNDS_MAX, Cost, Settings, drop_page_cache, in_turn, of_all, run, settle, timed
from states import State, expect_equal, expect_equal_whole, sharded, zero
from systems import Shardfast, System, systems


def measure(settings: Settings) -> Figures:
    found: dict[str, Any] = run(_worker, settings)
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


def _worker(settings: Settings) -> dict[str, Any]:
    rows = sharded(settings.total_bytes, seed=1)
    same = sharded(settings.total_bytes, seed=1000)
    columns = sharded(settings.total_bytes, seed=1000, dim=1)
    order, failed = systems(resharding=True)
    seconds: dict[str, tuple[list[float], list[float]]] = {}
    amounts: list[int] = []
    from_disk: list[int] = []

    def one(system: System, path: Path, is_measured: bool) -> None:
        *costs, fetched = _one(settings, system, path, rows, same, columns)
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


def read_from_disk() -> int:
    """Bytes that this process had storage read, past the page cache or into it."""
    counters = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in counters if line.startswith("read_bytes")).split()[1])


def _one(
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
