"""The arithmetic behind the rows of ``multistep.py``: from what was measured to what is printed, nothing else."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

LAZY = "one step (lazy)"
QUIET = "no checkpoints"


@dataclass
class Turns:
    """What the turns of one way took.

    Attributes:
        saves: In each turn.
        seconds: Of the steps of each turn.
        processor_s: Of the process, from the begin of each turn until its saves were committed.
        lags_s: From a saved step to its commit, for each turn its last save; empty where a way does not tell.
        ahead: The medians of :class:`shardfast.Checkpointer`'s figures of captures over several steps.
    """

    saves: int
    seconds: list[float] = field(default_factory=list)
    processor_s: list[float] = field(default_factory=list)
    lags_s: list[float] = field(default_factory=list)
    ahead: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Machine:
    """What a training and its device are beside a save.

    Attributes:
        state_bytes: Of parameters and moments.
        gradient_bytes: Of the gradients of one step.
        step_s: A step without checkpoints.
        bus_b_s: One copy from the device to page-locked memory.
        memory_b_s: At which the device reads its own memory; ``nan`` without a device.
    """

    state_bytes: int
    gradient_bytes: int
    step_s: float
    bus_b_s: float
    memory_b_s: float

    @property
    def x(self) -> float:
        """The time of a copy of the state, in steps."""
        return self.state_bytes / self.bus_b_s / self.step_s

    @property
    def r(self) -> float:
        return self.gradient_bytes / self.state_bytes


def law(x: float, r: float, steps: int, *, is_waited: bool) -> float:
    """The stall in steps of a capture over so many steps."""
    if steps == 1:
        return max(x - 1, 0.0)
    held = waited = 0.0
    for step in range(steps):
        gradients = r * held if step else 0.0
        waited += gradients if is_waited else 0.0
        held = min(x, held + (1.0 if is_waited else max(0.0, 1.0 - gradients)))
    return x - held + waited


def stalls(turns: Turns, quiet: Turns, step_s: float) -> list[float]:
    """What each save cost the training, in steps, by turn."""
    pairs = zip(turns.seconds, quiet.seconds, strict=True)
    return [(took - alone) / step_s / turns.saves for took, alone in pairs]


def kept(turns: Turns, quiet: Turns) -> list[float]:
    """The training's speed, without checkpoints being 1, by turn."""
    return [alone / took for took, alone in zip(turns.seconds, quiet.seconds, strict=True)]


def processor_s_per_gb(turns: Turns, quiet: Turns, state_bytes: int) -> float:
    """Processor time beyond that of the training, for each GB saved."""
    beyond = [took - alone for took, alone in zip(turns.processor_s, quiet.processor_s, strict=True)]
    return statistics.median(beyond) / (turns.saves * state_bytes / 1e9)


def bus_bytes(state_bytes: int, ahead: dict[str, float]) -> float:
    """Bytes of a save that leave the device: the state, gradients, and what was held, let go and copied again."""
    return state_bytes + ahead.get("gradient_bytes", 0.0) + ahead.get("let_go_bytes", 0.0)


def proof_ratio(ahead: dict[str, float], memory_b_s: float) -> float | None:
    """The device's part of the proof beside reading what is proven at the rate of its memory."""
    if not ahead.get("held_bytes") or not math.isfinite(memory_b_s):
        return None
    return ahead["device_proof_ms"] / 1e3 / (ahead["held_bytes"] / memory_b_s)


def best_steps(step_s: float, cost_s: float, lag_s: float, crash_s: float) -> int:
    """The steps between saves that waste least, T = M (1 + W0(-exp(-1 - c/M))), but not less than a save takes.

    With u = T/M that is the root of (1 - u) exp(u) = exp(-c/M) between 0 and 1, where the left side falls. A cost that
    was measured as nothing counts as a thousandth of a step.
    """
    target = math.exp(-max(cost_s, step_s / 1000) / crash_s)
    low, high = 0.0, 1.0
    for _ in range(60):
        u = (low + high) / 2
        low, high = (u, high) if (1 - u) * math.exp(u) > target else (low, u)
    return max(1, math.ceil(max(low * crash_s, lag_s) / step_s))


def over_of(name: str) -> int | None:
    """The steps over which a way captures, as its name says."""
    if name == LAZY:
        return 1
    words = name.split()
    return int(words[1]) if words[0] == "over" else None


COLUMNS = (
    *("stall in steps", "(min .. max)", "law", "training", "commit, s", "of lazy", "CPU s/GB", "bus, GB", "of lazy"),
    *("proof, of reading", "gradients kept, GB", "copies, gradients, replay, proof: ms"),
)


def row(name: str, turns: dict[str, Turns], machine: Machine) -> list[str]:
    """The cells of a way under :data:`COLUMNS`; empty ones were not measured."""
    own, quiet, lazy = turns[name], turns[QUIET], turns.get(LAZY)
    if name == QUIET:
        return ["0", "", "", "1", *[""] * (len(COLUMNS) - 4)]
    found, over, lag = stalls(own, quiet, machine.step_s), over_of(name), median_or_none(own.lags_s)
    of_lazy = median_or_none(lazy.lags_s) if lazy else None
    bus, ahead = bus_bytes(machine.state_bytes, own.ahead), own.ahead
    expected = law(machine.x, machine.r, over, is_waited=name.endswith("waited")) if over else None
    is_ours = not name.startswith("DCP")  # what others copy is not known
    parts = [ahead.get(f"{part}_ms") for part in ("copy", "gradient", "replay", "proof")]
    return [
        f"{statistics.median(found):.2f}",
        f"({min(found):.2f} .. {max(found):.2f})",
        cell(expected),
        cell(statistics.median(kept(own, quiet)), 3),
        cell(lag),
        cell(lag / of_lazy if lag is not None and of_lazy else None),
        cell(processor_s_per_gb(own, quiet, machine.state_bytes)),
        cell(bus / 1e9 if is_ours else None),
        cell(bus / machine.state_bytes if is_ours else None),
        cell(proof_ratio(ahead, machine.memory_b_s)),
        cell(ahead["gradients_kept_bytes"] / 1e9 if ahead else None),
        ", ".join(f"{part:.0f}" for part in parts if part is not None),
    ]


def median_or_none(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def cell(value: float | None, digits: int = 2) -> str:
    return "" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def text_of(columns: tuple[str, ...], rows: dict[str, list[str]]) -> str:
    """A table as Markdown."""
    lines = [["", *columns], ["---"] * (len(columns) + 1), *([name, *cells] for name, cells in rows.items())]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@dataclass
class Crashed:
    """A training with crashes: the steps between saves, steps that remained, steps that were lost, and all seconds."""

    interval: int
    remained: int = 0
    lost: int = 0
    seconds: float = 0.0
    restore_s: list[float] = field(default_factory=list)


CRASHED_COLUMNS = ("steps between saves", "steps a second", "of a training without crashes", "lost", "restore, s")


def crashed_row(crashed: Crashed, step_s: float) -> list[str]:
    pace = crashed.remained / crashed.seconds
    restored = cell(median_or_none(crashed.restore_s))
    return [f"{crashed.interval}", cell(pace, 3), cell(pace * step_s, 3), f"{crashed.lost}", restored]
