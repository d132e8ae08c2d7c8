"""Measures Shardfast beside its rivals and beside what the machine itself can do. See README.md for the rules.

make bench                                                  # everything, 2 GB on 2 processes
scripts/bench.sh --only transfer --gigabytes 4 --rounds 9
scripts/bench.sh --quick --where /mnt/nvme/bench-out
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import crashes
import deepspeed_engines
import footprint
import fsdp
import goals
import hooks
import loaders
import machine
import megatron_core
import planning
import replay
import replicas
import resharding
import restart
import sharing
import small
import stall
import stores
import trainers
import training
import transfer
import windows
from ceiling import expect_fio
from ranks import Settings

MEASURES = {
    "transfer": (transfer.measure, "durable save, cold and warm load, processor time, timeline"),
    "resharding": (resharding.measure, "cold load into another layout"),
    "restart": (restart.measure, "the first large load of a process beside the next ones"),
    "sharing": (sharing.measure, "ranks that read for each other, beside each for itself"),
    "small": (small.measure, "5,000 tensors of 1 KiB"),
    "stall": (stall.measure, "how long the call of an asynchronous save holds up the training"),
    "fsdp": (fsdp.measure, "FSDP1 beside FSDP2: what saves of flat parameters cost"),
    "megatron": (megatron_core.measure, "Megatron-Core and its distributed optimizer beside Megatron's checkpoints"),
    "deepspeed": (deepspeed_engines.measure, "DeepSpeed's engines with our block beside DeepSpeed's checkpoints"),
    "trainers": (
        trainers.measure,
        "accelerate, transformers, Lightning, torchtitan: with ours beside their own",
    ),
    "loaders": (loaders.measure, "data loaders in a state: stall, bytes, memory, units dealt out, a resumed epoch"),
    "replicas": (replicas.measure, "what the proof of replicas costs at the first save of a layout"),
    "training": (training.measure, "what a save in the background costs the training; the wait before the step"),
    "crashes": (crashes.measure, "a training that is killed now and then, by the interval between its saves"),
    "footprint": (footprint.measure, "memory beside the state"),
    "stores": (stores.measure, "saves to S3 and loads from it: rates, processor time, requests"),
    "hooks": (hooks.measure, "what captures ahead of a save cost the host in a step of 1,000 tensors"),
    "windows": (windows.measure, "captures over four steps beside one, on a host: memory, time to the commit"),
    "replay": (replay.measure, "replayed steps of AdamW beside loads and stores alone, and beside PyTorch's"),
    "planning": (planning.measure, "plans, coverage and manifests of up to 100,000 ranks, on one core"),
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
    described = machine.describe(args.where)
    machine.show(described)
    results: dict[str, Any] = {
        "machine": described,
        "settings": settings_of(settings),
        "quiet": machine.is_quiet(described),
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
