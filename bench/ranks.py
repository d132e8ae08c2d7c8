"""The processes of one measurement: started together, timed together, their processor time and memory counted.

A measure of another library runs as a script in an environment of its own (`elsewhere`, `asked`, `answer`).
"""

from __future__ import annotations

import datetime
import functools
import gc
import importlib.util
import json
import multiprocessing
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
S = TypeVar("S", bound="Named")

HANG = datetime.timedelta(minutes=5)
"""A rank that waits longer for another one fails; the run says so and ends."""

ROUNDS_MAX = 3
"""Of the measures whose differences are large; only the rates beside the ceiling need more."""

MIB = 1 << 20
CONSTANT_BYTES = 64 * MIB
"""Memory of ours beyond the staging budget that the goals allow."""

BUDGET_BYTES = 16 * MIB
"""The staging budget where memory is measured."""

ROOT = Path(__file__).parents[1]
ANSWER = "answer"
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Settings:
    """What all measures of a run share."""

    gigabytes: float
    processes: int
    rounds: int
    where: Path
    quick: bool

    @property
    def settle_s(self) -> float:
        """Seconds of rest before a measured save: a disk is busy for a while with what was deleted before."""
        return 0.3 if self.quick else 1.0

    @property
    def warm_ups(self) -> int:
        """Rounds that are not measured, before those that are."""
        return 0 if self.quick else 1

    @property
    def total_bytes(self) -> int:
        return int(self.gigabytes * 1e9)


@dataclass(frozen=True)
class Cost:
    """One measured action of all ranks.

    Attributes:
        seconds: From the moment that all ranks were ready until the last one was done.
        cpu_s: User and system time of all ranks and their descendants.
        machine_cpu_s: The same of the whole machine: also what the kernel wrote back on nobody's account, and what
            any neighbour did.
    """

    seconds: float
    cpu_s: float = 0.0
    machine_cpu_s: float = 0.0


@dataclass
class Costs:
    """The costs of one thing over the rounds."""

    all: list[Cost] = field(default_factory=list)

    def add(self, cost: Cost) -> None:
        self.all.append(cost)

    def seconds(self) -> list[float]:
        return [cost.seconds for cost in self.all]


def run(
    worker: Callable[..., Any], settings: Settings, *arguments: Any, environment: dict[str, str] | None = None
) -> Any:
    """Runs ``worker(settings, *arguments)`` on all ranks; what rank 0 returned.

    Raises:
        RuntimeError: If a rank failed, with what all of them wrote to stderr.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        ranks = [
            context.Process(target=_main, args=(rank, worker, settings, arguments, port, scratch, environment or {}))
            for rank in range(settings.processes)
        ]
        for rank in ranks:
            rank.start()
        try:
            _join(ranks)
        except RuntimeError as error:
            errors = "\n".join(f"{log.name}:\n{log.read_text()[-4000:]}" for log in sorted(scratch.glob("rank*")))
            raise RuntimeError(f"{error}\n{errors}") from None
        finally:
            for rank in ranks:
                rank.terminate()
        return pickle.loads((scratch / ANSWER).read_bytes())


def _join(ranks: list[Any]) -> None:
    """Waits for all; when one fails, ends the others, which would wait for it."""
    while any(rank.is_alive() for rank in ranks):
        failed = [rank for rank in ranks if rank.exitcode not in (None, 0)]
        for rank in ranks if failed else ():
            rank.terminate()
        time.sleep(0.05)
    codes = [rank.exitcode for rank in ranks]
    if any(codes):
        raise RuntimeError(f"a rank failed: exit codes {codes}")


def _main(
    rank: int,
    worker: Callable[..., Any],
    settings: Settings,
    arguments: tuple[Any, ...],
    port: int,
    scratch: Path,
    environment: dict[str, str],
) -> None:
    # Rivals and their daemons are talkative; what they say is shown when a rank fails.
    with (scratch / f"rank{rank}").open("w") as log:
        os.dup2(log.fileno(), sys.stderr.fileno())
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(settings.processes), "LOCAL_WORLD_SIZE": str(settings.processes)} | environment
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // settings.processes))
    dist.init_process_group("gloo", timeout=HANG)
    on_rank_0(lambda: settings.where.mkdir(parents=True, exist_ok=True))
    result = worker(settings, *arguments)
    if rank == 0:
        (scratch / ANSWER).write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
    # Rivals leave threads and daemons that an orderly exit would wait for.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def timed(action: Callable[[], object]) -> Cost:
    """Runs ``action`` on all ranks at once."""
    dist.barrier()
    machine, cpu, began = machine_cpu_s(), tree_cpu_s(), time.perf_counter()
    action()
    dist.barrier()
    seconds = time.perf_counter() - began
    own = torch.tensor([tree_cpu_s() - cpu], dtype=torch.float64)
    machine = machine_cpu_s() - machine
    dist.all_reduce(own)
    return Cost(seconds, float(own[0]), machine)


def on_rank_0(action: Callable[[], T]) -> T:
    """Runs ``action`` on rank 0 only; what it returned, on every rank."""
    result: list[Any] = [action() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(result)
    value: T = result[0]
    return value


def of_all(value: T) -> list[T]:
    """Every rank's value, on every rank."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


class Named(Protocol):
    """A system that takes part in a measure."""

    @property
    def name(self) -> str: ...


def attempt(action: Callable[..., object], *arguments: Any) -> str | None:
    """Runs ``action(*arguments)`` on all ranks; why it failed, told by the first rank where it did, to every rank."""
    reason = None
    try:
        action(*arguments)
    except BaseException as error:  # DCP's CheckpointException is no Exception
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        reason = f"{type(error).__name__}: {error}".replace("\n", " ")[:200]
    return next((reason for reason in of_all(reason) if reason), None)


def made(makers: dict[str, Callable[[], S]]) -> tuple[list[S], dict[str, str]]:
    """The systems that can be made on every rank; the others with the reason."""
    systems: list[S] = []
    missing: dict[str, str] = {}
    for name, maker in makers.items():
        own: list[S] = []
        reason = attempt(lambda own=own, maker=maker: own.append(maker()))
        if reason is None:
            systems += own
        else:
            missing[name] = reason
    return systems, missing


def turned(order: list[T], number: int) -> list[T]:
    """The systems in the order of this round: another one begins each time."""
    start = number % len(order)
    return order[start:] + order[:start]


def in_turn(
    order: list[S],
    failed: dict[str, str],
    settings: Settings,
    one: Callable[[S, Path, bool], object],
    *,
    rounds: int,
    before_round: Callable[[], object] = lambda: None,
) -> None:
    """Runs ``one(system, path, is_measured)`` for every system in every round; the path is removed then.

    A system that fails, on whatever rank, goes from ``order`` into ``failed`` with the reason.
    """
    for number in range(settings.warm_ups + rounds):
        is_measured = number >= settings.warm_ups
        if is_measured:
            before_round()
        for system in turned(order, number):
            path = settings.where / f"{system.name.replace(' ', '-').replace(',', '')}-{number}"
            reason = attempt(one, system, path, is_measured)
            remove(path)
            if reason is not None:
                failed[system.name] = reason
                order.remove(system)


def settle(settings: Settings) -> None:
    """Lets the disk come to rest before a measured save, for every system alike."""

    def rest() -> None:
        os.sync()
        time.sleep(settings.settle_s)

    on_rank_0(rest)


def may_drop_page_cache() -> bool:
    """Whether this user may drop the page cache of the machine."""
    return os.access(DROP_CACHES, os.W_OK)


def drop_page_cache(*folders: Path) -> None:
    """Makes the next read of the files in ``folders`` a cold one: drops the page cache, or these files from it."""

    def drop() -> None:
        os.sync()
        if may_drop_page_cache():
            DROP_CACHES.write_text("3\n")
            return
        for path in (path for folder in folders for path in folder.rglob("*") if path.is_file()):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    on_rank_0(drop)


def fill_page_cache(folder: Path) -> None:
    """Reads all files in ``folder`` into the page cache anew: a cold load may have gone past it, or have left it in
    pages that take longer to map, and all that is measured shall find the same."""
    drop_page_cache(folder)

    def read() -> None:
        for path in (path for path in folder.rglob("*") if path.is_file()):
            with path.open("rb", buffering=0) as file:
                while file.read(8 << 20):
                    pass

    on_rank_0(read)


def remove(path: Path) -> None:
    """Deletes a checkpoint."""
    on_rank_0(lambda: shutil.rmtree(path, ignore_errors=True))


def tree_cpu_s() -> float:
    """User and system seconds of this process and its descendants, those that ended and were waited for included."""
    ticks: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                stat = Path(entry.path, "stat").read_text()
            except OSError:
                continue  # it has just ended
            fields = stat[stat.rindex(")") + 2 :].split()
            ticks[int(entry.name)] = sum(int(value) for value in fields[11:15])
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    total, left = 0, [os.getpid()]
    while left:
        process = left.pop()
        total += ticks.get(process, 0)
        left += children.get(process, [])
    return total / TICKS_PER_SECOND


def machine_cpu_s() -> float:
    """Busy seconds of all cores since the machine started; time stolen by other machines is not in it."""
    user, nice, system, _idle, _iowait, irq, softirq = map(int, _cpu_line()[:7])
    return (user + nice + system + irq + softirq) / TICKS_PER_SECOND


def stolen_s() -> float:
    """Seconds that the hypervisor gave to other machines."""
    return int(_cpu_line()[7]) / TICKS_PER_SECOND


def _cpu_line() -> list[str]:
    with open("/proc/stat") as file:
        return file.readline().split()[1:]


def extra_memory(action: Callable[[], object]) -> int:
    """Bytes of resident memory at the peak of ``action`` above those before it."""
    gc.collect()
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5\n")  # the high-water mark starts anew
    action()
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def read_from_disk() -> int:
    """Bytes that this process had storage read, past the page cache or into it."""
    counters = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in counters if line.startswith("read_bytes")).split()[1])


def elsewhere(script: str, package: str, environment: str) -> Callable[[Settings], dict[str, Any]]:
    """A measure by a script beside this file, run by a Python that has ``package``.

    That is this one, or the one that ``scripts/ENVIRONMENT.sh`` installs in ``target/ENVIRONMENT``.
    """
    return functools.partial(_run_elsewhere, script, package, environment)


def _run_elsewhere(script: str, package: str, environment: str, settings: Settings) -> dict[str, Any]:
    is_here = importlib.util.find_spec(package) is not None
    python = Path(sys.executable) if is_here else ROOT / "target" / environment / "bin" / "python"
    if not python.exists():
        reason = f"{package} is not here: scripts/{environment}.sh installs it into target/{environment}"
        print(f"  not measured: {reason}")
        return {"not measured": reason}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / ANSWER
        told = json.dumps(vars(settings) | {"where": str(settings.where)})
        subprocess.run([python, Path(__file__).with_name(script), told, file], check=True)
        found: dict[str, Any] = json.loads(file.read_text())
    return found


def asked(*, gigabytes: float, processes: int) -> Settings:
    """The settings that such a script was started with: at most so many bytes and ``ROUNDS_MAX`` rounds."""
    told = json.loads(sys.argv[1])
    settings = Settings(**told | {"where": Path(told["where"])})
    least, rounds = min(settings.gigabytes, gigabytes), min(settings.rounds, ROUNDS_MAX)
    return replace(settings, gigabytes=least, rounds=rounds, processes=processes)


def answer(found: dict[str, Any]) -> None:
    """Writes down the figures of such a script."""
    Path(sys.argv[2]).write_text(json.dumps(found))
