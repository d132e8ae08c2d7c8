"""Reports of a durable checkpoint to Ray Train: named where it is, beside Ray's own upload of the same files.

`run.py` starts it in an environment that has Ray: `ray_train.py SETTINGS ANSWER`.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.train
import shardfast as sf
from figures import OURS, RAY, Figures, median, ours_first, ratio, spread, summary, table
from ranks import Settings, answer, asked, turned
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

GIGABYTES = 2.0
ARRAYS = 16
POLL_S = "0.02"
"""Seconds after which Ray asks a worker for reports again, 2 unless told: it is a part of "named"."""

NOTES = {
    OURS: "shardfast.integrations.ray.report() of the committed checkpoint; bytes below storage_path are counted",
    RAY: "ray.train.report(metrics, Checkpoint.from_directory(…)), synchronous; what it copies is not synced",
}


def worker(told: dict[str, Any]) -> dict[str, Any]:
    """Seconds of reports by system: the call, and until Ray names the checkpoint; bytes that it adds to the storage."""
    import shardfast.integrations.ray as integration

    settings = Settings(**told | {"where": Path(told["where"])})
    element = np.random.default_rng(0).random(settings.total_bytes // ARRAYS // 8)
    state = {"model": {str(number): element + number for number in range(ARRAYS)}}
    ckpt = sf.Checkpointer(integration.run_url())
    storage = Path(ckpt.url).parent
    source = settings.where / "source"
    sf.save(source, state)

    def by_ray(metrics: dict[str, Any]) -> None:
        ray.train.report(metrics, ray.train.Checkpoint.from_directory(source))

    ways: list[tuple[str, Callable[[dict[str, Any]], None]]] = [
        (OURS, lambda metrics: integration.report(metrics, ckpt)),
        (RAY, by_ray),
    ]
    found: dict[str, dict[str, list[float]]] = {name: {"call": [], "named": [], "bytes": []} for name, _ in ways}
    for number in range(settings.warm_ups + settings.rounds):
        for name, report in turned(ways, number):
            if name == OURS:
                ckpt.save(number + 1, state)
                ckpt.wait()
            os.sync()
            time.sleep(settings.settle_s)
            before, began = _bytes_below(storage), time.perf_counter()
            report({"round": number})
            call_s = time.perf_counter() - began
            named = ray.train.get_all_reported_checkpoints(
                consistency_mode=ray.train.CheckpointConsistencyMode.COMMITTED
            )
            named_s, added = time.perf_counter() - began, _bytes_below(storage) - before
            if named[-1].metrics != {"round": number}:
                raise AssertionError(f"{name}: Ray names {named[-1]} in round {number}")
            if number >= settings.warm_ups:
                for what, value in (("call", call_s), ("named", named_s), ("bytes", float(added))):
                    found[name][what].append(value)
            shutil.rmtree(named[-1].checkpoint.path)  # the disk would hold every round's
    ckpt.close()
    return found


def _bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.suffix != ".json")


def main() -> None:
    settings = asked(gigabytes=GIGABYTES, processes=1)
    place = settings.where / "ray"
    os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = POLL_S
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    ray.init(num_cpus=1, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
    told = vars(settings) | {"where": str(settings.where)}
    result = DataParallelTrainer(
        worker,
        train_loop_config=told,
        scaling_config=ray.train.ScalingConfig(num_workers=1),
        run_config=ray.train.RunConfig(name="one", storage_path=str(place)),
    ).fit()
    found = result.return_value
    ray.shutdown()
    rows: list[list[object]] = []
    figures: Figures = {"bytes": settings.total_bytes}
    for name, of in ours_first(found):
        times = {what: ratio(of[what], found[OURS][what]) for what in ("call", "named")}
        call_ms, named_ms = ([one * 1e3 for one in of[what]] for what in ("call", "named"))
        rows.append([
            name, median(call_ms), spread(call_ms), f"{median(times['call']):.1f}", spread(times["call"], 1),
            median(named_ms), spread(named_ms), f"{median(times['named']):.1f}", spread(times["named"], 1),
            f"{median(of['bytes']):,.0f}",
        ])  # fmt: skip
        figures[name] = {"call_ms": summary(call_ms), "named_ms": summary(named_ms), "bytes": summary(of["bytes"])}
        figures[name] |= {f"{what}_of_ours": summary(one) for what, one in times.items()}
    columns = ("call, ms", "(min .. max)", f"of {OURS}'s", "(min .. max)", "named, ms", "(min .. max)")
    title = f"a report of a durable checkpoint of {settings.total_bytes / 1e9:.2f} GB"
    table(title, ("", *columns, f"of {OURS}'s", "(min .. max)", "bytes added"), rows)
    for name, note in NOTES.items():
        print(f"  {name}: {note}")
    answer(figures)


if __name__ == "__main__":
    main()
