"""The example: stopped on two processes with two workers each, resumed on three with one, by its own command lines."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def lines_of(run, processes, workers, until=None):
    """What it prints; the job is killed once it has made step ``until``."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += [str(ROOT / "examples" / "loader.py"), str(run), f"--workers={workers}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        for line in process.stdout:
            found.append(line.strip())
            if line.startswith(f"step {until}:"):
                os.killpg(process.pid, 9)
                break
    assert until is not None or process.returncode == 0
    return found


def test_each_byte_is_read_once(tmp_path):
    lines_of(tmp_path / "run", 2, 2, until=20)
    lines_of(tmp_path / "run", 1, 0, until=60)
    rest = lines_of(tmp_path / "run", 3, 1)
    first = int(re.match(r"step (\d+):", rest[0])[1])
    assert first in (51, 61)
    assert rest[-1] == "all sources: each byte once"
