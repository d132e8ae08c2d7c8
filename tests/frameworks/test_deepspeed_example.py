"""The example: stopped under ZeRO-2 on two processes, resumed under ZeRO-3 on three, by its own command lines."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def losses(run, processes, stage, steps, until=None):
    """The losses by step; the job is killed once it prints that of step ``until``."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += [str(ROOT / "examples" / "deepspeed_zero.py"), str(run), f"--stage={stage}", f"--steps={steps}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = {}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        for line in process.stdout:
            said = re.fullmatch(r"step (\d+): loss (\S+)", line.strip())
            if said is not None:
                found[int(said[1])] = float(said[2])
            if said is not None and int(said[1]) == until:
                os.killpg(process.pid, 9)
                break
    assert until is not None or process.returncode == 0
    return found


def test_a_training_is_killed_and_goes_on_in_another_stage_on_another_number_of_processes(tmp_path):
    whole = losses(tmp_path / "whole", 2, 2, 18)
    losses(tmp_path / "run", 2, 2, 40, until=13)
    rest = losses(tmp_path / "run", 3, 3, 18)
    first = min(rest)
    assert first in (6, 11)
    assert list(rest) == list(range(first, 19))
    assert whole[18] < whole[1] - 0.3
    assert all(abs(loss - whole[step]) < 2e-3 for step, loss in rest.items()), (whole, rest)
