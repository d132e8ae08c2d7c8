"""The goals, each beside what this run found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepspeed_engines import THEIRS
from figures import OURS, median, table
from footprint import CONSTANT_BYTES
from loaders import ACCELERATE
from megatron_core import BY_DP, FULLY, OURS_ASYNC

Row = tuple[str, str, str, bool]
"""Measure, goal, what was found, whether the goal is reached."""

DCP = ("DCP, 1 thread", "DCP, 2 threads")


def show(results: dict[str, Any]) -> None:
    """Prints the goals of the measures that were run."""
    readers: dict[str, Callable[[dict[str, Any]], list[Row]]] = {
        "stall": _stall,
        "fsdp": _fsdp,
        "megatron": _megatron,
        "deepspeed": _deepspeed,
        "trainers": _trainers,
        "loaders": _loaders,
        "replicas": _replicas,
        "training": _training,
        "transfer": _transfer,
        "resharding": _resharding,
        "small": _small,
        "footprint": _footprint,
        "stores": _stores,
        "hooks": _hooks,
        "windows": _windows,
        "replay": _replay,
        "planning": _planning,
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


def _fsdp(found: dict[str, Any]) -> list[Row]:
    rows: list[Row] = []
    fsdp2, thousands = found["times"]["FSDP2"], found["parameters"] / 1000
    for kind, times in found["times"].items():
        if kind == "FSDP2":
            continue
        described = times["describe_ms"]["median"] / thousands
        of_fsdp2 = times["later_ms"]["median"] / fsdp2["later_ms"]["median"]
        of_rival = times["rival_ms"]["median"] / times["later_ms"]["median"]
        goal = "20 ms per 1,000 parameters"
        rows.append((f"first description, {kind}", goal, f"{described:.1f} ms", described <= 20))
        rows.append((f"stall of later saves, {kind}", "1.2 × FSDP2's", f"{of_fsdp2:.2f} ×", of_fsdp2 <= 1.2))
        rows.append((f"blocking time, {kind}", "20 × shorter than DCP's", f"{of_rival:.0f} ×", of_rival >= 20))
        is_within = found["within budget"][kind]
        rows.append((f"memory, {kind}", "budget + 64 MiB", "within" if is_within else "beyond", is_within))
    return rows


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
    return rows + _megatron_costs(found)


def _megatron_costs(found: dict[str, Any]) -> list[Row]:
    described = found["descriptions"]
    first, later = described["first_ms_per_1000"]["median"], described["later_us_a_region"]["median"]
    of_fsdp2, memory = described["later_of_fsdp2"]["median"], found["memory"]
    most = max(of[OURS] for of in memory["bytes"].values()) - memory["budget_bytes"]
    text = "within" if most <= CONSTANT_BYTES else "beyond"
    return [
        ("first description, Megatron", "20 ms per 1,000 parameters", f"{first:.1f} ms", first <= 20),
        ("later descriptions, Megatron", "1 µs a region", f"{later:.2f} µs", later <= 1),
        ("stall of later saves, Megatron", "1.2 × FSDP2's", f"{of_fsdp2:.2f} ×", of_fsdp2 <= 1.2),
        ("memory, Megatron", "budget + 64 MiB", text, most <= CONSTANT_BYTES),
    ]


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
    for stage, of in found["first"].items():
        first = of["of_process_ms_per_1000"]["median"]
        rows.append((f"first save, {stage}", "20 ms per 1,000 parameters", f"{first:.1f} ms", first <= 20))
    for stage, systems in found["loads"].items():
        if THEIRS in systems:
            times = systems[THEIRS]["of_ours"]["median"]
            rows.append((f"load into the same, {stage}", "2 × faster", f"{times:.2f} ×", times >= 2))
    for case, systems in found["resumed"].items():
        written = systems[OURS]["written_bytes"]
        if THEIRS not in systems:
            rows.append((f"resumed, {case}", "nothing written", f"{written} bytes; {THEIRS} fails", written == 0))
            continue
        times = systems[THEIRS]["of_ours"]["median"]
        text = f"{times:.1f} ×, {written} bytes"
        rows.append((f"resumed, {case}", "5 × faster, nothing written", text, times >= 5 and written == 0))
    for stage, systems in found["frozen"].items():
        share = systems[OURS]["of_trained"]
        title = f"bytes without what is frozen, {stage}"
        rows.append((title, "1.02 × what is trained", f"{share:.3f} ×", share <= 1.02))
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
    beyond, buffers = found["saves"]["beyond_ms"]["median"], found["buffers"]
    read, dealt = buffers["from_storage_of_needed"]["median"], found["units"]["dealt_s"]["median"]
    extra = buffers["extra_bytes"]["max"] - buffers["budget_bytes"]
    rows: list[Row] = [
        ("stall, a loader whose state takes 1 s", "1 ms more than without", f"{beyond:.2f} ms", beyond <= 1),
        ("bytes read, loader states dealt out", "1.02 of those needed", f"{read:.3f}", read <= 1.02),
        (
            "memory, loader states dealt out",
            "budget + 64 MiB",
            f"budget + {extra >> 20} MiB",
            extra <= CONSTANT_BYTES,
        ),
        ("dealing out 100,000 units", "0.5 s", f"{dealt:.2f} s", dealt <= 0.5),
    ]
    for kind, systems in found["resumed"].items():
        times, old = systems[ACCELERATE]["of_ours"]["median"], systems[OURS]["old"]
        text = f"{times:.1f} ×, {old} samples"
        rows.append((f"resumed epoch, {kind}", "50 × faster, no old sample read", text, times >= 50 and old == 0))
    return rows


def _replicas(found: dict[str, Any]) -> list[Row]:
    rows: list[Row] = []
    for world, of_world in found.items():
        price = of_world["cpu_s_per_gb"]["median"]
        rows.append((f"proof of replicas, {world} processes", "0.15 s per GB", f"{price:.3f} s per GB", price <= 0.15))
    return rows


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


def _small(found: dict[str, Any]) -> list[Row]:
    rows: list[Row] = []
    for part in ("durable save", "cold load"):
        slower = found[f"{part}, times ours"]
        fastest = min((slower[name]["median"] for name in DCP if name in slower), default=float("nan"))
        title = f"{found['count']} tensors of {found['bytes_each']} bytes, {part}"
        rows.append((title, "20 times as fast as DCP", f"{fastest:.1f} times", fastest >= 20))
    return rows


def _footprint(found: dict[str, Any]) -> list[Row]:
    prefix = "within budget at "
    return [
        (
            f"memory, {name.removeprefix(prefix)} the budget",
            "budget + 64 MiB",
            "within" if value else "beyond",
            bool(value),
        )
        for name, value in found.items()
        if name.startswith(prefix)
    ]


def _windows(found: dict[str, Any]) -> list[Row]:
    is_within = bool(found["within"])
    return [("memory, captures over several steps", "budget + 64 MiB", "within" if is_within else "beyond", is_within)]


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
    return rows + _store_requests(found["requests"]) + _store_costs(found["costs"])


def _store_requests(found: dict[str, Any]) -> list[Row]:
    rows: list[Row] = []
    if OURS in found["loads"]:
        puts, expected = found["saves"][OURS]["puts"], found["puts expected"]
        goal = "2 + indexes + 1 a file of one part, parts + 2 a longer one"
        rows.append(("requests of a save that write", f"{goal}: {expected}", f"{puts}", puts == expected))
        data, most = found["loads"][OURS]["data"], found["data requests most"]
        goal = "2 a file and 1 for 8 MiB"
        rows.append(("requests of a load for data", f"{goal}: {most:.1f}", f"{data}", data <= most))
        read = found["resharded bytes of needed"]
        rows.append(("bytes read, resharded, S3", "1.1 of those needed", f"{read:.3f}", read <= 1.1))
        requests, share = found["verified"]["requests"], found["verified"]["of_bytes"]
        text = f"{requests}, {share:.4%}"
        rows.append(
            ("verify --stored, a file", "2 requests, 0.05 % of the bytes", text, requests <= 2 and share <= 5e-4)
        )
    before = len(found["before first data"])
    rows.append((f"requests before data, {found['steps']:,} steps", "4", f"{before}", before <= 4))
    for part, of_part in found["late"].items():
        times, requests = of_part["times"]["median"], of_part["requests"]["median"]
        text = f"{times:.2f} × the time, {(requests - 1) * 100:.1f} %"
        is_reached = times <= 1.15 and requests <= 1.05
        rows.append((f"{part}, one answer in 100 is 2 s late", "1.15 × the time, 5 % more requests", text, is_reached))
    return rows


def _store_costs(found: dict[str, Any]) -> list[Row]:
    rows: list[Row] = []
    thrift = found["processor"]
    title = "client's processor time, uploads that are discarded"
    of_bare, of_rivals = thrift["of_bare"]["median"], {name: of["median"] for name, of in thrift["of_rival"].items()}
    rows.append((title, f"1.15 × that of {thrift['bare']}", f"{of_bare:.2f} ×", of_bare <= 1.15))
    if of_rivals:
        thriftiest = max(of_rivals, key=lambda rival: of_rivals[rival])
        text = f"{of_rivals[thriftiest]:.2f} × that of {thriftiest}"
        rows.append((title, "below every rival's", text, of_rivals[thriftiest] < 1))
    is_within = bool(found["memory"]["within"])
    rows.append(("memory, 20 times the budget, S3", "budget + 64 MiB", "within" if is_within else "beyond", is_within))
    for case, places in found["stall"].items():
        near, far = (places[place]["call_ms"]["median"] for place in ("local disk", "S3"))
        text = f"{far:.2f} ms, {far / near:.2f} ×"
        rows.append((f"stall, {case}, S3", f"1.1 × a local save's, {near:.2f} ms", text, far <= 1.1 * near))
    return rows


def _hooks(found: dict[str, Any]) -> list[Row]:
    rows: list[Row] = []
    for name, goal_ms in (("in a window, ms", 1.0), ("outside of windows, ms", 0.02)):
        if found[name]:
            ms = found[name]["median"]
            rows.append(
                (f"hooks of a step {name.removesuffix(', ms')}", f"{goal_ms:g} ms", f"{ms:.3f} ms", ms <= goal_ms)
            )
    return rows


def _replay(found: dict[str, Any]) -> list[Row]:
    rows: list[Row] = []
    for other, goal in (("of loads and stores", 0.8), ("of PyTorch", 1.0)):
        median_ratio = found[other]["median"]
        rows.append((f"replay, two threads, {other}", f"{goal}", f"{median_ratio:.2f}", median_ratio >= goal))
    return rows


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
