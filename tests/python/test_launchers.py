"""Processes that a launcher has started find each other without torch.distributed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from shardfast.launchers import first_of, most_of

PROGRAM = """
import sys
import numpy as np, shardfast as sf

rank = int(sys.argv[2])
state = {"model": {"w": np.arange(1000.0)}, "mine": sf.PerRank(rank)}
sf.save(sys.argv[1], state, timeout_s=60)
state = {"model": {"w": np.zeros(1000)}, "mine": sf.PerRank(-1)}
sf.load(sys.argv[1], state, timeout_s=60)
assert state["model"]["w"].sum() == 499_500.0
print(state["mine"].value, "torch" in sys.modules)
"""


EXAMPLE = Path(__file__).parents[2] / "examples" / "slurm" / "train.py"


def task(run, rank, command=None, **changed):
    """A task of a step of Slurm with two of them on this machine."""
    told = {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_PROCID": str(rank),
    }
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SHARDFAST_"))}
    environment = {name: value for name, value in {**clean, **told, **changed}.items() if value is not None}
    command = [sys.executable, *(command or ("-c", PROGRAM, str(run), str(rank)))]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)


def ended(process):
    said, errors = process.communicate(timeout=100)
    return process.returncode, said, errors


def test_tasks_of_a_step_meet_and_steps_do_not_meet_each_other(tmp_path):
    steps = [
        [task(tmp_path / step, rank, SLURM_STEP_ID=step, SHARDFAST_TOKEN=token) for rank in range(2)]
        for step, token in (("0", None), ("1", "secret"))
    ]
    for tasks in steps:
        for rank, one in enumerate(tasks):
            code, said, errors = ended(one)
            assert (code, said) == (0, f"{rank} False\n"), errors


def test_the_example_stops_and_goes_on(tmp_path):
    command = (EXAMPLE, tmp_path / "run", "300")
    tasks = [task(tmp_path, rank, command) for rank in range(2)]
    until = time.monotonic() + 60
    while not list(tmp_path.glob("run/step-*/COMMIT")):
        assert time.monotonic() < until
        time.sleep(0.05)
    tasks[1].send_signal(signal.SIGUSR1)
    told = [ended(one) for one in tasks]
    codes, said, _ = zip(*told, strict=True)
    assert codes == (0, 0) and said[0] == said[1] and said[0].startswith("told to stop: step "), told
    again = [task(tmp_path, rank, command, SLURM_STEP_ID="1") for rank in range(2)]
    assert [ended(one)[1] for one in again] == [f"step 300: {300 * 301 // 2}\n"] * 2


def test_a_process_of_a_batch_script_is_alone(tmp_path):
    told = {"SLURM_STEP_NUM_TASKS": None, "SLURM_STEP_ID": None, "SLURM_NTASKS": "2"}
    code, said, errors = ended(task(tmp_path / "run", 0, **told))
    assert (code, said) == (0, "0 False\n"), errors


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"SLURM_STEP_NODELIST": None}, "SLURM_STEP_NODELIST: not set; a step of Slurm has them beside"),
        ({"SLURM_PROCID": "first"}, "SLURM_PROCID='first': expected a number, at least 0"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2: this process is one of 2, and does not know the others"),
    ],
)
def test_what_contradicts_itself_is_refused(tmp_path, changed, said):
    code, _, errors = ended(task(tmp_path / "run", 0, **changed))
    assert code != 0 and said in errors, errors


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node7", "node7"),
        ("node[07-12,20],login", "node07"),
        ("a,b[1-2]", "a"),
        ("rack[2,4]n[1-3].cluster,x", "rack2n1.cluster"),
    ],
)
def test_the_first_host_of_a_list(nodes, first):
    assert first_of(nodes) == first


@pytest.mark.parametrize(("tasks", "most"), [("2", 2), ("4(x2),3", 4), ("1,12(x3)", 12), ("", 1)])
def test_the_most_tasks_of_a_machine(tasks, most):
    assert most_of(tasks) == most
