"""Storage that does not answer ends each call in its time."""

import re
import socketserver
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import shardfast as sf
import torch
from shardfast import _native

SHARDFAST = Path(sys.executable).parent / "shardfast"

TIMEOUT_S = 1.0

SLACK_S = 15.0
"""What a call may take beyond its timeout on a busy machine: far below the minute of pauses between twelve tries."""

OVER = "s3://b/run.*within the timeout of 1 s"

COMMANDS = [
    ["ls", "URL"],
    ["inspect", "URL"],
    ["verify", "URL"],
    ["verify", "URL", "--all", "--stored"],
    ["diff", "LOCAL", "URL"],
    ["export", "URL", "OUT"],
    ["copy", "URL", "OUT"],
    ["copy", "LOCAL", "URL"],
    ["sync", "URL", "OUT"],
    ["sync", "RUN", "URL"],
    ["rewind", "URL", "--to", "1"],
    ["pin", "URL"],
    ["sweep", "URL"],
]

BAD = [0, -1, float("nan"), 1e300, "soon"]


class Busy(socketserver.StreamRequestHandler):
    """Answers each request that the service is overloaded."""

    def handle(self):
        while self.rfile.readline().strip():
            pass
        self.wfile.write(b"HTTP/1.1 503 Slow Down\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")


@pytest.fixture
def away(monkeypatch):
    for name, value in {"ACCESS_KEY_ID": "k", "SECRET_ACCESS_KEY": "s", "REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Busy) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"s3://b/run?endpoint=http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_each_command_ends_in_its_time(away, tmp_path):
    run, local = tmp_path / "run", tmp_path / "run/step-00000001"
    sf.save(local, {"x": torch.arange(4.0)})
    places = {"URL": away, "RUN": str(run), "LOCAL": str(local)}
    began = time.monotonic()
    running = []
    for number, arguments in enumerate(COMMANDS):
        named = [places.get(word, f"{tmp_path}/{number}" if word == "OUT" else word) for word in arguments]
        command = [SHARDFAST, *named, "--timeout", "1"]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    for arguments, process in zip(COMMANDS, running, strict=True):
        _, said = process.communicate(timeout=240)
        assert process.returncode == 5, (arguments, said)
        assert re.search(f"^shardfast: Unavailable: .*{OVER}", said), (arguments, said)
    assert time.monotonic() - began < TIMEOUT_S + 2 * SLACK_S, "all of them at once"


def test_each_call_ends_in_its_time(away):
    state = {"x": torch.arange(4.0)}

    def retention():
        return _native.Retention(away, last=1, every=None, best=[], timeout_s=TIMEOUT_S)

    calls = [
        lambda: sf.mapped(away, timeout_s=TIMEOUT_S),
        lambda: sf.load(away, state, timeout_s=TIMEOUT_S),
        lambda: sf.Checkpointer(away, timeout_s=TIMEOUT_S).restore(state),
        lambda: sf.Checkpointer(away, keep=sf.last(1), timeout_s=TIMEOUT_S).save(1, state),
        lambda: retention().retain([1]),
        lambda: retention().clear(None),
        lambda: retention().clear([1]),
    ]
    for call in calls:
        began = time.monotonic()
        with pytest.raises(sf.Unavailable, match=OVER):
            call()
        assert time.monotonic() - began < TIMEOUT_S + SLACK_S


@pytest.mark.parametrize("bad", BAD)
def test_what_is_no_time_is_refused_by_name(bad, tmp_path):
    state = {"x": torch.arange(4.0)}
    calls = [
        lambda: sf.mapped(tmp_path, timeout_s=bad),
        lambda: sf.Checkpointer(tmp_path, timeout_s=bad),
        lambda: sf.save(tmp_path / "one", state, timeout_s=bad),
        lambda: sf.save_async(tmp_path / "one", state, timeout_s=bad),
        lambda: sf.load(tmp_path, state, timeout_s=bad),
        lambda: sf.plan_load(tmp_path, state, timeout_s=bad),
    ]
    for call in calls:
        with pytest.raises(sf.Invalid, match=f"^timeout_s={re.escape(repr(bad))}: expected a number of seconds"):
            call()
    assert list(tmp_path.iterdir()) == []
    done = subprocess.run([SHARDFAST, "ls", tmp_path, "--timeout", str(bad)], capture_output=True, text=True)
    assert done.returncode == 2, done
    assert "'--timeout <SECONDS>': expected a number of seconds" in done.stderr, done.stderr
