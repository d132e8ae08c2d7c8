"""A training goes on while the active NameNode of a pair dies, again and again: nothing that was saved is lost."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import shardfast as sf
from servers import running_hdfs

COMMAND = Path(sys.executable).with_name("shardfast")

FAILOVERS = int(os.environ.get("SHARDFAST_HDFS_FAILOVERS", "0"))
"""Deaths of an active NameNode."""

IN_CAMPAIGNS = pytest.mark.skipif(FAILOVERS == 0, reason="it takes minutes: make campaigns")

NAMENODES = ("namenode0", "namenode1")

LENGTH = 9_000_000
"""Elements of 4 bytes: an object of two parts, which are joined over the REST interface."""


@pytest.fixture(scope="module")
def pair():
    with running_hdfs("hdfs-ha") as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server


def state_of(step: int) -> dict:
    return {"model": {"w": np.full(LENGTH, step, dtype=np.float32)}, "extra": {"step": step}}


def loaded(url: str) -> int:
    state = state_of(0)
    sf.load(url, state)
    step = state["extra"]["step"]
    assert bool((state["model"]["w"] == step).all())
    return step


def fail_over(pair, active: int) -> None:
    """Kills the active NameNode, makes the other one active, and starts the dead one again, as a standby."""
    dead, other = NAMENODES[active], NAMENODES[1 - active]
    pair.kill(dead)
    pair.tool("org.apache.hadoop.hdfs.tools.DFSHAAdmin", "-transitionToActive", "--forceactive", other)
    pair.restart(dead)


@IN_CAMPAIGNS
def test_a_save_joins_its_parts_at_the_active_namenode(pair):
    for active in (0, 1):
        pending = sf.save_async(pair.hdfs(f"joined-{active}"), state_of(1))
        pending.committed()
        assert pending.report["failures"] == []
        fail_over(pair, active)
        assert loaded(pair.hdfs(f"joined-{active}")) == 1


@IN_CAMPAIGNS
def test_a_training_outlives_its_active_namenode(pair):
    run, ended, failed = pair.hdfs("run"), threading.Event(), []

    def fail_over_often() -> None:
        try:
            for number in range(FAILOVERS):
                time.sleep(0.5 + number % 5 * 0.3)
                fail_over(pair, number % 2)
        except BaseException as error:
            failed.append(error)
        finally:
            ended.set()

    thread = threading.Thread(target=fail_over_often)
    step, longest = 0, 0.0
    with sf.Checkpointer(run, every=sf.steps(1)) as ckpt:
        thread.start()
        while not ended.is_set():
            step += 1
            began = time.monotonic()
            ckpt.step(step, state_of(step))
            ckpt.wait()
            longest = max(longest, time.monotonic() - began)
            if step % 5 == 0:
                assert loaded(f"{run}/step-{step:08}") == step
    thread.join()
    assert failed == []
    told = [COMMAND, "ls", run, "--json"]
    listed = json.loads(subprocess.run(told, check=True, capture_output=True, text=True, timeout=120).stdout)
    committed = sorted(one["step"] for one in listed["checkpoints"] if one["status"] == "committed")
    assert committed == list(range(1, step + 1))
    for one in committed:
        assert loaded(f"{run}/step-{one:08}") == one
    print(f"{FAILOVERS} active NameNodes died in {step} saves, the longest of which took {longest:.1f} s")
    checked = pair.tool("org.apache.hadoop.hdfs.tools.DFSck", "/")
    assert "The filesystem under path '/' is HEALTHY" in checked, checked
