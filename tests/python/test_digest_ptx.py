"""The kernel that devices run, assembled for them by the assembler that comes with Triton."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest
from older import IS_OLDER

ROOT = Path(__file__).parents[2]
KERNEL = ROOT / "crates" / "transfer" / "src" / "cuda" / "device" / "digest.ptx"


@pytest.fixture(scope="module")
def assembler() -> Path:
    triton = importlib.util.find_spec("triton")
    if triton is None or triton.origin is None:
        pytest.skip("Triton is not installed: there is no assembler here")
    found = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "ptxas"
    if not os.access(found, os.X_OK):
        pytest.skip("this Triton has no assembler")
    return found


NEWEST = pytest.param("sm_100", marks=pytest.mark.skipif(IS_OLDER, reason="older assemblers do not know it"))


@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_90", NEWEST])
def test_the_kernel_assembles_for_every_device(assembler, target, tmp_path):
    out = tmp_path / "digest.cubin"
    command = [assembler, "--warning-as-error", "-v", "-arch", target, KERNEL, "-o", out]
    run = subprocess.run(command, capture_output=True, text=True)
    said = run.stdout + run.stderr
    assert run.returncode == 0, said
    assert out.stat().st_size > 0
    assert "0 bytes spill stores" in said, said
