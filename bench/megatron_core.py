"""Megatron-Core with its distributed optimizer, beside Megatron's own checkpoints: stall, durable save, load, memory.

`run.py` starts it in an environment that has Megatron-Core: `megatron_core.py SETTINGS ANSWER`.
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
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests" / "megatron"))

import jobs
import shardfast as sf
import torch
import torch.distributed as dist
from figures import BY_DP, FULLY, OURS, OURS_ASYNC, Figures, median, ours_first, ratio, spread, summary, table
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
from ranks import (
    BUDGET_BYTES,
    Settings,
    answer,
    asked,
    attempt,
    drop_page_cache,
    extra_memory,
    of_all,
    remove,
    run,
    settle,
    timed,
    turned,
)
from rivals import show_notes, sync, sync_directories
from shardfast import session
from shardfast.state.description import Describer, describe
from trained import expect_ours, saves_of, show_memory, show_saves

PROCESSES, GIGABYTES = 4, 0.5
SAVED, LOADED = Layout(tp=2, pp=2), Layout()
BYTES_OF_PARAMETER = 14
"""Two in bf16; the fp32 master and two moments."""

DESCRIBED_LAYERS, DESCRIPTIONS = 48, 50

WIDE = Kind(hidden=512, ffn=1024, channels=64, vocabulary=1024)
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


class Saved:
    """A job that is saved in one way; other ways save the same job by turns."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def step(self) -> None:
        self.job.step()

    def before_step(self) -> None:
        """Does nothing: a forked writer has the memory of the call."""

    def close(self) -> None:
        """Keeps the job."""


class Ours(Saved):
    def __init__(self, job: Job, *, asynchronous: bool) -> None:
        super().__init__(job)
        self.name = OURS_ASYNC if asynchronous else OURS
        self.note = "sf.save_async" if asynchronous else "sf.save"
        self._is_asynchronous = asynchronous
        self._pending: sf.Pending | None = None

    def save(self, place: Path) -> None:
        if self._is_asynchronous:
            self._pending = sf.save_async(place, self.job.state)
        else:
            sf.save(place, self.job.state)

    def before_step(self) -> None:
        if self._pending is not None:
            self._pending.staged()

    def finish(self, place: Path) -> None:
        if self._pending is not None:
            self._pending.committed()


class Theirs(Saved):
    def __init__(self, job: Job, kind: str, *, by_root: bool = False, asynchronous: bool = False) -> None:
        super().__init__(job)
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

    def save(self, place: Path) -> None:
        is_first = self._strategy is None
        if is_first:
            plain = TorchDistSaveShardedStrategy(cached_metadata=True)
            self._strategy = FullyParallelSaveStrategyWrapper(plain, self.job.group, do_cache_distribution=True)
        if dist.get_rank() == 0:
            place.mkdir(parents=True)
        request = dist_checkpointing.save(
            self.job.said(self._kind, by_root=self._by_root),
            str(place),
            self._strategy,
            validate_access_integrity=is_first,
            async_sharded_save=self._queue is not None,
            content_metadata=self.job.metadata(self._kind, self._by_root),
            async_strategy="mcore",
        )
        if self._queue is not None:
            self._queue.schedule_async_request(request)
        else:
            self._sync(place)

    def finish(self, place: Path) -> None:
        if self._queue is not None:
            self._queue.maybe_finalize_async_calls(blocking=True)
            self._sync(place)

    def _sync(self, place: Path) -> None:
        if dist.get_rank() == 0:
            sync(place / "metadata.json")
        sync_directories(place)


def ways_to_save(job: Job) -> list[Ours | Theirs]:
    theirs = [(FULLY, False), (FULLY, True), (BY_DP, False)]
    return [
        *(Ours(job, asynchronous=asynchronous) for asynchronous in (True, False)),
        *(
            Theirs(job, kind, by_root=by_root, asynchronous=asynchronous)
            for kind, by_root in theirs
            for asynchronous in (True, False)
        ),
    ]


@dataclass(frozen=True)
class Loading:
    """One way to load.

    Attributes:
        name: In the tables.
        saved: The way in which it was saved.
        load: Loads what it saved into a job.
        reshards: Whether another tensor and pipeline parallelism can load it.
    """

    name: str
    saved: Ours | Theirs
    load: Callable[[Path, Job], None]
    reshards: bool = True


def ways_to_load(source: Job) -> list[Loading]:
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

    fully, by_dp = Theirs(source, FULLY), Theirs(source, BY_DP)
    return [
        Loading(OURS, Ours(source, asynchronous=False), ours),
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
    told: dict[str, Any] = {"failed": {}, "notes": {}, "saves": {}}
    source, target = Job(SAVED, kind), Job(LOADED, kind)
    told["bytes"] = target.total_bytes()
    for job, layout in ((source, SAVED), (target, LOADED)):
        job.enter()
        failed: dict[str, str] = {}
        ways = ways_to_save(job)
        told["notes"] |= {way.name: way.note for way in ways}
        makers = {way.name: lambda seed, way=way: way for way in ways}
        told["saves"][str(layout)] = saves_of(makers, settings, failed)
        told["failed"] |= {f"{name}, {layout}": reason for name, reason in failed.items()}
    failed = {}
    told["loads"] = _loads(settings, source, target, Job(SAVED, kind, seed=5), failed)
    told["failed"] |= {f"load of {name}": reason for name, reason in failed.items()}
    del source, target
    end_children()
    return told


def _loads(settings: Settings, source: Job, target: Job, same: Job, failed: dict[str, str]) -> dict[str, Any]:
    """By system the seconds of cold loads, into the layout of the save and into another one."""
    order = ways_to_load(source)
    source.enter()
    saved = {id(one.saved): (one.saved, settings.where / f"megatron-{number}") for number, one in enumerate(order)}
    for system, path in saved.values():
        system.save(path)
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
    return expect_ours(seconds, failed)


def memory_worker(settings: Settings, layout: Layout) -> dict[str, int]:
    """By system, bytes of the rank that needs most in a save; ours first, which keeps its staging memory."""
    job = Job(layout, wide(settings.total_bytes))
    found: dict[str, int] = {}
    for way in ways_to_save(job):
        if not way.name.endswith("asynchronous"):
            path = settings.where / "megatron-memory"
            found[way.name] = max(of_all(extra_memory(functools.partial(way.save, path))))
            remove(path)
    end_children()
    return found


def description_worker(settings: Settings, layout: Layout) -> dict[str, Any]:
    """How long a rank takes to describe a state of many layers: at first, and before each later save."""
    job = Job(layout, Kind(layers=DESCRIBED_LAYERS))
    describer = Describer(lambda by: None)

    def seconds() -> float:
        began = time.perf_counter()
        describer.describe(job.state, pickle=False)
        return time.perf_counter() - began

    first = seconds()
    with torch._C.DisableTorchFunction():  # the mode with which Megatron trains on a CPU here takes half of the time
        later = [seconds() for _ in range(DESCRIPTIONS)]
    parameters = sum(1 for chunk in job.chunks for _ in chunk.parameters())
    return {"parameters": parameters, "leaves": len(describe(job.state)), "first_s": first, "later_s": later}


def end_children() -> None:
    """Ends the manager of Megatron's queue, which would outlive this process."""
    for child in multiprocessing.active_children():
        child.terminate()


def _show_loads(found: dict[str, dict[str, list[float]]], size: int) -> Figures:
    rows: list[list[object]] = []
    figures: dict[str, Any] = {}
    for name, seconds in ours_first(found):
        same, resharded = seconds["same"], seconds["resharded"]
        of_same = ratio(same, resharded) if resharded else []
        of_ours = ratio(resharded, found[OURS]["resharded"]) if resharded else []
        rows.append([
            name, median(same), spread(same), median(resharded), spread(resharded), median(of_same), spread(of_same),
            median(of_ours), spread(of_ours),
        ])  # fmt: skip
        pairs = {"same_s": same, "resharded_s": resharded, "resharded_of_same": of_same, "resharded_of_ours": of_ours}
        figures[name] = {what: summary(values) for what, values in pairs.items()}
    columns = (
        "same layout s", "(min .. max)", "resharded s", "(min .. max)", "its rate of the same's", "(min .. max)",
        f"of {OURS}'s", "(min .. max)",
    )  # fmt: skip
    title = f"cold loads of {size / 1e9:.2f} GB that TP2 x PP2 saved, into the same and into DP4"
    table(title, ("", *columns), rows)
    return figures


def _show_descriptions(found: dict[str, Any]) -> Figures:
    leaves, later = found["leaves"], [seconds * 1e6 / found["leaves"] for seconds in found["later_s"]]
    per_thousand = found["first_s"] * 1e6 / found["parameters"]
    title = f"descriptions of {found['parameters']} parameters, {leaves} leaves, on one rank"
    columns = ("first, ms per 1,000 parameters", "later, us a leaf", "(min .. max)")
    table(title, columns, [[per_thousand, median(later), spread(later)]])
    return {"first_ms_per_1000_parameters": per_thousand, "later_us_a_leaf": summary(later)}


def main() -> None:
    settings = asked(gigabytes=GIGABYTES, processes=PROCESSES)
    found = run(worker, settings)
    budget = {session.STAGING_BYTES: str(BUDGET_BYTES)}
    memory = {str(layout): run(memory_worker, settings, layout, environment=budget) for layout in (SAVED, LOADED)}
    figures: dict[str, Any] = {
        "bytes": found["bytes"],
        "failed": found["failed"],
        "saves": show_saves(found["saves"], found["bytes"], stall=OURS_ASYNC, durable=OURS, processes=PROCESSES),
        "loads": _show_loads(found["loads"], found["bytes"]),
        "memory": show_memory(memory, BUDGET_BYTES),
        "descriptions": _show_descriptions(run(description_worker, replace(settings, processes=1), LOADED)),
    }
    show_notes(found["notes"], found["failed"])
    answer(figures)


if __name__ == "__main__":
    main()
