"""A run that is saved in the memory of a process that outlives the training."""

import ctypes
import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import shardfast as sf
import torch
from filled import expect_state, state_of, steps
from keepers import COMMAND, TRAINING, begun, in_memory, keeper, told, wait_until
from shardfast import native
from torch import nn

KILLS = int(os.environ.get("SHARDFAST_MEMORY_KILLS", "2"))
"""Killed trainings of a usual run; a campaign sets more."""


@pytest.fixture
def run(tmp_path):
    place = tmp_path / "run"
    yield place
    process = keeper(place)
    if process is not None:
        os.kill(process, signal.SIGKILL)
        wait_until("the keeper is gone", lambda: keeper(place) is None)


def trained(run, *to, every=4, rows=300, **options):
    """Saves these steps into memory, as one training."""
    state = state_of(0, rows)
    with sf.Checkpointer(run, every=sf.steps(every), memory=sf.steps(1), **options) as ckpt:
        start = ckpt.restore(state)
        for step in to:
            ckpt.step(step, state_of(step, rows))
    return start


def test_a_training_that_is_killed_goes_on_from_memory(run):
    first = begun(run, 7, ENDS="killed").communicate(timeout=240)
    assert "restored 0" in first[0], first
    assert in_memory(run)[-1] == 7  # step 4 stays until it is sent
    again = begun(run, 9)
    out, errors = again.communicate(timeout=240)
    assert re.search(r"restored 7 \{'memory': \d+\}", out), (out, errors)
    assert "ended" in out, errors
    # What every= says and the newest are at the run's own place, and the keeper has ended.
    assert steps(run) == [8, 9], errors
    wait_until("the keeper has ended", lambda: keeper(run) is None)
    state = state_of(0)
    assert sf.Checkpointer(run).restore(state) == 9
    expect_state(state, 9)


@pytest.mark.parametrize("kill", range(KILLS))
def test_trainings_that_are_killed_lose_what_was_not_saved_alone(run, kill):
    chance = random.Random(kill)
    newest = 0
    for _ in range(3):
        process = begun(run, 10_000, rows=chance.choice([10, 3000]))
        saved = chance.randrange(1, 12)
        committed = newest
        for line in process.stdout:
            if line.startswith("restored"):
                start = int(line.split()[1])
                assert start >= newest, (line, newest)
            elif line.startswith("saved"):
                _, step, done = line.split()
                committed = max(committed, int(done) if done != "None" else 0)
                if int(step) >= start + saved:
                    break
        time.sleep(chance.random() * 0.05)
        process.kill()
        _, errors = process.communicate(timeout=240)
        assert "Error" not in errors, errors
        newest = committed
        assert keeper(run) is not None
        status = told("status", str(run))
        assert status["failure"] is None


def test_memory_holds_one_whole_state_and_the_one_in_the_making(run):
    rows = 3000
    with sf.Checkpointer(run, memory=sf.steps(1)) as ckpt:
        sizes = []
        for step in range(1, 8):
            ckpt.step(step, state_of(step, rows))
            ckpt.wait()
            sizes.append(told("status", str(run))["bytes"])
        assert in_memory(run) == [7]
        assert max(sizes) < 1.5 * rows * 201 * 4, sizes
    assert steps(run) == [7]


def test_what_is_due_is_sent_and_the_newest_at_the_end(run):
    assert trained(run, *range(1, 7)) == 0
    assert steps(run) == [4, 6]
    wait_until("the keeper has ended", lambda: keeper(run) is None)
    assert trained(run, 7, 8, 9) == 6
    assert steps(run) == [4, 6, 8, 9]


def test_a_keeper_that_dies_costs_its_level_alone(run, caplog):
    caplog.set_level(logging.WARNING)
    with sf.Checkpointer(run, every=sf.steps(4), memory=sf.steps(1)) as ckpt:
        for step in (1, 2):
            ckpt.step(step, state_of(step))
        ckpt.wait()
        lost = keeper(run)
        os.kill(lost, signal.SIGKILL)
        wait_until("it is gone", lambda: keeper(run) is None)
        ckpt.step(3, state_of(3))
        assert "does not answer" in caplog.text and "step 3 is not saved" in caplog.text
        wait_until("another one has begun", lambda: keeper(run) not in (None, lost))
        ckpt._memory.wait()
        for step in (4, 5):
            ckpt.step(step, state_of(step))
        ckpt.wait()
        assert in_memory(run)[-1] == 5
        assert "saves go to memory again" in caplog.text
        os.kill(keeper(run), signal.SIGKILL)
        wait_until("it is gone", lambda: keeper(run) is None)
        ckpt.step(8, state_of(8))
        ckpt.wait()
        assert "step 8 is saved to the run's own place" in caplog.text
        assert 8 in steps(run)
    state = state_of(0)
    assert sf.Checkpointer(run).restore(state) == 8
    expect_state(state, 8)


def group_of_memory() -> Path | None:
    """The control group of this process that bounds memory, of the first version of groups; ``None`` without one."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    found = [Path("/sys/fs/cgroup/memory") / group.lstrip("/") for _, kinds, group in lines if "memory" in kinds]
    return found[0] if found and os.access(found[0], os.W_OK) else None


@pytest.fixture
def group(run):
    """A control group of memory, which a training and its keeper are in."""
    above = group_of_memory()
    if above is None:
        pytest.skip("no control group of memory that this user may divide")
    made = above / f"shardfast-{os.getpid()}"
    made.mkdir()
    yield made
    process = keeper(run)
    if process is not None:
        os.kill(process, signal.SIGKILL)
    wait_until("no process is in the group", lambda: not (made / "cgroup.procs").read_text())
    made.rmdir()


def within(group, *command):
    """The command, in that group from its begin on."""
    return ["sh", "-c", 'echo $$ > "$0/cgroup.procs"; exec "$@"', group, *command]


def begun_within(group, run, last, rows):
    training = [sys.executable, "-c", TRAINING, run, last, rows]
    return subprocess.Popen(
        within(group, *map(str, training)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "EVERY": "1000", "ASKS": "1"},
    )


def test_memory_that_holds_no_two_states_is_refused_at_the_start(run, group):
    (group / "memory.limit_in_bytes").write_text(f"{1000 << 20}")
    training = begun_within(group, run, 9, 300000)
    said, errors = training.communicate("\n" * 9, timeout=240)
    assert training.returncode == 1, errors[-3000:]
    assert "shardfast.Exhausted: " in errors and "expected memory for 2" in errors
    assert "control group allows are in use" in errors and "saved 9" not in said
    assert steps(run) == []


HOG = "import sys; kept = b'x' * int(sys.argv[1]); print(1, flush=True); input()"


def test_memory_that_becomes_short_costs_its_level_alone(run, group):
    (group / "memory.limit_in_bytes").write_text(f"{1600 << 20}")
    training = begun_within(group, run, 7, 300000)
    for step in range(1, 4):
        training.stdin.write("\n")
        training.stdin.flush()
        while not training.stdout.readline().startswith(f"saved {step} "):
            assert training.poll() is None, training.communicate()[1][-3000:]
    wait_until("it is in memory", lambda: in_memory(run)[-1:] == [3])
    hog = subprocess.Popen(
        within(group, sys.executable, "-c", HOG, f"{told('status', run)['free_bytes'] - (100 << 20)}"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert hog.stdout.readline() == "1\n"
    training.stdin.write("\n\n")
    training.stdin.flush()
    for step in (4, 5):
        assert training.stdout.readline().startswith(f"saved {step} "), training.communicate()[1][-3000:]
    hog.communicate("\n", timeout=60)
    _, errors = training.communicate("\n\n", timeout=240)
    assert training.returncode == 0, errors[-3000:]
    assert "step 4 is not in memory, and training goes on" in errors and "expected memory for 2" in errors
    assert "step 7 is not in memory" not in errors and steps(run)[-1] == 7


def test_a_keeper_without_users_sends_the_newest_and_ends(run):
    out, errors = begun(run, 3, ENDS="killed", LINGERS="4").communicate(timeout=240)
    assert "saved 3" in out, errors
    assert in_memory(run) == [3] and steps(run) == []
    wait_until("it has ended", lambda: keeper(run) is None)
    assert steps(run) == [3]


def test_a_keeper_that_is_told_to_end_sends_the_newest_first(run, caplog):
    with sf.Checkpointer(run, memory=sf.steps(1)) as ckpt:
        ckpt.step(3, state_of(3))
        ckpt.wait()
        assert steps(run) == []
        os.kill(keeper(run), signal.SIGTERM)
        wait_until("it has ended", lambda: keeper(run) is None)
        assert steps(run) == [3]
        ckpt.step(4, state_of(4))
        assert "step 4 is not saved" in caplog.text
        ckpt._memory.wait()
        ckpt.step(5, state_of(5))
    assert steps(run) == [3, 5]


def test_a_keeper_hears_a_signal_that_another_of_its_threads_gets(run):
    with sf.Checkpointer(run, memory=sf.steps(1)) as ckpt:
        ckpt.step(3, state_of(3))
        ckpt.wait()
        process = keeper(run)
        threads = [int(path.name) for path in Path(f"/proc/{process}/task").iterdir()]
        other = next(thread for thread in threads if thread != process)
        time.sleep(0.2)  # its first thread waits
        assert ctypes.CDLL(None, use_errno=True).tgkill(process, other, signal.SIGTERM) == 0
        wait_until("it has ended", lambda: keeper(run) is None, within_s=30)
        assert steps(run) == [3]
        ckpt.step(4, state_of(4))
        ckpt._memory.wait()
        ckpt.step(5, state_of(5))
    assert steps(run) == [3, 5]


def test_a_keeper_that_is_stopped_holds_the_training_up_once(run, caplog):
    with sf.Checkpointer(run, memory=sf.steps(1), every=sf.steps(10)) as ckpt:
        ckpt.step(1, state_of(1))
        ckpt.wait()
        stopped = keeper(run)
        os.kill(stopped, signal.SIGSTOP)
        began = time.monotonic()
        for step in range(2, 11):
            ckpt.step(step, state_of(step))
        ckpt.wait()
        assert time.monotonic() - began < 60  # 10 s for each save that would ask
        assert steps(run) == [10] and "does not answer" in caplog.text
        os.kill(stopped, signal.SIGCONT)
        for step in range(11, 40):
            ckpt.step(step, state_of(step))
        ckpt.wait()
        assert in_memory(run)[-1] == 39


@pytest.mark.parametrize("keep", [sf.last(1), sf.last(2)])
def test_what_is_due_is_sent_whatever_follows_it(run, keep, caplog):
    caplog.set_level(logging.INFO)
    with sf.Checkpointer(run, every=sf.steps(4), memory=sf.steps(1), keep=keep, drain="2MB/s") as ckpt:
        for step in range(1, 8):
            ckpt.step(step, state_of(step, rows=3000))
            ckpt.wait()
    assert "step 4 is there" in caplog.text and "step 7 is there" in caplog.text
    assert steps(run)[-1] == 7


def test_a_training_that_is_told_to_stop_leaves_its_newest_step_at_its_own_place(run):
    with (
        pytest.raises(sf.Stopping),
        sf.Checkpointer(run, memory=sf.steps(1), on_signal="SIGUSR1", raise_stopping=True) as ckpt,
    ):
        ckpt.step(1, state_of(1))
        os.kill(os.getpid(), signal.SIGUSR1)
        for step in range(2, 50):
            ckpt.step(step, state_of(step))
    assert steps(run) == [ckpt.committed]


def test_a_history_that_went_on_elsewhere_does_not_come_back_from_memory(run):
    ckpt = sf.Checkpointer(run, memory=sf.steps(1), every=sf.steps(2))
    for step in (1, 2, 3):
        ckpt.step(step, state_of(step))
    ckpt.wait()
    wait_until("step 2 is sent", lambda: steps(run) == [2])
    # Another job, without this memory, goes on from step 2.
    with sf.Checkpointer(run, every=sf.steps(1)) as other:
        assert other.restore(state_of(0)) == 2
        other.step(3, state_of(30))
    state = state_of(0)
    assert sf.Checkpointer(run, memory=sf.steps(1)).restore(state) == 3
    assert torch.equal(state["model"].weight, torch.full_like(state["model"].weight, 30))


def test_a_training_that_goes_back_after_its_keeper_has_died_is_in_memory_again(run):
    ckpt = sf.Checkpointer(run, memory=sf.steps(1), every=sf.steps(2))
    for step in (1, 2, 3):
        ckpt.step(step, state_of(step))
    ckpt.wait()
    wait_until("step 2 is sent", lambda: steps(run) == [2])
    os.kill(keeper(run), signal.SIGKILL)
    wait_until("it is gone", lambda: keeper(run) is None)
    assert ckpt.restore(state_of(0)) == 2
    ckpt.step(3, state_of(33))
    ckpt.wait()
    # A new job, as after a kill.
    state = state_of(0)
    again = sf.Checkpointer(run, memory=sf.steps(1), every=sf.steps(2))
    assert again.restore(state) == 3
    assert torch.equal(state["model"].weight, torch.full_like(state["model"].weight, 33))
    assert set(again.restored.sources) == {"memory"}


def test_a_keeper_that_dies_before_the_end_is_an_error_of_the_end(run):
    ckpt = sf.Checkpointer(run, memory=sf.steps(1), every=sf.steps(4))
    for step in range(1, 7):
        ckpt.step(step, state_of(step))
    ckpt.wait()
    wait_until("step 4 is sent", lambda: steps(run) == [4])
    os.kill(keeper(run), signal.SIGKILL)
    wait_until("it is gone", lambda: keeper(run) is None)
    with pytest.raises(sf.Unavailable, match="memory alone: the run's own place has step 4 at most"):
        ckpt.close()
    ckpt.close()
    assert ckpt.drained == 4


def test_what_an_earlier_job_was_to_send_is_sent_by_the_next(run):
    killed = begun(run, 7, rows=30_000, ENDS="killed", DRAIN="1MB/s").communicate(timeout=240)
    assert "saved 7" in killed[0], killed
    assert in_memory(run) == [4, 7] and steps(run) == []
    assert trained(run, 8, 9, rows=30_000) == 7
    assert steps(run) == [4, 8, 9]


def test_a_reader_leaves_the_keeper_of_a_training_alone(run):
    with sf.Checkpointer(run, memory=sf.steps(1), every=sf.steps(100)) as ckpt:
        ckpt.step(1, state_of(1))
        ckpt.wait()
        process = keeper(run)
        read = begun(run, 0).communicate(timeout=240)
        assert "restored 1" in read[0] and "ended" in read[0], read
        assert keeper(run) == process and steps(run) == []
        ckpt.step(2, state_of(2))
    assert steps(run) == [2]


def test_a_job_that_went_back_unaware_of_newer_steps_is_refused(run):
    first = sf.Checkpointer(run, memory=sf.steps(1))
    first.step(1, state_of(1))
    first.wait()
    second = sf.Checkpointer(run, memory=sf.steps(1))
    assert second.restore(state_of(0)) == 1
    for step in (2, 3):
        first.step(step, state_of(step))
    first.wait()
    with pytest.raises(sf.Conflict, match="a training at step 2 cannot save there"):
        second.step(2, state_of(20))
    first.step(4, state_of(4))
    first.close()
    assert steps(run) == [4]


def test_what_is_left_behind_leaves_memory(run):
    for _ in range(3):
        ckpt = sf.Checkpointer(run, memory=sf.steps(1), rewind=True)
        for step in (5, 6):
            ckpt.step(step, state_of(step))
        ckpt.wait()
        assert in_memory(run) == [6]
        place = native.memory_place(str(run))[1]
        listed = subprocess.run([COMMAND, "ls", place, "--json"], capture_output=True, text=True)
        assert json.loads(listed.stdout)["abandoned"] == []
    ckpt.close()


def test_a_run_that_is_gone_is_named_and_nothing_leaves_memory(run):
    trained_once = begun(run, 3, ENDS="killed").communicate(timeout=240)
    assert "saved 3" in trained_once[0], trained_once
    away = run.with_name("away")
    run.rename(away)
    gone = subprocess.run([COMMAND, "keeper", "leave", run], capture_output=True, text=True, timeout=240)
    assert gone.returncode == 5 and "nothing of the run is there any more" in gone.stderr, gone
    assert in_memory(run) == [3]
    away.rename(run)
    wait_until("it is sent, and the keeper has ended", lambda: keeper(run) is None)
    assert steps(run) == [3]


def test_bad_input_is_refused(run, tmp_path):
    for options, message in (
        ({"memory": 5}, "expected a number of steps, such as"),
        ({"memory": sf.optimal(mtbf="6h")}, "expected a number of steps, such as"),
        ({"memory": sf.steps(5), "every": sf.optimal(mtbf="6h")}, "expected a number of steps beside memory="),
        ({"memory": sf.steps(50), "every": sf.steps(5)}, "expected it more often than every="),
        ({"memory": sf.steps(5), "local": tmp_path / "disk"}, "memory= and local=: expected one of them"),
        ({"memory": sf.steps(5), "every": sf.steps(50), "over": 3}, "expected 1 beside memory="),
        ({"memory": sf.steps(5), "drain": "fast"}, "expected a rate"),
    ):
        with pytest.raises(sf.Invalid, match=message):
            sf.Checkpointer(run, **options)
    for arguments, message in (
        ((0,), r"copies\(0\): expected a positive whole number"),
        ((1, "fast"), "rate='fast': expected a rate, such as '1GB/s'"),
        ((1, 5), "rate=5: expected a rate"),
    ):
        with pytest.raises(sf.Invalid, match=message):
            sf.copies(*arguments)
    assert keeper(run) is None


def test_a_list_of_the_run_tells_what_is_in_memory(run):
    listed = [COMMAND, "ls", run]
    with sf.Checkpointer(run, every=sf.steps(2), memory=sf.steps(1)) as ckpt:
        for step in (1, 2, 3):
            ckpt.step(step, state_of(step))
        ckpt.wait()
        wait_until("step 2 is sent", lambda: steps(run) == [2])
        wait_until("memory has the newest alone", lambda: in_memory(run) == [3])
        place = native.memory_place(str(run))[1]
        found = json.loads(subprocess.run([*listed, "--json"], capture_output=True, text=True).stdout)
        assert found["memory"] == {"url": place, "steps": [3], "error": None}
        assert [step["step"] for step in found["checkpoints"]] == [2]
        said = subprocess.run(listed, capture_output=True, text=True).stdout
        assert f"in the memory of this machine's keeper, {place}: steps 3\n" in said, said
    found = json.loads(subprocess.run([*listed, "--json"], capture_output=True, text=True).stdout)
    assert "memory" not in found and [step["step"] for step in found["checkpoints"]] == [2, 3]


def test_the_command_starts_asks_and_ends_a_keeper(run):
    missing = subprocess.run([COMMAND, "keeper", "status", run], capture_output=True, text=True)
    assert missing.returncode == 3 and "no keeper of this name runs on this machine" in missing.stderr
    begun = told("start", str(run), "--linger", "1h")
    assert begun["process"] == told("start", str(run))["process"] and begun["linger_s"] == 3600
    # It has nothing of the process that has started it.
    descriptors = [os.readlink(path) for path in Path(f"/proc/{begun['process']}/fd").iterdir()]
    assert all(one == "/dev/null" or one.startswith("socket:") for one in descriptors), descriptors
    assert os.getsid(begun["process"]) == begun["process"]
    told("leave", str(run))
    assert keeper(run) is None


def rank_trains(rank, world, run):
    torch.manual_seed(0)
    model = nn.Linear(64, 32)
    with sf.Checkpointer(run, every=sf.steps(2), memory=sf.steps(1)) as ckpt:
        start = ckpt.restore({"model": model})
        mean = model.weight.mean().item() if start else None
        for step in range(start + 1, start + 4):
            with torch.no_grad():
                model.weight.fill_(step)
            ckpt.step(step, {"model": model})
            ckpt.wait()
            assert native.keeper_process(native.memory_place(run)[0]) is not None
    return start, mean


def test_ranks_share_the_memory_and_another_number_of_them_restores(run, ranks):
    assert ranks(2)(rank_trains, str(run)) == [(0, None)] * 2
    assert steps(run) == [2, 3]
    assert ranks(3)(rank_trains, str(run)) == [(3, 3.0)] * 3
    assert steps(run) == [2, 3, 4, 6]
