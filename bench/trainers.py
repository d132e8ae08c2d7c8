"""accelerate, transformers' Trainer, Lightning and torchtitan with our integrations, beside their own checkpoints.

Its ranks run in an environment of their own (`trainer_ranks.py`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from asynchronous import show_notes
from deepspeed_engines import show_loads, show_saves
from environments import measured_by, missing
from figures import OURS, Figures
from ranks import ROUNDS_MAX, Settings

RANKS = Path(__file__).with_name("trainer_ranks.py")
PROCESSES, GIGABYTES = 2, 0.5
ACCELERATE, TRANSFORMERS, LIGHTNING, TITAN = "accelerate", "transformers", "Lightning", "torchtitan"
DDP, FSDP2 = "DDP", "FSDP2"

NOT_MEASURED = {
    f"{TRANSFORMERS}, {FSDP2}": "`distributed_config` saves the model alone, and "
    "`TrainingArguments(fsdp=…)` needs a device",
    f"{TITAN}, torch_checkpointing": "its manager saves and loads nothing yet (NotImplementedError)",
}


def measure(settings: Settings) -> Figures:
    gigabytes, rounds = min(settings.gigabytes, GIGABYTES), min(settings.rounds, ROUNDS_MAX)
    settings = replace(settings, processes=PROCESSES, gigabytes=gigabytes, rounds=rounds)
    found = measured_by(RANKS, "torchtitan", "what trains", "frameworks", settings)
    if found is None:
        return {"not measured": missing("what trains", "frameworks")}
    failed = found["failed"] | NOT_MEASURED
    figures: dict[str, Any] = {
        "bytes": found["bytes"],
        "failed": failed,
        "saves": show_saves(found["saves"], found["bytes"], stall=OURS, durable=OURS),
        "loads": show_loads(found["loads"], found["bytes"], "as a resume of the trainer does them"),
    }
    print(f"  {OURS}: attached, all options as they are; its saves run in the background, until durable")
    show_notes(found["notes"], failed)
    return figures
