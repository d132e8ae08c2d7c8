"""How far saves and loads are, while they run: in Python, on a terminal, over HTTP."""

import contextlib
import json
import os
import pty
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import shardfast as sf
import torch
from ports import free_ports
from prometheus_client.parser import text_string_to_metric_families
from shardfast.progress import line

COMMAND = Path(sys.executable).with_name("shardfast")
DASHBOARD = Path(__file__).parents[2] / "docs" / "dashboard.json"


def state_of(rank, rows=400):
    torch.manual_seed(rank)
    return {"model": torch.nn.Linear(500, rows), "extra": {"rank": sf.PerRank(rank), "step": 1}}


def test_a_save_counts_its_bytes(tmp_path):
    pending = sf.save_async(tmp_path / "one", state_of(0, rows=4000))
    seen = []
    while not pending.done():
        seen.append(pending.progress)
    pending.committed()
    last = pending.progress
    assert last.bytes == last.staged == last.written == pending.report["bytes_written"] > 8_000_000
    assert seen == sorted(seen)
    assert all(one.written <= one.bytes and one.staged <= one.bytes for one in seen)


def test_a_save_prints_as_one_line(tmp_path):
    pending = sf.save_async(tmp_path / "one", state_of(0))
    assert "\n" not in repr(pending)
    pending.committed()
    assert re.fullmatch(rf"<save of {tmp_path}/one: committed after \d+\.\d s>", str(pending))
    (tmp_path / "file").write_text("")
    failing = sf.save_async(tmp_path / "file" / "two", state_of(0))
    with pytest.raises(sf.Error):
        failing.committed()
    assert re.fullmatch(rf"<save of {tmp_path}/file/two: failed: .+>", str(failing))


def test_a_line_fits_into_its_terminal():
    for columns in (10, 24, 40, 80, 200):
        for done, total in ((0, 0), (1, 3), (5 << 30, 5 << 30)):
            text = line("load s3://bucket/runs/a-long-name/step-00000100", done, total, 2.0, columns)
            assert len(text) < columns and "\n" not in text
    text = line("load runs/a", 1 << 30, 4 << 30, 2.0, 80)
    assert text == "load runs/a [#######......................]  25%  1.0 GiB of 4.0 GiB  512 MiB/s"


def drawn(arguments, tmp_path):
    """What a child writes to the terminal that its standard error is."""
    sf.save(tmp_path / "one", state_of(0))
    program = (
        "import sys, torch, shardfast as sf; model = torch.nn.Linear(500, 400)\n"
        "state = {'model': model, 'extra': {'rank': sf.PerRank(0), 'step': 1}}\n"
        f"sf.load({str(tmp_path / 'one')!r}, state{arguments})\n"
    )
    terminal, child = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", program], stderr=child, stdout=subprocess.PIPE) as process:
        os.close(child)
        text = b""
        with contextlib.suppress(OSError):  # the terminal has no other end any more
            while piece := os.read(terminal, 4096):
                text += piece
        assert process.wait() == 0 and not process.stdout.read()
    os.close(terminal)
    return text.decode()


def test_a_load_draws_a_line_on_a_terminal_if_it_is_asked_to(tmp_path):
    text = drawn(", progress=True", tmp_path)
    assert "/one [####" in text and " 100%  783 KiB of 783 KiB" in text and text.endswith("\r\n")


def test_a_load_draws_nothing_unless_it_is_asked_to(tmp_path):
    assert drawn("", tmp_path) == ""


def got(port, path):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
        return answer.read().decode()


def live(port):
    return json.loads(got(port, "/live"))


def serves(rank, world, run, port):
    """Saves twice, fails once, and asks both ranks over HTTP; rank 1 comes late to the second save."""
    os.environ["SHARDFAST_METRICS"] = f"127.0.0.1:{port}"
    state = state_of(7)
    state["extra"]["rank"] = sf.PerRank(rank)
    sf.save(f"{run}/step-00000001", state)
    if rank == 1:
        until = time.monotonic() + 60
        frame = live(port)
        while not (frame["waits"] and frame["running"][0]["stored"]) and time.monotonic() < until:
            time.sleep(0.01)
            frame = live(port)
        assert len(frame["waits"]) == len(frame["running"]) == 1, frame
        (wait,), (running,) = frame["waits"], frame["running"]
        assert wait["ranks"] == [1] and wait["call"].startswith("save "), wait
        assert (running["operation"], running["step"]) == ("save", 2), running
        assert 0 < running["stored"] <= running["bytes"] and running["url"] == f"{run}/step-00000002", running
        assert frame["world"] == world and frame["rank"] == 0
    sf.save(f"{run}/step-00000002", state)
    with pytest.raises(sf.Conflict):
        sf.save(f"{run}/step-00000002", state)
    sf.load(f"{run}/step-00000002", state)
    families = {family.name: family for family in text_string_to_metric_families(got(port + rank, "/metrics"))}
    values = {
        (sample.name, sample.labels.get("operation"), sample.labels.get("outcome")): sample.value
        for sample in families["shardfast_operations"].samples
    }
    assert values["shardfast_operations_total", "save", "succeeded"] == 2
    assert values["shardfast_operations_total", "save", "failed"] == 1
    assert values["shardfast_operations_total", "load", "succeeded"] == 1
    steps = {sample.labels["operation"]: sample.value for sample in families["shardfast_last_step"].samples}
    assert steps == {"save": 2, "load": 2}
    for family in families.values():
        assert all(sample.labels["rank"] == str(rank) for sample in family.samples), family
    names = {sample.name for family in families.values() for sample in family.samples}
    shown = set(re.findall(r"shardfast_\w+", DASHBOARD.read_text()))
    assert shown <= names, shown - names
    kinds = {sample.labels["kind"]: 0 for sample in families["shardfast_storage_seconds"].samples}
    for sample in families["shardfast_storage_seconds"].samples:
        if sample.name.endswith("_bucket"):
            assert sample.value >= kinds[sample.labels["kind"]]  # buckets count all that are below
            kinds[sample.labels["kind"]] = sample.value
    assert kinds["large_writes"] + kinds["small_writes"] > 0
    ended = live(port + rank)["ended"]
    assert [(one["operation"], one["failure"] is None) for one in ended] == [
        ("save", True),
        ("save", True),
        ("save", False),
        ("load", True),
    ]
    if rank == 0:
        ranks = {other["rank"]: other["problem"] for other in live(port)["ranks"]}
        assert ranks == {1: None}
        top = subprocess.run(
            [COMMAND, "top", f"http://127.0.0.1:{port}"], check=True, capture_output=True, text=True
        ).stdout
        assert top.startswith("2 ranks, seen from rank 0 on ") and "load of step 2 loaded in" in top, top
    sf.save(f"{run}/step-00000003", state)  # so that no rank ends while the other asks


def test_ranks_serve_what_they_do(ranks, tmp_path):
    ranks(2)(serves, str(tmp_path / "run"), free_ports(2))


ALONE = """
import logging, sys, time, torch, shardfast as sf
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
sf.save(sys.argv[1], {"model": torch.nn.Linear(4, 4)})
print("saved", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def alone(url, **environment):
    """A process that has saved, and waits until the block has ended; gives it and its first lines."""
    with subprocess.Popen(
        [sys.executable, "-c", ALONE, str(url)],
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        lines = []
        while not lines or not lines[-1].startswith("saved"):
            lines.append(process.stdout.readline())
            assert lines[-1], lines
        try:
            yield process, "".join(lines)
        finally:
            process.stdin.close()
        assert process.wait() == 0


def test_a_server_reads_only_and_ends_with_its_process(tmp_path):
    with alone(tmp_path / "one", SHARDFAST_METRICS="127.0.0.1:0") as (process, log):
        port = int(re.search(r"serves http://127\.0\.0\.1:(\d+)/metrics", log)[1])
        for path, method, status in (("/other", "GET", 404), ("/metrics", "POST", 405), ("/live", "DELETE", 405)):
            request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(request, timeout=30)
            assert caught.value.code == status
        # Clients that say nothing, or nonsense, keep nobody else from an answer.
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(8)]
        silent[0].sendall(b"\x00\xff" * 9000)
        assert live(port)["ended"][0]["url"] == str(tmp_path / "one")
        for one in silent:
            one.close()
        assert len(list(Path(f"/proc/{process.pid}/task").iterdir())) > 1
    with pytest.raises(urllib.error.URLError):
        got(port, "/live")


def test_a_taken_port_or_a_wrong_address_fails_no_save(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with alone(tmp_path / "one", SHARDFAST_METRICS=f"127.0.0.1:{port}") as (_, log):
            assert f"SHARDFAST_METRICS=127.0.0.1:{port}: no metrics are served" in log and "port is taken" in log
    with alone(tmp_path / "two", SHARDFAST_METRICS="nonsense") as (_, log):
        assert "expected an address host:port" in log
    with alone(tmp_path / "three", SHARDFAST_METRICS=os.fsdecode(b"127.0.0.1:0\xff")) as (_, log):
        assert "SHARDFAST_METRICS=127.0.0.1:0\\udcff: no metrics are served" in log


QUIET = """
import os, sys, torch, shardfast as sf
sf.save(sys.argv[1], {"model": torch.nn.Linear(4, 4)})
names = []
for task in os.listdir("/proc/self/task"):
    try:
        names.append(open(f"/proc/self/task/{task}/comm").read().strip())
    except OSError:  # it has ended
        pass
lines = [line.split() for file in ("tcp", "tcp6") for line in open(f"/proc/net/{file}")]
listening = {line[9] for line in lines if line[3] == "0A"}
files = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
links = [os.readlink(file) for file in files if os.path.lexists(file)]
print([name for name in names if name.startswith("shardfast-metr")], [one for one in links if one[8:-1] in listening])
"""


@pytest.mark.parametrize("asked", [False, True])
def test_a_process_listens_only_if_it_is_asked_to(asked, tmp_path):
    environment = {name: text for name, text in os.environ.items() if name != "SHARDFAST_METRICS"}
    if asked:
        environment["SHARDFAST_METRICS"] = "127.0.0.1:0"
    text = subprocess.run(
        [sys.executable, "-c", QUIET, str(tmp_path / "one")],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert (text.strip() == "[] []") is not asked, text


def test_top_says_who_does_not_answer(tmp_path):
    for target, code, words in (
        (f"http://127.0.0.1:{free_ports(1)}", 5, "Unavailable"),
        ("https://127.0.0.1:9", 2, "expected http://host:port"),
        (str(tmp_path / "none"), 3, "expected a run"),
    ):
        done = subprocess.run([COMMAND, "top", target], capture_output=True, text=True)
        assert done.returncode == code and words in done.stderr, done


def test_top_refuses_what_is_no_rank():
    """An endpoint that answers HTML, as a proxy does."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n<html></html>")

        thread = threading.Thread(target=answer)
        thread.start()
        done = subprocess.run(
            [COMMAND, "top", f"http://127.0.0.1:{server.getsockname()[1]}"], capture_output=True, text=True
        )
        thread.join()
    assert done.returncode == 2 and "expected what a training's rank tells" in done.stderr, done


def test_a_save_prints_in_a_forked_process_too(tmp_path):
    pending = sf.save_async(tmp_path / "one", state_of(0))
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.write(write, repr(pending).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    assert os.read(read, 4096).decode() == f"<save of {tmp_path}/one: begun by another process>"
    os.close(read)
    pending.committed()


class Broken:
    """A stream that says that it is a terminal, and is none."""

    def isatty(self):
        return True

    def write(self, _):
        raise RuntimeError("not written")

    flush = write


def test_a_stream_that_fails_fails_no_load(tmp_path, monkeypatch):
    state = state_of(0)
    sf.save(tmp_path / "one", state)
    monkeypatch.setattr(sys, "stderr", Broken())
    assert sf.load(tmp_path / "one", state, progress=True).bytes_read > 0


def test_a_forked_process_leaves_the_port_to_others(tmp_path):
    program = ALONE.replace("sys.stdin.read()", "import os\nif os.fork(): os._exit(0)\nsys.stdin.read()")
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "one")],
        env={**os.environ, "SHARDFAST_METRICS": "127.0.0.1:0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        log = "".join(iter(process.stdout.readline, "saved\n"))
        process.wait()  # the child lives on, until its input ends
        port = int(re.search(r"serves http://127\.0\.0\.1:(\d+)/metrics", log)[1])
        with socket.create_server(("127.0.0.1", port)):
            pass
        process.stdin.close()


def test_a_pipe_for_events_that_nobody_reads_holds_nothing_up(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    run = tmp_path / "run"
    with alone(run / "step-00000001", SHARDFAST_EVENTS=str(tmp_path / "pipe")) as (_, log):
        assert "no events are written" in log
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with alone(tmp_path / "read", SHARDFAST_EVENTS=str(tmp_path / "pipe")) as (_, log):
        assert "no events are written" not in log
    assert os.read(reader, 1 << 16).startswith(b"{")
    os.close(reader)
    assert list((run / ".telemetry").iterdir())


def test_events_that_cannot_be_written_are_a_warning(tmp_path):
    with alone(tmp_path / "one", SHARDFAST_EVENTS=str(tmp_path)) as (_, log):
        assert f"SHARDFAST_EVENTS={tmp_path}: no events are written" in log
    with alone(tmp_path / "two", SHARDFAST_METRICS="me:hunter2@127.0.0.1:0") as (_, log):
        assert "no metrics are served" in log and "hunter2" not in log
