"""Rates of the machine itself: the disk's best durable write and cold read, the memory's copy.

fio sweeps over engines, block sizes, depths and numbers of jobs. Beside it stands a writer of our own, because fio's
buffers lie on 4 KiB pages unless huge pages were reserved at boot, and on some machines direct writes from 2 MiB pages
are faster: the threads of :class:`Threads` use memory that the kernel was advised to back with them.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from figures import median
from ranks import MIB, Cost, Costs, Settings, drop_page_cache, of_all, on_rank_0, settle, timed

SWEEP_BYTES = 512 * MIB
ALIGNMENT = 8 * MIB  # the largest block
FINALISTS = 3

Measurement = Callable[["Method", int], float]

FIO_MISSING = (
    "fio is missing; the ceiling is measured with it: apt install fio (Debian, Ubuntu), dnf install fio (Fedora)"
)


class Method(Protocol):
    """One way to write or read ``total`` bytes in the folder; every rank calls it.

    A write creates the files and makes them durable. What a read reads are the files that :func:`lay_out` made.
    """

    @property
    def name(self) -> str: ...
    def seconds(self, folder: Path, total: int) -> float: ...


@dataclass(frozen=True)
class Fio:
    """Written or read by fio: preallocated before its clock runs, the final flush within it."""

    verb: str
    engine: str
    direct: bool
    block_kib: int
    depth: int
    jobs: int

    @property
    def name(self) -> str:
        how = "direct" if self.direct else "buffered"
        return f"fio {self.engine} {how} {self.block_kib} KiB, depth {self.depth}, {self.jobs} job(s)"

    def seconds(self, folder: Path, total: int) -> float:
        seconds = on_rank_0(lambda: self._run(folder, total))
        if isinstance(seconds, str):
            raise RuntimeError(seconds)
        return seconds

    def _run(self, folder: Path, total: int) -> float | str:
        """Seconds, or why fio refused."""
        command = ["fio", "--name=ceiling", "--output-format=json", f"--rw={self.verb}", "--end_fsync=1"]
        command += [f"--ioengine={self.engine}", f"--bs={self.block_kib}k", f"--iodepth={self.depth}"]
        command += [f"--direct={int(self.direct)}", f"--numjobs={self.jobs}", "--fallocate=posix"]
        if self.engine == "io_uring":
            command.append("--registerfiles=1")
            if self.direct:
                command.append("--fixedbufs=1")
        if huge_pages_reserved(self.jobs * self.depth * self.block_kib * 1024):
            command.append("--mem=mmaphuge")
        files = [str(folder / f"ceiling.{rank}") for rank in range(dist.get_world_size())]
        if self.jobs == 1:
            size = len(files) * aligned(total // len(files))
            command += [f"--filename={':'.join(files)}", f"--size={size}", "--file_service_type=sequential"]
        else:
            command += [
                f"--directory={folder}",
                "--filename_format=ceiling.$jobnum",
                f"--size={aligned(total // self.jobs)}",
            ]
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode != 0:
            return f"{' '.join(command)}: {(ended.stderr or ended.stdout).strip()[:300]}"
        jobs = json.loads(ended.stdout[ended.stdout.index("{") :])["jobs"]
        moved = sum(job[self.verb]["io_bytes"] for job in jobs)
        slowest: float = max(job[self.verb]["runtime"] for job in jobs) / 1000
        seconds: float = slowest * total / moved
        return seconds  # sizes are rounded down to whole blocks


@dataclass(frozen=True)
class Threads:
    """Written or read by threads of every rank, directly, from or to memory on 2 MiB pages."""

    verb: str
    block_kib: int
    threads: int

    @property
    def name(self) -> str:
        return f"threads, huge pages, direct {self.block_kib} KiB, {self.threads} in flight a process"

    def seconds(self, folder: Path, total: int) -> float:
        length, block = aligned(total // dist.get_world_size()), self.block_kib * 1024
        flags = os.O_DIRECT | (os.O_WRONLY | os.O_CREAT if self.verb == "write" else os.O_RDONLY)
        descriptor = os.open(folder / f"ceiling.{dist.get_rank()}", flags, 0o644)
        buffers = [huge(block) for _ in range(self.threads)]
        try:
            if self.verb == "write":
                os.posix_fallocate(descriptor, 0, length)

            def lane(index: int) -> None:
                for at in range(index * block, length, self.threads * block):
                    if self.verb == "write":
                        os.pwrite(descriptor, buffers[index], at)
                    else:
                        os.preadv(descriptor, [buffers[index]], at)

            def all_lanes() -> None:
                with ThreadPoolExecutor(self.threads) as pool:
                    list(pool.map(lane, range(self.threads)))
                if self.verb == "write":
                    os.fsync(descriptor)

            return timed(all_lanes).seconds * total / (length * dist.get_world_size())
        finally:
            os.close(descriptor)


def aligned(length: int) -> int:
    return max(ALIGNMENT, length // ALIGNMENT * ALIGNMENT)


def huge(length: int) -> mmap.mmap:
    """Memory on 2 MiB pages where the kernel gives them, filled with noise: no device can take a short cut."""
    memory = mmap.mmap(-1, max(length, 2 * MIB), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    noise = os.urandom(MIB)
    for at in range(0, len(memory), MIB):
        memory[at : at + MIB] = noise[: len(memory) - at]
    return memory


def huge_pages_reserved(length: int) -> bool:
    """Whether the machine has reserved huge pages left for ``length`` bytes."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields.get("HugePages_Free", "0")) * int(fields.get("Hugepagesize", "0 kB").split()[0]) * 1024
    return free >= 2 * length


def expect_fio() -> None:
    if shutil.which("fio") is None:
        raise SystemExit(FIO_MISSING)


def write_methods(settings: Settings) -> list[Method]:
    """The sweep for writes."""
    processes = settings.processes
    if settings.quick:
        return [
            Fio("write", "io_uring", True, 1024, 4, processes),
            Fio("write", "psync", False, 1024, 1, processes),
            Threads("write", 1024, 4),
        ]
    methods: list[Method] = []
    for jobs in dict.fromkeys((1, processes)):
        for block, depth in ((256, 8), (1024, 2), (1024, 4), (1024, 8), (4096, 4), (8192, 2)):
            methods.append(Fio("write", "io_uring", True, block, depth, jobs))
        methods += [Fio("write", "psync", True, block, 1, jobs) for block in (1024, 4096)]
        methods += [Fio("write", "psync", False, block, 1, jobs) for block in (256, 1024, 8192)]
    methods += [Fio("write", "io_uring", False, 1024, 4, processes), Fio("write", "mmap", False, 1024, 1, processes)]
    methods += [Threads("write", 1024, threads) for threads in (2, 4, 8)]
    return methods


def read_methods(settings: Settings) -> list[Method]:
    """The sweep for reads."""
    processes = settings.processes
    if settings.quick:
        return [
            Fio("read", "io_uring", True, 1024, 8, processes),
            Fio("read", "psync", False, 1024, 1, processes),
            Threads("read", 1024, 4),
        ]
    methods: list[Method] = []
    for jobs in dict.fromkeys((1, processes)):
        for block, depth in ((256, 16), (1024, 4), (1024, 8), (1024, 16), (4096, 4), (8192, 4)):
            methods.append(Fio("read", "io_uring", True, block, depth, jobs))
        methods += [Fio("read", "psync", False, block, 1, jobs) for block in (256, 1024, 4096)]
    methods += [Fio("read", "io_uring", False, 1024, 8, processes), Fio("read", "mmap", False, 1024, 1, processes)]
    methods += [Threads("read", 1024, threads) for threads in (4, 8)]
    return methods


@dataclass
class Disk:
    """The disk's own rates in one run: the best methods of a sweep, which are then measured in every round."""

    settings: Settings
    folder: Path
    total: int
    sweep_gb_s: dict[str, dict[str, float]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    write: dict[str, Costs] = field(default_factory=dict)
    read: dict[str, Costs] = field(default_factory=dict)
    _writers: list[Method] = field(default_factory=list)
    _readers: list[Method] = field(default_factory=list)

    def prepare(self) -> None:
        """The sweep; then the files that the rounds read."""
        sweep = min(self.total, SWEEP_BYTES)
        on_rank_0(lambda: self.folder.mkdir(parents=True, exist_ok=True))
        self._writers = self._best("durable write", write_methods(self.settings), sweep, self._written)
        writer = self._writers[0]
        writer.seconds(self.folder, self.total)
        self._readers = self._best("cold read", read_methods(self.settings), sweep, self._read)

    def round(self) -> None:
        """Measures the finalists once; the files to be read stay."""
        for method in self._readers:
            self.read.setdefault(method.name, Costs()).add(Cost(self._read(method, self.total)))
        for method in self._writers:
            self.write.setdefault(method.name, Costs()).add(Cost(self._written(method, self.total)))

    def _best(self, title: str, methods: list[Method], total: int, measure: Measurement) -> list[Method]:
        """The finalists. The better half of a first pass is measured twice: once is chance."""
        rates: dict[str, float] = {}
        left = methods
        while True:
            for method in left:
                try:
                    rate = total / measure(method, total) / 1e9
                except (OSError, RuntimeError) as error:  # an engine that this kernel or this user is refused
                    self.failed[f"{title}, {method.name}"] = str(error)
                    continue
                rates[method.name] = max(rate, rates.get(method.name, 0.0))
            # Ranks may see other times; which methods go on is decided by one.
            rates = on_rank_0(partial(dict, rates))
            ordered = sorted((m for m in methods if m.name in rates), key=lambda method: -rates[method.name])
            if not ordered:
                raise SystemExit(f"{title}: no method works here: {self.failed}")
            if left is not methods or self.settings.quick:
                break
            left = ordered[: 2 * FINALISTS]
        self.sweep_gb_s[title] = {method.name: rates[method.name] for method in ordered}
        return ordered[:FINALISTS]

    def _written(self, method: Method, total: int) -> float:
        """Into files that are not there, after a rest; what was there before stays for the reads."""
        fresh = self.folder / "fresh"
        on_rank_0(lambda: fresh.mkdir(exist_ok=True))
        settle(self.settings)
        try:
            return method.seconds(fresh, total)
        finally:
            on_rank_0(lambda: shutil.rmtree(fresh))

    def _read(self, method: Method, total: int) -> float:
        drop_page_cache(self.folder)
        return method.seconds(self.folder, total)

    def show_sweep(self) -> None:
        """Prints every method that was tried, best first."""
        sweep = min(self.total, SWEEP_BYTES)
        print(f"\nsweep, {sweep / 1e9:.2f} GB each; the best {FINALISTS} are measured in every round:")
        for title, rates in self.sweep_gb_s.items():
            print(f"  {title}")
            for name, rate in rates.items():
                print(f"    {rate:6.2f} GB/s  {name}")
        for name, reason in self.failed.items():
            print(f"    refused      {name}: {reason}")


class Memory:
    """Copies of ``share`` bytes by every process at once, from memory to memory that was touched before.

    A load fills tensors in memory that the framework allocated, so the first two copies are the ceiling of a warm load;
    the third shows what larger pages would give.
    """

    TENSORS = ("memcpy", "torch copy_")
    HUGE = "memcpy, 2 MiB pages"

    def __init__(self, share: int) -> None:
        self._source = torch.empty(share // 4).uniform_()
        self._target = torch.zeros_like(self._source)
        self._huge = [huge(share // 4 * 4) for _ in range(2)]
        self._addresses = [ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in self._huge]
        self._bytes = self._source.numel() * 4
        self.costs: dict[str, Costs] = {}

    def round(self) -> None:
        ways: dict[str, Callable[[], object]] = {
            "memcpy": lambda: ctypes.memmove(self._target.data_ptr(), self._source.data_ptr(), self._bytes),
            "torch copy_": lambda: self._target.copy_(self._source),
            self.HUGE: lambda: ctypes.memmove(self._addresses[1], self._addresses[0], self._bytes),
        }
        for name, copy in ways.items():
            copy()  # the kernel may have taken back pages that were not touched for a while
            self.costs.setdefault(name, Costs()).add(timed(copy))


def best(costs: dict[str, Costs]) -> str:
    """The method with the lowest median."""
    return min(costs, key=lambda name: median(costs[name].seconds()))


def expect_room(folder: Path, needed: int) -> None:
    """Refuses to begin what the disk has no room for."""
    free = shutil.disk_usage(folder).free
    if min(of_all(free)) < needed:
        raise SystemExit(f"{folder}: {needed / 1e9:.1f} GB are needed for a while, {free / 1e9:.1f} GB are free")
