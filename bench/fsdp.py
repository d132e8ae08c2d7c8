"""FSDP1 beside FSDP2: what describing a state costs, the stall of the first and the later saves, and DCP's way."""

from __future__ import annotations

import functools
import time
import warnings
from pathlib import Path
from typing import Any

import shardfast as sf
import torch
import torch.distributed as dist
from asynchronous import DcpAsync
from figures import Figures, median, ratio, spread, summary, table
from footprint import CONSTANT_BYTES, extra_memory
from ranks import ROUNDS_MAX, Settings, of_all, remove, run
from shardfast import session
from shardfast.description import Describer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import CustomPolicy

FSDP2 = "FSDP2"
KINDS = (FSDP2, "FSDP1, use_orig_params", "FSDP1, flat")
RIVAL = "DCP async, thread"
LAYERS, WIDTH, IN_UNIT = 500, 64, 10
SAVES = 30
BUDGET_BYTES = 16 << 20


def measure(settings: Settings) -> Figures:
    found: dict[str, Any] = run(_worker, settings)
    rows: list[list[object]] = []
    for kind, times in found["times"].items():
        described, later, rival = times["describe_ms"], times["later_ms"], times["rival_ms"]
        of_fsdp2 = median(later) / median(found["times"][FSDP2]["later_ms"])
        of_rival = ratio(rival, later[: len(rival)])
        rows.append([
            kind, median(described), spread(described, 1), median(times["first_ms"]), median(later), spread(later),
            of_fsdp2, median(rival), median(of_rival), spread(of_rival, 1),
        ])  # fmt: skip
    columns = (
        "describe ms", "(min .. max)", "first save ms", "later ms", "(min .. max)", "of FSDP2's",
        f"{RIVAL} ms", "rival/later", "(min .. max)",
    )  # fmt: skip
    title = (
        f"{2 * LAYERS} parameters and their AdamW on {settings.processes} processes; the call of a save, of all ranks"
    )
    table(title, ("", *columns), rows)
    memory: dict[str, int] = run(_memory_worker, settings, environment={session.STAGING_BYTES: str(BUDGET_BYTES)})
    rows = [[kind, f"{extra / (1 << 20):.0f}"] for kind, extra in memory.items()]
    title = f"peak memory of a save above what was there before, of any rank; the budget is {BUDGET_BYTES >> 20} MiB"
    table(title, ("", "MiB"), rows)
    times = {kind: {name: summary(values) for name, values in of.items()} for kind, of in found["times"].items()}
    within = {kind: extra <= BUDGET_BYTES + CONSTANT_BYTES for kind, extra in memory.items()}
    return {"times": times, "memory_bytes": memory, "within budget": within, "rival": RIVAL, "parameters": 2 * LAYERS}


def built(kind: str, layers: int = LAYERS, width: int = WIDTH) -> tuple[nn.Module, torch.optim.Optimizer]:
    warnings.filterwarnings("ignore")
    units = [nn.Sequential(*(nn.Linear(width, width) for _ in range(IN_UNIT))) for _ in range(layers // IN_UNIT)]
    model: nn.Module = nn.Sequential(*units)
    if kind == FSDP2:
        for unit in units:
            fully_shard(unit)
        fully_shard(model)
    else:
        # DCP's stager does not take what FSDP1 gives without a mesh.
        device, mesh = torch.device("cpu"), init_device_mesh("cpu", (dist.get_world_size(),))
        policy = CustomPolicy(lambda module: module in units)
        is_original = "orig" in kind
        model = FullyShardedDataParallel(
            model, device_mesh=mesh, auto_wrap_policy=policy, use_orig_params=is_original, device_id=device
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, foreach=False)
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3) if parameter.numel() else None
    optimizer.step()


def _worker(settings: Settings) -> dict[str, Any]:
    rounds = 2 if settings.quick else SAVES
    rival_rounds = 1 if settings.quick else ROUNDS_MAX
    times: dict[str, dict[str, list[float]]] = {}
    for kind in KINDS:
        model, optimizer = built(kind)
        state = {"model": model, "optimizer": optimizer, "extra": {"step": 1}}
        described: list[float] = []
        for _ in range(rival_rounds + 1):
            dist.barrier()
            began = time.perf_counter()
            Describer(lambda by: None).describe(state, pickle=False)
            described.append((time.perf_counter() - began) * 1e3)
        calls = [_call(settings, state, number) for number in range(rounds + 1)]
        rival = DcpAsync(process=False)
        rival_calls = [_rival_call(settings, rival, model, optimizer) for _ in range(rival_rounds + 1)]
        rival.close()
        pooled = of_all((described[1:], calls[:1], calls[1:], rival_calls[1:]))
        names = ("describe_ms", "first_ms", "later_ms", "rival_ms")
        times[kind] = {name: [t for rank in pooled for t in rank[at]] for at, name in enumerate(names)}
    return {"times": times}


def _call(settings: Settings, state: dict[str, Any], number: int) -> float:
    path = settings.where / f"fsdp-{number}"
    dist.barrier()
    began = time.perf_counter()
    pending = sf.save_async(path, state)
    took = (time.perf_counter() - began) * 1e3
    pending.committed()
    remove(path)
    step(state["model"], state["optimizer"])
    return took


def _rival_call(settings: Settings, rival: DcpAsync, model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """DCP takes FSDP1's state by its SHARDED_STATE_DICT."""
    path = settings.where / "fsdp-rival"
    dist.barrier()
    began = time.perf_counter()
    rival.begin(path, model, optimizer, {"step": 1})
    took = (time.perf_counter() - began) * 1e3
    rival.finish()
    remove(path)
    return took


def _memory_worker(settings: Settings) -> dict[str, int]:
    layers, width = (20, 256) if settings.quick else (40, 1024)
    found: dict[str, int] = {}
    for kind in KINDS:
        model, optimizer = built(kind, layers, width)
        path: Path = settings.where / "fsdp-memory"
        found[kind] = max(of_all(extra_memory(functools.partial(sf.save, path, {"m": model, "o": optimizer}))))
        remove(path)
    return found
