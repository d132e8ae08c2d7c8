"""Nodes of HDFS that are killed at many moments of saves and loads, and savers that are killed: nothing is lost."""

import json
import os
import random
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import shardfast as sf
from servers import running_hdfs

COMMAND = Path(sys.executable).with_name("shardfast")

MOMENTS = int(os.environ.get("SHARDFAST_HDFS_MOMENTS", "0"))
"""Moments of a save, and of a load, at which a node is killed."""

SAVERS = int(os.environ.get("SHARDFAST_HDFS_SAVERS", "0"))
"""Savers that are killed."""

IN_CAMPAIGNS = "it takes minutes: make campaigns"

NODES = ("namenode", "datanode0", "datanode1", "datanode2")

LENGTH = 9_000_000
"""Elements of 4 bytes: an object of two parts."""

AGED_MS = 2 * 24 * 3600 * 1000
"""Age that files get before a sweep, which removes those of a day."""

SETTLED_S = 20
"""Time for records of this process to be written."""

SWEEPS_MAX = 4
"""Sweeps until nothing is left: a directory goes after the files in it have been gone for a day."""


@pytest.fixture(scope="module")
def hdfs():
    with running_hdfs() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server


def state_of(number: int) -> dict:
    return {"model": {"w": np.full(LENGTH, number, dtype=np.float32)}, "extra": {"number": number}}


def loaded(url: str) -> int:
    """The number of the state that is there, all of it."""
    state = state_of(0)
    sf.load(url, state)
    number = state["extra"]["number"]
    assert bool((state["model"]["w"] == number).all())
    return number


def seconds_of(work) -> float:
    """Median duration of some runs."""
    durations = []
    for run in range(4):
        began = time.monotonic()
        work(run)
        durations.append(time.monotonic() - began)
    return sorted(durations)[2]


@contextmanager
def killed(hdfs, node: str, after_s: float) -> Iterator[None]:
    """Kills a node after this time, and starts it again at once, beside what is done here; it is back afterwards."""

    def kill() -> None:
        time.sleep(after_s)
        hdfs.kill(node)
        hdfs.restart(node)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def asked(hdfs, method: str, path: str, query: str) -> dict:
    """The answer of the NameNode's REST interface."""
    url = f"http://{hdfs.http}/webhdfs/v1{path or '/'}?{query}&user.name={hdfs.environment['HADOOP_USER_NAME']}"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(url, method=method), timeout=60) as answer:
        return json.loads(answer.read() or b"{}")


def below(hdfs, path: str) -> list[tuple[str, str]]:
    """Paths of all that is below a directory, deepest last, with `FILE` or `DIRECTORY`."""
    found = []
    for one in asked(hdfs, "GET", path, "op=LISTSTATUS")["FileStatuses"]["FileStatus"]:
        at = f"{path}/{one['pathSuffix']}"
        found.append((at, one["type"]))
        if one["type"] == "DIRECTORY":
            found.extend(below(hdfs, at))
    return found


def temporaries(hdfs, path: str) -> list[str]:
    """Temporary files below a directory that stay there; those of this process's own records vanish in a moment."""
    until = time.monotonic() + SETTLED_S
    while (found := [at for at, _ in below(hdfs, path) if ".tmp-" in at]) and time.monotonic() < until:
        time.sleep(0.2)
    return found


def make_old(hdfs, path: str) -> None:
    """Sets the time of a file's or directory's last change; it may be gone."""
    then = int(time.time() * 1000) - AGED_MS
    try:
        asked(hdfs, "PUT", path, f"op=SETTIMES&modificationtime={then}")
    except urllib.error.HTTPError as error:
        assert error.code == 404, error


def healthy(hdfs) -> None:
    """Looks with Hadoop's own tools: no file lacks a block, or is open for writing; no file of a part is left."""
    assert temporaries(hdfs, "") == []
    checked = hdfs.tool("org.apache.hadoop.hdfs.tools.DFSck", "/", "-openforwrite", "-files")
    assert "The filesystem under path '/' is HEALTHY" in checked, checked
    assert [line for line in checked.splitlines() if "OPENFORWRITE" in line] == []
    listed = hdfs.tool("org.apache.hadoop.fs.FsShell", "-ls", "-R", "-C", "/")
    assert ".tmp-" not in listed, listed


def swept(hdfs, run: str) -> int:
    """Sweeps a run whose leftovers have become old, until nothing is removed; returns the number of files."""
    path, files = f"/{hdfs.bucket}/{run}", 0
    for _ in range(SWEEPS_MAX):
        for at, _ in below(hdfs, path):
            make_old(hdfs, at)
        told = [COMMAND, "sweep", hdfs.hdfs(run), "--json"]
        done = subprocess.run(told, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        removed = len(json.loads(done.stdout)["files"])
        files += removed
        if removed == 0:
            break
    return files


@pytest.mark.skipif(MOMENTS == 0, reason=IN_CAMPAIGNS)
@pytest.mark.parametrize("kind", ["namenode", "datanode"])
def test_a_node_that_dies_in_a_save(hdfs, kind):
    run = hdfs.hdfs(f"saves-{kind}")
    duration = seconds_of(lambda number: sf.save(f"{run}/step-{number + 1000:08}", state_of(number)))
    errors, longest = [], 0.0
    for moment in range(MOMENTS):
        node = [name for name in NODES if name.startswith(kind)][moment % (1 if kind == "namenode" else 3)]
        # With three replicas each block needs the DataNode that died; with two, most do.
        url = f"{run}/step-{moment:08}?replication={2 + moment % 2}"
        began = time.monotonic()
        with killed(hdfs, node, duration * moment / MOMENTS):
            try:
                sf.save(url, state_of(moment))
            except sf.Error as error:
                errors.append(str(error))
                assert url in str(error)
            longest = max(longest, time.monotonic() - began)
        if errors and url in errors[-1]:
            with pytest.raises(sf.NotFound):
                loaded(url)
        else:
            assert loaded(url) == moment
        assert loaded(f"{run}/step-00001000") == 0
    print(
        f"{kind}: {MOMENTS} kills in saves of {duration:.2f} s, {len(errors)} failed, longest {longest:.1f} s", errors
    )
    # The node is back before the retries end.
    assert errors == []
    # A call that cannot be made while the NameNode is dead is also the deletion of what a failed try left.
    print(f"sweeps removed {swept(hdfs, f'saves-{kind}')} files")
    healthy(hdfs)


@pytest.mark.skipif(MOMENTS == 0, reason=IN_CAMPAIGNS)
@pytest.mark.parametrize("kind", ["namenode", "datanode"])
def test_a_node_that_dies_in_a_load(hdfs, kind):
    url = hdfs.hdfs(f"loads-{kind}")
    sf.save(url, state_of(7))
    duration = seconds_of(lambda _: loaded(url))
    for moment in range(MOMENTS):
        node = [name for name in NODES if name.startswith(kind)][moment % (1 if kind == "namenode" else 3)]
        with killed(hdfs, node, duration * moment / MOMENTS):
            assert loaded(url) == 7
    print(f"{kind}: {MOMENTS} kills in loads of {duration:.2f} s, none failed")


SAVER = """
import sys
import numpy as np, shardfast as sf

url, number = sys.argv[1], int(sys.argv[2])
sf.save("memory://warm/one", {"model": {"w": np.zeros(4)}})
state = {"model": {"w": np.full(LENGTH, number, dtype=np.float32)}, "extra": {"number": number}}
print("begins", flush=True)
sf.save(url, state)
print("saved", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(SAVERS == 0, reason=IN_CAMPAIGNS)
def test_a_sweep_leaves_nothing_of_a_saver_that_was_killed(hdfs):
    dice, run = random.Random(40), "savers"
    duration = seconds_of(lambda number: sf.save(hdfs.hdfs(f"calm/{number}"), state_of(number)))
    sf.save(hdfs.hdfs(f"{run}/step-00000000"), state_of(1000))
    whole, partial, files = 0, 0, 0
    for number in range(1, SAVERS + 1):
        step = f"{run}/step-{number:08}"
        command = [sys.executable, "-c", f"LENGTH = {LENGTH}\n{SAVER}", hdfs.hdfs(step), str(number)]
        saver = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert saver.stdout.readline() == "begins\n"
            time.sleep(dice.uniform(0, 1.2 * duration))
        finally:
            saver.kill()
            saver.communicate()
        files += swept(hdfs, run)
        assert temporaries(hdfs, f"/{hdfs.bucket}/{run}") == []
        found = [at for at, kind in below(hdfs, f"/{hdfs.bucket}/{run}") if kind == "FILE" and f"/{step}/" in f"{at}/"]
        if f"/{hdfs.bucket}/{step}/COMMIT" in found:
            assert loaded(hdfs.hdfs(step)) == number
            # Each sweep looks at all that is there.
            asked(hdfs, "DELETE", f"/{hdfs.bucket}/{step}", "op=DELETE&recursive=true")
            whole += 1
        else:
            assert found == []
            partial += 1
        if number % 20 == 0:
            assert loaded(hdfs.hdfs(f"{run}/step-00000000")) == 1000
    print(f"{SAVERS} savers killed: {whole} checkpoints were whole, {partial} invisible; sweeps removed {files} files")
    assert whole > 0 and partial > 0
    healthy(hdfs)
