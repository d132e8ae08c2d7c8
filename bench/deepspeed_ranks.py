"""The ranks of the measures with DeepSpeed, which `deepspeed_engines.py` starts in an environment that has it.

`python bench/deepspeed_ranks.py SETTINGS ANSWER`: the settings as JSON, and the file for what was found.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests" / "frameworks"))

import shardfast.integrations.deepspeed as block
import torch
import torch.distributed as dist
from deepspeed_engines import STAGES, THEIRS, WORLDS, of_stage
from deepspeed_jobs import BATCH, Job, deepspeed, said
from environments import answer, asked
from figures import OURS
from footprint import extra_memory
from fsdp import BUDGET_BYTES
from megatron_core import OURS_ASYNC
from ranks import Settings, attempt, drop_page_cache, in_turn, of_all, on_rank_0, remove, run, timed
from shardfast import session
from systems import sync_files_of_rank
from trained import Digests, Maker, expect, expect_ours, loads_of, saves_of

BYTES_OF_PARAMETER = 14
"""Two in bf16; the fp32 master and two moments."""

WIDTH, RANK = 1024, 16
NARROW_LAYERS, NARROW_WIDTH = 500, 64
SAVES = 10
TAG, UNIVERSAL = "saved", "universal"
LAUNCHED = {"CROSS_SIZE": "1", "CROSS_RANK": "0"}
"""What DeepSpeed's launcher says of the machines; its fast writer asks for it."""


@dataclass(frozen=True)
class Kind:
    """A model of square layers.

    Attributes:
        layers: Their number.
        width: Their width.
        rank: The rank of the adapters that alone are trained; 0 to train everything.
    """

    layers: int
    width: int
    rank: int = 0

    @property
    def trained(self) -> int:
        """The elements that are trained."""
        return self.layers * (2 * self.width * self.rank if self.rank else self.width * (self.width + 1))


class Adapted(torch.nn.Module):
    """A frozen layer beside an adapter of low rank."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.frozen = torch.nn.Linear(kind.width, kind.width).requires_grad_(False)
        self.down = torch.nn.Linear(kind.width, kind.rank, bias=False)
        self.up = torch.nn.Linear(kind.rank, kind.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + self.up(self.down(x))


class Model(torch.nn.Module):
    """Layers with a sum around each, so that gradients reach the first one of many."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            Adapted(kind) if kind.rank else torch.nn.Linear(kind.width, kind.width) for _ in range(kind.layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x) / len(self.layers)
        return x


def wide(total_bytes: int) -> Kind:
    """A model of about so many bytes with its optimizer."""
    return Kind(max(1, round(total_bytes / BYTES_OF_PARAMETER / Kind(1, WIDTH).trained)), WIDTH)


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
    THEIRS,
    "its default engine, torch.save and torch.load; files and directories synced for it, which counts for the durable "
    "save and not for the stall",
    {},
)
FAST = Way(
    f"{THEIRS}, fast",
    '"checkpoint": {"writer": {"type": "fast", "data_parallel": "replica"}}; files and directories synced for it; its '
    "loads are not measured",
    {"checkpoint": {"writer": {"type": "fast", "data_parallel": "replica"}}},
)


class Trained:
    """An engine in training that is saved in one way."""

    def __init__(self, way: Way, kind: Kind, stage: int, seed: int = 0) -> None:
        torch.manual_seed(seed)
        model = Model(kind)
        optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3)
        config = {**Job(stage).config, **way.configuration}
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        self.name = way.name
        self._is_ours, self._width = way.is_ours, kind.width

    def step(self) -> None:
        x = torch.randn(BATCH, self._width).bfloat16()
        self.engine.backward((self.engine(x) - x.flip(1)).float().square().mean())
        self.engine.step()

    def save(self, place: Path, *, exclude_frozen: bool = False) -> None:
        """Saves; the training waits for it."""
        self.engine.save_checkpoint(str(place), tag=TAG, exclude_frozen_parameters=exclude_frozen)

    def before_step(self) -> None:
        """Does nothing: no engine has a wait of its own."""

    def finish(self, place: Path) -> None:
        """Waits until the save is durable."""
        if self._is_ours:
            block._loop_of(self.engine).saves.settle(0)
        else:
            sync_files_of_rank(place)

    def load(self, place: Path, tag: str = TAG, *, strict: bool = True) -> float:
        return timed(functools.partial(self._load, place, tag, strict)).seconds

    def _load(self, place: Path, tag: str, strict: bool) -> None:
        try:
            path, _ = self.engine.load_checkpoint(str(place), tag=tag, load_module_strict=strict)
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
    """On as many processes as save: stalls and durable saves, loads into the same, bytes without what is frozen."""
    kind = wide(settings.total_bytes)
    told: dict[str, Any] = {
        "bytes": kind.trained * BYTES_OF_PARAMETER,
        "failed": {},
        "notes": {way.name: way.note for way in (BACKGROUND, WAITED, DEFAULT, FAST)},
        "saves": {},
        "loads": {},
        "frozen": {},
        "digests": {},
    }
    for stage in STAGES:
        title = of_stage(stage)
        failed: dict[str, str] = {}
        ways = _makers(kind, stage, BACKGROUND, WAITED, DEFAULT, FAST)
        told["saves"][title] = saves_of(ways, settings, failed)
        told["failed"] |= {f"{name}, {title}": reason for name, reason in failed.items()}
        failed = {}
        ways = _makers(kind, stage, WAITED, DEFAULT)
        places = {name: _place(settings, name, stage) for name in ways}
        told["loads"][title], digests = loads_of(ways, places, settings, failed)
        told["digests"] |= {(name, stage): of for name, of in digests.items()}
        told["failed"] |= {f"load of {name}, {title}": reason for name, reason in failed.items()}
        failed = {}
        told["frozen"][title] = _frozen(settings, replace(kind, rank=RANK), stage, failed)
        told["failed"] |= {f"save without frozen, {name}, {title}": reason for name, reason in failed.items()}
    return told


def _makers(kind: Kind, stage: int, *ways: Way) -> dict[str, Maker]:
    return {way.name: functools.partial(Trained, way, kind, stage) for way in ways}


def _place(settings: Settings, name: str, stage: int) -> Path:
    """Where what is loaded by several measures stays."""
    return settings.where / f"deepspeed-{name}-{stage}"


def _frozen(settings: Settings, kind: Kind, stage: int, failed: dict[str, str]) -> dict[str, int]:
    """Bytes of a checkpoint without what is frozen, by system, and of what is trained."""
    found: dict[str, int] = {}

    def one(way: Way, path: Path, is_measured: bool) -> None:
        trained = Trained(way, kind, stage)
        trained.step()
        digests = trained.digests()
        trained.save(path, exclude_frozen=True)
        trained.finish(path)
        trained.close()
        found[way.name] = on_rank_0(lambda: sum(size for size, _ in _files(path / TAG).values()))
        other = Trained(way, kind, stage)  # with the same frozen layers
        other.load(path, strict=way.is_ours)
        expect(other, digests)
        other.close()

    in_turn([WAITED, DEFAULT], failed, replace(settings, quick=True), one, rounds=1)
    return {"trained": kind.trained * BYTES_OF_PARAMETER, **expect_ours(found, failed)}


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
    kind = wide(settings.total_bytes)
    universal = replace(DEFAULT, configuration={"checkpoint": {"load_universal": True}})

    def one(way: Way, path: Path, is_measured: bool) -> None:
        place = _place(settings, way.name, source)
        trained = Trained(way, kind, target, seed=5)
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


def first_worker(settings: Settings, stage: int) -> dict[str, Any]:
    """The call of the first save of engines with many parameters, and of later ones, in ms, of all ranks.

    Before the first save a training asks for what there is to load, as after a restart, and finds nothing.
    """
    kind = Kind(NARROW_LAYERS, NARROW_WIDTH)
    first: list[float] = []
    later: list[float] = []
    for number in range(settings.warm_ups + settings.rounds):
        trained = Trained(BACKGROUND, kind, stage)
        trained.step()
        trained.engine.load_checkpoint(str(settings.where / f"deepspeed-first-{number}"))
        for save in range(1 + (2 if settings.quick else SAVES)):
            path = settings.where / f"deepspeed-first-{number}-{save}"
            dist.barrier()
            began = time.perf_counter()
            trained.save(path)
            (later if save else first).append((time.perf_counter() - began) * 1e3)
            trained.finish(path)
            remove(path)
            trained.step()
        trained.close()
    pooled = of_all((first, later))
    return {
        "parameters": 2 * kind.layers,
        "of_process_ms": [of[0] for of, _ in pooled],
        "of_engine_ms": [call for of, _ in pooled for call in of[1:]],
        "later_ms": [call for _, of in pooled for call in of],
    }


def memory_worker(settings: Settings, stage: int) -> dict[str, int]:
    """By system, bytes of the rank that needs most in a save; ours first, which keeps its staging memory."""
    kind = wide(settings.total_bytes)
    found: dict[str, int] = {}
    for way in (BACKGROUND, DEFAULT, FAST):
        path = settings.where / "deepspeed-memory"
        reason = attempt(_memory, way, kind, stage, path, found)
        remove(path)
        if reason is not None and way.is_ours:
            raise RuntimeError(f"what is to be measured fails: {reason}")
    return found


def _memory(way: Way, kind: Kind, stage: int, path: Path, found: dict[str, int]) -> None:
    trained = Trained(way, kind, stage)
    trained.step()

    def save() -> None:
        trained.save(path)
        trained.finish(path)

    found[way.name] = max(of_all(extra_memory(save)))
    trained.close()


def _of_stages(worker: Callable[..., Any], settings: Settings, environment: dict[str, str]) -> dict[str, Any]:
    """What fresh processes find, by stage; a quick run starts those of one."""
    stages = STAGES[-1:] if settings.quick else STAGES
    return {of_stage(stage): run(worker, settings, stage, environment=LAUNCHED | environment) for stage in stages}


def main() -> None:
    settings = asked()
    found = run(worker, settings, environment=LAUNCHED)
    digests = found.pop("digests")
    found["resumed"] = {}
    for world in list(WORLDS)[: 1 if settings.quick else None]:
        of_world = run(resumed_worker, replace(settings, processes=world), digests, environment=LAUNCHED)
        found["resumed"] |= of_world["cases"]
        found["failed"] |= of_world["failed"]
    found["first"] = _of_stages(first_worker, settings, {})
    found["memory_bytes"] = _of_stages(memory_worker, settings, {session.STAGING_BYTES: str(BUDGET_BYTES)})
    found["budget_bytes"] = BUDGET_BYTES
    answer(found)


if __name__ == "__main__":
    main()
