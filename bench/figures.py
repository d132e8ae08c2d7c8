"""Figures and how they are shown: medians, their spread, tables, and the machine that they were measured on."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TypeVar

from ranks import machine_cpu_s, may_drop_page_cache, stolen_s

T = TypeVar("T")

OURS = "shardfast"
OURS_ASYNC = f"{OURS}, asynchronous"
DEEPSPEED, ACCELERATE, RAY = "DeepSpeed", "accelerate", "Ray's upload"
FULLY, BY_DP = "fully_reshardable", "dp_reshardable"
"""Megatron-Core's ways to save its distributed optimizer."""

ONE_STREAM = ("hdfs-native, one stream", "Hadoop's FsShell")
"""Clients of HDFS that move a file on one connection."""

FAR, NEAR = "HDFS", "local"
"""Places of the measure of HDFS."""

Figures = dict[str, object]
"""What a measure found, as it goes into the JSON file."""


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else float("nan")


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Lowest and highest value."""
    return f"({min(values):.{digits}f} .. {max(values):.{digits}f})" if values else "-"


def summary(values: Sequence[float]) -> dict[str, object]:
    """Median, extremes and the values themselves."""
    if not values:
        return {}
    return {"median": median(values), "min": min(values), "max": max(values), "values": list(values)}


def ratio(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """Round by round, so that a noisy neighbour hits both."""
    return [value / other for value, other in zip(values, others, strict=True)]


def ours_first(by_system: Mapping[str, T]) -> list[tuple[str, T]]:
    """Rounds begin with another system each: tables do not."""
    return sorted(by_system.items(), key=lambda item: item[0] != OURS)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints a table; numbers with two digits."""
    texts = [[f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(columns), *texts]) for i in range(len(columns))]
    print(f"\n{title}")
    for number, row in enumerate([list(columns), *texts]):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        print("  " + "  ".join(cells).rstrip())
        if number == 0:
            print("  " + "  ".join("-" * width for width in widths))


def timeline(title: str, reports: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Prints when each phase of a save ended, in the median over ``reports``; those medians in milliseconds.

    Phases overlap only in that a later one ends later: a bar covers the time between two ends.
    """
    names = {name for report in reports for name in report}
    ends = {name: median([report[name] for report in reports if name in report]) for name in names}
    ordered = dict(sorted(ends.items(), key=lambda item: item[1]))
    if not ordered:
        return ordered
    print(f"\n{title}")
    last, width, before = max(ordered.values()) or 1.0, 60, 0.0
    for name, end in ordered.items():
        start, stop = round(before / last * width), round(end / last * width)
        print(f"  {name:<12} {before:>9.1f} .. {end:>9.1f} ms  |{' ' * start}{'#' * max(1, stop - start)}")
        before = end
    return ordered


QUIET = 0.05
PACKAGES = [
    "shardfast",
    "torch",
    "torch_checkpointing",
    "torchsnapshot",
    "safetensors",
    "numpy",
    "s3fs",
    "s3torchconnector",
]
PACKAGES += ["multi-storage-client", "obstore"]


def describe_machine(where: Path) -> dict[str, object]:
    """Processor, memory, disk, kernel, versions, and how busy the machine was before the run."""
    cpu = _fields(Path("/proc/cpuinfo").read_text())
    memory = _fields(Path("/proc/meminfo").read_text())
    return {
        "processor": f"{os.cpu_count()} × {cpu.get('model name', platform.machine())}",
        "memory_gb": round(int(memory["MemTotal"].split()[0]) / 1e6, 1),
        "kernel": platform.release(),
        "transparent huge pages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "file system": _file_system(where),
        "before cold loads": "page cache dropped" if may_drop_page_cache() else "files evicted from the page cache",
        "fio": _output("fio", "--version"),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "checkout": _output("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"),
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "busy before the run": _busy(),
    }


def show_machine(machine: dict[str, object]) -> None:
    print("machine")
    for name, value in machine.items():
        print(f"  {name}: {value}")
    if not is_quiet(machine):
        print("  NOT QUIET: others use this machine; the figures tell less than those of a quiet one")


def is_quiet(machine: dict[str, object]) -> bool:
    busy = machine["busy before the run"]
    return isinstance(busy, dict) and all(share < QUIET for share in busy.values())


def _busy() -> dict[str, float]:
    """Shares of all cores' time within two seconds: used by others, stolen by other machines."""
    cores, seconds = os.cpu_count() or 1, 2.0
    used, stolen = machine_cpu_s(), stolen_s()
    time.sleep(seconds)
    return {
        "used": round((machine_cpu_s() - used) / seconds / cores, 3),
        "stolen": round((stolen_s() - stolen) / seconds / cores, 3),
    }


def _file_system(where: Path) -> str:
    """Of the nearest folder that is there."""
    while not where.exists():
        where = where.parent
    return _output("findmnt", "--noheadings", "--output", "FSTYPE,SOURCE,OPTIONS", "--target", str(where))


def _fields(text: str) -> dict[str, str]:
    pairs = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, value in pairs}


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return "unknown"


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:
        return "unknown"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
