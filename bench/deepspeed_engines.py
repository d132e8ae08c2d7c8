"""DeepSpeed's engines with our block in their configuration, beside DeepSpeed's own checkpoints, under ZeRO-1, 2 and 3.

`run.py` starts it in an environment that has DeepSpeed: `deepspeed_engines.py SETTINGS ANSWER`.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import os
import subprocess
import sys
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests" / "frameworks"))

import shardfast.integrations.deepspeed as block
import torch
from deepspeed_jobs import BATCH, Job, deepspeed, said
from figures import DEEPSPEED, OURS, OURS_ASYNC, Figures, median, ours_first, ratio, spread, summary, table
from ranks import (
    BUDGET_BYTES,
    Settings,
    answer,
    asked,
    attempt,
    drop_page_cache,
    extra_memory,
    in_turn,
    of_all,
    on_rank_0,
    remove,
    run,
    timed,
)
from rivals import show_notes, sync_files_of_rank
from shardfast import session
from trained import Digests, Maker, expect, expect_ours, loads_of, saves_of, show_loads, show_memory, show_saves

PROCESSES, GIGABYTES = 2, 0.5
STAGES = (1, 2, 3)
WORLDS = {3: ((2, 3), (2, 2), (3, 3)), 1: ((2, 3), (2, 2), (3, 3))}
"""By the processes that resume: the stage that saved on two, and the one that resumes."""

NOT_MEASURED = {
    f"{DEEPSPEED}, fast and decoupled": "on a processor ZeRO-1 refuses to hand over its tensors (`requires_grad`), and "
    "saves under ZeRO-3 are never committed: its rank waits for 300 s",
    f"{DEEPSPEED}, DataStates": "needs CUDA",
}

WIDTH = 1024
BYTES_OF_LAYER = 14 * WIDTH * (WIDTH + 1)
"""Of each parameter two bytes in bf16; the fp32 master and two moments."""

TAG, UNIVERSAL = "saved", "universal"
LAUNCHED = {"CROSS_SIZE": "1", "CROSS_RANK": "0"}
"""What DeepSpeed's launcher says of the machines; its fast writer asks for it."""


class Model(torch.nn.Module):
    """Square layers with a sum around each, so that gradients reach the first one of many."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x) / len(self.layers)
        return x


def of_stage(stage: int) -> str:
    return f"ZeRO-{stage}"


def layers_of(total_bytes: int) -> int:
    """The layers of a model of about ``total_bytes`` with its optimizer."""
    return max(1, round(total_bytes / BYTES_OF_LAYER))


@dataclass(frozen=True)
class Way:
    """One way to save and load.

    Attributes:
        name: In the tables.
        note: Its configuration.
        configuration: What it adds to DeepSpeed's configuration.
    """

    name: str
    note: str
    configuration: dict[str, Any]

    @property
    def is_ours(self) -> bool:
        return "shardfast" in self.configuration


BACKGROUND = Way(OURS_ASYNC, 'the block "shardfast": {}', {"shardfast": {}})
WAITED = Way(OURS, 'the block "shardfast": {"async": false}', {"shardfast": {"async": False}})
DEFAULT = Way(
    DEEPSPEED,
    "its default engine, torch.save and torch.load; files and directories synced for it, which counts for the durable "
    "save and not for the stall",
    {},
)
FAST = Way(
    f"{DEEPSPEED}, fast",
    '"checkpoint": {"writer": {"type": "fast", "data_parallel": "replica"}}; files and directories synced for it; its '
    "loads are not measured",
    {"checkpoint": {"writer": {"type": "fast", "data_parallel": "replica"}}},
)


class Trained:
    """An engine in training that is saved in one way."""

    def __init__(self, way: Way, layers: int, stage: int, seed: int = 0) -> None:
        torch.manual_seed(seed)
        model = Model(layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        config = {**Job(stage).config, **way.configuration}
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        self.name = way.name
        self._is_ours = way.is_ours

    def step(self) -> None:
        x = torch.randn(BATCH, WIDTH).bfloat16()
        self.engine.backward((self.engine(x) - x.flip(1)).float().square().mean())
        self.engine.step()

    def save(self, place: Path) -> None:
        """Saves; the training waits for it."""
        self.engine.save_checkpoint(str(place), tag=TAG)

    def before_step(self) -> None:
        """Does nothing: no engine has a wait of its own."""

    def finish(self, place: Path) -> None:
        """Waits until the save is durable."""
        if self._is_ours:
            block._loop_of(self.engine).saves.settle(0)
        else:
            sync_files_of_rank(place)

    def load(self, place: Path, tag: str = TAG) -> float:
        return timed(functools.partial(self._load, place, tag)).seconds

    def _load(self, place: Path, tag: str) -> None:
        try:
            path, _ = self.engine.load_checkpoint(str(place), tag=tag)
        except AssertionError as error:
            at = traceback.extract_tb(error.__traceback__)[-1]  # many of DeepSpeed's have no text
            raise AssertionError(f"{error} ({Path(at.filename).name}: {at.line})") from error
        if path is None:
            raise AssertionError(f"{self.name} loaded nothing")

    def digests(self) -> Digests:
        """Of parameters, masters and moments, each of them whole."""
        return {name: hashlib.sha256(array.ravel()).digest() for name, array in said(self.engine).items()}

    def close(self) -> None:
        self.engine.destroy()
        del self.engine
        gc.collect()


def worker(settings: Settings) -> dict[str, Any]:
    """On as many processes as save: stalls and durable saves, loads into the same."""
    layers = layers_of(settings.total_bytes)
    told: dict[str, Any] = {
        "bytes": layers * BYTES_OF_LAYER,
        "failed": {},
        "notes": {way.name: way.note for way in (BACKGROUND, WAITED, DEFAULT, FAST)},
        "saves": {},
        "loads": {},
        "digests": {},
    }
    for stage in STAGES:
        title = of_stage(stage)
        failed: dict[str, str] = {}
        ways = _makers(layers, stage, BACKGROUND, WAITED, DEFAULT, FAST)
        told["saves"][title] = saves_of(ways, settings, failed)
        told["failed"] |= {f"{name}, {title}": reason for name, reason in failed.items()}
        failed = {}
        ways = _makers(layers, stage, WAITED, DEFAULT)
        places = {name: _place(settings, name, stage) for name in ways}
        told["loads"][title], digests = loads_of(ways, places, settings, failed)
        told["digests"] |= {(name, stage): of for name, of in digests.items()}
        told["failed"] |= {f"load of {name}, {title}": reason for name, reason in failed.items()}
    return told


def _makers(layers: int, stage: int, *ways: Way) -> dict[str, Maker]:
    return {way.name: functools.partial(Trained, way, layers, stage) for way in ways}


def _place(settings: Settings, name: str, stage: int) -> Path:
    """Where what is loaded by several measures stays."""
    return settings.where / f"deepspeed-{name}-{stage}"


def _files(folder: Path) -> dict[Path, tuple[int, int]]:
    """The size of each file, and when it was written."""
    states = {path: path.stat() for path in folder.rglob("*") if path.is_file()}
    return {path: (state.st_size, state.st_mtime_ns) for path, state in states.items()}


def resumed_worker(settings: Settings, digests: dict[tuple[str, int], Digests]) -> dict[str, Any]:
    """On another world: by case and system the seconds of a conversion and of a load, and bytes that were written."""
    told: dict[str, Any] = {"cases": {}, "failed": {}}
    for source, target in WORLDS[settings.processes]:
        title = f"{of_stage(source)} into {of_stage(target)} on {settings.processes}"
        failed: dict[str, str] = {}
        told["cases"][title] = _resumed(settings, source, target, digests, failed)
        told["failed"] |= {f"{title}, {name}": reason for name, reason in failed.items()}
    return told


def _resumed(
    settings: Settings, source: int, target: int, digests: dict[tuple[str, int], Digests], failed: dict[str, str]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    layers = layers_of(settings.total_bytes)
    universal = replace(DEFAULT, configuration={"checkpoint": {"load_universal": True}})

    def one(way: Way, path: Path, is_measured: bool) -> None:
        place = _place(settings, way.name, source)
        trained = Trained(way, layers, target, seed=5)
        before = on_rank_0(lambda: _files(settings.where))
        drop_page_cache(place)
        converted = 0.0
        if way.is_ours:
            loaded = trained.load(place)
        else:
            converted = _converted(place / TAG, path / UNIVERSAL)
            loaded = trained.load(path, UNIVERSAL)
        after = on_rank_0(lambda: _files(settings.where))
        expect(trained, digests[way.name, source])
        trained.close()
        of = found.setdefault(way.name, {"converted_s": [], "loaded_s": [], "written_bytes": []})
        of["converted_s"].append(converted)
        of["loaded_s"].append(loaded)
        of["written_bytes"].append(sum(state[0] for file, state in after.items() if before.get(file) != state))

    # Every process that resumes does it once, so the first round counts, too.
    in_turn([WAITED, universal], failed, settings, one, rounds=max(1, settings.rounds - settings.warm_ups))
    return expect_ours({name: of for name, of in found.items() if name not in failed}, failed)


CONVERT = """
import time
from deepspeed.checkpoint import ds_to_universal
said = ds_to_universal.parse_arguments()
began = time.perf_counter()
ds_to_universal.main(said)
print(time.perf_counter() - began)
"""


def _converted(source: Path, target: Path) -> float:
    """Seconds in which DeepSpeed's tool converts a checkpoint, without those in which Python starts."""

    def convert() -> tuple[float, str]:
        command = [sys.executable, "-c", CONVERT, "--input_folder", source, "--output_folder", target]
        ran = subprocess.run(
            [*map(str, command), "--inject_missing_state"],
            env=os.environ | {"OMP_NUM_THREADS": "1"},  # its processes are forked
            capture_output=True,
            text=True,
        )
        if ran.returncode != 0:
            return 0.0, (ran.stderr.strip().splitlines() or ["it ended without a word"])[-1]
        return float(ran.stdout.splitlines()[-1]), ""

    took, error = on_rank_0(convert)
    if error:
        raise RuntimeError(f"ds_to_universal: {error}")
    return took


def memory_worker(settings: Settings, stage: int) -> dict[str, int]:
    """By system, bytes of the rank that needs most in a save; ours first, which keeps its staging memory."""
    layers = layers_of(settings.total_bytes)
    found: dict[str, int] = {}
    for way in (BACKGROUND, DEFAULT, FAST):
        path = settings.where / "deepspeed-memory"
        reason = attempt(_memory, way, layers, stage, path, found)
        remove(path)
        if reason is not None and way.is_ours:
            raise RuntimeError(f"what is to be measured fails: {reason}")
    return found


def _memory(way: Way, layers: int, stage: int, path: Path, found: dict[str, int]) -> None:
    trained = Trained(way, layers, stage)
    trained.step()

    def save() -> None:
        trained.save(path)
        trained.finish(path)

    found[way.name] = max(of_all(extra_memory(save)))
    trained.close()


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
    print(f"  {DEEPSPEED}: ds_to_universal without Python's start, then load_universal, out of the page cache")
    return figures


def main() -> None:
    settings = asked(gigabytes=GIGABYTES, processes=PROCESSES)
    found = run(worker, settings, environment=LAUNCHED)
    size, failed, digests = found["bytes"], found["failed"] | NOT_MEASURED, found["digests"]
    resumed: dict[str, Any] = {}
    for world in list(WORLDS)[: 1 if settings.quick else None]:
        of_world = run(resumed_worker, replace(settings, processes=world), digests, environment=LAUNCHED)
        resumed |= of_world["cases"]
        failed |= of_world["failed"]
    budget = LAUNCHED | {session.STAGING_BYTES: str(BUDGET_BYTES)}
    stages = STAGES[-1:] if settings.quick else STAGES
    memory = {of_stage(stage): run(memory_worker, settings, stage, environment=budget) for stage in stages}
    figures: dict[str, Any] = {
        "bytes": size,
        "failed": failed,
        "saves": show_saves(found["saves"], size, stall=OURS_ASYNC, durable=OURS, processes=PROCESSES),
        "loads": show_loads(found["loads"], size, "into a new engine of the same stage", PROCESSES),
        "resumed": _show_resumed(resumed, size),
        "memory": show_memory(memory, BUDGET_BYTES),
    }
    show_notes(found["notes"], failed)
    answer(figures)


if __name__ == "__main__":
    main()
