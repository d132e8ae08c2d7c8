"""Saves and loads over S3: rates beside bare clients and rivals, at full speed and over slow connections.

The server and the clients run on one machine. The processor time of the server and that of the clients are reported
separately.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import store_costs
import store_requests
import torch
import torch.distributed as dist
from ceiling import best
from figures import OURS, Figures, median, ours_first, ratio, spread, summary, table, timeline
from ranks import ROUNDS_MAX, Cost, Costs, Settings, attempt, drop_page_cache, of_all, on_rank_0, run, timed, turned
from states import State, bytes_of, expect_equal, sharded, zero
from store_rivals import (
    CHECKSUM,
    NOT_MEASURED,
    Bare,
    Obstore,
    Ours,
    StoreSystem,
    bare_clients,
    delete,
    store_systems,
)
from store_server import SLOW, Server, behind, missing, running

PARTS = ("durable save", "cold load")
BEST = 3
"""So many clients of the sweep are measured again in each round."""


@dataclass(frozen=True)
class Way:
    """How to measure over one kind of connection.

    Attributes:
        depths: Requests in flight of the bare clients in the sweep.
        sweep_share: The sweep moves so much of the bytes; more parts than the largest depth.
        rival_rounds: So many of the rounds measure the rivals, too: they take minutes.
        warms_rivals: Whether the warm-up does.
    """

    depths: tuple[int, ...]
    sweep_share: float
    rival_rounds: int
    warms_rivals: bool


FAST = Way((4, 8, 16), sweep_share=0.25, rival_rounds=3, warms_rivals=True)
FAR = Way((8, 16, 32), sweep_share=1, rival_rounds=1, warms_rivals=False)


@dataclass
class Found:
    """What the ranks measured; rank 0's. Costs by part and by client or system, the server's seconds beside them."""

    bytes: int
    ceiling: dict[str, dict[str, Costs]] = field(default_factory=lambda: {part: {} for part in PARTS})
    costs: dict[str, dict[str, Costs]] = field(default_factory=lambda: {part: {} for part in PARTS})
    server_s: dict[str, dict[str, list[float]]] = field(default_factory=lambda: {part: {} for part in PARTS})
    sweep_gb_s: dict[str, dict[str, float]] = field(default_factory=lambda: {part: {} for part in PARTS})
    notes: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    phases: list[dict[str, float]] = field(default_factory=list)


def measure(settings: Settings) -> Figures:
    reason = missing()
    if reason is not None:
        print(f"  not measured: {reason}")
        return {"not measured": reason}
    figures: dict[str, Any] = {}
    with running() as server:
        found: Found = run(_worker, settings, server, FAST, environment=server.environment)
        figures["plain"] = show(settings, found, "S3 on this machine")
        fewer = replace(settings, rounds=min(settings.rounds, ROUNDS_MAX), gigabytes=settings.gigabytes / 2)
        with behind(server, **SLOW) as slow:
            found = run(_worker, fewer, slow, FAR, environment=slow.environment)
        figures["slow"] = show(fewer, found, "S3, each connection with 20 MB/s and 30 ms")
        figures["requests"] = store_requests.measure(settings, server)
        figures["costs"] = store_costs.measure(settings, server)
    return figures


def _worker(settings: Settings, server: Server, way: Way) -> Found:
    state = sharded(settings.total_bytes, seed=1)
    other = sharded(settings.total_bytes, seed=1000)
    found = Found(bytes_of(state))
    ceiling = _Ceiling(settings, server, found, way)
    order, absent = store_systems(server)
    found.failed |= absent
    found.notes = {system.name: system.note for system in order}
    ours = next(system for system in order if isinstance(system, Ours))
    for number in range(settings.warm_ups + settings.rounds):
        is_measured = number >= settings.warm_ups
        if is_measured:
            ceiling.round()
        with_rivals = number < settings.warm_ups + way.rival_rounds if is_measured else way.warms_rivals
        for system in turned(order, number):
            if system is not ours and not with_rivals:
                continue
            prefix = f"run-{number}-{order.index(system)}"
            reason = attempt(_one, server, system, prefix, state, other, found if is_measured else None)
            on_rank_0(lambda prefix=prefix: delete(server, prefix))
            if reason is not None:
                found.failed[system.name] = reason
                order.remove(system)
    reports = [report["phases_ms"] for report in ours.shardfast.reports[settings.warm_ups :]]
    by_rank = of_all(reports)
    found.phases = [
        {name: max(ranks[save].get(name, 0.0) for ranks in by_rank) for name in by_rank[0][save]}
        for save in range(len(reports))
    ]
    return found


def _one(server: Server, system: StoreSystem, prefix: str, state: State, other: State, found: Found | None) -> None:
    saved, save_server_s = _timed(server, lambda: system.save(prefix, state))
    zero(other)
    drop_page_cache()
    loaded, load_server_s = _timed(server, lambda: system.load(prefix, other))
    expect_equal(other, state, system.name)
    if found is not None:
        for part, cost, seconds in zip(PARTS, (saved, loaded), (save_server_s, load_server_s), strict=True):
            found.costs[part].setdefault(system.name, Costs()).add(cost)
            found.server_s[part].setdefault(system.name, []).append(seconds)


def _timed(server: Server, action: Callable[[], object]) -> tuple[Cost, float]:
    """The cost on the side of the clients, and the server's processor seconds."""
    before = server.cpu_s()
    cost = timed(action)
    return cost, server.cpu_s() - before


class _Ceiling:
    """What bare clients reach: a sweep over all of them, then the best ones each round."""

    def __init__(self, settings: Settings, server: Server, found: Found, way: Way) -> None:
        self.server, self.found = server, found
        generator = torch.Generator().manual_seed(dist.get_rank())
        share = found.bytes // dist.get_world_size()
        self.data = torch.randint(0, 256, (share,), dtype=torch.uint8, generator=generator).numpy().tobytes()
        clients, self.failed = bare_clients(server, way.depths[-1:] if settings.quick else way.depths)
        self.key = f"bare-{dist.get_rank()}"
        swept = self.data[: int(share * way.sweep_share)]
        rates: dict[str, list[tuple[float, Bare]]] = {part: [] for part in PARTS}
        for client in clients:
            costs: list[Cost] = []
            reason = attempt(lambda client=client, costs=costs: costs.extend(self._both(client, swept)))
            if reason is not None:
                self.failed[client.name] = reason
                continue
            for part, cost in zip(PARTS, costs, strict=True):
                # Ranks measure slightly different times; they must choose the same.
                rate = on_rank_0(lambda cost=cost: len(swept) * dist.get_world_size() / cost.seconds / 1e9)
                found.sweep_gb_s[part][client.name] = rate
                rates[part].append((rate, client))
        found.failed |= self.failed
        self.best = {
            part: [client for _, client in sorted(of, key=lambda pair: -pair[0])[:BEST]] for part, of in rates.items()
        }
        # A save has S3 verify a checksum of each part; the fastest client that does the same stands beside the others.
        fastest = next((client for client in self.best[PARTS[0]] if isinstance(client, Obstore)), None)
        if fastest is not None:
            self.best[PARTS[0]].append(Obstore(server, fastest.part_bytes, fastest.depth, CHECKSUM))
        self.number = 0

    def _both(self, client: Bare, data: bytes) -> list[Cost]:
        return [self._put(client, data)[0], self._get(client, data)[0]]

    def _put(self, client: Bare, data: bytes) -> tuple[Cost, float]:
        return _timed(self.server, lambda: client.put(self.key, data))

    def _get(self, client: Bare, data: bytes) -> tuple[Cost, float]:
        drop_page_cache()
        return _timed(self.server, lambda: client.get(self.key, len(data)))

    def round(self) -> None:
        """One transfer of all bytes by each of the best clients, uploads first: downloads need an object."""
        self.number += 1
        for part, move in zip(PARTS, (self._put, self._get), strict=True):
            for client in turned(self.best[part], self.number):
                cost, seconds = move(client, self.data)
                self.found.ceiling[part].setdefault(client.name, Costs()).add(cost)
                self.found.server_s[part].setdefault(client.name, []).append(seconds)
        on_rank_0(lambda: delete(self.server, "bare-"))


def show(settings: Settings, found: Found, where: str) -> Figures:
    """Prints the tables; the figures for the file."""
    print(f"\n{where}: {found.bytes / 1e9:.2f} GB on {settings.processes} processes, {settings.rounds} rounds")
    for part, rates in found.sweep_gb_s.items():
        text = ", ".join(f"{name}: {rate:.2f}" for name, rate in sorted(rates.items(), key=lambda item: -item[1]))
        print(f"  sweep, {part}, GB/s: {text}")
    figures: dict[str, Any] = {"bytes": found.bytes, "sweep_gb_s": found.sweep_gb_s, "failed": found.failed}
    for part in PARTS:
        figures[part] = _show_part(part, found)
    title = "where a save of shardfast spends its time (milliseconds after the call, slowest rank, median)"
    figures["timeline_ms"] = timeline(title, found.phases)
    print("\nconfigurations")
    for name, note in found.notes.items():
        print(f"  {name}: {note}")
    for name, reason in {**found.failed, **NOT_MEASURED}.items():
        print(f"  not in the tables: {name}: {reason}")
    return figures


def _ratio(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """Round by round; rivals take part in the first rounds only."""
    both = min(len(values), len(others))
    return ratio(values[:both], others[:both])


def _show_part(part: str, found: Found) -> dict[str, Any]:
    gigabytes = found.bytes / 1e9
    ceiling, costs = found.ceiling[part], found.costs[part]
    top = best(ceiling)
    rivals = {name: cost for name, cost in costs.items() if name != OURS}
    rival = best(rivals) if rivals else None
    client_s = {name: [one.cpu_s / gigabytes for one in cost.all] for name, cost in {**ceiling, **costs}.items()}
    server_s = {name: [one / gigabytes for one in of] for name, of in found.server_s[part].items()}
    rows: list[list[object]] = []
    for name, cost in [*ceiling.items(), *ours_first(costs)]:
        rates = [gigabytes / one for one in cost.seconds()]
        of_top = _ratio(ceiling[top].seconds(), cost.seconds())
        row: list[object] = [name, median(rates), spread(rates), median(of_top), spread(of_top)]
        row.append(median(_ratio(rivals[rival].seconds(), cost.seconds())) if rival and name in costs else "")
        row += [median(client_s[name]), spread(client_s[name]), median(server_s[name])]
        rows.append(row)
    columns = ("GB/s", "(min .. max)", "of ceiling", "(min .. max)", "of best rival", "CPU s/GB", "", "server's CPU")
    table(part, ("", *columns), rows)
    print(f"  ceiling: {top}")
    figures: dict[str, Any] = {
        "ceiling": top,
        "clients": {name: [asdict(one) for one in cost.all] for name, cost in ceiling.items()},
        "systems": {name: [asdict(one) for one in cost.all] for name, cost in costs.items()},
        "of_ceiling": {name: summary(_ratio(ceiling[top].seconds(), cost.seconds())) for name, cost in costs.items()},
        "server_cpu_s_per_gb": {name: summary(seconds) for name, seconds in server_s.items()},
        "client_cpu_s_per_gb": {name: summary(seconds) for name, seconds in client_s.items()},
    }
    if OURS in costs:
        figures["times_rival"] = {
            name: summary(_ratio(cost.seconds(), costs[OURS].seconds())) for name, cost in rivals.items()
        }
    return figures
