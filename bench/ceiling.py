"""What the machine itself can do: the disk's best durable write and cold read rate, the memory's copy rate.

The ceiling of a run is the best rate that any method here reaches in that run: which one is best differs by machine.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CHUNK = 4 << 20


def _buffer(length: int) -> mmap.mmap:
    """Page-aligned memory that is not zero, so that no file system or device can take a short cut."""
    buffer = mmap.mmap(-1, length)
    pattern = os.urandom(1 << 20)
    for offset in range(0, length, len(pattern)):
        buffer[offset : offset + len(pattern)] = pattern[: length - offset]
    return buffer


def write(path: Path, length: int, *, direct: bool, threads: int) -> None:
    """Writes a file and makes it and its name durable."""
    buffer = _WRITE_BUFFER
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct else 0)
    fd = os.open(path, flags)
    try:
        os.posix_fallocate(fd, 0, length)
        with ThreadPoolExecutor(threads) as pool:
            list(
                pool.map(
                    lambda at: os.pwrite(fd, memoryview(buffer)[: min(CHUNK, length - at)], at), range(0, length, CHUNK)
                )
            )
        os.fsync(fd)
    finally:
        os.close(fd)
    directory = os.open(path.parent, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)


def read(path: Path, *, direct: bool, threads: int) -> None:
    """Reads a file once into memory."""
    length = path.stat().st_size
    fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    buffers = [mmap.mmap(-1, CHUNK) for _ in range(threads)]

    def lane(index: int) -> None:
        for at in range(index * CHUNK, length, threads * CHUNK):
            os.preadv(fd, [buffers[index]], at)

    try:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lane, range(threads)))
    finally:
        os.close(fd)


WRITES: dict[str, Callable[[Path, int], None]] = {
    f"{'direct' if direct else 'buffered'} write, {threads} in flight": (
        lambda path, length, direct=direct, threads=threads: write(path, length, direct=direct, threads=threads)
    )
    for direct in (True, False)
    for threads in (1, 4)
}
READS: dict[str, Callable[[Path], None]] = {
    f"{'direct' if direct else 'buffered'} read, {threads} in flight": (
        lambda path, direct=direct, threads=threads: read(path, direct=direct, threads=threads)
    )
    for direct in (True, False)
    for threads in (1, 4, 8)
}
_WRITE_BUFFER = _buffer(CHUNK)


def drop_page_cache(paths: list[Path]) -> str:
    """Makes the next read of these files a cold one; says how."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
        return "page cache dropped"
    except OSError:
        for path in paths:
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
        return "files evicted from the page cache"
