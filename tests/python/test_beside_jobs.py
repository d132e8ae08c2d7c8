"""The command beside jobs that save, keep and go on."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import shardfast as sf

COMMAND = Path(sys.executable).with_name("shardfast")


def opens(process, path):
    """Whether the process has a file below this path open now."""
    fds = Path(f"/proc/{process.pid}/fd")
    for number in os.listdir(fds):
        try:
            if os.readlink(fds / number).startswith(f"{path}/"):
                return True
        except OSError:
            continue
    return False


def test_a_checkpoint_that_leaves_while_the_run_is_verified_is_no_damage(tmp_path):
    steps = [tmp_path / f"step-{step:08}" for step in (1, 2)]
    for step, place in enumerate(steps, 1):
        sf.save(place, {"model": {"w": np.full(32 << 20, step, np.float64)}}, step=step)
    verify = subprocess.Popen([COMMAND, "verify", "--all", "--json", tmp_path], stdout=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while not (found := [place for place in steps if opens(verify, place)]):
        assert verify.poll() is None and time.monotonic() < until
    verify.send_signal(signal.SIGSTOP)
    (first,) = found
    (other,) = [place for place in steps if place != first]
    shutil.rmtree(other)
    verify.send_signal(signal.SIGCONT)
    said = json.loads(verify.communicate(timeout=240)[0])
    assert verify.returncode == 0 and said["sound"] is True, said
    assert [one["url"] for one in said["checkpoints"]] == [str(first)]
    assert said["left"] == [str(other)]


def test_a_job_goes_on_no_more_behind_a_rewind(tmp_path):
    run = tmp_path / "run"
    state = {"model": {"w": np.zeros(4)}}
    with sf.Checkpointer(run, every=sf.steps(1)) as ckpt:
        for step in (1, 2, 3):
            ckpt.step(step, state)
        ckpt.wait()
        rewound = subprocess.run([COMMAND, "rewind", "--to", "2", run], capture_output=True, text=True)
        assert rewound.returncode == 0 and "moved 1 step (3)" in rewound.stdout, rewound
        with pytest.raises(sf.Conflict, match="only the newest job commits and deletes"):
            ckpt.save(4, state)
            ckpt.wait()
        with pytest.raises(sf.Conflict):
            ckpt.save(5, state)
            ckpt.wait()
    assert sorted(path.parent.name for path in run.glob("step-*/COMMIT")) == ["step-00000001", "step-00000002"]
    with sf.Checkpointer(run, every=sf.steps(1)) as ckpt:  # the job that goes on from there
        assert ckpt.restore(state) == 2
        ckpt.step(3, state)
        ckpt.wait()
    assert sorted(path.parent.name for path in run.glob("step-*/COMMIT"))[-1] == "step-00000003"
