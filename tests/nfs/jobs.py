"""Serves what the tests ask of a guest: functions by name, one after the other, in one process of Python.

`python jobs.py PORT`. Whoever connects sends the name and the arguments as JSON, and gets what the function returned,
or the kind and the message of its error, and how many seconds it took.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import shardfast as sf

PEER_PORT = 9


def state_of(seed, length=0):
    """Arrays and values that follow from a seed; without one, the same state with nothing in it."""
    random = np.random.default_rng(seed)
    arrays = {"weight": random.standard_normal((40, 50)), "bias": random.integers(0, 1 << 30, 777)}
    if length:
        arrays["long"] = random.integers(0, 1 << 60, length // 8)
    if seed is None:
        arrays = {name: np.zeros_like(array) for name, array in arrays.items()}
    return {"model": arrays, "extra": {"seed": seed, "text": f"of {seed}"}}


def is_equal(state, seed, length=0):
    expected = state_of(seed, length)
    arrays = all(array.tobytes() == expected["model"][name].tobytes() for name, array in state["model"].items())
    return arrays and state["extra"] == expected["extra"]


def save(place, seed, length=0, timeout_s=60):
    sf.save(place, state_of(seed, length), step=seed, timeout_s=timeout_s)


def load(place, seed, length=0, timeout_s=60):
    state = state_of(None, length)
    sf.load(place, state, timeout_s=timeout_s)
    return is_equal(state, seed, length)


def restore(run, timeout_s=60):
    """The newest step of a run, whose seed is its number, or 0."""
    state = state_of(None)
    step = sf.Checkpointer(run, timeout_s=timeout_s).restore(state)
    assert not step or is_equal(state, step), f"other bits of step {step}"
    return step


def train(run, first, last, kept):
    """A run of which the newest checkpoints are kept; the newest that was found at its start."""
    with sf.Checkpointer(run, every=sf.steps(1), keep=sf.last(kept), timeout_s=60) as checkpointer:
        state = state_of(None)
        found = checkpointer.restore(state)
        for step in range(first, last + 1):
            checkpointer.step(step, state_of(step))
    return found


_running = {}


def begin_run(run):
    """Restores a run, whose checkpointer stays for the calls to come."""
    _running[run] = sf.Checkpointer(run, every=sf.steps(1), keep=sf.last(2), timeout_s=60)
    return _running[run].restore(state_of(None))


def step_run(run, step):
    _running[run].step(step, state_of(step))
    _running[run].wait()


def exchange(path):
    """Puts a copy of a directory in its place: who has something open in it finds it gone."""
    os.rename(path, f"{path}.old")
    subprocess.run(["cp", "--archive", f"{path}.old", path], capture_output=True, check=False)  # some of it may go
    shutil.rmtree(f"{path}.old", ignore_errors=True)


def remove(path):
    """Puts an empty directory in the place of one in which the other machine has files open."""
    os.rename(path, f"{path}.old")
    os.mkdir(path)
    shutil.rmtree(f"{path}.old")


def leave(directory, name, hours):
    """A file that a saver left, so many hours ago."""
    left = Path(directory, name)
    left.parent.mkdir(parents=True)
    left.write_bytes(b"left")
    for path in (left, *list(left.parents)[:2]):
        os.utime(path, (time.time() - hours * 3600,) * 2)


def is_there(path):
    return Path(path).exists()


def command(*words):
    """Runs the command `shardfast`: its exit code, output and errors."""
    program = Path(sys.executable).with_name("shardfast")
    ran = subprocess.run([program, *words], capture_output=True, text=True, check=False)
    return ran.returncode, ran.stdout, ran.stderr


def race(run, rounds, peer):
    """Saves each step at the moment at which the other guest does: who won, or the kind of the error."""
    if peer is None:
        with socket.create_server(("", PEER_PORT)) as server:
            other = server.accept()[0]
    else:
        other = socket.create_connection((peer, PEER_PORT), timeout=30)
    outcomes = []
    number = 0 if peer is None else 1
    with other:
        other.settimeout(120)
        for step in range(1, rounds + 1):
            state = {"extra": {"number": number}}
            other.sendall(b".")
            assert other.recv(1) == b"."
            try:
                sf.save(f"{run}/step-{step:08}", state, step=step, timeout_s=60)
                outcomes.append("won")
            except sf.Error as error:
                outcomes.append(type(error).__name__)
    return outcomes


def winner(place):
    state = {"extra": {"number": None}}
    sf.load(place, state, timeout_s=60)
    return state["extra"]["number"]


def answer(request):
    name, arguments = request
    began = time.monotonic()
    try:
        found = {"value": globals()[name](*arguments)}
    except Exception as error:
        found = {"kind": type(error).__name__, "message": str(error)}
    return found | {"seconds": time.monotonic() - began}


def serve(port):
    with socket.create_server(("", port)) as server:
        while True:
            asked, _ = server.accept()
            with asked, asked.makefile("rw") as stream:
                stream.write(json.dumps(answer(json.loads(stream.readline()))))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    serve(int(sys.argv[1]))
