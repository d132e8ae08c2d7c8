"""The commands that show a job, in a real terminal, tmux, whose size changes, while the job saves, fails and ends."""

import contextlib
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from ports import free_ports

COMMAND = Path(sys.executable).with_name("shardfast")

UNPACKED = Path(__file__).parents[2] / "target" / "receivers" / "usr"

# Saves each step that a line of its input names; rank 1 first sleeps for as long as the line says.
JOB = """
import os, sys, time, torch, shardfast as sf
torch.distributed.init_process_group("gloo")
torch.manual_seed(7)
run, rank = sys.argv[1], torch.distributed.get_rank()
state = {"model": torch.nn.Linear(500, 400)}
print("ready", flush=True)
for line in sys.stdin:
    step, wait = line.split()
    if rank == 1:
        time.sleep(float(wait))
    try:
        sf.save(f"{run}/step-{int(step):08}", state, step=int(step))
    except sf.Conflict:
        pass
"""


class Terminal:
    """A terminal of its own that runs a command; what is left on its screen stays readable after the command's end."""

    def __init__(self, place, *command, columns=100, rows=24):
        self.socket = str(place / f"terminal-{free_ports(1)}")
        self._tmux("new-session", "-d", "-x", str(columns), "-y", str(rows), "sleep 600")
        self._tmux("set-option", "-g", "remain-on-exit", "on")
        self._tmux("set-option", "-g", "remain-on-exit-format", "")  # its line would push the first one off the screen
        self._tmux("set-option", "-g", "window-size", "manual")
        # tmux itself loses the status of some commands.
        told = ["sh", "-c", 'trap : INT; "$@"; echo "exit status $?"', "sh"]
        self._tmux("respawn-pane", "-k", *told, *map(str, command))

    def _tmux(self, *command):
        environment = {**os.environ, "LD_LIBRARY_PATH": str(UNPACKED / "lib" / f"{platform.machine()}-linux-gnu")}
        command = [UNPACKED / "bin" / "tmux", "-S", self.socket, "-f", "/dev/null", *command]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=60).stdout

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(subprocess.CalledProcessError):
            self._tmux("kill-server")

    def resize(self, columns, rows):
        self._tmux("resize-window", "-x", str(columns), "-y", str(rows))

    def keys(self, *keys):
        self._tmux("send-keys", *keys)

    def screen(self, is_joined=True):
        """The text on the screen, with lines that the terminal broke joined again."""
        return self._tmux("capture-pane", "-p", *(["-J"] if is_joined else []))

    def shows(self, *parts, seconds=60):
        """The screen as soon as it has all these parts."""
        over = time.monotonic() + seconds
        while not all(part in (screen := self.screen()) for part in parts):
            assert time.monotonic() < over, f"{parts} are not all in\n{screen}"
            time.sleep(0.1)
        return screen


class Job:
    """Two ranks that tell what they do."""

    def __init__(self, run):
        self.run, self.port = run, free_ports(3)
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self):
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port + 2), "WORLD_SIZE": "2"}
        common |= {"LOCAL_WORLD_SIZE": "2", "SHARDFAST_METRICS": f"127.0.0.1:{self.port}"}
        pipe = subprocess.PIPE
        self.ranks = [
            subprocess.Popen(
                [sys.executable, "-c", JOB, str(self.run)],
                env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=pipe,
                stdout=pipe,
                text=True,
            )
            for rank in range(2)
        ]
        for rank in self.ranks:
            assert rank.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *_):
        for rank in self.ranks:
            rank.kill()
            rank.wait()
            rank.stdin.close()
            rank.stdout.close()

    def saves(self, step, wait=0.0):
        for rank in self.ranks:
            rank.stdin.write(f"{step} {wait}\n")
            rank.stdin.flush()

    def listens(self):
        """Waits until rank 0 answers, as it does from its first save on."""
        until = time.monotonic() + 60
        with socket.socket() as tried:
            while tried.connect_ex(("127.0.0.1", self.port)):
                assert time.monotonic() < until
                time.sleep(0.05)


def test_top_shows_a_job_that_saves_fails_and_ends_at_any_size(tmp_path):
    with Job(tmp_path / "run") as job, contextlib.ExitStack() as ends:
        job.saves(1)
        job.listens()
        terminal = ends.enter_context(Terminal(tmp_path, COMMAND, "top", job.url))
        terminal.shows("2 ranks, seen from rank 0 on ", "save of step 1 committed in ")
        job.saves(2, 5.0)
        terminal.shows("save of step 2, for ", "waits for rank 1 since ", " 100 %  ")
        terminal.shows("save of step 2 committed in ", "nothing is saved or loaded now")
        job.saves(2)
        terminal.shows("save of step 2 failed after ")
        for columns, rows in [(40, 12), (12, 4), (1, 1), (200, 60)]:
            terminal.resize(columns, rows)
            time.sleep(1.5)
            assert "exit status" not in terminal.screen(), (columns, rows)
            lines = terminal.screen(is_joined=False).splitlines()
            assert len(lines) <= rows and all(len(line) <= columns for line in lines), lines
        screen = terminal.shows("2 ranks, seen from rank 0 on ", "save of step 2 failed after ")
        assert screen.count("seen from") == 1, screen
        terminal.resize(60, 20)
        job.ranks[1].send_signal(signal.SIGSTOP)
        terminal.shows("1 rank does not answer: rank 1: ")
        job.ranks[1].send_signal(signal.SIGCONT)
        for rank in job.ranks:
            rank.kill()
        screen = terminal.shows("no answer for ")
        assert "save of step 2" in screen
        terminal.shows("no answer for 3", "exit status 0", seconds=90)


def test_top_of_a_run_goes_on_until_its_user_ends_it(tmp_path):
    run = tmp_path / "run"
    with Job(run) as job:
        job.saves(1)
        until = time.monotonic() + 60
        while not list(run.glob(".telemetry/*-save-*")):
            assert time.monotonic() < until
            time.sleep(0.1)
        with Terminal(tmp_path, COMMAND, "top", run) as terminal:
            terminal.shows("  1  committed  ")
            job.saves(2)
            terminal.shows("  2  committed  ")
            terminal.resize(30, 8)
            terminal.shows("run: 2 saves, 0 loads")
            terminal.keys("C-c")
            terminal.shows(f"exit status {128 + signal.SIGINT}")


def test_watch_says_a_failure_its_end_and_a_job_that_is_gone(tmp_path):
    options = ["--every", "100ms", "--room", "0"]
    with Job(tmp_path / "run") as job, contextlib.ExitStack() as ends:
        job.saves(1)
        job.listens()
        terminal = ends.enter_context(Terminal(tmp_path, COMMAND, "watch", job.url, *options))
        terminal.resize(60, 20)
        time.sleep(1)  # it looks at what ended before it began, too
        job.saves(1)
        time.sleep(1)
        assert terminal.shows("UTC firing failed: step 1: ").count("firing failed") == 1
        terminal.resize(33, 40)
        job.saves(2)
        terminal.shows("UTC resolved failed: step")
        for rank in job.ranks:
            rank.kill()
        terminal.shows("UTC firing silent: the")
        terminal.keys("C-c")
        terminal.shows(f"exit status {128 + signal.SIGINT}")
