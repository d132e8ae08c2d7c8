"""Saves and loads that a rank refuses while it reads the state: recorded, counted and told like others that fail."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import shardfast as sf
import torch
from ports import free_ports

COMMAND = Path(sys.executable).with_name("shardfast")


class Raises:
    """A value whose methods raise, on one rank alone if that is given."""

    def __init__(self, error=None):
        self.error = error

    def state_dict(self):
        if self.error is not None:
            raise self.error
        return {"a": 1}

    def load_state_dict(self, state):
        if self.error is not None:
            raise self.error


class Slow:
    def __init__(self, seconds):
        self.seconds = seconds

    def state_dict(self):
        time.sleep(self.seconds)
        return {"a": 1}

    def load_state_dict(self, state):
        assert state == {"a": 1}


def net(rows=4):
    return torch.nn.Linear(4, rows)


def records(run, kind, count):
    """Waits until so many records are there: a thread stores them that no call waits for."""
    until = time.monotonic() + 15
    while len(found := sorted(Path(run, ".telemetry").glob(f"*-{kind}-*"))) < count and time.monotonic() < until:
        time.sleep(0.01)
    assert len(found) == count, found


def reported(run, *options):
    text = subprocess.run([COMMAND, "report", run, "--json", *options], check=True, capture_output=True, text=True)
    return json.loads(text.stdout)


REFUSED = """
import sys, torch, shardfast as sf
run = sys.argv[1]
with sf.Checkpointer(run) as ckpt:
    ckpt.save(1, {"model": torch.nn.Linear(4, 4)})
ckpt = sf.Checkpointer(run)
ckpt.save(2, {"model": torch.nn.Linear(4, 4), "x": print})
"""


def test_a_save_that_is_refused_is_recorded_also_if_the_process_ends_with_it(tmp_path):
    run, lines = tmp_path / "run", tmp_path / "events"
    environment = {**os.environ, "SHARDFAST_EVENTS": str(lines)}
    ended = subprocess.run([sys.executable, "-c", REFUSED, run], env=environment, capture_output=True, text=True)
    assert ended.returncode == 1 and "Invalid" in ended.stderr, ended.stderr
    saves = reported(run)["saves"]
    assert [(save["step"], save["outcome"], save["world"]) for save in saves] == [(1, "committed", 1), (2, "failed", 1)]
    (verdict,) = (found for found in saves[1]["verdicts"] if found["cause"] == "failed")
    assert (verdict["subject"], verdict["cause"]) == ("rank 0", "failed") and "x" in verdict["text"], verdict
    watched = subprocess.run([COMMAND, "watch", run, "--once", "--room", "0"], capture_output=True, text=True)
    assert watched.returncode == 1 and watched.stdout.startswith("firing failed: step 2: "), watched
    last = json.loads(lines.read_text().splitlines()[-1])
    assert (last["event"], last["failed"], last["url"]) == ("outcome", True, f"{run}/step-00000002"), last


def counted(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    of = (line for line in lines if line.startswith("shardfast_operations_total{"))
    return {
        (kind, outcome): int(float(line.rsplit(" ", 1)[1]))
        for line in of
        for kind in ("save", "load")
        for outcome in ("succeeded", "failed")
        if f'"{kind}"' in line and f'"{outcome}"' in line
    }


def refuses(rank, world, run, culprit, port):
    """Each kind of refusal once, by one rank; the others only hear of it."""
    os.environ["SHARDFAST_METRICS"] = f"127.0.0.1:{port}"
    mine = ValueError("boom") if rank == culprit else None
    with sf.Checkpointer(run) as ckpt:
        ckpt.save(1, {"model": net(), "value": Raises()})
        ckpt.wait()
        with pytest.raises(ValueError if mine else sf.Invalid, match="boom"):
            ckpt.save(2, {"model": net(), "value": Raises(mine)})
            ckpt.wait()
        for wrong in ({"model": net(5), "value": Raises()}, {"model": net(), "value": Raises(mine)}):
            with pytest.raises((ValueError, sf.Invalid)):
                ckpt.restore(wrong)
        with pytest.raises(sf.NotFound):
            ckpt.restore({"model": net(), "value": Raises()}, step=7)
        records(run, "save", 2)
        records(run, "load", 3)
    assert counted(port + rank) == {
        ("save", "succeeded"): 1,
        ("save", "failed"): 1,
        ("load", "succeeded"): 0,
        ("load", "failed"): 3,
    }
    with urllib.request.urlopen(f"http://127.0.0.1:{port + rank}/live", timeout=30) as answer:
        frame = json.load(answer)
    failures = [one["failure"] for one in frame["ended"] if one["failure"]]
    assert len(failures) == 4 and "boom" in failures[0] and "boom" in failures[2], failures
    assert frame["running"] == []


@pytest.mark.parametrize("culprit", [0, 1])
def test_refusals_of_one_rank_are_recorded_of_all_and_name_that_rank(ranks, tmp_path, culprit):
    run = str(tmp_path / "run")
    ranks(2)(refuses, run, culprit, free_ports(2))
    report = reported(run)
    failed = [one for one in (*report["saves"], *report["loads"]) if one["outcome"] == "failed"]
    assert [(one["step"], one["not_reporting"]) for one in failed] == [(2, []), (1, []), (1, []), (7, [])]
    for one in (failed[0], failed[2]):
        (verdict,) = (found for found in one["verdicts"] if found["cause"] == "failed")  # a busy machine has others
        assert (verdict["subject"], verdict["text"]) == (f"rank {culprit}", "it failed: ValueError: boom"), verdict
    (refused,) = (found for found in failed[1]["verdicts"] if found["cause"] == "failed")
    assert refused["subject"] == "all ranks"


def slow_on_one(rank, world, run):
    with sf.Checkpointer(run) as ckpt:
        state = {"model": net(), "value": Slow(0)}
        ckpt.save(1, state)
        ckpt.wait()
        began = time.time()
        ckpt.save(2, {"model": state["model"], "value": Slow(0.8 if rank == 1 else 0)})
        took_ms = 1e3 * (time.time() - began)
        ckpt.wait()
        assert ckpt.report["phases_ms"]["captured"] >= ckpt.report["phases_ms"]["described"] >= 800 * rank
        ckpt.restore({"model": net(), "value": Slow(0.8 if rank == 1 else 0)})
        records(run, "load", 1)
    return began, took_ms


STATE_READ = ("describe", "state")  # phase and cause of a verdict


def test_the_time_in_which_a_call_reads_the_state_counts(ranks, tmp_path):
    run = str(tmp_path / "run")
    (began, _), (_, took_ms) = ranks(2)(slow_on_one, run)
    report = reported(run)
    save, (load,) = report["saves"][1], report["loads"]
    assert abs(save["began_unix_ms"] - 1e3 * began) < 500
    assert 800 <= save["stalled_ms"] <= took_ms and save["staged_ms"] >= 800 and save["ended_ms"] >= 800
    for one in (save, load):
        assert one["phases"]["describe"][1] >= 800 > one["phases"]["describe"][0], one["phases"]
        # On a busy machine a description takes both ranks some time, too (a verdict on all ranks), and a rank that
        # has no processor meanwhile is held up as well.
        described = [verdict for verdict in one["verdicts"] if (verdict["phase"], verdict["cause"]) == STATE_READ]
        (found,) = [verdict for verdict in described if verdict["subject"] == "rank 1"]
        assert "state_dict()" in found["text"], found
        assert all(found["lost_ms"] >= verdict["lost_ms"] for verdict in described), described
        # Rank 1 may also call late; the report says so if that cost more time.
        late = [verdict["lost_ms"] for verdict in one["verdicts"] if verdict["cause"] == "called_late"]
        assert all(lost_ms > found["lost_ms"] for lost_ms in late), one["verdicts"]


STOPS = """
import os, signal, sys, time, torch, shardfast as sf
rank = int(os.environ["RANK"])
torch.distributed.init_process_group("gloo")
part = {f"part{rank}": torch.full((30_000_000,), rank)}
pending = sf.save_async(f"{sys.argv[1]}/step-00000001", part, step=1, timeout_s=4)
phases = {}
while "planned" not in phases:  # what it writes then takes some time
    phases = pending.report["phases_ms"]
if rank == 2:
    os.kill(os.getpid(), signal.SIGSTOP)
try:
    pending.committed()
except sf.Unavailable:
    time.sleep(8)
"""


def test_the_record_of_a_save_with_a_stopped_rank_has_what_the_others_did(tmp_path):
    run, script = str(tmp_path / "run"), tmp_path / "stops.py"
    script.write_text(STOPS)
    port = free_ports(1)
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "3", "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen([sys.executable, script, run], env={**os.environ, **given, "RANK": str(rank)})
        for rank in range(3)
    ]
    for job in started[:2]:
        job.wait(240)
    started[2].kill()
    started[2].wait()
    (save,) = reported(run)["saves"]
    assert (save["outcome"], save["not_reporting"]) == ("failed", [2]), save
    told = [rank is not None for rank in save["phases"]["plan"]]
    assert told == [True, True, False], save["phases"]


def test_a_plan_and_a_look_are_no_loads(tmp_path):
    url = tmp_path / "run" / "step-00000001"
    sf.save(url, {"model": net()}, step=1)
    assert sf.plan_load(url, {"model": net(5)}).problems
    with pytest.raises(sf.NotFound):
        sf.load(tmp_path / "other" / "step-00000001", {"model": net()})
    sf.mapped(url)
    time.sleep(0.3)
    assert not list(tmp_path.rglob("*-load-*")) and not (tmp_path / "other").exists()
