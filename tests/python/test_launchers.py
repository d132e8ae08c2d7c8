"""Processes that a launcher has started find each other without torch.distributed."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ports import free_ports
from shardfast.launchers import PORTS, first_of, most_of, port_of, tasks_without_step

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


def test_a_task_of_the_job_as_it_was_before_it_was_requeued_is_refused(tmp_path):
    stale = task(tmp_path / "run", 1)
    tasks = [task(tmp_path / "run", rank, SLURM_RESTART_COUNT="1") for rank in range(2)]
    for rank, one in enumerate(tasks):
        code, said, errors = ended(one)
        assert (code, said) == (0, f"{rank} False\n"), errors
    code, _, errors = ended(stale)
    assert code != 0 and "refuses rank 1: the token is not this job's" in errors, errors


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


@pytest.mark.parametrize(
    ("rank_is", "world_is", "local_is"),
    [("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"), ("PMI_RANK", "PMI_SIZE", "OTHER")],
)
def test_processes_of_mpirun_meet_if_they_are_told_where(tmp_path, rank_is, world_is, local_is):
    # In an allocation of Slurm they have the variables of Open MPI's daemon, a task on each machine.
    is_in_slurm = rank_is.startswith("OMPI")
    told = {world_is: "2", local_is: "2", "SLURM_PROCID": "0" if is_in_slurm else None}
    code, _, errors = ended(task(tmp_path / "run", 0, **told, **{rank_is: "0"}))
    assert code != 0 and f"{world_is}=2: mpirun has started this process as one of 2" in errors, errors
    assert not (tmp_path / "run").exists()
    root = {"SHARDFAST_ROOT": f"127.0.0.1:{free_ports(1)}", "SHARDFAST_TOKEN": "secret"}
    tasks = [task(tmp_path / "run", rank, **told, **root, **{rank_is: f"{rank}"}) for rank in range(2)]
    for rank, one in enumerate(tasks):
        code, said, errors = ended(one)
        assert (code, said) == (0, f"{rank} False\n"), errors


def test_a_process_of_a_batch_script_with_several_tasks_says_that_it_is_alone(tmp_path):
    told = {"SLURM_STEP_NUM_TASKS": None, "SLURM_STEP_ID": None, "SLURM_NTASKS": "2"}
    code, _, errors = ended(task(tmp_path / "run", 0, **told))
    assert code != 0 and "SLURM_NTASKS=2: the job has 2 tasks" in errors and "set WORLD_SIZE=1" in errors, errors
    assert not (tmp_path / "run").exists()
    for number, alone in enumerate(({**told, "WORLD_SIZE": "1"}, {**told, "SLURM_NTASKS": "1"})):
        code, said, errors = ended(task(tmp_path / f"{number}", 0, **alone))
        assert (code, said) == (0, "0 False\n"), errors


def test_a_job_of_torchrun_in_each_task_is_alone(tmp_path):
    code, said, errors = ended(task(tmp_path / "run", 0, WORLD_SIZE="1", TORCHELASTIC_RUN_ID="none"))
    assert (code, said) == (0, "0 False\n"), errors


def test_a_port_that_is_taken_is_named_with_what_chooses_it(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port_of(4712, 0)))
        taken.listen()
        code, _, errors = ended(task(tmp_path / "run", 0, SLURM_JOB_ID="4712"))
    expected = f'rank 0 of 2: cannot listen on "localhost", port {port_of(4712, 0)}: '
    assert code != 0 and expected in errors and "give all ranks another SHARDFAST_ROOT" in errors, errors


def test_tasks_that_machines_get_in_turn_serve_metrics_at_ports_of_their_own(tmp_path):
    """Task 1 of two nodes with two each may be the second on its machine, and the first by its number."""
    port = free_ports(2)
    told = {"SHARDFAST_METRICS": f"127.0.0.1:{port}", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    tasks = [task(tmp_path / "run", rank, SLURM_LOCALID=str(rank), SLURM_JOB_ID="4713", **told) for rank in range(2)]
    for one in tasks:
        code, _, errors = ended(one)
        assert code == 0 and "no metrics are served" not in errors, errors


def test_steps_of_neighbouring_jobs_have_ports_of_their_own():
    found = [port_of(job, step) for job in range(123_456, 123_456 + 100) for step in range(100)]
    assert len({*found}) == 10_000 and {*found} <= {*PORTS}
    assert len({port_of(job, 0) for job in range(len(PORTS))}) == len(PORTS)


@pytest.mark.parametrize(
    ("told", "tasks"),
    [
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, 2),
        ({"SLURM_PROCID": "0"}, 1),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}, 1),
        ({"SLURM_NTASKS": "2"}, 1),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "many"}, 1),
    ],
)
def test_tasks_of_a_batch_script_that_srun_has_not_started(monkeypatch, told, tasks):
    for name in ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert tasks_without_step() == tasks


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"SLURM_STEP_NODELIST": None}, "SLURM_STEP_NODELIST: not set; a step of Slurm has them beside"),
        ({"SLURM_PROCID": "first"}, "SLURM_PROCID='first': expected a number, at least 0"),
        ({"SLURM_STEP_NUM_TASKS": ""}, "SLURM_STEP_NUM_TASKS='': expected a number, at least 1"),
        ({"SLURM_STEP_NUM_TASKS": "two"}, "SLURM_STEP_NUM_TASKS='two': expected a number, at least 1"),
        ({"SLURM_STEP_ID": "first"}, "SLURM_STEP_ID='first': expected a number, at least 0"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2: this process is one of 2, and does not know the others"),
        ({"WORLD_SIZE": "1"}, "WORLD_SIZE=1, but srun has started 2 tasks (SLURM_STEP_NUM_TASKS): unset WORLD_SIZE"),
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
