"""The ranks of the measures with Megatron-Core, which `megatron_core.py` starts in an environment that has it.

`python bench/megatron_jobs.py SETTINGS ANSWER`: the settings as JSON, and the file for what was found.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

sys.path.append(str(Path(__file__).parents[1] / "tests" / "megatron"))

import jobs
import megatron_on_cpu
import shardfast as sf
import torch
import torch.distributed as dist
from environments import answer, asked
from figures import OURS
from footprint import extra_memory
from fsdp import BUDGET_BYTES, FSDP2, built
from fsdp import step as step_fsdp
from jobs import Kind, Layout
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron_core import BY_DP, FULLY, OURS_ASYNC
from ranks import Settings, attempt, drop_page_cache, in_turn, of_all, remove, run, settle, timed, turned
from shardfast import session
from shardfast.description import Describer, describe
from systems import sync, sync_directories

SAVED, LOADED = Layout(tp=2, pp=2), Layout()
BYTES_OF_PARAMETER = 14
"""Two in bf16; the fp32 master and two moments."""

WIDE = Kind(hidden=512, ffn=1024, channels=64, vocabulary=1024)
NARROW = Kind(layers=250, hidden=64)
OF_LAYER = 8
"""Parameters of a layer: two matrices of attention and of the MLP each, two norms with their biases."""

SAVES, DESCRIPTIONS, BLOCKS = 10, 5, 2
NO_GROUPS = dict(vars(parallel_state))


class Job:
    """A model and its optimizer in one layout. Several of them share a process: `enter` the one that is used next."""

    def __init__(self, layout: Layout, kind: Kind, seed: int = 0) -> None:
        vars(parallel_state).update(NO_GROUPS)  # destroy_model_parallel() would end other jobs' groups of gloo
        jobs.make_groups(layout)
        self._groups = dict(vars(parallel_state))
        self.chunks, self.optimizer = jobs.build(layout, kind, seed)
        jobs.step(self.chunks, self.optimizer, seed)

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.chunks, "optimizer": self.optimizer}

    def enter(self) -> None:
        vars(parallel_state).update(self._groups)

    def step(self) -> None:
        """A step with the gradients that are there."""
        assert self.optimizer.step()[0]

    def tensors(self) -> Iterator[torch.Tensor]:
        """The parameters of this rank, its masters and moments, in one order."""
        for chunk in self.chunks:
            yield from (parameter.detach() for parameter in chunk.parameters())
        for one in self.optimizer.chained_optimizers:
            for stepped in itertools.chain.from_iterable(group["params"] for group in one.optimizer.param_groups):
                yield stepped.detach()
                yield from (one.optimizer.state[stepped][moment] for moment in ("exp_avg", "exp_avg_sq"))

    def total_bytes(self) -> int:
        """Of a job with data parallelism alone, each element once; every rank calls it."""
        sizes = [(tensor.nbytes, tensor.dtype is torch.float32) for tensor in self.tensors()]
        of_optimizers = of_all(sum(size for size, is_stepped in sizes if is_stepped))
        return sum(of_optimizers) + sum(size for size, is_stepped in sizes if not is_stepped)

    def zero(self) -> None:
        for tensor in self.tensors():
            tensor.zero_()
        for one in self.optimizer.chained_optimizers:
            for state in one.optimizer.state.values():
                state["step"] = torch.zeros(())  # Megatron's load leaves one tensor to all of AdamW's parameters

    def said(self, kind: str, *, by_root: bool = False, is_loading: bool = False) -> dict[str, Any]:
        """The state as Megatron's own loop gives it to `dist_checkpointing`."""
        metadata = self.metadata(kind, by_root) | {"dp_cp_group": self.group}
        (chunk,) = self.chunks
        model = chunk.module.module.sharded_state_dict(metadata=metadata)
        optimizer = self.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
        return {"model": model, "optimizer": optimizer}

    def metadata(self, kind: str, by_root: bool) -> dict[str, Any]:
        metadata: dict[str, Any] = {"distrib_optim_sharding_type": kind}
        if kind == FULLY:
            metadata["distrib_optim_fully_reshardable_mem_efficient"] = by_root
        return metadata | {"chained_optim_avoid_prefix": True, "singleton_local_shards": False}

    @property
    def group(self) -> Any:
        return parallel_state.get_data_parallel_group(with_context_parallel=True)


def repair_load() -> None:
    """Lets Megatron load into AdamW of PyTorch, whose step counter is a tensor that it looks for among the moments."""
    original = DistributedOptimizer._set_main_param_and_optimizer_states

    def with_step(self: Any, parameter: Any, tensors: dict[str, Any]) -> None:
        group, number = self.model_param_group_index_map[parameter]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][number]]
        original(self, parameter, {"step": state["step"], **tensors})

    DistributedOptimizer._set_main_param_and_optimizer_states = with_step


class SaveSystem(Protocol):
    """One way to save.

    Attributes:
        name: In the tables.
        note: Its configuration.
    """

    name: str
    note: str

    def begin(self, path: Path, job: Job) -> None:
        """What the training waits for."""

    def before_step(self) -> None:
        """Waits until the optimizer may step."""

    def finish(self, path: Path) -> None:
        """Waits until the save is durable."""


class Ours:
    def __init__(self, *, asynchronous: bool) -> None:
        self.name = OURS_ASYNC if asynchronous else OURS
        self.note = "sf.save_async" if asynchronous else "sf.save"
        self._is_asynchronous = asynchronous
        self._pending: sf.Pending | None = None

    def begin(self, path: Path, job: Job) -> None:
        if self._is_asynchronous:
            self._pending = sf.save_async(path, job.state)
        else:
            sf.save(path, job.state)

    def before_step(self) -> None:
        if self._pending is not None:
            self._pending.staged()

    def finish(self, path: Path) -> None:
        if self._pending is not None:
            self._pending.committed()


class Theirs:
    def __init__(self, kind: str, *, by_root: bool = False, asynchronous: bool = False) -> None:
        gathered = (", gathered by one" if by_root else ", gathered by all") if kind == FULLY else ""
        self.name = f"{kind}{gathered}{', asynchronous' if asynchronous else ''}"
        forked = ", async_strategy=mcore, whose forked writer copies nothing on a CPU" if asynchronous else ""
        self.note = (
            "dist_checkpointing.save, fully parallel, structure cached after the first save and not validated again"
            f"{forked}; files synced by itself, metadata.json and the directory for it"
        )
        self._kind, self._by_root = kind, by_root
        self._queue = AsyncCallsQueue() if asynchronous else None
        self._strategy: Any = None

    def begin(self, path: Path, job: Job) -> None:
        is_first = self._strategy is None
        if is_first:
            plain = TorchDistSaveShardedStrategy(cached_metadata=True)
            self._strategy = FullyParallelSaveStrategyWrapper(plain, job.group, do_cache_distribution=True)
        if dist.get_rank() == 0:
            path.mkdir(parents=True)
        request = dist_checkpointing.save(
            job.said(self._kind, by_root=self._by_root),
            str(path),
            self._strategy,
            validate_access_integrity=is_first,
            async_sharded_save=self._queue is not None,
            content_metadata=job.metadata(self._kind, self._by_root),
            async_strategy="mcore",
        )
        if self._queue is not None:
            self._queue.schedule_async_request(request)
        else:
            self._sync(path)

    def before_step(self) -> None:
        """The forked writer has the memory of the call."""

    def finish(self, path: Path) -> None:
        if self._queue is not None:
            self._queue.maybe_finalize_async_calls(blocking=True)
            self._sync(path)

    def _sync(self, path: Path) -> None:
        if dist.get_rank() == 0:
            sync(path / "metadata.json")
        sync_directories(path)


def save_systems() -> list[SaveSystem]:
    theirs = [(FULLY, False), (FULLY, True), (BY_DP, False)]
    return [
        *(Ours(asynchronous=asynchronous) for asynchronous in (True, False)),
        *(
            Theirs(kind, by_root=by_root, asynchronous=asynchronous)
            for kind, by_root in theirs
            for asynchronous in (True, False)
        ),
    ]


@dataclass(frozen=True)
class Loading:
    """One way to load.

    Attributes:
        name: In the tables.
        saved: The system that saved.
        load: Loads what it saved into a job.
        reshards: Whether another tensor and pipeline parallelism can load it.
    """

    name: str
    saved: SaveSystem
    load: Callable[[Path, Job], None]
    reshards: bool = True


def load_systems() -> list[Loading]:
    def theirs(path: Path, job: Job, *, kind: str, parallel: bool) -> None:
        strategy: Any = TorchDistLoadShardedStrategy()
        if parallel:
            strategy = FullyParallelLoadStrategyWrapper(strategy, job.group)
        said = job.said(kind, is_loading=True)
        loaded = dist_checkpointing.load(said, str(path), strategy, validate_access_integrity=False)
        (chunk,) = job.chunks
        chunk.module.module.load_state_dict(loaded["model"])
        job.optimizer.load_state_dict(loaded["optimizer"])

    def ours(path: Path, job: Job) -> None:
        sf.load(path, job.state)

    fully, by_dp = Theirs(FULLY), Theirs(BY_DP)
    return [
        Loading(OURS, Ours(asynchronous=False), ours),
        Loading(FULLY, fully, functools.partial(theirs, kind=FULLY, parallel=False)),
        Loading(f"{FULLY}, fully parallel load", fully, functools.partial(theirs, kind=FULLY, parallel=True)),
        Loading(BY_DP, by_dp, functools.partial(theirs, kind=BY_DP, parallel=False), reshards=False),
    ]


def wide(total_bytes: int) -> Kind:
    """A model of about so many bytes with its optimizer, whose layers two stages share."""
    matrices = 2 * WIDE.hidden * 8 * WIDE.channels + WIDE.hidden * 8 * WIDE.channels + 3 * WIDE.hidden * WIDE.ffn
    return replace(WIDE, layers=2 * max(1, round(total_bytes / BYTES_OF_PARAMETER / matrices / 2)))


def worker(settings: Settings) -> dict[str, Any]:
    repair_load()
    kind = wide(settings.total_bytes)
    told: dict[str, Any] = {"failed": {}, "notes": {one.name: one.note for one in save_systems()}, "saves": {}}
    source, target = Job(SAVED, kind), Job(LOADED, kind)
    told["bytes"] = target.total_bytes()
    for job, layout in ((source, SAVED), (target, LOADED)):
        job.enter()
        failed: dict[str, str] = {}
        told["saves"][str(layout)] = _saves(settings, job, failed)
        told["failed"] |= {f"{name}, {layout}": reason for name, reason in failed.items()}
    failed = {}
    told["loads"] = _loads(settings, source, target, Job(SAVED, kind, seed=5), failed)
    told["failed"] |= {f"load of {name}": reason for name, reason in failed.items()}
    del source, target
    told |= _descriptions(settings)
    end_children()
    return told


def _saves(settings: Settings, job: Job, failed: dict[str, str]) -> dict[str, Any]:
    """By system the first save, and those that are measured: of the slowest rank the call, the wait, until durable."""
    found: dict[str, Any] = {}

    def one(system: SaveSystem, path: Path, is_measured: bool) -> None:
        settle(settings)
        dist.barrier()
        began = time.perf_counter()
        system.begin(path, job)
        called = time.perf_counter()
        system.before_step()
        waited = time.perf_counter()
        system.finish(path)
        dist.barrier()
        ended = time.perf_counter()
        job.step()
        took = of_all((called - began, waited - called, ended - began))
        of = found.setdefault(system.name, {"first": [], "later": []})
        of["later" if is_measured else "first"].append([max(times) for times in zip(*took, strict=True)])

    in_turn(save_systems(), failed, settings, one, rounds=settings.rounds)
    return _expect_ours({name: of for name, of in found.items() if name not in failed}, failed)


def _expect_ours(found: dict[str, Any], failed: dict[str, str]) -> dict[str, Any]:
    if {OURS, OURS_ASYNC} & failed.keys():
        raise RuntimeError(f"what is to be measured fails: {failed}")
    return found


def _loads(settings: Settings, source: Job, target: Job, same: Job, failed: dict[str, str]) -> dict[str, Any]:
    """By system the seconds of cold loads, into the layout of the save and into another one."""
    order = load_systems()
    source.enter()
    saved = {id(one.saved): (one.saved, settings.where / f"megatron-{number}") for number, one in enumerate(order)}
    for system, path in saved.values():
        system.begin(path, source)
    settle(settings)
    expected = {"same": [tensor.clone() for tensor in source.tensors()]}
    seconds: dict[str, dict[str, list[float]]] = {one.name: {"same": [], "resharded": []} for one in order}

    def load(one: Loading, into: str, is_measured: bool) -> None:
        job = same if into == "same" else target
        job.enter()
        job.zero()
        path = saved[id(one.saved)][1]
        drop_page_cache(path)
        took = timed(functools.partial(one.load, path, job)).seconds
        # Megatron's load into another layout says what ours shall be, and the reverse.
        mine = expected.setdefault(into, [tensor.clone() for tensor in job.tensors()])
        if not all(map(torch.equal, job.tensors(), mine)):
            raise AssertionError(f"{one.name} loaded other bytes")
        if is_measured:
            seconds[one.name][into].append(took)

    for number in range(settings.warm_ups + settings.rounds):
        for one in turned(list(order), number):
            for into in ("same", "resharded") if one.reshards else ("same",):
                reason = attempt(load, one, into, number >= settings.warm_ups)
                if reason is not None:
                    failed[one.name] = reason
                    order.remove(one)
                    del seconds[one.name]
                    break
    for _, path in saved.values():
        remove(path)
    return _expect_ours(seconds, failed)


def _descriptions(settings: Settings) -> dict[str, Any]:
    """What it costs to describe a layout, and later saves beside those of FSDP2 with as many tensors."""
    job = Job(SAVED, replace(NARROW, layers=20) if settings.quick else NARROW)
    state, parameters = job.state, sum(1 for chunk in job.chunks for _ in chunk.parameters())
    regions = sum(len(leaf.layout.regions) for leaf in describe(state) if hasattr(leaf, "layout"))
    first: list[float] = []
    again: list[float] = []
    for _ in range(DESCRIPTIONS + 1):
        describer = Describer(lambda by: None)
        dist.barrier()
        first.append(_ms(lambda describer=describer: describer.describe(state, pickle=False)))
        again.append(_ms(lambda describer=describer: describer.describe(state, pickle=False)))
    tensors = len(list(job.tensors())) + parameters  # and a step counter each
    fsdp2 = built(FSDP2, layers=max(of_all(tensors)) // 8, width=64)
    calls: dict[str, dict[str, list[float]]] = {}
    for _ in range(1 if settings.quick else BLOCKS):
        for name, of, step in (
            ("Megatron", state, job.step),
            (FSDP2, dict(zip(("model", "optimizer"), fsdp2, strict=True)), lambda: step_fsdp(*fsdp2)),
        ):
            took = [_call(settings, of, step) for _ in range(1 + (2 if settings.quick else SAVES))]
            into = calls.setdefault(name, {"first": [], "later": []})
            into["first"].append(took[0])
            into["later"] += took[1:]
    pooled = of_all((parameters, regions, tensors, first[1:], again[1:], calls))
    return {
        "described": [
            {"parameters": parameters, "regions": regions, "tensors": tensors, "first_ms": of_first, "again_ms": again}
            for parameters, regions, tensors, of_first, again, _ in pooled
        ],
        "calls_ms": {
            name: {which: [call for *_, of in pooled for call in of[name][which]] for which in ("first", "later")}
            for name in calls
        },
    }


def _ms(action: Callable[[], object]) -> float:
    """Without the stand-ins' function mode, which would cost more than what is measured with this."""
    with megatron_on_cpu.without_mode():
        began = time.perf_counter()
        action()
        return (time.perf_counter() - began) * 1e3


def _call(settings: Settings, state: dict[str, Any], step: Callable[[], object]) -> float:
    """The call of a save, in ms."""
    path = settings.where / "megatron-call"
    begun: list[sf.Pending] = []
    dist.barrier()
    took = _ms(lambda: begun.append(sf.save_async(path, state)))
    begun[0].committed()
    remove(path)
    step()
    return took


def memory_worker(settings: Settings, layout: Layout) -> dict[str, int]:
    """By system, bytes of the rank that needs most in a save; ours first, which keeps its staging memory."""
    job = Job(layout, wide(settings.total_bytes))
    found: dict[str, int] = {}
    for system in save_systems():
        if not system.name.endswith("asynchronous"):
            path = settings.where / "megatron-memory"
            found[system.name] = max(of_all(extra_memory(functools.partial(system.begin, path, job))))
            remove(path)
    end_children()
    return found


def end_children() -> None:
    """Ends the manager of Megatron's queue, which would outlive this process."""
    for child in multiprocessing.active_children():
        child.terminate()


def main() -> None:
    settings = asked()
    found = run(worker, settings)
    budget = {session.STAGING_BYTES: str(BUDGET_BYTES)}
    found["memory_bytes"] = {
        str(layout): run(memory_worker, settings, layout, environment=budget) for layout in (SAVED, LOADED)
    }
    found["budget_bytes"] = BUDGET_BYTES
    answer(found)


if __name__ == "__main__":
    main()
