"""A training that is killed at any moment, within and outside of windows, goes on from what it had at a save."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from older import IS_OLDER

pytestmark = pytest.mark.skipif(IS_OLDER, reason="variants are those of the newest PyTorch's kernels")

KILLS = int(os.environ.get("SHARDFAST_AHEAD_KILLS", "1"))
"""Kills of a usual run; a campaign sets more."""

DEADLINE_S = 120
"""For the first save with replayed bytes: long enough for a busy machine."""

TRAINING = """
import hashlib, sys, time
from pathlib import Path
import shardfast as sf, torch
from torch import nn

place, seen = sys.argv[1], Path(sys.argv[2])
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(40, 500), nn.Tanh(), nn.Linear(500, 500), nn.Linear(500, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
state = {"model": model, "optimizer": optimizer}

def digest():
    moments = [optimizer.state[p][name] for p in model.parameters() for name in ("exp_avg", "exp_avg_sq")]
    held = [one.detach().numpy().tobytes() for one in (*model.parameters(), *moments)]
    return hashlib.sha256(b"".join(held)).hexdigest()

with sf.Checkpointer(place, every=sf.steps(6), keep=sf.last(2), over=4) as ckpt:
    begin = ckpt.restore(state)
    if begin:
        told = dict(line.split() for line in seen.read_text().splitlines())
        assert told[str(begin)] == digest(), f"step {begin} holds other bytes than the training had"
    print(begin, flush=True)
    for step in range(begin + 1, begin + 2000):
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 6 == 0:
            with seen.open("a") as log:
                log.write(f"{step} {digest()}\\n")
        ckpt.step(step, state)
        if ckpt.capture.figures():
            Path(f"{seen}.replayed").touch()
        time.sleep(0.003)
"""


def await_file(path: Path) -> None:
    until = time.monotonic() + DEADLINE_S
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert path.exists(), "no save held replayed bytes"


def test_a_training_that_is_killed_goes_on_from_what_it_had(tmp_path):
    dice = random.Random(4)
    begins = []
    for _ in range(KILLS + 1):
        command = [sys.executable, "-c", TRAINING, str(tmp_path / "run"), str(tmp_path / "seen")]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            begins.append(int(process.stdout.readline() or "-1"))
            if len(begins) == 1:
                await_file(tmp_path / "seen.replayed")
            time.sleep(dice.uniform(0.0, 2.0))
            assert process.poll() is None, process.stderr.read()
        finally:
            process.kill()
            process.communicate()
    assert begins[0] == 0 and begins == sorted(begins) and begins[-1] >= begins[1] > 0, begins
