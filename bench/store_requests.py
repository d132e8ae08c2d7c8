"""Requests to an S3 server: of a save and of a load, before the first data byte of a restore, with late answers."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import shardfast as sf
import torch
import torch.distributed as dist
from figures import OURS, Figures, median, ours_first, ratio, spread, summary, table
from ranks import ROUNDS_MAX, Settings, attempt, on_rank_0, run, timed, turned
from states import bytes_of, expect_equal, expect_equal_whole, sharded, zero
from store_rivals import MIB, Ours, delete, open_store, store_systems
from store_server import SLOW, Server, behind

DATA_FILE = ".safetensors"
INDEX = "model.safetensors.index.json"
STEPS = 1000
LATE = {"late_every": 100, "late": 2.0}
JOINED_BYTES = 8 * MIB
"""What one data request may read."""


@dataclass(frozen=True)
class Counted:
    """Requests of one save or load, of all ranks."""

    puts: int
    data: int
    others: int
    data_bytes: int

    @staticmethod
    def of(exchanges: list[dict[str, Any]]) -> Counted:
        data = [one for one in exchanges if one["method"] == "GET" and not _is_list(one) and not _is_small(one)]
        puts = [one for one in exchanges if one["method"] in ("PUT", "POST") and not one["target"].endswith("?delete")]
        others = len(exchanges) - len(data) - len(puts)
        return Counted(len(puts), len(data), others, sum(one["received"] for one in data))


def _is_list(exchange: dict[str, Any]) -> bool:
    return "list-type" in exchange["target"]


def _is_small(exchange: dict[str, Any]) -> bool:
    """Whether it asks for something other than the bytes of tensors."""
    name = Path(urlsplit(exchange["target"]).path).name
    return name in ("COMMIT", INDEX, ".metadata", ".snapshot_metadata") or name.startswith("manifest")


def measure(settings: Settings, server: Server) -> Figures:
    with behind(server) as counted:
        found: dict[str, Any] = run(_counting_worker, settings, counted, environment=counted.environment)
        figures = _show_counted(found)
        alone = replace(settings, processes=1)
        steps = 20 if settings.quick else STEPS
        before = run(_restore_worker, alone, counted, steps, environment=counted.environment)
    print(f"  restoring among {steps:,} steps: {len(before)} requests before the first data byte: {', '.join(before)}")
    figures |= {"steps": steps, "before first data": before}
    # With fewer bytes some saves and loads would have no late answer.
    few = replace(settings, rounds=min(settings.rounds, ROUNDS_MAX))
    with behind(server, **SLOW) as slow, behind(server, **SLOW, **LATE) as late:
        found = run(_late_worker, few, slow, late, environment=server.environment)
    figures["late"] = _show_late(found)
    return figures


def _counting_worker(settings: Settings, server: Server) -> dict[str, Any]:
    state, other = sharded(settings.total_bytes // 4, seed=1), sharded(settings.total_bytes // 4, seed=1000)
    columns = sharded(settings.total_bytes // 4, seed=1000, dim=1)
    order, failed = store_systems(server)
    saves: dict[str, Counted] = {}
    loads: dict[str, Counted] = {}
    found: dict[str, Any] = {"bytes": bytes_of(state), "saves": saves, "loads": loads, "failed": failed}

    def counted() -> Counted:
        dist.barrier()
        return on_rank_0(lambda: Counted.of(server.exchanges()))

    def one(number: int) -> None:
        system = order[number]
        if system.name == OURS:
            # The first save to a bucket tries whether the server keeps the condition of publishing.
            system.save("tried", state)
        counted()
        prefix = f"counted-{number}"
        system.save(prefix, state)
        saves[system.name] = counted()
        zero(other)
        system.load(prefix, other)
        loads[system.name] = counted()
        expect_equal(other, state, system.name)
        if system.name == OURS:
            found["objects"] = on_rank_0(lambda: _objects(server, prefix))
            found["verified"] = on_rank_0(lambda: _verified(server, prefix))
            zero(columns)
            system.load(prefix, columns)
            found["resharded"] = counted()
            expect_equal_whole(columns, state, system.name)
        on_rank_0(lambda: delete(server, prefix))

    for number, system in enumerate(order):
        reason = attempt(one, number)
        if reason is not None:
            failed[system.name] = reason
    return found


def _objects(server: Server, prefix: str) -> dict[str, int]:
    import obstore

    return {one["path"]: one["size"] for page in obstore.list(open_store(server), prefix=prefix) for one in page}


def _verified(server: Server, prefix: str) -> dict[str, int]:
    """What ``shardfast verify --stored`` asks for of data files: the most requests for one, bytes received of all."""
    server.exchanges()
    command = [str(Path(sys.executable).with_name("shardfast")), "verify", "--stored", server.url(prefix)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    exchanges = [one for one in server.exchanges() if urlsplit(one["target"]).path.endswith(DATA_FILE)]
    requests = Counter(urlsplit(one["target"]).path for one in exchanges)
    return {"requests": max(requests.values()), "bytes": sum(one["received"] for one in exchanges)}


def part_bytes(size: int) -> int:
    """Bytes of a part of a data file of this size, as docs/guide/storage.md says."""
    if size <= 1024 * MIB:
        return 8 * MIB
    return min(64 * MIB, -(-size // (128 * 8 * MIB)) * 8 * MIB)


def puts_expected(objects: dict[str, int]) -> int:
    """Requests that write, of a save that wrote these objects: one each, a longer data file one a part and two."""
    puts = 0
    for path, size in objects.items():
        part = part_bytes(size)
        puts += -(-size // part) + 2 if path.endswith(DATA_FILE) and size > part else 1
    return puts


def _show_counted(found: dict[str, Any]) -> dict[str, Any]:
    saves, loads = found["saves"], found["loads"]
    rows: list[list[object]] = []
    for name, save in ours_first(saves):
        load = loads.get(name, Counted(0, 0, 0, 0))
        read = load.data_bytes / found["bytes"]
        rows.append([name, save.puts, save.data + save.others, load.data, load.others, read])
    resharded: Counted = found["resharded"]
    of_needed = resharded.data_bytes / found["bytes"]
    rows.append([f"{OURS}, other layout", "", "", resharded.data, resharded.others, of_needed])
    columns = ("save: writes", "others", "load: data", "others", "bytes read of needed")
    table(f"requests of all ranks, {found['bytes'] / 1e9:.2f} GB", ("", *columns), rows)
    objects = found["objects"]
    files = [path for path in objects if path.endswith(DATA_FILE)]
    print(f"  shardfast wrote {len(objects)} objects: {puts_expected(objects)} writes expected")
    verified = found["verified"]
    stored = sum(objects[path] for path in files)
    print(f"  verify --stored: {verified['requests']} requests a file, {verified['bytes'] / stored:.4%} of the bytes")
    for name, reason in found["failed"].items():
        print(f"  not in the table: {name}: {reason}")
    return {
        "bytes": found["bytes"],
        "verified": {"requests": verified["requests"], "of_bytes": verified["bytes"] / stored},
        "saves": {name: asdict(one) for name, one in saves.items()},
        "loads": {name: asdict(one) for name, one in loads.items()},
        "resharded": asdict(resharded),
        "puts expected": puts_expected(objects),
        "data requests most": 2 * len(files) + found["bytes"] / JOINED_BYTES,
        "resharded bytes of needed": of_needed,
        "failed": found["failed"],
    }


def _restore_worker(settings: Settings, server: Server, steps: int) -> list[str]:
    """The requests of a restore before its first one for data, in a run of so many steps."""
    local = settings.where / "steps"
    shutil.rmtree(local, ignore_errors=True)
    state = {"model": {"w": torch.arange(1000.0)}, "extra": {"n": 1}}
    with sf.Checkpointer(local) as checkpointer:
        for step in range(1, steps + 1):
            checkpointer.save(step, state)
    asyncio.run(_upload(server, local, "steps"))
    shutil.rmtree(local)
    server.exchanges()
    with sf.Checkpointer(server.url("steps")) as checkpointer:
        restored = checkpointer.restore(state)
    if restored != steps:
        raise AssertionError(f"restored step {restored} of {steps}")
    exchanges = server.exchanges()
    first = next(at for at, one in enumerate(exchanges) if one["target"].endswith(DATA_FILE))
    delete(server, "steps")
    return [f"{one['method']} {'list' if _is_list(one) else Path(one['target']).name}" for one in exchanges[:first]]


async def _upload(server: Server, folder: Path, prefix: str) -> None:
    """Copies a folder's files as they are; a load needs nothing but their bytes."""
    import obstore

    store, slots = open_store(server), asyncio.Semaphore(8)

    async def one(file: Path) -> None:
        async with slots:
            await obstore.put_async(store, f"{prefix}/{file.relative_to(folder)}", file.read_bytes())

    await asyncio.gather(*[one(file) for file in folder.rglob("*") if file.is_file()])


def _late_worker(settings: Settings, slow: Server, late: Server) -> dict[str, Any]:
    state, other = sharded(settings.total_bytes, seed=1), sharded(settings.total_bytes, seed=1000)
    found: dict[str, Any] = {"bytes": bytes_of(state)}
    servers = {"in time": slow, "late": late}
    for number in range(settings.warm_ups + settings.rounds):
        for name in turned(list(servers), number):
            server, prefix = servers[name], f"late-{number}-{name.replace(' ', '-')}"
            ours = Ours(server)
            zero(other)
            dist.barrier()
            on_rank_0(server.exchanges)
            for part, action in (
                ("save", lambda ours=ours, prefix=prefix: ours.save(prefix, state)),
                ("load", lambda ours=ours, prefix=prefix: ours.load(prefix, other)),
            ):
                cost = timed(action)
                exchanges = on_rank_0(server.exchanges)
                if number >= settings.warm_ups:
                    of = found.setdefault(part, {}).setdefault(name, {"s": [], "requests": [], "late": []})
                    of["s"].append(cost.seconds)
                    of["requests"].append(len(exchanges))
                    of["late"].append(sum(one["is_late"] for one in exchanges))
            expect_equal(other, state, name)
            on_rank_0(lambda prefix=prefix: delete(slow, prefix))
    return found


def _show_late(found: dict[str, Any]) -> dict[str, Any]:
    rows: list[list[object]] = []
    figures: dict[str, Any] = {}
    for part in ("save", "load"):
        plain, late = found[part]["in time"], found[part]["late"]
        times, requests = ratio(late["s"], plain["s"]), ratio(late["requests"], plain["requests"])
        figures[part] = {"times": summary(times), "requests": summary(requests), **found[part]}
        row = [part, median(plain["s"]), median(late["s"]), median(times), spread(times), median(late["late"])]
        rows.append([*row, f"{median(plain['requests']):.0f}", median(requests), spread(requests)])
    columns = ("in time s", "late s", "ratio", "(min .. max)", "late ones", "requests", "ratio", "(min .. max)")
    title = f"one answer in 100 is 2 s late, connections with 20 MB/s and 30 ms, {found['bytes'] / 1e9:.2f} GB"
    table(title, ("", *columns), rows)
    return figures
