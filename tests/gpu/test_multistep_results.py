"""The arithmetic of ``bench/gpu/multistep.py``, on numbers that were made up: it runs without a device."""

import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench/gpu"))

from results import (
    COLUMNS,
    CRASHED_COLUMNS,
    LAZY,
    QUIET,
    Crashed,
    Machine,
    Turns,
    best_steps,
    bus_bytes,
    crashed_row,
    kept,
    law,
    over_of,
    processor_s_per_gb,
    proof_ratio,
    row,
    stalls,
    text_of,
)

MACHINE = Machine(state_bytes=12 * 10**9, gradient_bytes=4 * 10**9, step_s=0.1, bus_b_s=60e9, memory_b_s=3e12)
AHEAD = {
    "held_bytes": 9e9,
    "let_go_bytes": 1e9,
    "gradient_bytes": 5e9,
    "gradients_kept_bytes": 2e9,
    "copy_ms": 150.0,
    "gradient_ms": 80.0,
    "replay_ms": 900.0,
    "proof_ms": 300.0,
    "device_proof_ms": 6.0,
}
QUIET_TURNS = Turns(2, [5.0, 5.0, 5.0], [6.0, 6.0, 6.0])
TURNS = {
    QUIET: QUIET_TURNS,
    LAZY: Turns(2, [5.2, 5.3, 5.4], [18.0, 18.0, 18.0], [4.0, 5.0, 6.0]),
    "over 3 steps": Turns(2, [5.0, 5.1, 5.02], [30.0, 54.0, 24.0], [6.0, 6.0, 6.0], AHEAD),
    "DCP async, pinned": Turns(2, [10.0, 10.0, 10.0], [6.0, 6.0, 6.0]),
}


def test_the_machine():
    assert (MACHINE.x, MACHINE.r) == (pytest.approx(2.0), pytest.approx(1 / 3))


@pytest.mark.parametrize("r", [1 / 3, 1 / 7])
@pytest.mark.parametrize("steps", [2, 3, 6])
def test_the_law_is_the_formulas_of_the_issue(r, steps):
    covered = (1 - (1 - r) ** steps) / r
    assert law(100.0, r, steps, is_waited=False) == pytest.approx(100 - covered)
    assert law(100.0, r, 1, is_waited=False) == 99
    gain = (steps - 1) * (1 - r * steps / 2)
    assert law(100.0, r, 1, is_waited=True) - law(100.0, r, steps, is_waited=True) == pytest.approx(gain)
    assert law(0.5, r, steps, is_waited=False) == law(0.5, r, 1, is_waited=False) == 0


def test_ratios_are_of_a_turn_and_stalls_of_a_save():
    assert stalls(TURNS[LAZY], QUIET_TURNS, 0.1) == pytest.approx([1.0, 1.5, 2.0])
    assert kept(TURNS["DCP async, pinned"], QUIET_TURNS) == [0.5] * 3
    assert processor_s_per_gb(TURNS[LAZY], QUIET_TURNS, MACHINE.state_bytes) == pytest.approx(0.5)
    assert bus_bytes(MACHINE.state_bytes, AHEAD) == 18e9
    assert bus_bytes(MACHINE.state_bytes, {}) == 12e9
    assert proof_ratio(AHEAD, MACHINE.memory_b_s) == pytest.approx(2.0)
    assert proof_ratio({}, MACHINE.memory_b_s) is proof_ratio(AHEAD, math.nan) is None


def test_rows():
    cells = {name: dict(zip(COLUMNS, row(name, TURNS, MACHINE), strict=True)) for name in TURNS}
    assert row(LAZY, TURNS, MACHINE)[:4] == ["1.50", "(1.00 .. 2.00)", "1.00", "0.943"]
    ours = row("over 3 steps", TURNS, MACHINE)
    assert ours[:4] == ["0.10", "(0.00 .. 0.50)", "0.00", "0.996"]
    assert ours[4:] == ["6.00", "1.20", "1.00", "18.00", "1.50", "2.00", "2.00", "150, 80, 900, 300"]
    assert [text for text in cells["DCP async, pinned"].values() if text] == [
        "25.00",
        "(25.00 .. 25.00)",
        "0.500",
        "0.00",
    ]
    assert [text for text in cells[QUIET].values() if text] == ["0", "1"]
    lines = text_of(COLUMNS, {name: row(name, TURNS, MACHINE) for name in TURNS}).splitlines()
    assert len(lines) == 2 + len(TURNS) and len({line.count("|") for line in lines}) == 1


def test_names_say_the_steps():
    assert [over_of(name) for name in (LAZY, "over 4 steps, waited", "synchronous", QUIET)] == [1, 4, None, None]


@pytest.mark.parametrize("cost_s", [0.01, 0.5, 10.0])
def test_the_best_interval_wastes_least(cost_s):
    crash_s, step_s = 600.0, 0.01

    def waste(steps: int) -> float:
        interval = steps * step_s
        return crash_s / interval * math.exp(interval / crash_s) * -math.expm1(-(interval + cost_s) / crash_s)

    found = best_steps(step_s, cost_s, 0.0, crash_s)
    assert waste(found) <= min(waste(round(found * by)) for by in (0.5, 0.9, 0.97, 1.03, 1.1, 2)) + 1e-12
    # Near the first order of it, which is the paper's.
    assert found * step_s == pytest.approx(math.sqrt(2 * cost_s * crash_s), rel=0.1)


def test_the_best_interval_has_bounds():
    assert best_steps(0.1, cost_s=0.1, lag_s=30.0, crash_s=600.0) == 300
    assert best_steps(0.1, cost_s=-1.0, lag_s=0.0, crash_s=600.0) == best_steps(0.1, 0.0001, 0.0, 600.0) >= 1
    assert best_steps(100.0, cost_s=0.1, lag_s=0.0, crash_s=600.0) == 1


def test_a_training_with_crashes():
    cells = crashed_row(Crashed(interval=50, remained=900, lost=70, seconds=120.0, restore_s=[2.0, 4.0]), 0.1)
    assert dict(zip(CRASHED_COLUMNS, cells, strict=True))["of a training without crashes"] == "0.750"
    assert cells == ["50", "7.500", "0.750", "70", "3.00"]
