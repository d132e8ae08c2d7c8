"""Megatron-Core with its distributed optimizer, beside Megatron's own checkpoints: stall, durable save, load, memory.

Its ranks run in an environment of their own (`megatron_jobs.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from asynchronous import show_notes
from environments import measured_by, missing
from figures import OURS, Figures, median, ours_first, ratio, spread, summary, table
from ranks import ROUNDS_MAX, Settings

JOBS = Path(__file__).with_name("megatron_jobs.py")
PROCESSES, GIGABYTES = 4, 0.5
OURS_ASYNC = f"{OURS}, asynchronous"
FULLY, BY_DP = "fully_reshardable", "dp_reshardable"


def measure(settings: Settings) -> Figures:
    gigabytes, rounds = min(settings.gigabytes, GIGABYTES), min(settings.rounds, ROUNDS_MAX)
    settings = replace(settings, processes=PROCESSES, gigabytes=gigabytes, rounds=rounds)
    found = measured_by(JOBS, "megatron", "Megatron-Core", "megatron", settings)
    if found is None:
        return {"not measured": missing("Megatron-Core", "megatron")}
    figures: dict[str, Any] = {
        "bytes": found["bytes"],
        "failed": found["failed"],
        "saves": {layout: _show_saves(layout, of, found["bytes"]) for layout, of in found["saves"].items()},
        "loads": _show_loads(found["loads"], found["bytes"]),
        "descriptions": _show_descriptions(found),
        "memory": _show_memory(found["memory_bytes"], found["budget_bytes"]),
    }
    show_notes(found["notes"], found["failed"])
    return figures


def _show_saves(layout: str, found: dict[str, Any], size: int) -> Figures:
    """By system: its stall and its durable save, and how many times ours these take, round by round."""
    stalls = {name: [call * 1e3 for call, _, _ in of["later"]] for name, of in found.items()}
    totals = {name: [total for _, _, total in of["later"]] for name, of in found.items()}
    rows: list[list[object]] = []
    figures: dict[str, Any] = {}
    for name, of in ours_first(found):
        times_stall = ratio(stalls[name], stalls[OURS_ASYNC])
        times_total = ratio(totals[name], totals[OURS])
        first = median([call * 1e3 for call, _, _ in of["first"]])
        waits = [wait * 1e3 for _, wait, _ in of["later"]]
        rows.append([
            name, f"{first:.1f}", f"{median(stalls[name]):.1f}", spread(stalls[name], 1), median(times_stall),
            spread(times_stall, 1), f"{median(waits):.1f}", median(totals[name]), spread(totals[name]),
            median(times_total), spread(times_total),
        ])  # fmt: skip
        figures[name] = {
            "first_ms": first,
            "stall_ms": summary(stalls[name]),
            "step_at_once_ms": summary(waits),
            "durable_s": summary(totals[name]),
            "stall_of_ours": summary(times_stall),
            "durable_of_ours": summary(times_total),
        }
    columns = (
        "first stall ms", "stall ms", "(min .. max)", f"of {OURS_ASYNC}'s", "(min .. max)", "a step at once waits ms",
        "durable s", "(min .. max)", f"of {OURS}'s", "(min .. max)",
    )  # fmt: skip
    title = f"saves of {size / 1e9:.2f} GB as {layout} on {PROCESSES} processes, of the slowest rank"
    table(title, ("", *columns), rows)
    return figures


def _show_loads(found: dict[str, dict[str, list[float]]], size: int) -> Figures:
    rows: list[list[object]] = []
    figures: dict[str, Any] = {}
    for name, seconds in ours_first(found):
        same, resharded = seconds["same"], seconds["resharded"]
        of_same = ratio(same, resharded) if resharded else []
        of_ours = ratio(resharded, found[OURS]["resharded"]) if resharded else []
        rows.append([
            name, median(same), spread(same), median(resharded), spread(resharded), median(of_same), spread(of_same),
            median(of_ours), spread(of_ours),
        ])  # fmt: skip
        pairs = {"same_s": same, "resharded_s": resharded, "resharded_of_same": of_same, "resharded_of_ours": of_ours}
        figures[name] = {what: summary(values) for what, values in pairs.items()}
    columns = (
        "same layout s", "(min .. max)", "resharded s", "(min .. max)", "its rate of the same's", "(min .. max)",
        f"of {OURS}'s", "(min .. max)",
    )  # fmt: skip
    title = f"cold loads of {size / 1e9:.2f} GB that TP2 x PP2 saved, into the same and into DP4"
    table(title, ("", *columns), rows)
    return figures


def _show_descriptions(found: dict[str, Any]) -> Figures:
    ranks, calls = found["described"], found["calls_ms"]
    first = [ms / (of["parameters"] / 1000) for of in ranks for ms in of["first_ms"]]
    again = [ms * 1e3 / of["regions"] for of in ranks for ms in of["again_ms"]]
    of_fsdp2 = median(calls["Megatron"]["later"]) / median(calls["FSDP2"]["later"])
    blocks = [_blocks(calls[name]["later"], len(calls[name]["first"])) for name in ("Megatron", "FSDP2")]
    ratios = ratio(*blocks)
    rows: list[list[object]] = [
        ["first description, ms per 1,000 parameters", f"{median(first):.1f}", spread(first, 1)],
        ["later descriptions, us a region", median(again), spread(again)],
    ]
    for name, of in calls.items():
        for which, values in of.items():
            rows.append([f"call of {which} saves, {name}, ms", median(values), spread(values)])
    rows.append(["call of later saves, of FSDP2's", of_fsdp2, spread(ratios)])
    one = ranks[0]
    title = f"a rank with {one['parameters']} parameters, {one['tensors']} tensors, {one['regions']} regions"
    table(title, ("", "median", "(min .. max)"), rows)
    return {
        "first_ms_per_1000": summary(first),
        "later_us_a_region": summary(again),
        "calls_ms": {name: {which: summary(of) for which, of in both.items()} for name, both in calls.items()},
        "later_of_fsdp2": summary(ratios) | {"median": of_fsdp2},
    }


def _blocks(values: Sequence[float], count: int) -> list[float]:
    """The median of each of ``count`` equal stretches: a rank's block of saves."""
    size = len(values) // count
    return [median(values[at * size : (at + 1) * size]) for at in range(count)]


def _show_memory(found: dict[str, dict[str, int]], budget_bytes: int) -> Figures:
    systems = list(dict.fromkeys(name for of in found.values() for name in of))
    rows = [
        [name, *(f"{of[name] / (1 << 20):.0f}" if name in of else "-" for of in found.values())] for name in systems
    ]
    title = f"peak memory of a rank in a save, above what was there before; the budget is {budget_bytes >> 20} MiB"
    table(title, ("", *(f"{layout} MiB" for layout in found)), rows)
    return {"bytes": found, "budget_bytes": budget_bytes}
