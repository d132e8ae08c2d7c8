"""What becomes of memory when a training, its keeper or its job ends otherwise than planned.

``SHARDFAST_MEMORY_SIGNALS`` is the number of trainings that a signal ends.
"""

import contextlib
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import shardfast as sf
import torch
from filled import state_of, steps
from keepers import COMMAND, begun, in_memory, keeper, told, wait_until
from shardfast import native
from torch import nn

SIGNALS = int(os.environ.get("SHARDFAST_MEMORY_SIGNALS", "1"))


@pytest.fixture
def run(tmp_path):
    place = tmp_path / "run"
    yield place
    process = keeper(place)
    if process is not None:
        os.kill(process, signal.SIGKILL)
        wait_until("the keeper is gone", lambda: keeper(place) is None)


def test_what_only_memory_has_is_sent_at_once_when_asked(run):
    killed = begun(run, 11, EVERY="4", DRAIN="1KB/s", ENDS="killed").communicate(timeout=240)
    assert in_memory(run) == [4, 8, 11] and steps(run) == [], killed
    sent = told("persist", str(run))
    # What was due and waited comes along.
    assert sent["step"] == 11 and sent["bytes"] > 0 and steps(run) == [4, 8, 11]
    assert told("persist", str(run)) == {**sent, "bytes": 0}
    for step in (4, 8, 11):
        state = {"model": nn.Linear(200, 300), "extra": {"step": 0}}
        sf.load(f"{run}/step-{step:08}", state)
        assert state["extra"]["step"] == step and bool((state["model"].weight == step).all())
    # The keeper goes on. While a training uses it, that sends by itself.
    with sf.Checkpointer(run, every=sf.steps(100), memory=sf.steps(1)) as ckpt:
        state = {"model": nn.Linear(200, 300), "extra": {"step": 0}}
        assert ckpt.restore(state) == 11
        ckpt.step(12, state)
        ckpt.wait()
        refused = subprocess.run([COMMAND, "keeper", "persist", run], capture_output=True, text=True)
        assert refused.returncode != 0 and "1 process uses it: a training sends what is due" in refused.stderr, refused
    assert steps(run)[-1] == 12
    wait_until("the keeper has ended", lambda: keeper(run) is None)
    missing = subprocess.run([COMMAND, "keeper", "persist", run], capture_output=True, text=True)
    assert missing.returncode == 3 and "no keeper of this name runs on this machine" in missing.stderr


def test_what_memory_has_of_an_older_job_is_not_sent_and_one_without_memory_is_told(run, caplog):
    assert begun(run, 5, EVERY="5").communicate(timeout=240)[0].endswith("ended\n")
    begun(run, 7, EVERY="100", ENDS="killed").communicate(timeout=240)
    assert in_memory(run)[-1] == 7 and steps(run) == [5]
    with caplog.at_level(logging.WARNING, "shardfast"), sf.Checkpointer(run) as ckpt:
        state = {"model": nn.Linear(200, 300), "extra": {"step": 0}}
        assert ckpt.restore(state) == 5
        ckpt.save(6, state)
    assert any("looked at only with memory=" in record.getMessage() for record in caplog.records), caplog.records
    refused = subprocess.run([COMMAND, "keeper", "persist", run], capture_output=True, text=True)
    assert "of a job that is not the run's newest one: nothing was sent" in refused.stderr, refused


def test_a_keeper_with_nothing_ends_whatever_its_run_is(run, tmp_path):
    (tmp_path / "file").write_text("no directory")
    impossible = str(tmp_path / "file" / "run")
    told("start", impossible)
    told("leave", impossible)
    assert keeper(impossible) is None


def test_a_list_shows_a_run_of_which_all_is_in_memory(run):
    with sf.Checkpointer(run, every=sf.steps(100), memory=sf.steps(1)) as ckpt:
        ckpt.step(1, state_of(1))
        ckpt.wait()
        listed = subprocess.run([COMMAND, "ls", run, "--json"], capture_output=True, text=True)
        found = json.loads(listed.stdout)
        assert listed.returncode == 0 and found["checkpoints"] == [] and found["memory"]["steps"] == [1]


def test_a_keeper_takes_no_descriptor_and_no_memory_for_each_save(run):
    def descriptors():
        return len(os.listdir(f"/proc/{keeper(run)}/fd"))

    with sf.Checkpointer(run, every=sf.steps(1000), memory=sf.steps(1)) as ckpt:
        for step in range(1, 320):
            ckpt.step(step, state_of(step))
            ckpt.wait()
            if step == 20:
                before = descriptors()
        assert descriptors() <= before + 4
        # Records of at most 200 saves stay, and two checkpoints.
        assert told("status", str(run))["objects"] < 230


def rank_is_overtaken(rank, world, run, every):
    state, refused = {"model": nn.Linear(200, 300)}, []
    ckpt = sf.Checkpointer(run, every=sf.steps(every), memory=sf.steps(1))
    ckpt.step(1, state)
    ckpt.wait()
    torch.distributed.barrier()
    if rank == 0:
        os.kill(keeper(run), signal.SIGKILL)
        wait_until("the keeper is gone", lambda: keeper(run) is None)
        out, errors = begun(run, 3).communicate(timeout=240)
        assert "ended" in out, errors
        wait_until("its keeper has ended", lambda: keeper(run) is None)
    torch.distributed.barrier()
    for step in range(2, 200):
        try:
            ckpt.step(step, state)
            ckpt.wait()
        except sf.Conflict as error:
            refused.append(str(error))
            if len(refused) == 3:
                break
        time.sleep(0.05)
    torch.distributed.barrier()
    with contextlib.suppress(sf.Error):
        ckpt.close()
    return refused


@pytest.mark.parametrize("every", [4, 1000])
def test_a_job_that_was_overtaken_does_not_go_on_with_a_new_keeper(run, ranks, every):
    for refused in ranks(2)(rank_is_overtaken, str(run), every):
        assert len(refused) == 3 and all("only the newest job commits" in text for text in refused), refused
    assert keeper(run) is None or told("status", str(run))["bytes"] == 0
    assert steps(run) == [3]


def rank_outlives_keepers(rank, world, run):
    name = native.memory_place(run)[0]
    state = {"model": nn.Linear(64, 32)}
    with sf.Checkpointer(run, every=sf.steps(7), memory=sf.steps(1)) as ckpt:
        ckpt.restore(state)
        for step in range(1, 120):
            with torch.no_grad():
                state["model"].weight.fill_(step)
            if rank == 0 and step % 29 == 10 and (process := native.keeper_process(name)) is not None:
                os.kill(process, signal.SIGKILL)
            ckpt.step(step, state)
            time.sleep(0.01)
    return ckpt.committed


def test_a_keeper_that_dies_at_any_moment_costs_no_rank_its_training(run, ranks):
    assert all(committed is not None and committed >= 112 for committed in ranks(2)(rank_outlives_keepers, str(run)))
    wait_until("the keeper has ended", lambda: keeper(run) is None)
    assert steps(run)[-1] == 119


PHASES = ("forward", "step", "save", "validation")

LAUNCHED = """
import os, sys, time, torch, torch.distributed as dist, shardfast as sf
from torch.utils.data import DataLoader
run, notes, on_signal = sys.argv[1:]
dist.init_process_group("gloo")
is_first = dist.get_rank() == 0
torch.manual_seed(0)
def note(text):
    if is_first:
        with open(notes, "a") as out:
            out.write(text + "\\n")
    time.sleep(0.02)
model = torch.nn.Linear(1000, 1000)
state = {"model": model}
loader = DataLoader(torch.arange(10**6), batch_size=2, num_workers=2, persistent_workers=True)
with sf.Checkpointer(run, every=sf.steps(1000), memory=sf.steps(1), on_signal=on_signal or None) as ckpt:
    for step, batch in enumerate(loader, ckpt.restore(state) + 1):
        note("forward")
        model(batch.sum() * torch.ones(1000)).sum().backward()
        note("step")
        with torch.no_grad():
            model.weight.fill_(step)
        note("save")
        ckpt.step(step, state)
        if ckpt.stopping:
            break
        ckpt.wait()
        note(f"saved {step}")
        note("validation")
        with torch.no_grad():
            model(torch.ones(1000))
"""


def below(process):
    """The processes that a process has started, and those that they have."""
    found = []
    for task in Path(f"/proc/{process}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *below(child)]
    return found


@pytest.mark.parametrize("seed", range(SIGNALS))
def test_a_signal_to_all_that_a_launcher_has_started_costs_no_step_that_is_in_memory(run, tmp_path, seed):
    dice = random.Random(f"signals {seed}")
    phase, to, on_signal = dice.choice(PHASES), dice.choice(["launcher", "group", "each"]), dice.choice(["", "SIGTERM"])
    notes, script = tmp_path / "notes", tmp_path / "training.py"
    script.write_text(LAUNCHED)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    with (tmp_path / "log").open("w") as log:
        launcher = subprocess.Popen(
            [*command, script, run, notes, on_signal],
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    all_of_it = []
    try:
        steps_before = dice.randrange(2, 8)
        told = f"saved {steps_before}\n"
        wait_until(told, lambda: notes.exists() and told in notes.read_text())
        wait_until(phase, lambda: notes.read_text().endswith(f"{phase}\n"))
        all_of_it = [launcher.pid, *below(launcher.pid)]
        time.sleep(dice.random() * 0.02)
        saved = max(int(line.split()[1]) for line in notes.read_text().splitlines() if line.startswith("saved"))
        if to == "launcher":
            launcher.terminate()
        elif to == "group":
            os.killpg(launcher.pid, signal.SIGTERM)
        else:
            for process in all_of_it:
                os.kill(process, signal.SIGTERM)
        launcher.wait(timeout=120)
    finally:
        for process in {launcher.pid, *all_of_it} - {keeper(run)}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        launcher.wait()
    model = nn.Linear(1000, 1000)
    with sf.Checkpointer(run, every=sf.steps(1000), memory=sf.steps(1)) as ckpt:
        restored = ckpt.restore({"model": model})
        assert restored >= saved, (phase, to, on_signal, (tmp_path / "log").read_text()[-3000:])
        assert bool((model.weight == restored).all())
