"""A run that is saved on the local disk and sent to its own place in the background."""

import contextlib
import json
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import servers
import shardfast as sf
import torch
from filled import expect_state, state_of, steps
from shardfast import levels, native, session
from torch import nn

KILLS = int(os.environ.get("SHARDFAST_LOCAL_KILLS", "3"))
"""Killed trainings of a usual run; a campaign sets more."""

COMMAND = Path(sys.executable).with_name("shardfast")


def near(local):
    """The place of the only run on that local disk."""
    (place,) = Path(local).iterdir()
    return place


def data_file(run, step):
    (file,) = (run / f"step-{step:08d}" / "model").glob("*.safetensors")
    return file


def flip(file, offset=-1000):
    data = bytearray(file.read_bytes())
    data[offset] ^= 1
    file.write_bytes(data)


def train(url, local, first, last, rows=300, **options):
    """Trains from a step to another, each saved."""
    with sf.Checkpointer(url, every=sf.steps(1), local=local, **options) as ckpt:
        into = state_of(0, rows)
        start = ckpt.restore(into)
        if start:
            expect_state(into, start)
        for step in range(first or start + 1, last + 1):
            ckpt.step(step, state_of(step, rows))
    return start


def restored(url, local, **options):
    into = state_of(0)
    ckpt = sf.Checkpointer(url, local=local)
    step = ckpt.restore(into, **options)
    if step:
        expect_state(into, step)
    return step, ckpt.restored.sources if ckpt.restored else {}


class Away:
    """Directories into which nothing can be saved, as if the place were away: each is a file for a while."""

    def __init__(self, run):
        self.run = run

    def __enter__(self):
        self.held = self.run.with_name("held")
        if self.run.exists():
            self.run.rename(self.held)
        self.run.write_text("away")

    def __exit__(self, *_):
        self.run.unlink()
        if self.held.exists():
            self.held.rename(self.run)


def left_unsent(url, local, first, last):
    """Saves these steps in a process that dies before it has sent any of them."""
    script = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import shardfast as sf
from test_local import state_of
ckpt = sf.Checkpointer({str(url)!r}, every=sf.steps(1), local={str(local)!r}, drain="1B/s")
ckpt.restore(state_of(0))
for step in range({first}, {last} + 1):
    ckpt.step(step, state_of(step))
    ckpt.wait()
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_run_is_saved_on_the_local_disk_and_sent(tmp_path):
    run, local = tmp_path / "run", tmp_path / "nvme"
    with sf.Checkpointer(run, every=sf.steps(1), keep=sf.last(3) | sf.every(2), local=local) as ckpt:
        assert ckpt.restore(state_of(0)) == 0
        for step in range(1, 8):
            ckpt.step(step, state_of(step))
            ckpt.wait()
            assert steps(near(local))[-1] == step, "durable there, before it is sent"
    assert ckpt.drained == 7
    assert set(steps(run)) == {2, 4, 5, 6, 7}
    assert steps(near(local)) == [6, 7]
    for step in steps(run):
        into = state_of(0)
        sf.load(run / f"step-{step:08d}", into)
        expect_state(into, step)
    # Both places have it: all of it comes from the local one.
    step, sources = restored(run, local)
    assert step == 7 and list(sources) == ["local", "url"] and sources["local"] > 0 and sources["url"] == 0
    # Another machine has no such disk.
    assert restored(run, tmp_path / "other")[0] == 7
    assert restored(run, local, step=5)[0] == 5


def rank_trains(rank, world, run, local):
    model, start = nn.Linear(64, 64), 0
    with torch.no_grad():
        model.weight.zero_()
    state = {"model": model, "mine": sf.PerRank({"rank": rank})}
    with sf.Checkpointer(run, every=sf.steps(1), local=local) as ckpt:
        start = ckpt.restore(state)
        for step in range(start + 1, start + 4):
            with torch.no_grad():
                model.weight.add_(1)
            ckpt.step(step, state)
    assert state["mine"].value == {"rank": rank}
    return start, float(model.weight.detach().mean()), ckpt.restored.sources if ckpt.restored else None


def test_ranks_of_one_machine_share_its_disk(ranks, tmp_path):
    run, local = str(tmp_path / "run"), str(tmp_path / "nvme")
    assert [(start, mean) for start, mean, _ in ranks(2)(rank_trains, run, local)] == [(0, 3.0)] * 2
    assert steps(run) == [1, 2, 3]
    again = ranks(2)(rank_trains, run, local)
    assert [(start, mean) for start, mean, _ in again] == [(3, 6.0)] * 2
    assert all(sources["url"] == 0 for _, _, sources in again)
    assert steps(run)[-1] == 6


def test_what_was_not_sent_is_restored_and_sent_by_the_next_job(tmp_path):
    run, local = tmp_path / "run", tmp_path / "nvme"
    train(run, local, 1, 2)
    left_unsent(run, local, 3, 4)
    assert (steps(run), steps(near(local))) == ([1, 2], [3, 4])
    step, sources = restored(run, local)
    assert step == 4 and list(sources) == ["local"]
    assert steps(run) == [1, 2], "a restore alone sends nothing"
    assert train(run, local, None, 5) == 4
    assert steps(run) == [1, 2, 3, 4, 5]


def test_a_lost_disk_costs_what_was_not_sent(tmp_path):
    run, local = tmp_path / "run", tmp_path / "nvme"
    train(run, local, 1, 3)
    left_unsent(run, local, 4, 5)
    shutil.rmtree(local)
    assert restored(run, local)[0] == 3
    assert train(run, local, None, 4) == 3
    assert steps(run) == [1, 2, 3, 4]


def test_damage_on_the_local_disk_is_read_from_the_other_place(tmp_path, caplog):
    run, local = tmp_path / "run", tmp_path / "nvme"
    train(run, local, 1, 2)
    file = data_file(near(local), 2)
    flip(file)
    step, sources = restored(run, local)
    assert step == 2 and sources["local"] > 0 and 0 < sources["url"] < sources["local"] + sources["url"]
    header = file.read_bytes()
    file.write_bytes(b"\0" * 20 + header[20:])
    assert restored(run, local)[0] == 2
    file.unlink()
    step, sources = restored(run, local)
    assert step == 2 and sources["url"] > 0
    for manifest in near(local).glob("step-00000002/*.sfm*"):
        manifest.unlink()
    assert restored(run, local)[0] == 2


def test_each_damaged_byte_of_either_place_is_found_and_read_from_the_other(tmp_path):
    run, local = tmp_path / "run", tmp_path / "nvme"
    train(run, local, 1, 1)
    for place in (near(local), run):
        for file in filter(Path.is_file, (place / "step-00000001").rglob("*")):
            for offset in range(0, file.stat().st_size, 4099 if file.suffix == ".safetensors" else 61):
                flip(file, offset)
                assert restored(run, local)[0] == 1, (file, offset)
                flip(file, offset)


def test_damage_of_what_was_not_sent_is_passed_over_and_said(tmp_path, caplog):
    run, local = tmp_path / "run", tmp_path / "nvme"
    train(run, local, 1, 2)
    left_unsent(run, local, 3, 4)
    flip(data_file(near(local), 4))
    caplog.set_level(logging.WARNING, "shardfast")
    assert restored(run, local)[0] == 3
    assert "passed over" in caplog.text and "step-00000004" in caplog.text
    # The training goes on from there, and the damaged one is out of its way.
    assert train(run, local, None, 5) == 3
    assert steps(near(local)) == [4, 5] and steps(run) == [1, 2, 3, 4, 5]
    assert list(near(local).glob("abandoned-*/step-00000004"))
    into = state_of(0)
    assert sf.Checkpointer(run, local=local).restore(into, step=4) == 4
    expect_state(into, 4)


def test_what_another_machine_went_on_without_is_not_restored(tmp_path, caplog):
    run, first, second = tmp_path / "run", tmp_path / "first", tmp_path / "second"
    train(run, first, 1, 2)
    left_unsent(run, first, 3, 6)
    assert train(run, second, None, 4) == 2
    assert steps(run) == [1, 2, 3, 4]
    caplog.set_level(logging.WARNING, "shardfast")
    step, sources = restored(run, first)
    assert step == 4 and list(sources) == ["url"]
    assert "step-00000006: a newer job of" in caplog.text
    assert train(run, first, None, 5) == 4
    assert steps(run) == [1, 2, 3, 4, 5] and steps(near(first)) == [5]
    moved = {path.parent.name for path in near(first).glob("abandoned-*/step-*/COMMIT")}
    assert moved == {f"step-{step:08d}" for step in (3, 4, 5, 6)}, "nothing of it is deleted"
    assert restored(run, second)[0] == 5


def test_a_run_that_is_begun_anew_gets_nothing_of_the_old_one(tmp_path):
    run, local = tmp_path / "run", tmp_path / "nvme"
    train(run, local, 1, 9)
    shutil.rmtree(run)
    assert restored(run, local)[0] == 0
    train(run, local, 1, 2)
    assert (steps(run), steps(near(local))) == ([1, 2], [1, 2])
    assert restored(run, local)[0] == 2


def test_a_restore_of_an_earlier_step_wants_the_later_ones_out_of_its_way(tmp_path):
    run, local = tmp_path / "run", tmp_path / "nvme"
    train(run, local, 1, 2)
    left_unsent(run, local, 3, 4)
    ckpt = sf.Checkpointer(run, every=sf.steps(1), local=local)
    state = state_of(0)
    assert ckpt.restore(state, step=2) == 2
    with pytest.raises(sf.Conflict, match="up to step 4"):
        ckpt.step(3, state_of(3))
    ckpt = sf.Checkpointer(run, every=sf.steps(1), local=local, rewind=True)
    assert ckpt.restore(state, step=2) == 2
    ckpt.step(3, state_of(3))
    ckpt.close()
    assert (steps(run), steps(near(local))) == ([1, 2, 3], [3])


def test_an_old_job_sends_no_more_once_a_newer_one_saves(tmp_path, caplog):
    run = tmp_path / "run"
    old = sf.Checkpointer(run, every=sf.steps(1), local=tmp_path / "old")
    old.step(1, state_of(1))
    old.close()
    old = sf.Checkpointer(run, every=sf.steps(1), local=tmp_path / "old", drain="1B/s")
    old.restore(state_of(0))
    for step in (2, 3):
        old.step(step, state_of(step))
        old.wait()
    code = f"import sys; sys.path[0] = {str(Path(__file__).parent)!r}; from test_local import train; "
    code += f"train({str(run)!r}, {str(tmp_path / 'new')!r}, 2, 2)"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert steps(run) == [1, 2]
    old._draining.cancel()
    caplog.clear()
    fresh = levels.Draining(str(run), old._near, None, None, 60.0)
    here = session.current(60.0)
    fresh.begin(here, str(run))
    with pytest.raises(sf.Conflict, match="only the newest job commits and deletes"):
        fresh.finish(here)
    with pytest.raises(sf.Conflict, match="only the newest job commits and deletes"):
        fresh.retain([3])
    assert "only the newest job commits and deletes" in caplog.text and steps(run) == [1, 2]
    assert restored(run, tmp_path / "new")[0] == 2
    assert restored(run, tmp_path / "old")[0] == 2, "what the old job had not sent is of no history any more"


def test_a_place_that_is_away_does_not_stop_the_training(tmp_path, caplog):
    run, local = tmp_path / "run", tmp_path / "nvme"
    ckpt = sf.Checkpointer(run, every=sf.steps(1), keep=sf.every(3) | sf.last(1), local=local, timeout_s=2)
    ckpt.step(1, state_of(1))
    ckpt.wait()
    ckpt._draining.finish(session.current(60.0))
    with Away(run):
        for step in range(2, 9):
            ckpt.step(step, state_of(step))
            ckpt.wait()
        assert set(steps(near(local))) >= {3, 6, 7, 8}, "what is kept for good waits"
        with pytest.raises(sf.Error, match="The next job on this machine sends what it can"):
            ckpt.close()
    assert steps(run) == [1]
    assert train(run, local, None, 9, keep=sf.every(3) | sf.last(1)) == 8
    assert steps(run) == [3, 6, 9]


def test_without_a_rule_every_checkpoint_arrives(tmp_path):
    run, local = tmp_path / "run", tmp_path / "nvme"
    train(run, local, 1, 20)
    assert steps(run) == list(range(1, 21)) and steps(near(local)) == [19, 20]


@pytest.fixture
def small_disk(tmp_path):
    """A disk with room for five and a half checkpoints of 2 MB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=11m", "none", place], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted: {mounted.stderr}")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def test_a_small_disk_and_a_slow_way_skip_checkpoints_and_say_so_once(small_disk, tmp_path, caplog):
    run = tmp_path / "run"
    caplog.set_level(logging.WARNING, "shardfast")
    ckpt = sf.Checkpointer(run, every=sf.steps(1), local=small_disk, drain="1B/s")
    for step in range(1, 9):
        ckpt.step(step, state_of(step, 2500))
        ckpt.wait()
    ckpt._draining.cancel()
    ckpt.close()
    assert caplog.text.count("this is said once") == 1
    train(run, small_disk, None, 9, rows=2500)
    assert steps(run)[-2:] == [8, 9] and len(steps(run)) < 9


def test_a_full_disk_has_room_again(small_disk, tmp_path):
    run, rule = tmp_path / "run", sf.every(1)
    ckpt = sf.Checkpointer(run, every=sf.steps(1), keep=rule, local=small_disk, drain="1B/s", timeout_s=5)
    failed = 0
    for step in range(1, 9):
        try:
            ckpt.step(step, state_of(step, 2500))
            ckpt.wait()
        except sf.Exhausted:
            failed += 1
    ckpt._draining.cancel()
    ckpt.close()
    assert failed, "what is kept for good waits"
    durable = steps(near(small_disk))[-1]
    with sf.Checkpointer(run, every=sf.steps(1), keep=rule, local=small_disk) as ckpt:
        assert ckpt.restore(state_of(0, 2500)) == durable
        until = time.monotonic() + 60
        for step in range(durable + 1, durable + 9):
            while True:
                try:
                    ckpt.step(step, state_of(step, 2500))
                    ckpt.wait()
                    break
                except sf.Exhausted:
                    assert time.monotonic() < until
                    time.sleep(0.1)
    assert steps(run)[-8:] == list(range(durable + 1, durable + 9))


def test_a_training_that_had_ended_is_sent_by_its_next_start(tmp_path):
    run, local = tmp_path / "run", tmp_path / "nvme"
    train(run, local, 1, 1)
    left_unsent(run, local, 2, 3)
    assert train(run, local, 4, 3) == 3, "nothing is left to train"
    assert steps(run) == [1, 2, 3]
    # A job that saves nothing sends nothing either if another machine has the newest job, which goes on.
    left_unsent(run, local, 4, 5)
    train(run, tmp_path / "other", None, 4)
    assert train(run, local, 9, 8) == 4
    assert steps(run) == [1, 2, 3, 4]


def test_what_an_interrupted_sending_left_is_sent_first_or_goes(tmp_path):
    run, local = tmp_path / "run", tmp_path / "nvme"
    for step in (1, 3, 5):
        left_unsent(run, local, step, step + 1)
        begun = [path.name for path in run.glob("step-*") if not (path / "COMMIT").exists()]
        assert len(begun) <= 1, "each goes on with what the one before has begun"
    train(run, local, None, 7, keep=sf.last(2))
    assert steps(run)[-2:] == [6, 7]
    others = [path for path in run.glob("step-*") if not (path / "COMMIT").exists()]
    assert all((path / ".leaving").exists() for path in others), [list(path.rglob("*")) for path in others]


def test_a_rewind_of_a_local_place_is_refused(tmp_path):
    run, local = tmp_path / "run", tmp_path / "nvme"
    train(run, local, 1, 2)
    done = subprocess.run([COMMAND, "rewind", "--to", "1", near(local)], capture_output=True, text=True)
    assert done.returncode and "rewind=True" in done.stderr
    assert restored(run, local)[0] == 2


def test_a_run_has_one_place_however_it_is_spelled_and_each_service_another(tmp_path):
    run, local = tmp_path / "run", str(tmp_path / "nvme")
    (tmp_path / "link").symlink_to(tmp_path)
    spelled = [run, f"file://{run}", tmp_path / "link" / "run", f"{tmp_path}/link/../{tmp_path.name}/run"]
    assert len({sf.Checkpointer(place, local=local)._near for place in spelled}) == 1
    services = ["", "?endpoint=http://a", "?endpoint=http://b", "?region=x&endpoint=http://a"]
    places = [levels.place_of(local, f"s3://bucket/run{options}", local) for options in services]
    assert len(set(places)) == 3 and places[1] == places[3]


def test_an_error_of_the_program_does_not_wait_for_the_sending(tmp_path):
    run, local = tmp_path / "run", tmp_path / "nvme"
    began = time.monotonic()
    with pytest.raises(ZeroDivisionError), sf.Checkpointer(run, every=sf.steps(1), local=local, drain="1B/s") as ckpt:
        ckpt.step(1, state_of(1))
        ckpt.wait()
        raise ZeroDivisionError
    assert time.monotonic() - began < 30
    assert (steps(run), steps(near(local))) == ([], [1])


def test_a_drain_keeps_to_its_rate(tmp_path):
    run, local = tmp_path / "run", tmp_path / "nvme"
    began = time.monotonic()
    train(run, local, 1, 1, rows=2500, drain="1MB/s")
    assert time.monotonic() - began > 0.9, "two megabytes, one piece of which may go at once"


DIES = """
import sys, time
sys.path.insert(0, {tests!r})
import shardfast as sf
from test_local import state_of
with sf.Checkpointer({run!r}, every=sf.steps(1), keep=sf.last(2), local={local!r}, drain="40MB/s") as ckpt:
    start = ckpt.restore(state_of(0, 4000))
    print(start, flush=True)
    for step in range(start + 1, start + 1000):
        ckpt.step(step, state_of(step, 4000))
        time.sleep(0.05)
"""


@pytest.mark.parametrize("place", ["disk", "service"])
def test_trainings_that_are_killed_lose_nothing_that_was_durable(place, tmp_path, monkeypatch):
    dice, local = random.Random(7), tmp_path / "nvme"
    if place == "disk":
        kill(str(tmp_path / "run"), local, dice)
        return
    with servers.running("versitygw") as server:
        for variable, value in server.environment.items():
            monkeypatch.setenv(variable, value)
        kill(server.s3("local/run"), local, dice)


def kill(run, local, dice):
    script = DIES.format(tests=str(Path(__file__).parent), run=run, local=str(local))
    durable = 0
    for _ in range(KILLS):
        training = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        start = int(training.stdout.readline())
        assert start >= durable, "a step that was durable is restored"
        time.sleep(0.3 + dice.random() * 1.5)
        training.send_signal(signal.SIGKILL)
        training.wait()
        durable = max(steps(near(local)), default=0)
    assert train(run, local, None, durable + 1, rows=4000, keep=sf.last(2)) == durable
    shutil.rmtree(local)
    into = state_of(0, 4000)
    assert sf.Checkpointer(run).restore(into) == durable + 1
    expect_state(into, durable + 1)
    found = subprocess.run([COMMAND, "verify", "--all", "--json", run], capture_output=True, text=True)
    assert json.loads(found.stdout)["sound"] is True, found.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"local": "s3://bucket/x"}, "expected a directory on a disk of this machine, found a URL"),
        ({"local": "/proc/self"}, "local='/proc/self': "),
        ({"drain": "1GB/s"}, "expected local= or memory= beside it"),
        ({"local": "nvme", "drain": "fast"}, "expected a rate, such as '1GB/s'"),
        ({"local": "nvme", "drain": "0B/s"}, "expected a rate"),
        ({"local": "nvme", "drain": 5}, "expected a rate"),
        ({"local": 5}, "expected a path or a URL"),
    ],
)
def test_bad_input_is_refused_at_the_start(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(sf.Invalid, match=message):
        sf.Checkpointer("run", **options)


def on_several_machines(rank, world, run, local):
    levels.machine = lambda: f"machine {rank}"
    ckpt = sf.Checkpointer(run, every=sf.steps(1), local=local)
    with pytest.raises(sf.Invalid, match="expected ranks of one machine"):
        ckpt.restore(state_of(0))


def test_ranks_of_several_machines_are_refused(ranks, tmp_path):
    ranks(2)(on_several_machines, str(tmp_path / "run"), str(tmp_path / "nvme"))


def test_a_local_place_inside_the_run_is_refused(tmp_path):
    run = tmp_path / "run"
    with pytest.raises(sf.Invalid, match="expected another place than the run's own"):
        sf.Checkpointer(run, local=run)


def test_a_sending_that_is_cut_sends_at_most_one_file_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(levels, "FILE_BYTES", 1 << 18)
    run, local = tmp_path / "run", tmp_path / "nvme"
    ckpt = sf.Checkpointer(run, every=sf.steps(1), local=local, drain="1B/s")
    ckpt.step(1, state_of(1, 5000))
    ckpt.wait()
    ckpt._draining.cancel()
    ckpt.close()
    files = sorted((near(local) / "step-00000001/model").glob("*.safetensors"))
    total, largest = sum(file.stat().st_size for file in files), max(file.stat().st_size for file in files)
    assert len(files) >= 16
    sent, cuts = 0, 0
    while not (run / "step-00000001/COMMIT").exists():
        drain = native.Drain(str(ckpt._near), str(run), last=None, every=None, best=[], rate=4_000_000, timeout_s=60)
        timer = threading.Timer(0.15, drain.stop)
        timer.start()
        before = written()
        with contextlib.suppress(sf.Cancelled):
            drain.next()
        timer.cancel()
        sent, cuts = sent + written() - before, cuts + 1
    print(f"{cuts} sendings, {sent / total:.2f} of {total} bytes")
    assert cuts > 3 and sent <= total + cuts * (largest + (64 << 10))
    into = state_of(0, 5000)
    sf.load(run / "step-00000001", into)
    expect_state(into, 1)


def written():
    """Bytes that this process has given to write calls."""
    return int(re.search(r"wchar: (\d+)", Path("/proc/self/io").read_text())[1])


def test_a_damaged_checkpoint_is_never_sent_and_close_says_so(tmp_path):
    run, local = tmp_path / "run", tmp_path / "nvme"
    train(run, local, 1, 1)
    left_unsent(run, local, 2, 4)
    flip(data_file(near(local), 3))
    ckpt = sf.Checkpointer(run, every=sf.steps(1), local=local)
    assert ckpt.restore(state_of(0)) == 4
    ckpt.step(5, state_of(5))
    with pytest.raises(sf.Corrupt, match="step 3 was not sent"):
        ckpt.close()
    assert steps(run) == [1, 2, 4, 5]


def test_a_training_that_goes_back_by_itself_is_refused(tmp_path):
    run, local = tmp_path / "run", tmp_path / "nvme"
    train(run, local, 1, 2)
    ckpt = sf.Checkpointer(run, every=sf.steps(1), local=local, drain="1B/s")
    assert ckpt.restore(state_of(0)) == 2
    for step in (3, 4, 5):
        ckpt.step(step, state_of(step))
        ckpt.wait()
    with pytest.raises(sf.Conflict, match="later steps of the run, up to step 5"):
        ckpt.step(4, state_of(4))
    ckpt._draining.cancel()
    ckpt.close()
