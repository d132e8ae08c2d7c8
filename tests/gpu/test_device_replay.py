"""Every variant of CUDA, replayed beside PyTorch's own steps on a device: no bit may differ in 1,000 steps of random
and hostile values. Variants of a CPU go through the same code, which shows on any machine that it compares."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rows import CPU_ROWS, CUDA_ROWS, Row
from test_replay import IS_OLDER, STEPS

pytestmark = pytest.mark.skipif(IS_OLDER, reason="variants are those of the newest PyTorch's kernels")

SOURCE = Path(__file__).parents[2] / "crates/optim/src/variant.rs"
names = [row.name for row in CUDA_ROWS]

has_avx2 = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="PyTorch takes other kernels here"
)


def differing(row: Row, device: str, replay: Callable, steps: int) -> dict[str, dict[str, int]]:
    """For each variant of the row the runs in which it has other bits, with the first step after which it had."""
    found: dict[str, dict[str, int]] = {variant: {} for variant in row.variants}
    for run in row.runs:
        case = row.case(run, device, steps=steps)
        for variant, runs in found.items():
            wrong = [number for number, elements in enumerate(case.differing(replay, variant)) if elements]
            if wrong:
                runs[str(run)] = min(steps, (wrong[0] + 1) * case.of_pass)
    return found


def expect_one(row: Row, found: dict[str, dict[str, int]]) -> None:
    equal = [variant for variant, runs in found.items() if not runs]
    print(f"{row.name}: {len(row.runs)} runs, the bits of {', '.join(equal) or 'no variant'}")
    assert equal, f"no variant has the bits of {row.name}; runs by the step after which they differed: {found}"


@pytest.mark.parametrize("row", CUDA_ROWS, ids=names)
def test_steps_of_a_device(device, replay, row):
    expect_one(row, differing(row, str(device), replay, STEPS))


@has_avx2
@pytest.mark.parametrize("row", CPU_ROWS, ids=[row.name for row in CPU_ROWS])
def test_steps_of_this_processor(replay, row):
    expect_one(row, differing(row, "cpu", replay, steps=30))


@has_avx2
def test_another_variant_is_seen_to_differ(replay):
    row = CPU_ROWS[0]
    wrong = row._replace(runs=row.runs[1:2], variants=["adam.fused.cpu-default.f32"])
    with pytest.raises(AssertionError, match="no variant has the bits"):
        expect_one(wrong, differing(wrong, "cpu", replay, steps=30))


def test_every_variant_of_cuda_is_in_a_row():
    known = re.findall(r'\bcuda\("([^"]+)"', SOURCE.read_text())
    assert known and sorted(known) == sorted(variant for row in CUDA_ROWS for variant in row.variants)
