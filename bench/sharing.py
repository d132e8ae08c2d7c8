"""A load in which ranks read for each other, beside one in which each reads for itself: cold and warm, 2 to 8 ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import shardfast as sf
from figures import Figures, median, ratio, spread, summary, table
from ranks import Settings, drop_page_cache, fill_page_cache, in_turn, of_all, remove, run, timed
from shardfast import _native, verbs
from shardfast.load_plan import LoadPlan, Options
from shardfast.session import TIMEOUT_S, current
from states import State, bytes_of, expect_equal_whole, sharded, zero

WORLDS = (2, 4, 8)
LAYOUTS = ("columns", "replicas")
WAYS = {
    "each for itself": "never",
    "shared": "always",
    "by default": "auto",
}
PLAIN = next(iter(WAYS))


class Loader:
    """One way of loading."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.peer_reads = WAYS[name]

    def load(self, path: Path, state: State) -> LoadPlan:
        session = current()
        checkpoint = _native.open(session, str(path), timeout_s=TIMEOUT_S)
        return verbs.fill(
            session,
            checkpoint,
            {"model": state},
            Options(),
            TIMEOUT_S,
            peer_reads=self.peer_reads,
        )


def measure(settings: Settings) -> Figures:
    figures: dict[str, Any] = {}
    for layout in LAYOUTS:
        for world in (2,) if settings.quick else WORLDS:
            # Every replica is as large as the whole.
            share = 1 if layout == "columns" else world
            of_world = replace(settings, processes=world, gigabytes=settings.gigabytes / share)
            found: dict[str, Any] = run(_worker, of_world, layout)
            size, cold, warm, moved = found["bytes"], found["cold"], found["warm"], found["moved"]
            rows: list[list[object]] = []
            for name in WAYS:
                read = moved[name]
                rows.append([
                    name,
                    median(cold[name]),
                    median(ratio(cold[PLAIN], cold[name])),
                    spread(ratio(cold[PLAIN], cold[name])),
                    median(warm[name]),
                    median(ratio(warm[PLAIN], warm[name])),
                    sum(read) / size,
                    max(read) * world / sum(read),
                    ", ".join(when for when, is_shared in found["is_shared"][name].items() if is_shared) or "no",
                ])  # fmt: skip
            columns = ("cold s", "of plain", "(min .. max)", "warm s", "of plain", "read/unique", "max/mean", "shared")
            table(f"load as {layout}, {world} processes, {size / 1e9:.2f} GB of unique bytes", ("", *columns), rows)
            figures[f"{layout} {world}"] = {
                "bytes": size,
                "bytes_read_of_unique": {name: sum(read) / size for name, read in moved.items()},
                "max_of_mean": {name: max(read) * world / sum(read) for name, read in moved.items()},
                "cold_of_plain": {name: summary(ratio(cold[PLAIN], seconds)) for name, seconds in cold.items()},
                "warm_of_plain": {name: summary(ratio(warm[PLAIN], seconds)) for name, seconds in warm.items()},
                "is_shared": found["is_shared"],
            }
    return figures


def _worker(settings: Settings, layout: str) -> dict[str, Any]:
    rows = sharded(settings.total_bytes, seed=1)
    path = settings.where / "shared"
    sf.save(path, {"model": rows})
    target = sharded(settings.total_bytes, seed=2, dim=1 if layout == "columns" else 9)
    cold: dict[str, list[float]] = {}
    warm: dict[str, list[float]] = {}
    moved: dict[str, list[int]] = {}
    is_shared: dict[str, dict[str, bool]] = {}

    def one(loader: Loader, _: Path, is_measured: bool) -> None:
        for times, prepare in ((cold, drop_page_cache), (warm, fill_page_cache)):
            zero(target)
            prepare(path)
            plans: list[LoadPlan] = []
            cost = timed(lambda plans=plans: plans.append(loader.load(path, target)))
            expect_equal_whole(target, rows, loader.name)
            if is_measured:
                times.setdefault(loader.name, []).append(cost.seconds)
            if times is cold:
                # What a warm load reads comes from no storage.
                moved[loader.name] = of_all(plans[0].bytes_read)
            is_shared.setdefault(loader.name, {})["cold" if times is cold else "warm"] = plans[0].is_shared

    failed: dict[str, str] = {}
    in_turn([Loader(name) for name in WAYS], failed, settings, one, rounds=min(settings.rounds, 3))
    if failed:
        raise RuntimeError(f"not measured: {failed}")
    remove(path)
    return {"bytes": bytes_of(rows), "cold": cold, "warm": warm, "moved": moved, "is_shared": is_shared}
