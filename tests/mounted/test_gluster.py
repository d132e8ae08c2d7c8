"""Two machines that mount volumes of one GlusterFS save and load there as on one disk."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import gluster
import pytest
from gluster import SHARED, wait_until
from machine_rank import Job

COMMAND = Path(sys.executable).with_name("shardfast")
AT = Path(os.environ["SHARDFAST_TEST_MOUNTED"])
CONFORMANCE = os.environ["SHARDFAST_TEST_CONFORMANCE"]
"""The program of the store's conformance tests."""

SEED = int(os.environ.get("SHARDFAST_GLUSTER_SEED", "1"))
ROUNDS = 100
KILLS = 6
SMALL, LARGE = 100_000, 30_000_000

BOUND_S = 120.0
"""Seconds in which a save ends whose storage dies."""

both = pytest.mark.parametrize("volume", list(gluster.VOLUMES))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with gluster.running(AT, tmp_path_factory.mktemp("bricks")) as one:
        yield one


def at(cluster, machine: int, *command: object, fails: int = 0) -> str:
    """What a command prints on a machine."""
    words = [*cluster.machines[machine].enter, *map(str, command)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == fails, (command, done.stdout, done.stderr)
    return done.stdout


def steps(cluster, machine: int, run: Path) -> dict[int, str]:
    """The status of each step of a run, as a machine sees it."""
    listed = json.loads(at(cluster, machine, COMMAND, "ls", run, "--json"))
    return {one["step"]: one["status"] for one in listed["checkpoints"]}


@both
def test_the_store_keeps_its_contract_over_two_mounts_by_turns(cluster, volume):
    mounts = [machine.clients / volume / "conformance" for machine in cluster.machines]
    cluster.run("mkdir", mounts[0])
    named = ":".join(map(str, mounts))
    said = cluster.run("env", f"SHARDFAST_TEST_MOUNTS={named}", CONFORMANCE, "--exact", "mounted_twice", "--nocapture")
    assert "1 passed" in said and "skipped" not in said, said


@both
def test_what_one_machine_saves_the_other_one_loads(cluster, volume):
    run = SHARED / volume / "crossed"
    with Job(cluster, [0, 1]) as job:
        job.do(do="save", url=f"{run}/one", number=1, elements=LARGE)
        assert job.do(do="load", url=f"{run}/one", number=1, elements=LARGE) == [True, True]
    with Job(cluster, [1, 0]) as job:
        assert job.do(do="load", url=f"{run}/one", number=1, elements=LARGE) == [True, True]
    for machine in (0, 1):
        assert ": sound" in at(cluster, machine, COMMAND, "verify", run / "one")


@both
def test_a_name_that_was_looked_for_before_it_was_there_is_found(cluster, volume):
    run = SHARED / volume / "awaited"
    with Job(cluster, [0]) as saver, Job(cluster, [1]) as reader:
        for number in range(1, 6):
            url = f"{run}/step-{number:08}"
            for path in (run, url, f"{url}/COMMIT", f"{url}/manifest", f"{url}/model"):
                reader.do(do="looks", path=str(path))
            reader.tell(do="load", url=url, number=number, elements=SMALL)
            (absent,) = reader.answers()
            assert absent["error"] == "NotFound", absent
            assert reader.do(do="restore", url=str(run), elements=SMALL)[0][0] == number - 1
            saver.do(do="save", url=url, number=number, elements=SMALL)
            assert reader.do(do="load", url=url, number=number, elements=SMALL) == [True]
            assert reader.do(do="restore", url=str(run), elements=SMALL) == [[number, True]]
            assert steps(cluster, 1, run) == dict.fromkeys(range(1, number + 1), "committed")


@both
def test_a_place_that_another_machine_has_just_cleared_is_free(cluster, volume):
    place = SHARED / volume / "cleared"
    with Job(cluster, [0]) as one, Job(cluster, [1]) as other:
        one.do(do="save", url=str(place), number=1, elements=SMALL)
        for number in range(2, 8):
            saver, clearer = (one, other) if number % 2 else (other, one)
            assert clearer.do(do="load", url=str(place), number=number - 1, elements=SMALL) == [True]
            assert saver.do(do="load", url=str(place), number=number - 1, elements=SMALL) == [True]
            clearer.do(do="clear", place=str(place))
            saver.do(do="save", url=str(place), number=number, elements=SMALL)
            assert clearer.do(do="load", url=str(place), number=number, elements=SMALL) == [True]


@both
def test_of_two_machines_that_publish_at_once_one_wins(cluster, volume):
    run, won = SHARED / volume / "raced", [0, 0]
    with Job(cluster, [0]) as one, Job(cluster, [1]) as other:
        for number in range(1, ROUNDS + 1):
            url = f"{run}/step-{number:08}"
            for job in (one, other):
                job.tell(do="save", url=url, number=number, elements=1000, at=time.time() + 0.05)
            answers = [*one.answers(), *other.answers()]
            winners = [machine for machine in (0, 1) if "found" in answers[machine]]
            assert len(winners) == 1, (number, answers)
            assert answers[1 - winners[0]]["error"] == "Conflict", (number, answers)
            won[winners[0]] += 1
            for job in (one, other):
                assert job.do(do="load", url=url, number=number, elements=1000) == [True]
    print(f"machines won {won} of {ROUNDS} rounds")


@both
def test_what_is_kept_and_swept_is_the_same_for_both_machines(cluster, volume):
    run = SHARED / volume / "kept"
    with Job(cluster, [0, 1]) as job:
        assert job.do(do="steps", url=str(run), first=1, last=6, elements=SMALL) == [6, 6]
    for machine in (0, 1):
        assert [step for step, status in steps(cluster, machine, run).items() if status == "committed"] == [5, 6]

    with Job(cluster, [1, 0]) as job:
        pids = job.do(do="pid")
        job.tell(do="save", url=f"{run}/step-00000007", number=7, elements=20 * LARGE)
        wait_until(lambda: "step-00000007" in at(cluster, 0, "ls", run), "the save has begun")
        time.sleep(0.3)
        cluster.run("kill", "-KILL", *pids)
    for machine in (0, 1):
        assert steps(cluster, machine, run).get(7) != "committed"
    told = 0
    for _ in range(4):
        # A directory goes after the files in it have been gone for a day.
        at(cluster, 0, "find", run, "-depth", "-exec", "touch", "--date=2 days ago", "{}", ";")
        told += len(json.loads(at(cluster, 1, COMMAND, "sweep", run, "--json"))["files"])
    assert told >= 2, "nothing was left to be swept"
    for machine in (0, 1):
        assert steps(cluster, machine, run) == {5: "committed", 6: "committed"}
        assert "step-00000007" not in at(cluster, machine, "ls", run)
        assert ": sound" in at(cluster, machine, COMMAND, "verify", run / "step-00000006")
    with Job(cluster, [1, 0]) as job:
        assert job.do(do="restore", url=str(run), elements=SMALL) == [[6, True]] * 2


@both
def test_a_brick_that_dies_in_saves_and_comes_back_breaks_no_checkpoint(cluster, volume):
    run, dice, saved = SHARED / volume / "killed", random.Random(SEED), []
    with Job(cluster, [0, 1]) as job:
        job.do(do="save", url=f"{run}/step-00000001", number=1, elements=LARGE)
        began = time.monotonic()
        job.do(do="save", url=f"{run}/step-00000002", number=2, elements=LARGE)
        lasts = time.monotonic() - began
        for number in range(3, 3 + KILLS):
            pid = cluster.pids(volume)[number % gluster.VOLUMES[volume]]
            job.tell(do="save", url=f"{run}/step-{number:08}", number=number, elements=LARGE)
            time.sleep(dice.random() * lasts)
            cluster.run("kill", "-KILL", pid)
            time.sleep(dice.random())
            cluster.restart(volume)
            answers = job.answers(BOUND_S)
            print(volume, number, answers)
            for machine in (0, 1):
                wait_until(lambda machine=machine: answers_at(cluster, machine, run), "the volume is back")
            if volume == "replicated":
                # Until then a list may come from the brick that was away.
                wait_until(lambda: is_healed(cluster), "the bricks are equal")
            seen = [steps(cluster, machine, run).get(number) for machine in (0, 1)]
            assert seen[0] == seen[1], (answers, seen)
            seen = [one == "committed" for one in seen]
            assert all("found" in answer for answer in answers) <= seen[0], (answers, seen)
            assert all(answer.get("error", "Unavailable") == "Unavailable" for answer in answers), answers
            assert volume != "replicated" or seen[0], answers
            saved += [number] * seen[0]
        for number in (1, 2, *saved):
            url = f"{run}/step-{number:08}"
            assert job.do(do="load", url=url, number=number, elements=LARGE) == [True, True]
            assert ": sound" in at(cluster, number % 2, COMMAND, "verify", url)
        job.do(do="save", url=f"{run}/step-00000100", number=100, elements=LARGE)
    print(f"{volume}: {len(saved)} of {KILLS} saves outlived their brick")


def answers_at(cluster, machine: int, place: Path) -> bool:
    words = [*cluster.machines[machine].enter, "ls", place]
    return subprocess.run(words, capture_output=True).returncode == 0


def is_healed(cluster) -> bool:
    lines = cluster.gluster("volume", "heal", "replicated", "info").splitlines()
    counts = [line.split(": ")[1] for line in lines if line.startswith("Number of entries: ")]
    return counts == ["0", "0"]


@both
def test_the_doctor_tells_how_names_are_published_there(cluster, volume):
    told = json.loads(at(cluster, 1, COMMAND, "doctor", SHARED / volume, "--json"))
    found = {one["name"]: one for one in told["findings"]}
    print(found)
    assert "fuse.glusterfs" in found["file system"]["found"] and found["file system"]["status"] == "ok"
    assert found["names"]["found"] == (
        "a new one is published by a link; a machine may remember names and attributes for 1 s"
    )
    assert found["direct I/O"]["status"] == "ok"
