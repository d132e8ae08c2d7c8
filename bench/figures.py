"""Medians, their spread, and tables of them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")

OURS = "shardfast"
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
