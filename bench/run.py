"""Measures Shardfast beside its rivals and beside what the machine itself can do. See README.md for the rules.

make bench                                                  # everything, 2 GB on 2 processes
scripts/bench.sh --only transfer --gigabytes 4 --rounds 9
scripts/bench.sh --quick --where /mnt/nvme/bench-out
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import goals
import hdfs
import stall
import stops
import stores
import telemetry
import tiers
import training
import transfer
from ceilings import expect_fio
from figures import describe_machine, is_quiet, show_machine
from ranks import ROOT, Settings, elsewhere


def planning(settings: Settings) -> dict[str, Any]:
    """Runs `bench/scale`, which needs no ranks."""
    with tempfile.TemporaryDirectory() as directory:
        results = Path(directory) / "scale.json"
        command = ["cargo", "run", "--quiet", "--release", "--locked", "--package", "shardfast-scale", "--"]
        quick = ["--quick"] if settings.quick else []
        subprocess.run([*command, *quick, "--json", str(results)], cwd=ROOT, check=True)
        figures: dict[str, Any] = json.loads(results.read_text())
        return figures


MEASURES = {
    "transfer": (transfer.measure, "durable save, cold and warm load, processor time, timeline"),
    "resharding": (transfer.measure_resharding, "cold load into another layout"),
    "stall": (stall.measure, "how long the call of an asynchronous save holds up the training"),
    "training": (training.measure, "what a save in the background costs the training; the wait before the step"),
    "stores": (stores.measure, "saves to S3 and loads from it: rates and processor time"),
    "hdfs": (hdfs.measure, "saves to HDFS and loads from it: rates, calls, memory, stall"),
    "megatron": (
        elsewhere("megatron_core.py", "megatron", "megatron"),
        "Megatron-Core and its distributed optimizer beside Megatron's checkpoints",
    ),
    "deepspeed": (
        elsewhere("deepspeed_engines.py", "deepspeed", "frameworks"),
        "DeepSpeed's engines with our block beside DeepSpeed's checkpoints",
    ),
    "trainers": (
        elsewhere("trainers.py", "torchtitan", "frameworks"),
        "accelerate, transformers, Lightning, torchtitan: with ours beside their own",
    ),
    "loaders": (
        elsewhere("loaders.py", "torchdata", "frameworks"),
        "data loaders in a state: stall, a resumed epoch beside accelerate's",
    ),
    "ray": (
        elsewhere("ray_train.py", "ray", "frameworks"),
        "a report of a durable checkpoint to Ray Train beside Ray's upload of it",
    ),
    "telemetry": (
        telemetry.measure,
        "what it costs to tell what saves and loads do",
    ),
    "tiers": (tiers.measure, "memory and a local disk in front of a run: saves, and steps beside the sending"),
    "stops": (stops.measure, "steps of a job that can be told to stop; how fast it does"),
    "planning": (planning, "plans, coverage and manifests of up to 100,000 ranks, on one core"),
}
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run: small, one round, few methods")
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=list(MEASURES), metavar="MEASURE",
                        help="; ".join(f"{name}: {what}" for name, (_, what) in MEASURES.items()))  # fmt: skip
    parser.add_argument("--gigabytes", type=float, help="size of the state on all processes (2; quick: 0.15)")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, help="measured rounds (5, but at most 3 beside transfer; quick: 1)")
    parser.add_argument("--where", type=Path, default=Path("bench-out"), help="a directory on the disk to be measured")
    args = parser.parse_args()
    expect_fio()
    warnings.filterwarnings("ignore")
    where: Path = args.where.resolve() / "shardfast-bench"
    gigabytes, rounds = (0.15, 1) if args.quick else (2.0, 5)
    settings = Settings(args.gigabytes or gigabytes, args.processes, args.rounds or rounds, where, args.quick)
    described = describe_machine(args.where)
    show_machine(described)
    results: dict[str, Any] = {
        "machine": described,
        "settings": settings_of(settings),
        "quiet": is_quiet(described),
    }
    try:
        for name in args.only:
            print(f"\n=== {name}: {MEASURES[name][1]}", flush=True)
            began = time.perf_counter()
            results[name] = MEASURES[name][0](settings)
            print(f"--- {name}: {time.perf_counter() - began:.0f} s", flush=True)
    finally:
        shutil.rmtree(where, ignore_errors=True)
    goals.show(results)
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"{str(described['when']).replace(':', '')}.json"
    file.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\nevery figure: {file}")


def settings_of(settings: Settings) -> dict[str, Any]:
    return {name: str(value) if name == "where" else value for name, value in vars(replace(settings)).items()}


if __name__ == "__main__":
    main()
