"""How far a save or load is, as numbers, in words, and as a line on a terminal."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

DRAW_S = 0.2
"""How often the line is drawn."""


class Progress(NamedTuple):
    """The bytes of one rank's part of a save so far."""

    bytes: int
    """All that this rank moves, with the headers of files, as far as it knows: values follow when tensors are written.
    """
    staged: int
    """Those that are copied."""
    written: int
    """Those that the storage has taken, not yet durable."""


def size(number: float) -> str:
    """The number of bytes in the unit that fits it."""
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    power = 0
    while number >= 1024 and power < len(units) - 1:
        number, power = number / 1024, power + 1
    return f"{number:.{0 if power == 0 or number >= 100 else 1}f} {units[power]}"


def line(what: str, done: int, total: int, seconds: float, columns: int) -> str:
    """One line of at most that many columns: what is done, a bar, the share, the bytes, and their rate."""
    share = done / total if total else 0.0
    rate = f"  {size(done / seconds)}/s" if seconds > 0 else ""
    figures = f" {share:4.0%}  {size(done)} of {size(total)}{rate}"
    room = columns - 1 - len(figures)
    name = what if len(what) <= max(room - 14, 8) else "…" + what[-max(room - 15, 7) :]
    cells = min(room - len(name) - 3, 40)
    bar = f" [{'#' * round(share * cells)}{'.' * (cells - round(share * cells))}]" if cells >= 4 else ""
    return f"{name}{bar}{figures}"[: max(columns - 1, 1)]


@contextlib.contextmanager
def shown(what: str, moved: Callable[[], tuple[int, int]], wanted: bool) -> Iterator[None]:
    """Draws a line on standard error, if that is a terminal and the line ``wanted``, while the block runs.

    ``moved`` returns the bytes in all, and those that are done.
    """
    if not wanted or not _is_terminal():
        yield
        return
    began, over = time.monotonic(), threading.Event()

    def draw() -> None:
        while not over.wait(DRAW_S):
            _write(what, moved, began)

    thread = threading.Thread(target=draw, name="shardfast-progress", daemon=True)
    thread.start()
    try:
        yield
        over.set()
        thread.join()
        _write(what, moved, began)
    finally:
        over.set()
        thread.join()
        with contextlib.suppress(Exception):
            print(file=sys.stderr)


def _is_terminal() -> bool:
    with contextlib.suppress(Exception):  # of what the program has put in its place
        return sys.stderr is not None and sys.stderr.isatty()
    return False


def _write(what: str, moved: Callable[[], tuple[int, int]], began: float) -> None:
    total, done = moved()
    columns = shutil.get_terminal_size().columns
    text = line(what, done, total, time.monotonic() - began, columns)
    with contextlib.suppress(Exception):  # a terminal that is gone, or what the program has put in its place
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
