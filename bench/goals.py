"""The goals, each beside what this run found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from figures import ACCELERATE, BY_DP, DEEPSPEED, FAR, FULLY, NEAR, ONE_STREAM, OURS, OURS_ASYNC, RAY, median, table
from ranks import CONSTANT_BYTES

Row = tuple[str, str, str, bool]
"""Measure, goal, what was found, whether the goal is reached."""


def show(results: dict[str, Any]) -> None:
    """Prints the goals of the measures that were run."""
    readers: dict[str, Callable[[dict[str, Any]], list[Row]]] = {
        "stall": _stall,
        "megatron": _megatron,
        "deepspeed": _deepspeed,
        "trainers": _trainers,
        "loaders": _loaders,
        "ray": _ray,
        "training": _training,
        "transfer": _transfer,
        "resharding": _resharding,
        "stores": _stores,
        "hdfs": _hdfs,
        "tiers": _tiers,
        "planning": _planning,
        "telemetry": _telemetry,
        "stops": _stops,
    }
    rows = [row for name, read in readers.items() if name in results for row in read(results[name])]
    table("goals", ("", "goal", "found", ""), [[*row[:3], "reached" if row[3] else "MISSED"] for row in rows])
    if not results["quiet"]:
        print("  the machine was not quiet: measure again before any of this is believed")


def _stall(found: dict[str, Any]) -> list[Row]:
    rows: list[Row] = []
    for name, systems in found["stall_ms"].items():
        if int(name.split()[0]) <= 1000 and systems.get(OURS):
            calls = systems[OURS]
            reached = calls["median"] <= 1 and calls["max"] <= 5
            text = f"{calls['median']:.2f} ms, worst {calls['max']:.2f} ms of {len(calls['values'])}"
            rows.append((f"stall, {name}", "median 1 ms, worst 5 ms", text, reached))
    for name, systems in found["first_ms"].items():
        if systems.get(OURS):
            first = systems[OURS]["median"]
            rows.append((f"stall of the first save, {name}", "10 ms", f"{first:.1f} ms", first <= 10))
    return rows


def _telemetry(found: dict[str, Any]) -> list[Row]:
    rows: list[Row] = []
    for part in ("durable save", "cold load", "processor time"):
        rate = found["ratios"][part]["median"]
        rows.append((f"{part}, with all sinks", "0.99 of without", f"{rate:.3f}", rate >= 0.99))
    for part in ("call", "step at once"):
        off, on = (found["found"][mode][part]["median"] for mode in ("without", "with all sinks"))
        rows.append((f"{part}, with all sinks", "10 us longer", f"{1e3 * (on - off):.1f} us", on - off <= 0.01))
    for name, goal, value in found["scale"]:
        if goal is not None:
            rows.append((name, f"{goal:g}", f"{value:.2f}", value <= goal))
    return rows


def _stops(found: dict[str, Any]) -> list[Row]:
    step, beyond, restart = (found[name]["median"] for name in ("longer", "beyond_ms", "restart_ms"))
    return [
        ("step with on_signal", "1.002 of without", f"{step:.5f}", step <= 1.002),
        ("stop beyond step and save", "50 ms", f"{beyond:.1f} ms", beyond <= 50),
        ("restore and first step, of nothing", "300 ms", f"{restart:.0f} ms", restart <= 300),
    ]


def _megatron(found: dict[str, Any]) -> list[Row]:
    if "not measured" in found:
        return []
    rows: list[Row] = []
    for layout, systems in found["saves"].items():
        for kind, stall_goal, durable_goal in ((FULLY, 20, 2), (BY_DP, 5, 1)):
            rivals = [of for name, of in systems.items() if name.startswith(kind)]
            if not rivals:
                continue
            stall = min(of["stall_of_ours"]["median"] for of in rivals)
            durable = min(of["durable_of_ours"]["median"] for of in rivals)
            title = f"{layout} beside {kind}"
            rows.append((f"stall, {title}", f"{stall_goal} × shorter", f"{stall:.1f} ×", stall >= stall_goal))
            goal = f"{durable_goal} × faster"
            rows.append((f"durable save, {title}", goal, f"{durable:.2f} ×", durable >= durable_goal))
    own = found["loads"][OURS]["resharded_of_same"]["median"]
    rows.append(("resharded load, Megatron", "0.9 of the same layout's", f"{own:.2f}", own >= 0.9))
    times = [of["resharded_of_ours"] for name, of in found["loads"].items() if name.startswith(FULLY)]
    if times:
        fastest = min(of["median"] for of in times)
        rows.append((f"resharded load beside {FULLY}", "2 × faster", f"{fastest:.2f} ×", fastest >= 2))
    most = max(of[OURS] for of in found["memory"]["bytes"].values()) - found["memory"]["budget_bytes"]
    text = "within" if most <= CONSTANT_BYTES else "beyond"
    return [*rows, ("memory, Megatron", "budget + 64 MiB", text, most <= CONSTANT_BYTES)]


def _deepspeed(found: dict[str, Any]) -> list[Row]:
    if "not measured" in found:
        return []
    rows: list[Row] = []
    for stage, systems in found["saves"].items():
        rivals = [of for name, of in systems.items() if not name.startswith(OURS)]
        if rivals:
            stall = min(of["stall_of_ours"]["median"] for of in rivals)
            durable = min(of["durable_of_ours"]["median"] for of in rivals)
            rows.append((f"stall, {stage}", "50 × shorter", f"{stall:.1f} ×", stall >= 50))
            rows.append((f"durable save, {stage}", "2 × faster", f"{durable:.2f} ×", durable >= 2))
    for stage, systems in found["loads"].items():
        if DEEPSPEED in systems:
            times = systems[DEEPSPEED]["of_ours"]["median"]
            rows.append((f"load into the same, {stage}", "2 × faster", f"{times:.2f} ×", times >= 2))
    for case, systems in found["resumed"].items():
        written = systems[OURS]["written_bytes"]
        if DEEPSPEED not in systems:
            rows.append((f"resumed, {case}", "nothing written", f"{written} bytes; {DEEPSPEED} fails", written == 0))
            continue
        times = systems[DEEPSPEED]["of_ours"]["median"]
        text = f"{times:.1f} ×, {written} bytes"
        rows.append((f"resumed, {case}", "5 × faster, nothing written", text, times >= 5 and written == 0))
    memory = found["memory"]
    for stage, of in memory["bytes"].items():
        beyond = (of[OURS_ASYNC] - memory["budget_bytes"]) >> 20
        is_within = of[OURS_ASYNC] - memory["budget_bytes"] <= CONSTANT_BYTES
        rows.append((f"memory, {stage}", "budget + 64 MiB", f"budget + {beyond} MiB", is_within))
    return rows


def _trainers(found: dict[str, Any]) -> list[Row]:
    if "not measured" in found:
        return []
    rows: list[Row] = []
    goals = (
        ("saves", "stall_of_ours", "stall", 20, "shorter"),
        ("saves", "durable_of_ours", "durable save", 1.5, "faster"),
        ("loads", "of_ours", "load", 1.5, "faster"),
    )
    for part, figure, what, goal, better in goals:
        for title, systems in found[part].items():
            rivals = [of[figure]["median"] for name, of in systems.items() if name != OURS]
            if rivals:
                times = min(rivals)
                rows.append((f"{what}, {title}", f"{goal} × {better}", f"{times:.2f} ×", times >= goal))
    return rows


def _loaders(found: dict[str, Any]) -> list[Row]:
    if "not measured" in found:
        return []
    beyond = found["saves"]["beyond_ms"]["median"]
    rows: list[Row] = [
        ("stall, a loader whose state takes 1 s", "1 ms more than without", f"{beyond:.2f} ms", beyond <= 1)
    ]
    for kind, systems in found["resumed"].items():
        times, old = systems[ACCELERATE]["of_ours"]["median"], systems[OURS]["old"]
        text = f"{times:.1f} ×, {old} samples"
        rows.append((f"resumed epoch, {kind}", "50 × faster, no old sample read", text, times >= 50 and old == 0))
    return rows


def _ray(found: dict[str, Any]) -> list[Row]:
    if "not measured" in found:
        return []
    call, times = found[OURS]["call_ms"], found[RAY]["call_of_ours"]["median"]
    text = f"{call['median']:.1f} ms, worst {call['max']:.1f} ms"
    return [
        ("a report to Ray, durable checkpoint", "20 ms", text, call["median"] <= 20),
        ("a report to Ray, durable checkpoint", f"20 × faster than {RAY}", f"{times:.0f} ×", times >= 20),
    ]


def _training(found: dict[str, Any]) -> list[Row]:
    ours = found["times"].get(OURS)
    if not ours:
        return []
    rivals = {name: times for name, times in found["times"].items() if name != OURS}
    wait = ours["wait_ms"]
    rows: list[Row] = [("wait before the step", "1 ms", f"{wait['median']:.2f} ms", wait["median"] <= 1)]
    for what, unit, title in (("slowdown", "×", "step with / without a save"), ("lost_s", " s", "price of a save")):
        best = min((times[what]["median"] for times in rivals.values()), default=float("inf"))
        own = ours[what]["median"]
        rows.append((title, f"below every rival's, {best:.2f}{unit}", f"{own:.2f}{unit}", own < best))
    return rows


def _transfer(found: dict[str, Any]) -> list[Row]:
    rows: list[Row] = []
    for part, goal in (("durable save", 0.95), ("cold load", 0.95), ("warm load", 0.8)):
        of_ceiling = found[part]["of_ceiling"].get(OURS)
        if not of_ceiling:
            continue
        own = of_ceiling["median"]
        rows.append((part, f"{goal} of the ceiling", f"{own:.2f}", own >= goal))
        if part == "warm load":
            continue
        if found[part]["of_best_rival"]:
            of_rival = found[part]["of_best_rival"]["median"]
            rows.append((part, "ahead of every rival", f"{of_rival:.2f} × the fastest", of_rival > 1))
        rows.append(_thrift(part, found[part]["systems"]))
    return rows


def _thrift(part: str, systems: dict[str, list[dict[str, float]]]) -> Row:
    """Processor time beside that of the thriftiest rival that is as fast."""
    seconds = {name: median([cost["seconds"] for cost in costs]) for name, costs in systems.items()}
    cpu = {name: median([cost["cpu_s"] for cost in costs]) for name, costs in systems.items()}
    as_fast = [name for name in systems if name != OURS and seconds[name] <= seconds[OURS]]
    goal = "half of the thriftiest rival's that is as fast"
    if not as_fast:
        thriftiest = min((name for name in systems if name != OURS), key=lambda name: cpu[name], default=OURS)
        text = f"none is as fast; {cpu[OURS] / cpu[thriftiest]:.2f} × that of {thriftiest}"
        return (f"processor time, {part}", goal, text, True)
    thriftiest = min(as_fast, key=lambda name: cpu[name])
    ratio = cpu[OURS] / cpu[thriftiest] if cpu[thriftiest] else float("inf")
    return (f"processor time, {part}", goal, f"{ratio:.2f} × that of {thriftiest}", ratio <= 0.5)


def _resharding(found: dict[str, Any]) -> list[Row]:
    rows: list[Row] = []
    if OURS in found["resharded_of_same"]:
        own = found["resharded_of_same"][OURS]["median"]
        rows.append(("resharded load", "0.9 of the same layout's", f"{own:.2f}", own >= 0.9))
        read, asked = found["bytes_from_disk_of_needed"], found["bytes_read_of_needed"]
        text = f"{read:.3f} from the disk ({asked:.2f} asked for)"
        rows.append(("bytes read, resharded", "1.02 of those needed", text, read <= 1.02))
    return rows


def _stores(found: dict[str, Any]) -> list[Row]:
    if "not measured" in found:
        return []
    rows: list[Row] = []
    for link, name, goal in (("plain", "S3", 0.95), ("slow", "S3, slow connections", 0.9)):
        for part in ("durable save", "cold load"):
            of_part = found[link][part]
            if OURS not in of_part["of_ceiling"]:
                continue
            own = of_part["of_ceiling"][OURS]["median"]
            rows.append((f"{part}, {name}", f"{goal} of the ceiling", f"{own:.2f}", own >= goal))
            times = {rival: of["median"] for rival, of in of_part["times_rival"].items()}
            if link == "plain":
                fastest = min(times, key=lambda rival: times[rival], default=None)
                if fastest:
                    text = f"{times[fastest]:.2f} × {fastest}"
                    rows.append((f"{part}, {name}", "ahead of every rival", text, times[fastest] > 1))
            else:
                for rival in (rival for rival in times if rival.startswith("DCP with fsspec")):
                    text = f"{times[rival]:.1f} ×"
                    rows.append((f"{part}, {name}", f"10 × as fast as {rival}", text, times[rival] >= 10))
    return rows


def _hdfs(found: dict[str, Any]) -> list[Row]:
    if "not measured" in found:
        return []
    rows: list[Row] = []
    for part in ("durable save", "cold load"):
        of_streams = found["slow"][part]["of_streams"]["median"]
        rows.append((f"{part}, slow streams", "0.9 of streams × 20 MB/s", f"{of_streams:.2f}", of_streams >= 0.9))
        for rival, times in found["slow"][part]["times"].items():
            if rival in ONE_STREAM:
                text = f"{times['median']:.1f} ×"
                rows.append((f"{part}, slow streams", f"6 × {rival}", text, times["median"] >= 6))
        of_part = found["plain"][part]
        if OURS in of_part["of_ceiling"]:
            own = of_part["of_ceiling"][OURS]["median"]
            rows.append((f"{part}, HDFS", "0.9 of the best bare client", f"{own:.2f}", own >= 0.9))
            for rival, times in of_part["times_rival"].items():
                text = f"{times['median']:.2f} ×"
                rows.append((f"{part}, HDFS", f"faster than {rival}", text, times["median"] > 1))
    calls = found["calls"]
    for verb, allowed in (("save", "allowed"), ("load", "load_allowed")):
        reached = calls[verb] <= calls[allowed]
        rows.append((f"calls of a {verb} to the NameNode", f"at most {calls[allowed]}", f"{calls[verb]}", reached))
    concat = found["concat_ms"]["median"]
    rows.append(("concat of 16 sub-files", "20 ms", f"{concat:.1f} ms", concat <= 20))
    for part in ("durable save", "cold load"):
        beyond = (found["memory"][part] - found["memory"]["budget_bytes"]) >> 20
        is_within = found["memory"][part] - found["memory"]["budget_bytes"] <= CONSTANT_BYTES
        rows.append((f"memory of a {part}, HDFS", "budget + 64 MiB", f"budget + {beyond} MiB", is_within))
    for state, places in found["stall_ms"].items():
        far, near = places[FAR], places[NEAR]
        reached = near["min"] <= far["median"] <= near["max"]
        text = f"{far['median']:.2f} ms, {near['median']:.2f} local"
        rows.append((f"stall, {state}, HDFS", "within the spread of a local one", text, reached))
    return rows


def _tiers(found: dict[str, Any]) -> list[Row]:
    durable, step = found["durable_of_directory"]["median"], found["step_of_quiet"]["median"]
    return [
        ("durable save with local=, of a directory", "1.05", f"{durable:.2f}", durable <= 1.05),
        *(
            (f"memory copies, of a {what}", "0.8", f"{found[key]['median']:.2f}", found[key]["median"] >= 0.8)
            for what, key in (("save into memory", "copies_of_memory_save"), ("restore", "copies_of_memory_restore"))
        ),
        ("a step beside a sending at its limit", "1.02 of a quiet one", f"{step:.3f}", step <= 1.02),
    ]


def _planning(found: dict[str, Any]) -> list[Row]:
    rows: list[Row] = []
    for job in found["commit"]:
        ranks, plan, root = job["ranks"], job["plan_ms"], (job["prove_ms"] + job["assemble_ms"]) / 1e3
        goal = 1 if ranks < 10_000 else 15
        rows.append((f"plan of one of {ranks:,} ranks", "10 ms", f"{plan:.2f} ms", plan <= 10))
        rows.append((f"coverage and manifest of {ranks:,} ranks", f"{goal} s", f"{root:.2f} s", root <= goal))
        if ranks < 10_000:
            size, opening = job["manifest_bytes"] / 1e6, job["open_ms"]
            text = f"{size:.1f} MB, {opening:.1f} ms"
            rows.append((f"manifest of {ranks:,} ranks", "16 MB, 50 ms", text, size <= 16 and opening <= 50))
    slowest = max(nanoseconds for _, nanoseconds in found["flat_run_ns"])
    rows.append(("a region of a flat run", "1 µs", f"{slowest:.0f} ns", slowest <= 1000))
    return rows
