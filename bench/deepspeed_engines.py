"""DeepSpeed's engines with the block in their configuration, beside DeepSpeed's own checkpoints, under ZeRO-1, 2 and 3.

Its ranks run in an environment of their own (`deepspeed_ranks.py`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from asynchronous import show_notes
from environments import measured_by, missing
from figures import OURS, Figures, median, ours_first, ratio, spread, summary, table
from megatron_core import OURS_ASYNC
from ranks import ROUNDS_MAX, Settings

RANKS = Path(__file__).with_name("deepspeed_ranks.py")
PROCESSES, GIGABYTES = 2, 0.5
THEIRS = "DeepSpeed"
STAGES = (1, 2, 3)
WORLDS = {3: ((2, 3), (2, 2), (3, 3)), 1: ((2, 3), (2, 2), (3, 3))}
"""By the processes that resume: the stage that saved on two, and the one that resumes."""

NOT_MEASURED = {
    f"{THEIRS}, fast and decoupled": "on a processor ZeRO-1 refuses to hand over its tensors (`requires_grad`), and "
    "saves under ZeRO-3 are never committed: its rank waits for 300 s",
    f"{THEIRS}, DataStates": "needs CUDA",
}


def of_stage(stage: int) -> str:
    return f"ZeRO-{stage}"


def measure(settings: Settings) -> Figures:
    gigabytes, rounds = min(settings.gigabytes, GIGABYTES), min(settings.rounds, ROUNDS_MAX)
    settings = replace(settings, processes=PROCESSES, gigabytes=gigabytes, rounds=rounds)
    found = measured_by(RANKS, "deepspeed", THEIRS, "frameworks", settings)
    if found is None:
        return {"not measured": missing(THEIRS, "frameworks")}
    failed = found["failed"] | NOT_MEASURED
    figures: dict[str, Any] = {
        "bytes": found["bytes"],
        "failed": failed,
        "saves": show_saves(found["saves"], found["bytes"]),
        "first": _show_first(found["first"]),
        "loads": show_loads(found["loads"], found["bytes"], "into a new engine of the same stage"),
        "resumed": _show_resumed(found["resumed"], found["bytes"]),
        "frozen": _show_frozen(found["frozen"]),
        "memory": _show_memory(found["memory_bytes"], found["budget_bytes"]),
    }
    show_notes(found["notes"], failed)
    return figures


def show_saves(found: dict[str, Any], size: int, *, stall: str = OURS_ASYNC, durable: str = OURS) -> Figures:
    """By stage and system: its stall and its durable save, and how many times ours these take, round by round.

    Args:
        found: What the ranks measured.
        size: Bytes of the state.
        stall: The way of ours whose stalls are compared.
        durable: That whose durable saves are.
    """
    rows: list[list[object]] = []
    figures: dict[str, Any] = {}
    for stage, systems in found.items():
        stalls = {name: [call * 1e3 for call, _, _ in of] for name, of in systems.items()}
        totals = {name: [total for _, _, total in of] for name, of in systems.items()}
        figures[stage] = {}
        for name, of in ours_first(systems):
            times_stall = ratio(stalls[name], stalls[stall])
            times_total = ratio(totals[name], totals[durable])
            waits = [wait * 1e3 for _, wait, _ in of]
            rows.append([
                stage, name, f"{median(stalls[name]):.1f}", spread(stalls[name], 1), f"{median(times_stall):.1f}",
                spread(times_stall, 1), f"{median(waits):.1f}", median(totals[name]), spread(totals[name]),
                median(times_total), spread(times_total),
            ])  # fmt: skip
            figures[stage][name] = {
                "stall_ms": summary(stalls[name]),
                "step_at_once_ms": summary(waits),
                "durable_s": summary(totals[name]),
                "stall_of_ours": summary(times_stall),
                "durable_of_ours": summary(times_total),
            }
    columns = (
        "stall ms", "(min .. max)", f"of {stall}'s", "(min .. max)", "a step at once waits ms", "durable s",
        "(min .. max)", f"of {durable}'s", "(min .. max)",
    )  # fmt: skip
    title = f"saves of {size / 1e9:.2f} GB on {PROCESSES} processes, of the slowest rank"
    table(title, ("", "", *columns), rows)
    return figures


def _show_first(found: dict[str, Any]) -> Figures:
    rows: list[list[object]] = []
    figures: dict[str, Any] = {}
    for stage, of in found.items():
        thousands = of["parameters"] / 1000
        first, next_ones = ([call / thousands for call in of[f"of_{what}_ms"]] for what in ("process", "engine"))
        later = [call / thousands for call in of["later_ms"]]
        rows.append([
            stage, median(first), spread(first), median(next_ones), spread(next_ones), median(later), spread(later),
        ])  # fmt: skip
        figures[stage] = {
            "of_process_ms_per_1000": summary(first),
            "of_engine_ms_per_1000": summary(next_ones),
            "later_ms_per_1000": summary(later),
        }
    columns = (
        "first of a process", "(min .. max)", "first of a further engine", "(min .. max)", "later", "(min .. max)",
    )  # fmt: skip
    count = next(iter(found.values()))["parameters"]
    title = f"the call of a save, {OURS_ASYNC}, ms per 1,000 parameters; engines with {count}, all ranks"
    table(title, ("", *columns), rows)
    return figures


def show_loads(found: dict[str, dict[str, list[float]]], size: int, how: str) -> Figures:
    rows: list[list[object]] = []
    figures: dict[str, Any] = {}
    for stage, systems in found.items():
        figures[stage] = {}
        for name, seconds in ours_first(systems):
            times = ratio(seconds, systems[OURS])
            rows.append([stage, name, median(seconds), spread(seconds), median(times), spread(times)])
            figures[stage][name] = {"seconds": summary(seconds), "of_ours": summary(times)}
    columns = ("s", "(min .. max)", f"of {OURS}'s", "(min .. max)")
    title = f"cold loads of {size / 1e9:.2f} GB {how}, on {PROCESSES} processes"
    table(title, ("", "", *columns), rows)
    return figures


def _show_resumed(found: dict[str, Any], size: int) -> Figures:
    rows: list[list[object]] = []
    figures: dict[str, Any] = {}
    for case, systems in found.items():
        figures[case] = {}
        totals = {
            name: [sum(both) for both in zip(of["converted_s"], of["loaded_s"], strict=True)]
            for name, of in systems.items()
        }
        for name, of in ours_first(systems):
            times, written = ratio(totals[name], totals[OURS]), max(of["written_bytes"])
            rows.append([
                case, name, median(of["converted_s"]), median(of["loaded_s"]), median(totals[name]),
                spread(totals[name]), f"{written / 1e9:.2f}", median(times), spread(times, 1),
            ])  # fmt: skip
            figures[case][name] = {
                "converted_s": summary(of["converted_s"]),
                "loaded_s": summary(of["loaded_s"]),
                "seconds": summary(totals[name]),
                "written_bytes": written,
                "of_ours": summary(times),
            }
    columns = ("converts s", "loads s", "both s", "(min .. max)", "writes GB", f"of {OURS}'s", "(min .. max)")
    title = f"resumed on another world: {size / 1e9:.2f} GB that {PROCESSES} processes saved, cold"
    table(title, ("", "", *columns), rows)
    print(f"  {THEIRS}: ds_to_universal without Python's start, then load_universal, out of the page cache")
    return figures


def _show_frozen(found: dict[str, dict[str, int]]) -> Figures:
    rows: list[list[object]] = []
    figures: dict[str, Any] = {}
    for stage, of in found.items():
        trained = of.pop("trained")
        rows += [[stage, name, f"{size / 1e6:.2f}", f"{size / trained:.3f}"] for name, size in of.items()]
        figures[stage] = {name: {"bytes": size, "of_trained": size / trained} for name, size in of.items()}
    title = "a checkpoint of adapters, exclude_frozen_parameters=True, beside 14 bytes a trained parameter"
    table(title, ("", "", "MB", "of what is trained"), rows)
    return figures


def _show_memory(found: dict[str, dict[str, int]], budget_bytes: int) -> Figures:
    systems = list(dict.fromkeys(name for of in found.values() for name in of))
    rows = [
        [name, *(f"{of[name] / (1 << 20):.0f}" if name in of else "-" for of in found.values())] for name in systems
    ]
    title = f"peak memory of a rank in a save, above what was there before; the budget is {budget_bytes >> 20} MiB"
    table(title, ("", *(f"{stage} MiB" for stage in found)), rows)
    return {"bytes": found, "budget_bytes": budget_bytes}
