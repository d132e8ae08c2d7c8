"""What was measured on: so that a figure can be read, and a noisy run be told from a quiet one."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib import metadata
from pathlib import Path

from ranks import machine_cpu_s, may_drop_page_cache, stolen_s

QUIET = 0.05
PACKAGES = (
    "shardfast",
    "torch",
    "torch_checkpointing",
    "torchsnapshot",
    "safetensors",
    "numpy",
    "s3fs",
    "s3torchconnector",
    "multi-storage-client",
    "obstore",
)


def describe(where: Path) -> dict[str, object]:
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


def show(machine: dict[str, object]) -> None:
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
