"""What a user writes, checked by `mypy --strict` against the installed package: every public name, with its types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import shardfast as sf


class Loader:
    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def train(run: Path, total: int) -> int:
    state: dict[str, Any] = {"dataloader": Loader(), "extra": {"args": {"lr": 1e-3}, "seed": sf.PerRank(1)}}
    seen: list[int] = []
    state["extra"] |= {"random": sf.random_state(), "seen": sf.Stateful(seen.copy, seen.extend)}
    keep = sf.last(3) | sf.every(10_000)
    with sf.Checkpointer(run, every=sf.steps(200), keep=keep) as ckpt:
        start: int = ckpt.restore(state, older=True, strict=False, cast=True, per_rank="rank0")
        for step in range(start, total):
            saved: bool = ckpt.step(step + 1, state)
            if not saved and step + 1 == total:
                ckpt.save(step + 1, state)
        newest: int | None = ckpt.newest
    with sf.Checkpointer(run, every=sf.optimal(mtbf="6h", at_least=10, at_most=1000)) as ckpt:
        due: int | None = ckpt.every.next_due(start) if ckpt.every else None
        print(ckpt.every, due)
    return newest or 0


def plain(path: str) -> str:
    state: dict[str, Any] = {"extra": {"note": "hello"}}
    sf.save(path, state, step=3, user={"git": "abc"})
    pending: sf.Pending = sf.save_async(f"{path}-later", state)
    pending.staged(timeout_s=10.0)
    pending.committed()
    report: dict[str, Any] = pending.report
    if not pending.done():
        raise sf.Internal(str(report))
    plan: sf.LoadPlan = sf.plan_load(path, state, only=["extra"], rename={"extra/old": "extra/note"})
    sf.load(path, state, rename=lambda name: name.removeprefix("ema_"))
    try:
        sf.load(f"{path}-missing", state)
    except (sf.NotFound, sf.Corrupt, sf.Unsupported) as error:
        problem: sf.Error = error
        return f"{plan}{problem}"
    except sf.Error:
        raise
    return str(plan)
