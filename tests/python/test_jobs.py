"""Two jobs in one run: the one that was the last to begin commits and deletes, the other does neither any more."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import shardfast as sf
import torch.distributed as dist

OTHER = """
import sys, numpy as np, shardfast as sf
run, first, last, length = sys.argv[1], *map(int, sys.argv[2:])
state = {"model": {"w": np.full(length, -1.0)}}
with sf.Checkpointer(run, every=sf.steps(1)) as ckpt:
    ckpt.restore(state)
    for step in range(first, last + 1):
        ckpt.step(step, state)
        ckpt.wait()
"""


def other_job(run, first, last, length=1000):
    """Another job restores there, and makes these steps."""
    alone = {name: text for name, text in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "-c", OTHER, run, str(first), str(last), str(length)]
    return subprocess.run(command, env=alone, capture_output=True, text=True, timeout=120)


def committed(run):
    return sorted(int(commit.parent.name[5:]) for commit in Path(run).glob("step-*/COMMIT"))


def is_overtaken(rank, world, run):
    state = {"model": {"w": np.full(1000, 1.0)}}
    ckpt = sf.Checkpointer(run, every=sf.steps(1), keep=sf.last(1))
    for step in (1, 2):
        ckpt.step(step, state)
        ckpt.wait()
    with sf.Checkpointer(run, every=sf.steps(1)) as second:  # of the same job
        second.step(3, state)
    ckpt.step(4, state)
    ckpt.wait()
    if rank == 0:
        done = other_job(run, 5, 6)
        assert done.returncode == 0, done.stderr
    dist.barrier()
    before = committed(run)
    with pytest.raises(sf.Conflict, match=r"only the newest job commits.*stop this one") as refused:
        ckpt.step(7, state)
        ckpt.wait()
    assert "job 1 of the run, and job 2" in str(refused.value)
    ends = list(Path(run, ".telemetry").glob("*-end.json"))
    ckpt.close()
    assert list(Path(run, ".telemetry").glob("*-end.json")) == ends, "the run goes on with the other job"
    return before


def test_a_job_that_was_overtaken_neither_commits_nor_deletes(ranks, tmp_path):
    run = str(tmp_path / "run")
    before, _ = ranks(2)(is_overtaken, run)
    # Of the other job all steps stay: it has no keep=.
    assert before == committed(run) == [4, 5, 6]


def test_a_job_that_only_restores_or_is_refused_stops_nobody(tmp_path):
    run, state = str(tmp_path / "run"), {"model": {"w": np.full(1000, 1.0)}}
    with sf.Checkpointer(run, every=sf.steps(1)) as ckpt:
        ckpt.step(5, state)
        ckpt.wait()
        assert other_job(run, 1, 0).returncode == 0
        refused = other_job(run, 2, 2)
        assert "Conflict" in refused.stderr and "step 5" in refused.stderr
        ckpt.step(6, state)
    assert committed(run) == [5, 6]


TRAINS = """
import json, os, sys, numpy as np, shardfast as sf
ckpt = sf.Checkpointer(sys.argv[1], every=sf.steps(1), keep=sf.last(1))
state = {"model": {"w": np.full(1 << 24, 1.0)}}
for step in range(ckpt.restore(state) + 1, 1000):
    try:
        ckpt.step(step, state)
        ckpt.wait()
    except sf.Conflict as error:
        print(json.dumps([step, str(error)]), flush=True)
        break
    print(step, flush=True)
"""


def test_a_job_that_was_stopped_in_a_save_and_runs_again_commits_nothing(tmp_path):
    run = tmp_path / "run"
    old = subprocess.Popen([sys.executable, "-c", TRAINS, run], stdout=subprocess.PIPE, text=True)
    try:
        assert old.stdout.readline() == "1\n" and old.stdout.readline() == "2\n"
        # Stopped once the save has a file, before it can have all.
        while not (found := [path for path in run.glob("step-*/model/*") if path.parts[-3] >= "step-00000003"]):
            time.sleep(0.0005)
        os.kill(old.pid, signal.SIGSTOP)
        step = max(int(path.parts[-3][5:]) for path in found)
        assert step not in committed(run)
        new = other_job(str(run), step + 1, step + 1, 1 << 24)
        assert new.returncode == 0, new.stderr
        before = committed(run)
        os.kill(old.pid, signal.SIGCONT)
        refused = old.stdout.read().splitlines()
        assert old.wait(60) == 0
        at, message = json.loads(refused[-1])
        assert at == step and len(refused) == 1, refused
        assert "job 2 has begun to save there" in message, message
        assert committed(run) == before == [step - 1, step + 1]
    finally:
        old.kill()
        old.wait()


def test_a_job_whose_directory_was_moved_does_not_take_the_next_one_for_its_own(tmp_path):
    run, state = str(tmp_path / "run"), {"model": {"w": np.full(1000, 1.0)}}
    with sf.Checkpointer(run, every=sf.steps(1), keep=sf.last(1)) as ckpt:
        ckpt.step(1, state)
        ckpt.wait()
        os.rename(run, tmp_path / "moved")
        ckpt.step(2, state)  # nobody else is there
        ckpt.wait()
        os.rename(run, tmp_path / "moved again")
        assert other_job(run, 1, 2).returncode == 0
        with pytest.raises(sf.Conflict, match="only the newest job commits"):
            ckpt.step(3, state)
            ckpt.wait()
    assert committed(run) == [1, 2]


def test_a_run_that_is_spelled_otherwise_is_the_same(tmp_path):
    run, state = tmp_path / "run", {"model": {"w": np.full(1000, 1.0)}}
    (tmp_path / "link").symlink_to(run)
    with (
        sf.Checkpointer(run, every=sf.steps(1)) as ckpt,
        sf.Checkpointer(f"file://{run}", every=sf.steps(1)) as second,
        sf.Checkpointer(tmp_path / "link", every=sf.steps(1)) as third,
    ):
        for step, one in enumerate([ckpt, second, third, ckpt, second], start=1):
            one.step(step, state)
            one.wait()
    assert committed(run) == [1, 2, 3, 4, 5]
