"""Workers of data loaders where a scheduler sends the signal to all processes of a job."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import os, signal, subprocess, sys, threading, time
import torch, shardfast as sf

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, number):
        time.sleep(0.002)
        return number

def main():
    run, context, name, whom, is_persistent = sys.argv[1:]
    ckpt = sf.Checkpointer(run, every=sf.steps(1000), on_signal=name)
    loader = torch.utils.data.DataLoader(
        Rows(), batch_size=4, num_workers=2, multiprocessing_context=context, persistent_workers=is_persistent == "1",
        worker_init_fn=sf.outlive_signals if context == "spawn" else None,
    )
    rows = iter(loader)
    workers = [worker.pid for worker in rows._workers]
    to = f"-{os.getpgid(0)}" if whom == "all" else " ".join(map(str, (*workers, os.getpid())))
    # Another process does it, as launchers do.
    tell = lambda: subprocess.run(["sh", "-c", f"kill -s {name.removeprefix('SIG')} -- {to}"], start_new_session=True)
    for step, batch in enumerate(rows, 1):
        if step == 5:
            threading.Timer(0.005, tell).start()
        ckpt.step(step, {"model": {"w": torch.full((10,), float(step))}})
        if ckpt.stopping:
            break
    print("stopped after", step, *workers, flush=True)
    ckpt.close()
    # The iterator lives until the program ends, which ends the workers.

if __name__ == "__main__":
    main()
"""


def runs(pid):
    """Whether a process runs: it is there, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("context", "name", "whom", "is_persistent"),
    [
        ("fork", "SIGTERM", "all", True),
        ("fork", "SIGTERM", "all", False),
        ("fork", "SIGTERM", "each", True),
        ("fork", "SIGUSR1", "all", True),
        ("spawn", "SIGTERM", "all", True),
        ("spawn", "SIGUSR1", "each", False),
    ],
)
def test_a_training_whose_workers_get_the_signal_stops_and_ends(tmp_path, context, name, whom, is_persistent):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, tmp_path / "program.py", tmp_path / "run", context, name, whom, str(int(is_persistent))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, start_new_session=True)
    assert done.returncode == 0, done.stderr
    *said, first, second = done.stdout.split()
    step = int(said[-1])
    assert 5 <= step < 1000
    assert [path.parent.name for path in (tmp_path / "run").glob("*/COMMIT")] == [f"step-{step:08}"]
    until = time.monotonic() + 20
    while runs(first) or runs(second):
        assert time.monotonic() < until, "a worker outlives its training"
        time.sleep(0.05)


ENDS = """
import multiprocessing, os, signal, sys, time
import shardfast as sf

def works(ready):
    ready.set()
    time.sleep(600)

if __name__ == "__main__":
    ckpt = sf.Checkpointer(sys.argv[1], every=sf.steps(10), on_signal="SIGTERM")
    fork = multiprocessing.get_context("fork")
    ready = fork.Event()
    child = fork.Process(target=works, args=(ready,), daemon=True)
    child.start()
    ready.wait()
    os.system(f"kill -TERM {child.pid}")  # not its parent
    child.join(0.5)
    print(child.exitcode, flush=True)
    if sys.argv[2] == "terminate":
        child.terminate()
        child.join()
        print(child.exitcode, flush=True)
    ckpt.close()
"""


@pytest.mark.parametrize("how", ["terminate", "at the program's end"])
def test_a_forked_process_ends_when_its_parent_ends_it(tmp_path, how):
    (tmp_path / "program.py").write_text(ENDS)
    command = [sys.executable, tmp_path / "program.py", tmp_path / "run", how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, start_new_session=True)
    expected = ["None", str(-signal.SIGTERM)] if how == "terminate" else ["None"]
    assert (done.returncode, done.stdout.split()) == (0, expected), done.stderr


def test_a_process_whose_parent_was_killed_ends_by_any_signal(tmp_path):
    killed = "open(sys.argv[1] + '.pid', 'w').write(str(child.pid)); os.kill(os.getpid(), signal.SIGKILL)"
    (tmp_path / "program.py").write_text(ENDS.replace("print(child.exitcode, flush=True)", killed, 1))
    command = [sys.executable, tmp_path / "program.py", tmp_path / "run", "terminate"]
    assert subprocess.run(command, timeout=60, start_new_session=True, check=False).returncode == -signal.SIGKILL
    child = int((tmp_path / "run.pid").read_text())
    assert runs(child)
    os.kill(child, signal.SIGTERM)
    until = time.monotonic() + 20
    while runs(child):
        assert time.monotonic() < until
        time.sleep(0.05)
