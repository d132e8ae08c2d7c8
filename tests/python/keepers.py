"""Keepers as tests ask them, and a training that saves into the memory of one."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from shardfast import native

COMMAND = Path(sys.executable).with_name("shardfast")


def keeper(run):
    return native.keeper_process(native.memory_place(str(run))[0])


def told(*arguments):
    done = subprocess.run([COMMAND, "keeper", *arguments, "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def in_memory(run):
    """The committed steps that the keeper has."""
    place = native.memory_place(str(run))[1]
    listed = subprocess.run([COMMAND, "ls", place, "--json"], capture_output=True, text=True)
    return [step["step"] for step in json.loads(listed.stdout)["checkpoints"] if step["status"] == "committed"]


def wait_until(what, is_so, within_s=240):
    until = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < until, what
        time.sleep(0.02)


TRAINING = """
import os, sys, torch, shardfast as sf
from torch import nn
if "LINGERS" in os.environ:
    from shardfast import memory
    memory.LINGER_S = float(os.environ["LINGERS"])
run, last, rows = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
model = nn.Linear(200, rows)
state = {"model": model, "extra": {"step": 0}}
ckpt = sf.Checkpointer(
    run, every=sf.steps(int(os.environ.get("EVERY", "4"))), memory=sf.steps(1), keep=sf.last(2),
    drain=os.environ.get("DRAIN"),
)
start = ckpt.restore(state)
if start:
    assert bool((model.weight == start).all()) and state["extra"]["step"] == start, start
print("restored", start, dict(ckpt.restored.sources) if start else {}, flush=True)
for step in range(start + 1, last + 1):
    if "ASKS" in os.environ:
        input()
    with torch.no_grad():
        model.weight.fill_(step)
        model.bias.fill_(-step)
    state["extra"] = {"step": step}
    ckpt.step(step, state)
    print("saved", step, ckpt.committed, flush=True)
if os.environ.get("ENDS") == "killed":
    ckpt.wait()
    os.kill(os.getpid(), 9)
ckpt.close()
print("ended", flush=True)
"""


def begun(run, last, rows=300, **environment):
    """A training of one process, also from within a rank."""
    alone = {name: text for name, text in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "-c", TRAINING, str(run), str(last), str(rows)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**alone, **environment}
    )
