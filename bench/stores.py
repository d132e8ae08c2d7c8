"""Saves and loads over S3: rates beside bare clients and rivals, at full speed and over slow connections.

The server and the clients run on one machine. The processor time of the server and that of the clients are reported
separately. Ours, rivals in their best documented configuration, and bare clients find the server and their credentials
in the environment of their process (``store_servers.Server.environment``).
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from ceilings import best
from figures import OURS, Figures, median, ours_first, ratio, spread, summary, table, timeline
from ranks import (
    MIB,
    ROUNDS_MAX,
    Cost,
    Costs,
    Settings,
    attempt,
    drop_page_cache,
    made,
    of_all,
    on_rank_0,
    run,
    timed,
    turned,
)
from rivals import Shardfast
from states import State, bytes_of, expect_equal, sharded, zero
from store_servers import REGION, SLOW, Server, behind, missing, running
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

CHECKSUM = "CRC64NVME"
"""What Shardfast sends with each part, by the name that obstore gives it."""


class StoreSystem(Protocol):
    """One way to save to S3 and to load from there; what is saved is durable when the service has confirmed it.

    Attributes:
        name: In the tables.
        note: Its configuration, and what it leaves out.
    """

    name: str
    note: str

    def save(self, prefix: str, state: State) -> None: ...
    def load(self, prefix: str, state: State) -> None: ...


class Timed(Protocol):
    """A server that tells its processor time."""

    def cpu_s(self) -> float: ...


class Place(Protocol):
    """A server that knows Shardfast's URLs."""

    def url(self, prefix: str) -> str: ...


class Ours:
    name = OURS
    note = "sf.save and sf.load; checksums written and verified, atomic commit"

    def __init__(self, server: Place) -> None:
        self.server = server
        self.shardfast = Shardfast()

    def save(self, prefix: str, state: State) -> None:
        self.shardfast.save(self.server.url(prefix), state)

    def load(self, prefix: str, state: State) -> None:
        self.shardfast.load(self.server.url(prefix), state)


class DcpFsspec:
    """DCP's own way to any place that fsspec knows."""

    def __init__(self, server: Server, threads: int) -> None:
        self.name = f"DCP with fsspec, {threads} thread{'s' if threads > 1 else ''}"
        self.note = (
            f"FsspecWriter(thread_count={threads}, sync_files=False) and FsspecReader with s3fs as it is; its "
            "sync_files=True syncs every disk of this machine; no atomic commit"
        )
        importlib.import_module("s3fs")  # fails here where it cannot be used
        self.bucket, self.threads = server.bucket, threads

    def save(self, prefix: str, state: State) -> None:
        from torch.distributed.checkpoint import FsspecWriter

        writer = FsspecWriter(f"s3://{self.bucket}/{prefix}", thread_count=self.threads, sync_files=False)
        dcp_save(dict(state), storage_writer=writer)

    def load(self, prefix: str, state: State) -> None:
        from torch.distributed.checkpoint import FsspecReader

        dcp_load(dict(state), storage_reader=FsspecReader(f"s3://{self.bucket}/{prefix}"))


class S3Connector:
    """AWS's connector for PyTorch: DCP over the client of AWS (CRT)."""

    name = "S3 connector's DCP writer"
    note = "S3StorageWriter(thread_count=2) and S3StorageReader (dcp_optimized), parts of 8 MiB; no atomic commit"

    def __init__(self, server: Server) -> None:
        from s3torchconnector import S3ClientConfig

        importlib.import_module("s3torchconnector.dcp")  # fails here where it cannot be used
        self.bucket = server.bucket
        self.config = S3ClientConfig(force_path_style=True)

    def save(self, prefix: str, state: State) -> None:
        from s3torchconnector.dcp import S3StorageWriter

        path = f"s3://{self.bucket}/{prefix}"
        writer = S3StorageWriter(REGION, path, s3client_config=self.config, thread_count=2)
        dcp_save(dict(state), storage_writer=writer)

    def load(self, prefix: str, state: State) -> None:
        from s3torchconnector.dcp import S3StorageReader

        path = f"s3://{self.bucket}/{prefix}"
        dcp_load(dict(state), storage_reader=S3StorageReader(REGION, path, s3client_config=self.config))


class MultiStorage:
    """NVIDIA's multi-storage-client under DCP."""

    name = "MSC"
    note = (
        "multi-storage-client's MultiStorageFileSystemWriter and Reader(thread_count=2), transfers in Rust; through "
        "temporary files; no atomic commit"
    )
    PROFILE = "bench"

    def __init__(self, server: Server) -> None:
        options = {
            "base_path": server.bucket,
            "region_name": REGION,
            "endpoint_url": server.endpoint,
            "rust_client": {"allow_http": True},
        }
        keys = {"access_key": server.key, "secret_key": server.secret}
        profile = {
            "storage_provider": {"type": "s3", "options": options},
            "credentials_provider": {"type": "S3Credentials", "options": keys},
        }
        self.folder = tempfile.TemporaryDirectory()
        config = Path(self.folder.name, "msc.json")
        config.write_text(json.dumps({"profiles": {self.PROFILE: profile}}))
        os.environ["MSC_CONFIG"] = str(config)
        importlib.import_module("multistorageclient.contrib.torch")  # fails here where it cannot be used

    def save(self, prefix: str, state: State) -> None:
        from multistorageclient.contrib.torch import MultiStorageFileSystemWriter

        writer = MultiStorageFileSystemWriter(f"msc://{self.PROFILE}/{prefix}", thread_count=2, sync_files=False)
        dcp_save(dict(state), storage_writer=writer)

    def load(self, prefix: str, state: State) -> None:
        from multistorageclient.contrib.torch import MultiStorageFileSystemReader

        reader = MultiStorageFileSystemReader(f"msc://{self.PROFILE}/{prefix}", thread_count=2)
        dcp_load(dict(state), storage_reader=reader)


NOT_MEASURED = {
    "Run:ai model streamer": "loads safetensors only, and saves nothing",
    "torch_checkpointing 0.1.1": "has no storage but a file system",
    "torchsnapshot 0.1.0": "hands botocore a stream that the present botocore cannot sign with awscrt (ValueError)",
}
"""What is not in the tables, and why."""


def store_systems(server: Server) -> tuple[list[StoreSystem], dict[str, str]]:
    """Ours first, then the rivals; and those that cannot be made here, with the reason. Every rank calls it."""
    makers: dict[str, Callable[[], StoreSystem]] = {
        OURS: lambda: Ours(server),
        "DCP with fsspec, 1 thread": lambda: DcpFsspec(server, 1),
        "DCP with fsspec, 8 threads": lambda: DcpFsspec(server, 8),
        S3Connector.name: lambda: S3Connector(server),
        MultiStorage.name: lambda: MultiStorage(server),
    }
    return made(makers)


class Bare(Protocol):
    """A client that only moves the bytes of one object."""

    @property
    def name(self) -> str: ...
    def put(self, key: str, data: bytes) -> None: ...
    def get(self, key: str, size: int) -> None: ...


class Obstore:
    """The library object_store as it is, from Python; nothing is placed, and no checksum is sent but ``checksum``."""

    def __init__(self, server: Server, part_bytes: int, depth: int, checksum: str | None = None) -> None:
        self.name = f"obstore, {part_bytes // MIB} MiB × {depth}{f', {checksum}' if checksum else ''}"
        self.part_bytes, self.depth = part_bytes, depth
        self.store = open_store(server, checksum)

    def put(self, key: str, data: bytes) -> None:
        import obstore

        obstore.put(self.store, key, data, chunk_size=self.part_bytes, max_concurrency=self.depth)

    def get(self, key: str, size: int) -> None:
        asyncio.run(self._get(key, size))

    async def _get(self, key: str, size: int) -> None:
        import obstore

        slots = asyncio.Semaphore(self.depth)

        async def one(start: int) -> None:
            async with slots:
                end = min(start + self.part_bytes, size)
                part = await obstore.get_range_async(self.store, key, start=start, end=end)
                if len(part) != end - start:
                    raise AssertionError(f"{self.name} read {len(part)} bytes of {end - start}")

        await asyncio.gather(*[one(start) for start in range(0, size, self.part_bytes)])


class Crt:
    """The client of AWS (CRT), as the S3 connector brings it; it chooses its connections by a rate to aim at."""

    def __init__(self, server: Server, part_bytes: int, target_gbps: float) -> None:
        from s3torchconnectorclient._mountpoint_s3_client import MountpointS3Client

        self.name = f"AWS CRT, {part_bytes // MIB} MiB, {target_gbps:g} Gbit/s"
        self.bucket = server.bucket
        self.client = MountpointS3Client(
            REGION,
            throughput_target_gbps=target_gbps,
            part_size=part_bytes,
            endpoint=server.endpoint,
            force_path_style=True,
        )

    def put(self, key: str, data: bytes) -> None:
        stream = self.client.put_object(self.bucket, key)
        stream.write(data)
        stream.close()

    def get(self, key: str, size: int) -> None:
        found = sum(len(piece) for piece in self.client.get_object(self.bucket, key))
        if found != size:
            raise AssertionError(f"{self.name} read {found} bytes of {size}")


def bare_clients(server: Server, depths: tuple[int, ...]) -> tuple[list[Bare], dict[str, str]]:
    """The bare clients over part sizes and depths; those that cannot be made here, with the reason."""
    makers: dict[str, Callable[[], Bare]] = {}
    for part in (8 * MIB, 16 * MIB, 32 * MIB):
        for depth in depths:
            makers[f"obstore {part} {depth}"] = lambda part=part, depth=depth: Obstore(server, part, depth)
    for part, target in ((8 * MIB, 10.0), (16 * MIB, 10.0), (8 * MIB, 50.0)):
        makers[f"AWS CRT {part} {target}"] = lambda part=part, target=target: Crt(server, part, target)
    return made(makers)


def open_store(server: Server, checksum: str | None = None) -> Any:
    """The bucket for obstore. The payload is not signed: that is the fastest that it knows."""
    from obstore.store import S3Store

    options = {"checksum_algorithm": checksum} if checksum else {}
    return S3Store(
        server.bucket,
        endpoint=server.endpoint,
        access_key_id=server.key,
        secret_access_key=server.secret,
        region=REGION,
        unsigned_payload=True,
        virtual_hosted_style_request=False,
        client_options={"allow_http": True, "timeout": "300s"},
        **options,
    )


def delete(server: Server, prefix: str) -> None:
    """Deletes the objects below ``prefix``."""
    import obstore

    store = open_store(server)
    for page in obstore.list(store, prefix=prefix):
        obstore.delete(store, [entry["path"] for entry in page])


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
        figures["plain"] = show(settings, found, "S3 on this machine", NOT_MEASURED)
        fewer = replace(settings, rounds=min(settings.rounds, ROUNDS_MAX), gigabytes=settings.gigabytes / 2)
        with behind(server, SLOW) as slow:
            found = run(_worker, fewer, slow, FAR, environment=slow.environment)
        figures["slow"] = show(fewer, found, "S3, each connection with 20 MB/s and 30 ms", NOT_MEASURED)
    return figures


def _worker(settings: Settings, server: Server, way: Way) -> Found:
    state = sharded(settings.total_bytes, seed=1)
    found = Found(bytes_of(state))
    ceiling = _s3_ceiling(settings, server, found, way)
    order, absent = store_systems(server)
    found.failed |= absent
    in_rounds(settings, server, found, ceiling, order, way, state, lambda prefix: delete(server, prefix))
    return found


def in_rounds(
    settings: Settings,
    server: Timed,
    found: Found,
    ceiling: Ceiling,
    order: list[StoreSystem],
    way: Way,
    state: State,
    remove: Callable[[str], object],
) -> None:
    """Measures the ceiling and all systems in every round; ``remove`` removes what lies at a prefix."""
    other = sharded(settings.total_bytes, seed=1000)
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
            on_rank_0(lambda prefix=prefix: remove(prefix))
            if reason is not None:
                found.failed[system.name] = reason
                order.remove(system)
    reports = [report["phases_ms"] for report in ours.shardfast.reports[settings.warm_ups :]]
    by_rank = of_all(reports)
    found.phases = [
        {name: max(ranks[save].get(name, 0.0) for ranks in by_rank) for name in by_rank[0][save]}
        for save in range(len(reports))
    ]


def _one(server: Timed, system: StoreSystem, prefix: str, state: State, other: State, found: Found | None) -> None:
    saved, save_server_s = timed_beside(server, lambda: system.save(prefix, state))
    zero(other)
    drop_page_cache()
    loaded, load_server_s = timed_beside(server, lambda: system.load(prefix, other))
    expect_equal(other, state, system.name)
    if found is not None:
        for part, cost, seconds in zip(PARTS, (saved, loaded), (save_server_s, load_server_s), strict=True):
            found.costs[part].setdefault(system.name, Costs()).add(cost)
            found.server_s[part].setdefault(system.name, []).append(seconds)


def timed_beside(server: Timed, action: Callable[[], object]) -> tuple[Cost, float]:
    """The cost on the side of the clients, and the server's processor seconds."""
    before = server.cpu_s()
    cost = timed(action)
    return cost, server.cpu_s() - before


class Ceiling:
    """What bare clients reach: a sweep over all of them, then the best ones each round.

    Args:
        server: Whose processor time stands beside.
        found: Where the rates go.
        data: What each client moves in a round.
        clients: All of them.
        sweep_share: The sweep moves so much of the data.
        remove: Removes what the clients left.
    """

    def __init__(
        self,
        server: Timed,
        found: Found,
        data: bytes,
        clients: list[Bare],
        sweep_share: float,
        remove: Callable[[], object],
    ) -> None:
        self.server, self.found, self.data, self.remove = server, found, data, remove
        self.key = f"bare-{dist.get_rank()}"
        swept = self.data[: int(len(data) * sweep_share)]
        rates: dict[str, list[tuple[float, Bare]]] = {part: [] for part in PARTS}
        for client in clients:
            costs: list[Cost] = []
            reason = attempt(lambda client=client, costs=costs: costs.extend(self._both(client, swept)))
            if reason is not None:
                found.failed[client.name] = reason
                continue
            for part, cost in zip(PARTS, costs, strict=True):
                # Ranks measure slightly different times; they must choose the same.
                rate = on_rank_0(lambda cost=cost: len(swept) * dist.get_world_size() / cost.seconds / 1e9)
                found.sweep_gb_s[part][client.name] = rate
                rates[part].append((rate, client))
        self.best = {
            part: [client for _, client in sorted(of, key=lambda pair: -pair[0])[:BEST]] for part, of in rates.items()
        }
        self.number = 0

    def _both(self, client: Bare, data: bytes) -> list[Cost]:
        return [self._put(client, data)[0], self._get(client, data)[0]]

    def _put(self, client: Bare, data: bytes) -> tuple[Cost, float]:
        return timed_beside(self.server, lambda: client.put(self.key, data))

    def _get(self, client: Bare, data: bytes) -> tuple[Cost, float]:
        drop_page_cache()
        return timed_beside(self.server, lambda: client.get(self.key, len(data)))

    def round(self) -> None:
        """One transfer of all bytes by each of the best clients, uploads first: downloads need an object."""
        self.number += 1
        for part, move in zip(PARTS, (self._put, self._get), strict=True):
            for client in turned(self.best[part], self.number):
                cost, seconds = move(client, self.data)
                self.found.ceiling[part].setdefault(client.name, Costs()).add(cost)
                self.found.server_s[part].setdefault(client.name, []).append(seconds)
        on_rank_0(self.remove)


def _s3_ceiling(settings: Settings, server: Server, found: Found, way: Way) -> Ceiling:
    clients, absent = bare_clients(server, way.depths[-1:] if settings.quick else way.depths)
    found.failed |= absent
    data = noise(found.bytes // dist.get_world_size())
    ceiling = Ceiling(server, found, data, clients, way.sweep_share, lambda: delete(server, "bare-"))
    # A save has S3 verify a checksum of each part; the fastest client that does the same stands beside the others.
    fastest = next((client for client in ceiling.best[PARTS[0]] if isinstance(client, Obstore)), None)
    if fastest is not None:
        ceiling.best[PARTS[0]].append(Obstore(server, fastest.part_bytes, fastest.depth, CHECKSUM))
    return ceiling


def noise(length: int) -> bytes:
    """Bytes for this rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return bytes(torch.randint(0, 256, (length,), dtype=torch.uint8, generator=generator).numpy().tobytes())


def show(settings: Settings, found: Found, where: str, absent: dict[str, str]) -> Figures:
    """Prints the tables; the figures for the file."""
    print(f"\n{where}: {found.bytes / 1e9:.2f} GB on {settings.processes} processes, {settings.rounds} rounds")
    for part, rates in found.sweep_gb_s.items():
        text = ", ".join(f"{name}: {rate:.2f}" for name, rate in sorted(rates.items(), key=lambda item: -item[1]))
        print(f"  sweep, {part}, GB/s: {text}")
    figures: dict[str, Any] = {"bytes": found.bytes, "sweep_gb_s": found.sweep_gb_s, "failed": found.failed}
    for part in PARTS:
        figures[part] = show_part(part, found)
    title = "where a save of shardfast spends its time (milliseconds after the call, slowest rank, median)"
    figures["timeline_ms"] = timeline(title, found.phases)
    print("\nconfigurations")
    for name, note in found.notes.items():
        print(f"  {name}: {note}")
    for name, reason in {**found.failed, **absent}.items():
        print(f"  not in the tables: {name}: {reason}")
    return figures


def by_rounds(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """Round by round; rivals take part in the first rounds only."""
    both = min(len(values), len(others))
    return ratio(values[:both], others[:both])


def show_part(part: str, found: Found) -> dict[str, Any]:
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
        of_top = by_rounds(ceiling[top].seconds(), cost.seconds())
        row: list[object] = [name, median(rates), spread(rates), median(of_top), spread(of_top)]
        row.append(median(by_rounds(rivals[rival].seconds(), cost.seconds())) if rival and name in costs else "")
        row += [median(client_s[name]), spread(client_s[name]), median(server_s[name])]
        rows.append(row)
    columns = ("GB/s", "(min .. max)", "of ceiling", "(min .. max)", "of best rival", "CPU s/GB", "", "server's CPU")
    table(part, ("", *columns), rows)
    print(f"  ceiling: {top}")
    figures: dict[str, Any] = {
        "ceiling": top,
        "clients": {name: [asdict(one) for one in cost.all] for name, cost in ceiling.items()},
        "systems": {name: [asdict(one) for one in cost.all] for name, cost in costs.items()},
        "of_ceiling": {
            name: summary(by_rounds(ceiling[top].seconds(), cost.seconds())) for name, cost in costs.items()
        },
        "server_cpu_s_per_gb": {name: summary(seconds) for name, seconds in server_s.items()},
        "client_cpu_s_per_gb": {name: summary(seconds) for name, seconds in client_s.items()},
    }
    if OURS in costs:
        figures["times_rival"] = {
            name: summary(by_rounds(cost.seconds(), costs[OURS].seconds())) for name, cost in rivals.items()
        }
    return figures
