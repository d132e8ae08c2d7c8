"""Saves to HDFS and loads from it: rates beside bare clients and rivals, slow streams, calls, concat, memory, stall.

The servers, a NameNode and three DataNodes, and the clients run on one machine. A block has one replica: the client
sends each byte once however many there are, and the processors that it shares with the servers would copy it thrice.
Clients find the cluster's configuration in the environment of their process (``store_servers.Cluster.environment``).
"""

from __future__ import annotations

import http.client
import importlib.util
import io
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import shardfast as sf
import torch.distributed as dist
from figures import FAR, NEAR, ONE_STREAM, OURS, Figures, median, ratio, spread, summary, table, timeline
from ranks import (
    MIB,
    ROOT,
    ROUNDS_MAX,
    Settings,
    drop_page_cache,
    extra_memory,
    made,
    of_all,
    on_rank_0,
    remove,
    run,
    timed,
    turned,
)
from rivals import Shardfast
from shardfast import session
from states import State, bytes_of, counted, expect_equal, sharded, zero
from store_servers import HDFS, SLOW_STREAM, Cluster, datanodes_behind, missing, running_hdfs
from stores import PARTS, Bare, Ceiling, Found, Ours, StoreSystem, Way, in_rounds, noise, show
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

REPLICAS = 1
CLIENT = {"dfs.replication": str(REPLICAS), "dfs.blocksize": str(128 * MIB)}
"""Settings of all clients: a test's cluster has small blocks. hdfs-native takes them from the NameNode instead."""

ONE_BLOCK = 1 << 30
"""Block length of what a rival writes as one file: the client library can fail where a file's next block begins."""

GIGABYTES_MAX = 1.0
JARS = ROOT / "target" / "servers" / "hdfs" / "lib"
RAM = Path("/dev/shm")
SAVE, LOAD = PARTS


def client_of(cluster: Cluster) -> Any:
    from hdfs_native import Client

    return Client(cluster.server)


class HdfsNative:
    """The library hdfs-native as it is, from Python: each part is a file, some are moved at a time."""

    def __init__(self, cluster: Cluster, part_bytes: int, depth: int) -> None:
        from hdfs_native import WriteOptions

        self.name = f"hdfs-native, {part_bytes // MIB} MiB × {depth}"
        self.cluster, self.part_bytes, self.depth = cluster, part_bytes, depth
        self.client = client_of(cluster)
        self.options = WriteOptions(block_size=part_bytes, overwrite=True, replication=REPLICAS)

    def put(self, key: str, data: bytes) -> None:
        def one(at: int) -> None:
            with self.client.create(self._path(key, at), self.options) as file:
                for start in range(at, min(at + self.part_bytes, len(data)), MIB):
                    file.write(data[start : min(start + MIB, at + self.part_bytes)])

        with ThreadPoolExecutor(self.depth) as pool:
            list(pool.map(one, range(0, len(data), self.part_bytes)))

    def get(self, key: str, size: int) -> None:
        def one(at: int) -> None:
            expected = min(self.part_bytes, size - at)
            found = len(self.client.read(self._path(key, at)).read_range(0, expected))
            if found != expected:
                raise AssertionError(f"{self.name} read {found} bytes of {expected}")

        with ThreadPoolExecutor(self.depth) as pool:
            list(pool.map(one, range(0, size, self.part_bytes)))

    def _path(self, key: str, at: int) -> str:
        return self.cluster.path(f"{key}/{self.part_bytes}-{at}")


class HadoopShell:
    """Hadoop's own client, FsShell, with the start of its JVM; what it writes is synced for it, since it does not."""

    def __init__(self, cluster: Cluster, files: int) -> None:
        self.name = f"Hadoop's FsShell, {files} file{'s' if files > 1 else ''} at a time"
        self.cluster, self.files = cluster, files
        self.folder = tempfile.TemporaryDirectory(dir=RAM)

    def prepare(self, data: bytes) -> None:
        """Writes the files that ``put`` copies, into memory."""
        length = -(-len(data) // self.files)
        self.out.mkdir(exist_ok=True)
        for number in range(self.files):
            (self.out / str(number)).write_bytes(data[number * length : (number + 1) * length])

    @property
    def out(self) -> Path:
        return Path(self.folder.name, "out")

    def put(self, key: str, data: bytes) -> None:
        self.shell("-mkdir", "-p", self.cluster.path(f"{key}/shell"))
        self.shell(
            "-put", "-f", "-t", str(self.files), *map(str, self.out.iterdir()), self.cluster.path(f"{key}/shell")
        )
        os.sync()

    def get(self, key: str, size: int) -> None:
        into = Path(self.folder.name, "in")
        into.mkdir()
        self.shell("-get", "-f", "-t", str(self.files), self.cluster.path(f"{key}/shell/*"), str(into))
        found = sum(file.stat().st_size for file in into.iterdir())
        shutil.rmtree(into)
        if found != size:
            raise AssertionError(f"{self.name} read {found} bytes of {size}")

    def shell(self, *arguments: str) -> None:
        """Runs one command, in a JVM as it comes."""
        classes = f"{self.cluster.configuration}:{JARS}/*"
        options = ["--add-opens=java.base/java.lang=ALL-UNNAMED", "-XX:-UsePerfData"]
        command = ["java", *options, "-cp", classes, "org.apache.hadoop.fs.FsShell", *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


class DcpHdfs:
    """DCP's own way to any place that fsspec knows, with the file system that hdfs-native brings for fsspec."""

    def __init__(self, cluster: Cluster, threads: int) -> None:
        import fsspec

        self.name = f"DCP with fsspec, {threads} thread{'s' if threads > 1 else ''}"
        self.note = (
            f"FsspecWriter(thread_count={threads}, sync_files=False) and FsspecReader with hdfs-native's file system; "
            "tell() and readinto(), which DCP needs, are added to its files, and buffers of 1 MiB; it writes bytes, "
            "since views take it twelve times as long; no atomic commit"
        )
        fsspec.register_implementation("hdfs", _file_system(), clobber=True)
        self.cluster, self.threads = cluster, threads

    def save(self, prefix: str, state: State) -> None:
        from torch.distributed.checkpoint import FsspecWriter

        writer = FsspecWriter(self.cluster.url(prefix), thread_count=self.threads, sync_files=False)
        dcp_save(dict(state), storage_writer=writer)

    def load(self, prefix: str, state: State) -> None:
        from torch.distributed.checkpoint import FsspecReader

        dcp_load(dict(state), storage_reader=FsspecReader(self.cluster.url(prefix)))


class _Written(io.RawIOBase):
    """A file of hdfs-native that knows how much was written."""

    def __init__(self, file: Any) -> None:
        self.file, self.at = file, 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        written: int = self.file.write(bytes(data))  # a view of memory takes it twelve times as long
        self.at += written
        return written

    def tell(self) -> int:
        return self.at

    def close(self) -> None:
        if not self.closed:
            self.file.close()
        super().close()


class _Read(io.RawIOBase):
    """A file of hdfs-native that fills a buffer."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.file.seek(offset, whence)
        return self.tell()

    def tell(self) -> int:
        at: int = self.file.tell()
        return at

    def readinto(self, buffer: Any) -> int:
        data = self.file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _file_system() -> type:
    from hdfs_native.fsspec import HdfsFileSystem

    class FileSystem(HdfsFileSystem):  # type: ignore[misc]
        def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
            if mode == "rb":
                return io.BufferedReader(_Read(super()._open(path, mode)), MIB)
            return io.BufferedWriter(
                _Written(super()._open(path, mode, block_size=ONE_BLOCK, replication=REPLICAS)), MIB
            )

    return FileSystem


def measure(settings: Settings) -> Figures:
    reason = missing(HDFS)
    if reason is None and importlib.util.find_spec("hdfs_native") is None:
        reason = "hdfs-native is not installed: requirements/bench.txt names it"
    if reason is not None:
        print(f"  not measured: {reason}")
        return {"not measured": reason}
    settings = replace(settings, gigabytes=min(settings.gigabytes, GIGABYTES_MAX))
    fewer = replace(settings, rounds=min(settings.rounds, ROUNDS_MAX))
    figures: dict[str, Any] = {}
    with running_hdfs(CLIENT) as cluster:
        here = cluster.environment
        before = cluster.cpu_s_by_node()
        found: Found = run(_rates, settings, cluster, environment=here)
        figures["plain"] = show(settings, found, "HDFS on this machine", {})
        took = {node: seconds - before[node] for node, seconds in cluster.cpu_s_by_node().items()}
        figures["cpu_s_by_node"] = took
        print(f"  processor time of the servers, s: {', '.join(f'{node} {took[node]:.1f}' for node in took)}")
        with datanodes_behind(cluster, SLOW_STREAM) as slow:
            alone = replace(fewer, processes=1)
            figures["slow"] = _show_slow(alone, run(_slow, alone, slow, environment=slow.environment))
        figures["calls"] = _show_calls(run(_calls, settings, cluster, environment=here))
        figures["concat_ms"] = _show_concat(run(_concat, replace(settings, processes=1), cluster, environment=here))
        budget = {session.STAGING_BYTES: str(MEMORY_BUDGET_BYTES)}
        figures["memory"] = _show_memory(run(_memory, settings, cluster, environment=here | budget))
        figures["stall_ms"] = _show_stall(settings, run(_stall, settings, cluster, environment=here))
    return figures


PART_MIB = (32, 64, 128)
"""Lengths of parts that are tried."""


def _rates(settings: Settings, cluster: Cluster) -> Found:
    state = sharded(settings.total_bytes, seed=1)
    found = Found(bytes_of(state))
    data = noise(found.bytes // dist.get_world_size())
    makers: dict[str, Callable[[], Bare]] = {}
    for part in PART_MIB[:1] if settings.quick else PART_MIB:
        for depth in (4,) if settings.quick else (2, 4, 8):
            makers[f"{part} {depth}"] = lambda part=part, depth=depth: HdfsNative(cluster, part * MIB, depth)
    clients, absent = made(makers)
    shells, no_shells = made({"FsShell": lambda: HadoopShell(cluster, 4)})
    for shell in shells:
        shell.prepare(data)
    found.failed |= absent | no_shells
    ceiling = Ceiling(cluster, found, data, [*clients, *shells], 1, lambda: _remove_all(cluster, "bare-"))
    # It stands in each round, also where it is none of the best.
    for part in PARTS:
        ceiling.best[part] += [shell for shell in shells if shell not in ceiling.best[part]]
    systems: dict[str, Callable[[], StoreSystem]] = {
        OURS: lambda: Ours(cluster),
        "DCP, 1": lambda: DcpHdfs(cluster, 1),
        "DCP, 4": lambda: DcpHdfs(cluster, 4),
    }
    order, absent = made(systems)
    found.failed |= absent
    way = Way((), sweep_share=1, rival_rounds=settings.rounds, warms_rivals=True)
    in_rounds(settings, cluster, found, ceiling, order, way, state, lambda prefix: _remove_all(cluster, prefix))
    return found


def _remove_all(cluster: Cluster, prefix: str) -> None:
    """Deletes what has names that begin so."""
    client = client_of(cluster)
    for status in list(client.list_status(cluster.path(""), False)):
        if Path(status.path).name.startswith(prefix):
            client.delete(status.path, True)


ONE_STREAM_SHARE = 0.2
"""One stream moves so much of the bytes: at 20 MB/s all of them would take minutes."""


@dataclass
class Slow:
    """One process over slow connections: seconds of each for ``bytes``."""

    bytes: int
    seconds: dict[str, dict[str, list[float]]] = field(default_factory=lambda: {part: {} for part in PARTS})
    cpu_s: dict[str, dict[str, list[float]]] = field(default_factory=lambda: {part: {} for part in PARTS})
    server_s: dict[str, dict[str, list[float]]] = field(default_factory=lambda: {part: {} for part in PARTS})
    files: int = 0
    phases: list[dict[str, float]] = field(default_factory=list)


STREAMS = 32
"""Connections on which Shardfast writes the first parts of an object, and those on which it reads."""

PART_BYTES = 32 * MIB
"""Length of a part of an object of at most 4 GiB."""

PARALLEL, (ALONE, SHELL) = "hdfs-native, parallel files", ONE_STREAM


def _slow(settings: Settings, cluster: Cluster) -> Slow:
    state, other = sharded(settings.total_bytes, seed=1), sharded(settings.total_bytes, seed=1000)
    found = Slow(bytes_of(state))
    ours = Ours(cluster)
    data = noise(found.bytes)
    short = data[: int(len(data) * ONE_STREAM_SHARE)]
    shell = HadoopShell(cluster, 1)
    shell.prepare(short)
    bare: dict[str, tuple[Bare, bytes]] = {
        PARALLEL: (HdfsNative(cluster, PART_BYTES, STREAMS), data),
        ALONE: (HdfsNative(cluster, ONE_BLOCK, 1), short),
        SHELL: (shell, short),
    }

    def moved(part: str, name: str, share: float, action: Callable[[], object]) -> None:
        before = cluster.cpu_s()
        cost = timed(action)
        if number < settings.warm_ups:
            return
        found.seconds[part].setdefault(name, []).append(cost.seconds / share)
        found.cpu_s[part].setdefault(name, []).append(cost.cpu_s / share)
        found.server_s[part].setdefault(name, []).append((cluster.cpu_s() - before) / share)

    for number in range(settings.warm_ups + settings.rounds):
        for name in turned([OURS, *bare], number):
            if number < settings.warm_ups and name in ONE_STREAM:
                continue
            prefix = f"slow-{number}"
            if name == OURS:
                moved(SAVE, name, 1, lambda prefix=prefix: ours.save(prefix, state))
                found.files = len(_files(cluster, prefix, ".safetensors"))
                zero(other)
                drop_page_cache()
                moved(LOAD, name, 1, lambda prefix=prefix: ours.load(prefix, other))
                expect_equal(other, state, name)
            else:
                client, of = bare[name]
                share = len(of) / len(data)
                moved(SAVE, name, share, lambda client=client, of=of, prefix=prefix: client.put(prefix, of))
                drop_page_cache()
                moved(LOAD, name, share, lambda client=client, of=of, prefix=prefix: client.get(prefix, len(of)))
            _remove_all(cluster, prefix)
    found.phases = [report["phases_ms"] for report in ours.shardfast.reports[settings.warm_ups :]]
    return found


def _show_slow(settings: Settings, found: Slow) -> Figures:
    rate = SLOW_STREAM.rate
    title = f"HDFS, each connection with {rate / 1e6:g} MB/s"
    print(f"\n{title}: {found.bytes / 1e9:.2f} GB by one process, {settings.rounds} rounds, {found.files} data file(s)")
    figures: dict[str, Any] = {"bytes": found.bytes, "files": found.files}
    for part in PARTS:
        seconds, gigabytes = found.seconds[part], found.bytes / 1e9
        streams = min(STREAMS, -(-found.bytes // PART_BYTES)) if part == SAVE else STREAMS
        of_streams = [found.bytes / s / (streams * rate) for s in seconds[OURS]]
        rows: list[list[object]] = []
        for name, of in seconds.items():
            times = ratio(of, seconds[OURS])
            cpu = (median(found.cpu_s[part][name]) / gigabytes, median(found.server_s[part][name]) / gigabytes)
            rows.append([name, median([gigabytes / s for s in of]), median(times), spread(times), *cpu])
        columns = ("GB/s", "ours is so many times as fast", "(min .. max)", "CPU s/GB", "server's CPU")
        table(part, ("", *columns), rows)
        print(f"  of {streams} streams × {rate / 1e6:g} MB/s: {median(of_streams):.2f} {spread(of_streams)}")
        figures[part] = {
            "seconds": {name: summary(of) for name, of in seconds.items()},
            "cpu_s": {name: summary(of) for name, of in found.cpu_s[part].items()},
            "server_cpu_s": {name: summary(of) for name, of in found.server_s[part].items()},
            "streams": streams,
            "of_streams": summary(of_streams),
            "times": {name: summary(ratio(of, seconds[OURS])) for name, of in seconds.items() if name != OURS},
        }
    figures["timeline_ms"] = timeline("where a save of shardfast spends its time (milliseconds, median)", found.phases)
    return figures


def _files(cluster: Cluster, prefix: str, ending: str = "") -> list[str]:
    found = client_of(cluster).list_status(cluster.path(prefix), True)
    return [status.path for status in found if not status.isdir and status.path.endswith(ending)]


KINDS = ("puts", "heads", "lists", "deletes")
"""Requests of a report that go to the NameNode."""

COUNTED_AFTER_S = 11.0
"""The NameNode tells its counts with a delay of up to ten seconds."""


def _calls(settings: Settings, cluster: Cluster) -> dict[str, Any]:
    """Calls of one save and one load: by the NameNode, and by the save's report."""
    state = sharded(settings.total_bytes, seed=1)
    shardfast = Shardfast()

    def counted_calls(action: Callable[[], object]) -> dict[str, int]:
        def settled() -> dict[str, int]:
            time.sleep(COUNTED_AFTER_S)
            return cluster.calls()

        before = on_rank_0(settled)
        action()
        dist.barrier()
        after = on_rank_0(settled)
        return {name: count - before.get(name, 0) for name, count in after.items() if count != before.get(name, 0)}

    # The first one of a process asks for more.
    shardfast.save(cluster.url("calls-0"), state)
    sf.load(cluster.url("calls-0"), {"model": state})
    saved = counted_calls(lambda: shardfast.save(cluster.url("calls-1"), state))
    loaded = counted_calls(lambda: sf.load(cluster.url("calls-1"), {"model": state}))
    files = on_rank_0(lambda: len(_files(cluster, "calls-1")))
    requests = of_all(shardfast.reports[-1]["requests"])
    failures = of_all(shardfast.reports[-1]["failures"])
    on_rank_0(lambda: _remove_all(cluster, "calls-"))
    reported = {kind: sum(of.get(kind, 0) for of in requests) for kind in KINDS}
    return {
        "saved": saved,
        "loaded": loaded,
        "files": files,
        "reported": reported,
        "failures": [one for of in failures for one in of],
    }


def _show_calls(found: dict[str, Any]) -> Figures:
    saved, loaded, reported, files = found["saved"], found["loaded"], found["reported"], found["files"]
    # Of what a report counts as puts, each sub-file has three; a small file may have been renamed.
    sub_files, blocks = saved.get("Create", 0), saved.get("AddBlock", 0)
    joins = reported["puts"] - 3 * sub_files - saved.get("Rename2", 0)
    save, load = sum(saved.values()) + joins, sum(loaded.values())
    allowed, load_allowed = 2 * sub_files + blocks + 4 * files, files + 3
    print(f"\ncalls to the NameNode of a save of {files} files in {sub_files} sub-files and {blocks} blocks")
    print(f"  {save}, of which {joins} over its REST interface ({allowed} allowed): {saved}")
    print(f"  by the report {sum(reported.values())}: {reported}")
    print(f"  of a load {load} ({load_allowed} allowed): {loaded}")
    calls = {"save": save, "allowed": allowed, "load": load, "load_allowed": load_allowed}
    return found | calls | {"sub_files": sub_files, "blocks": blocks, "joins": joins}


JOINED, CONCATS = 16, 50


def _concat(settings: Settings, cluster: Cluster) -> list[float]:
    """Milliseconds of concats of sub-files over WebHDFS, on one connection."""
    from hdfs_native import WriteOptions

    client = client_of(cluster)
    options = WriteOptions(block_size=MIB, replication=REPLICAS)
    host, port = cluster.http.rsplit(":", 1)
    connection = http.client.HTTPConnection(host, int(port))
    times: list[float] = []

    def write(path: str) -> None:
        with client.create(path, options) as file:
            file.write(b"x" * 1000)

    for number in range(3 if settings.quick else CONCATS):
        paths = [cluster.path(f"concat-{number}/{part}") for part in range(JOINED)]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(write, paths))
        query = f"op=CONCAT&sources={','.join(paths[1:])}&user.name={cluster.user}"
        began = time.perf_counter()
        connection.request("POST", f"/webhdfs/v1{paths[0]}?{query}")
        answer = connection.getresponse()
        text = answer.read()
        times.append((time.perf_counter() - began) * 1e3)
        if answer.status != http.HTTPStatus.OK:
            raise AssertionError(f"concat: {answer.status}: {text!r}")
        found = client.get_file_info(paths[0]).length
        if found != 1000 * JOINED:
            raise AssertionError(f"concat made a file of {found} bytes")
    _remove_all(cluster, "concat-")
    return times


def _show_concat(times: list[float]) -> Figures:
    print(f"\nconcat of {JOINED} sub-files, {len(times)} times: median {median(times):.1f} ms {spread(times, 1)}")
    return summary(times)


MEMORY_BUDGET_BYTES = 64 * MIB
"""The smallest that HDFS takes: two parts."""

BUDGETS = 20
"""The state of a process has so many times the bytes of the budget."""


def _memory(settings: Settings, cluster: Cluster) -> dict[str, int]:
    """Bytes beyond those before a save, at its peak, of the rank that took most."""
    budgets = 2 if settings.quick else BUDGETS
    state = sharded(budgets * MEMORY_BUDGET_BYTES * dist.get_world_size(), seed=1)
    sf.save(cluster.url("memory-0"), {"model": dict(list(state.items())[:1])})
    save = max(of_all(extra_memory(lambda: sf.save(cluster.url("memory-1"), {"model": state}))))
    load = max(of_all(extra_memory(lambda: sf.load(cluster.url("memory-1"), {"model": state}))))
    on_rank_0(lambda: _remove_all(cluster, "memory-"))
    return {SAVE: save, LOAD: load, "bytes": bytes_of(state)}


def _show_memory(found: dict[str, int]) -> Figures:
    rows: list[list[object]] = [[part, (found[part] - MEMORY_BUDGET_BYTES) >> 20] for part in PARTS]
    budget = MEMORY_BUDGET_BYTES >> 20
    table(f"extra memory, {found['bytes'] / 1e9:.2f} GB, a budget of {budget} MiB", ("", "beyond it, MiB"), rows)
    return {**found, "budget_bytes": MEMORY_BUDGET_BYTES}


CASES = ((100, MIB), (1000, 4 << 10))
"""Tensors of a state, and the bytes of each."""

STALL_WARM_UPS, STALL_SAVES = 2, 20


def _stall(settings: Settings, cluster: Cluster) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of the call of an asynchronous save by state and place, of all ranks; each save is waited for."""
    found: dict[str, dict[str, list[float]]] = {}
    for tensors, bytes_each in CASES[1:] if settings.quick else CASES:
        module, optimizer = counted(tensors, bytes_each)
        state = {"model": module, "optimizer": optimizer, "extra": {"step": 1}}
        times: dict[str, list[float]] = {FAR: [], NEAR: []}
        for number in range(STALL_WARM_UPS + (2 if settings.quick else STALL_SAVES)):
            for place in turned([FAR, NEAR], number):
                folder = settings.where / "stall"
                path = folder if place == NEAR else cluster.url("stall")
                dist.barrier()
                began = time.perf_counter()
                pending = sf.save_async(path, state)
                took = (time.perf_counter() - began) * 1e3
                pending.staged()
                pending.committed()
                optimizer.step()
                remove(folder)
                on_rank_0(lambda: _remove_all(cluster, "stall"))
                if number >= STALL_WARM_UPS:
                    times[place].append(took)
        found[f"{tensors} tensors of {bytes_each >> 10} KiB"] = {
            place: [one for rank in of_all(of) for one in rank] for place, of in times.items()
        }
    return found


def _show_stall(settings: Settings, found: dict[str, dict[str, list[float]]]) -> Figures:
    rows: list[list[object]] = []
    for state, by_place in found.items():
        for place, times in by_place.items():
            rows.append([state, place, len(times), f"{median(times):.3f}", f"{max(times):.2f}", spread(times, 3)])
    title = f"stall of the call, {settings.processes} processes, each save waited for"
    table(title, ("state", "place", "calls", "median ms", "worst ms", "(min .. max)"), rows)
    return {state: {place: summary(times) for place, times in of.items()} for state, of in found.items()}
