"""The command that watches a run: what it prints, which command it runs, and how it ends."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import shardfast as sf
from nets import net
from ports import free_ports

COMMAND = Path(sys.executable).with_name("shardfast")
SILENT = ["--room", "0"]
"""A disk that is nearly full is no matter of these tests."""


def saves(run, steps):
    with sf.Checkpointer(run, every=sf.steps(1)) as ckpt:
        for step in steps:
            ckpt.step(step, {"model": net()})
            ckpt.wait()


def fails(run, step):
    """A save that fails: a committed checkpoint is there."""
    with pytest.raises(sf.Conflict):
        sf.save(f"{run}/step-{step:08}", {"model": net()}, step=step)
    until = time.monotonic() + 60
    while len(list(run.glob(f".telemetry/*-save-{step:08}.*"))) < 2 and time.monotonic() < until:
        time.sleep(0.01)  # it is stored by a thread that nobody waits for


def once(run, *options):
    return subprocess.run([COMMAND, "watch", run, "--once", *options], capture_output=True, text=True, timeout=120)


def test_one_look_says_what_fires_by_its_exit_code(tmp_path):
    run = tmp_path / "run"
    missing = once(run)
    assert (missing.returncode, missing.stdout) == (3, "") and "expected a run" in missing.stderr
    saves(run, range(1, 4))
    quiet = once(run, *SILENT)
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")
    assert json.loads(once(run, *SILENT, "--json").stdout) == {"url": str(run), "alerts": []}
    fails(run, 3)
    found = once(run, *SILENT)
    assert (found.returncode, found.stderr) == (1, "")
    assert found.stdout.startswith("firing failed: step 3: the save failed on rank 0: it failed: ")
    alert = json.loads(once(run, *SILENT, "--json").stdout)["alerts"][0]
    assert (alert["rule"], alert["subject"], alert["step"]) == ("failed", "run", 3)
    assert once(run, "--room", "1e15").stdout.count("\n") == 2


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--rate", "1.5"], "--rate 1.5: expected a share"),
        (["--rate", "-1"], "--rate -1"),
        (["--overdue", "0.5"], "--overdue 0.5"),
        (["--room", "-2"], "--room -2"),
        (["--room", "nan"], "--room NaN"),
        (["--stall", "-5s"], "--stall"),
        (["--slow", "-1"], "-1"),
        (["--every", "0"], "--every"),
        (["--rate", "0.5", "--rate", "0.8"], "cannot be used multiple times"),
        (["--every", "5s"], "--once"),
    ],
)
def test_rules_that_are_none_are_refused_by_name(tmp_path, options, named):
    saves(tmp_path / "run", [1])
    refused = once(tmp_path / "run", *options)
    assert (refused.returncode, refused.stdout) == (2, "") and named in refused.stderr, refused.stderr


@contextlib.contextmanager
def watching(run, *options):
    """A watch of the run; what it prints is read line by line."""
    command = [COMMAND, "watch", run, "--every", "50ms", *SILENT, *options]
    watch = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield watch
    finally:
        watch.kill()
        watch.wait()


def test_a_watch_says_each_begin_and_end_once_until_it_is_interrupted(tmp_path):
    run = tmp_path / "run"
    saves(run, [1, 2])
    with watching(run) as watch:
        fails(run, 2)
        line = watch.stdout.readline()
        assert " UTC firing failed: step 2: the save failed on rank 0: " in line, line
        time.sleep(0.5)
        sf.save(f"{run}/step-00000003", {"model": net()}, step=3)
        line = watch.stdout.readline()
        assert " UTC resolved failed: step 2: " in line, line
        time.sleep(0.3)
        watch.send_signal(signal.SIGINT)
        out, err = watch.communicate(timeout=240)
        assert (watch.returncode, out, err) == (-signal.SIGINT, "", "")


def test_a_watch_in_json_has_an_object_in_a_line(tmp_path):
    run = tmp_path / "run"
    saves(run, [1])
    fails(run, 1)
    with watching(run, "--json") as watch:
        found = json.loads(watch.stdout.readline())
        assert (found["state"], found["rule"], found["step"]) == ("firing", "failed", 1)
        assert abs(found["unix_ms"] / 1000 - time.time()) < 60


def test_a_watch_ends_when_nobody_reads_it(tmp_path):
    run = tmp_path / "run"
    saves(run, [1])
    with watching(run) as watch:
        watch.stdout.close()
        fails(run, 1)
        assert watch.wait(240) == 0


def test_a_run_that_is_away_for_a_while_is_said_once(tmp_path):
    run, away = tmp_path / "run", tmp_path / "away"
    saves(run, [1])
    with watching(run) as watch:
        time.sleep(0.5)
        run.rename(away)
        assert "shardfast: NotFound: " in watch.stderr.readline()
        time.sleep(0.3)
        away.rename(run)
        fails(run, 1)
        assert "firing failed" in watch.stdout.readline()
        watch.send_signal(signal.SIGINT)
        assert watch.communicate(timeout=240)[1] == ""


JOB = """
import sys, torch, shardfast as sf
run, state = sys.argv[1], {"model": torch.nn.Linear(4, 4)}
print("ready", flush=True)
for line in sys.stdin:
    try:
        sf.save(f"{run}/step-{int(line):08}", state, step=int(line))
        print("saved", flush=True)
    except sf.Conflict:
        print("failed", flush=True)
"""


class Job:
    """A training that serves what it does, and saves the step that it is given."""

    def __init__(self, run):
        self.run, self.port = run, free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self):
        command = [sys.executable, "-c", JOB, str(self.run)]
        environment = {**os.environ, "SHARDFAST_METRICS": f"127.0.0.1:{self.port}"}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
        assert self.process.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()

    def saves(self, step):
        self.process.stdin.write(f"{step}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


def test_one_look_at_a_job_says_what_fires_by_its_exit_code(tmp_path):
    with Job(tmp_path / "run") as job:
        assert job.saves(1) == "saved"
        quiet = once(job.url, *SILENT)
        assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")
        assert json.loads(once(job.url, *SILENT, "--json").stdout) == {"url": job.url, "alerts": []}
        assert job.saves(1) == "failed"
        found = once(job.url, *SILENT)
        assert found.returncode == 1
        assert found.stdout.startswith(f"firing failed: step 1: {job.run}, seen from rank 0: the save failed: "), found
        (alert,) = json.loads(once(job.url, *SILENT, "--json").stdout)["alerts"]
        assert (alert["rule"], alert["subject"], alert["step"]) == ("failed", str(job.run), 1)
        assert job.saves(2) == "saved"
        until = time.monotonic() + 60
        while "firing room: " not in (found := once(job.url, "--room", "1e15")).stdout:
            assert time.monotonic() < until, found  # a thread that nobody waits for has looked for room
            time.sleep(0.05)
    gone = once(job.url)
    assert gone.returncode == 1 and gone.stdout.startswith("firing silent: the job does not answer: http://127"), gone
    assert once("http://127.0.0.1").returncode == once("https://127.0.0.1:9").returncode == 2


def test_a_watch_of_a_job_says_each_begin_and_end_once(tmp_path):
    run = tmp_path / "run"
    with Job(run) as job:
        job.saves(1)
        with watching(job.url) as watch:
            assert job.saves(1) == "failed"
            assert " UTC firing failed: step 1: " in watch.stdout.readline()
            time.sleep(0.3)
            job.saves(2)
            assert " UTC resolved failed: step 1: " in watch.stdout.readline()
            job.process.send_signal(signal.SIGKILL)
            line = watch.stdout.readline()
            assert " UTC firing silent: the job has not answered for " in line and "Connection refused" in line, line
            job.process.wait()
            with socket.create_server(("127.0.0.1", job.port)) as server:  # not a job's answer
                connection, _ = server.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]")
                assert "expected what a training's rank tells" in watch.stderr.readline()


def rank_that_dies(rank, world, run, port):
    """Saves; rank 1 then stops itself, and rank 0 looks at the job."""
    os.environ["SHARDFAST_METRICS"] = f"127.0.0.1:{port}"
    sf.save(f"{run}/step-00000001", {"model": net()})
    if rank == 1:
        time.sleep(1)
        parent = os.getpid()
        if os.fork() == 0:
            time.sleep(8)
            os.kill(parent, signal.SIGCONT)
            os._exit(0)
        os.kill(parent, signal.SIGSTOP)
        return None
    assert once(f"http://127.0.0.1:{port}", *SILENT).stdout == ""
    time.sleep(2)
    return once(f"http://127.0.0.1:{port}", *SILENT).stdout


def test_a_rank_that_does_not_answer_is_an_alert(ranks, tmp_path):
    said, _ = ranks(2)(rank_that_dies, str(tmp_path / "run"), free_ports(2))
    assert said == "firing silent_ranks: rank 1 does not answer: no answer within 1 s\n"


def ends(run):
    return list((run / ".telemetry").glob("*-end.json"))


def test_a_run_whose_job_has_ended_says_so_and_one_that_failed_does_not(tmp_path):
    saves(tmp_path / "ended", [1, 2])
    (note,) = ends(tmp_path / "ended")
    found = json.loads(note.read_text())
    assert abs(found["ended_unix_ms"] / 1000 - time.time()) < 60 and note.name == f"{found['ended_unix_ms']}-end.json"
    with pytest.raises(ZeroDivisionError), sf.Checkpointer(tmp_path / "failed", every=sf.steps(1)) as ckpt:
        ckpt.step(1, {"model": net()})
        raise ZeroDivisionError
    ckpt = sf.Checkpointer(tmp_path / "failed")
    ckpt.close()
    assert ends(tmp_path / "failed") == [], "an error, and a checkpointer that has saved nothing"
    assert json.loads(subprocess.check_output([COMMAND, "report", tmp_path / "ended", "--json"]))["unreadable"] == []


def told(place, number):
    """What the command has noted, once it has done so that often."""
    until = time.monotonic() + 60
    while len(lines := place.read_text().splitlines() if place.exists() else []) < number:
        assert time.monotonic() < until, lines
        time.sleep(0.01)
    return lines


def test_the_command_gets_the_alert_in_its_environment(tmp_path):
    run, place = tmp_path / "run", tmp_path / "told"
    saves(run, [1])
    noting = (
        'echo "$SHARDFAST_ALERT|$SHARDFAST_ALERT_STATE|$SHARDFAST_ALERT_STEP|$SHARDFAST_ALERT_SUBJECT|'
        f'$SHARDFAST_ALERT_RUN|$SHARDFAST_ALERT_TEXT" >> {place}'
    )
    with watching(run, "--exec", noting):
        fails(run, 1)
        first = told(place, 1)[0]
        assert first.startswith(f"failed|firing|1|run|{run}|the save failed on rank 0: it failed: ")
        sf.save(f"{run}/step-00000002", {"model": net()}, step=2)
        assert told(place, 2)[1].startswith(f"failed|resolved|1|run|{run}|")
    fails(run, 2)
    assert once(run, *SILENT, "--exec", noting).returncode == 1
    assert len(told(place, 3)) == 3


def test_a_command_that_fails_or_hangs_does_not_stop_the_watch(tmp_path):
    run, place = tmp_path / "run", tmp_path / "told"
    saves(run, [1])
    command = (
        f'echo "$SHARDFAST_ALERT_STATE" >> {place}; [ "$SHARDFAST_ALERT_STATE" = resolved ] && exit 7; sleep 600 & wait'
    )
    with watching(run, "--exec", command) as watch:
        fails(run, 1)
        told(place, 1)
        began = time.monotonic()
        assert "took more than 10 s: it was ended" in watch.stderr.readline()
        assert 9 < time.monotonic() - began < 40
        sf.save(f"{run}/step-00000002", {"model": net()}, step=2)
        assert "the command of --exec failed: exit status: 7" in watch.stderr.readline()
        assert told(place, 2) == ["firing", "resolved"]
    # What the command had started was ended with it.
    left = [path for path in Path("/proc").glob("[0-9]*/environ") if is_of(path, f"SHARDFAST_ALERT_RUN={run}")]
    assert left == []


def is_of(environ, entry):
    try:
        return environ.stat().st_uid == os.getuid() and entry.encode() in environ.read_bytes().split(b"\0")
    except OSError:
        return False
