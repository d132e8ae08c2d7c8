"""Two machines that mount one directory over NFS, with default options, save and load as machines of one disk do."""

import json

import pytest


def both(workers, name, *arguments):
    """Calls a function on both guests at the same time; what each returned."""
    asked = [worker.begin(name, *arguments) for worker in workers]
    return [one.value() for one in asked]


@pytest.mark.smoke
def test_two_ranks_save_and_load(ranks, place):
    both(ranks, "save", f"{place.name}/one", 7)
    assert both(ranks, "load", f"{place.name}/one", 7) == [True, True]
    assert (place.here / "one/COMMIT").exists()


@pytest.mark.smoke
def test_a_name_that_a_client_remembers_as_absent_is_found(alone, place):
    one, other = alone
    run = f"{place.name}/run"
    commit = f"{run}/step-00000001/COMMIT"
    other.call("save", f"{run}/step-00000002.old", 1)  # the run is there, and is listed
    assert one.call("restore", run) == 0
    for path in (commit, f"{run}/step-00000001", f"{place.name}/named"):
        assert not one.call("is_there", path)
    other.call("save", f"{run}/step-00000001", 1)
    other.call("save", f"{place.name}/named", 2)
    remembered = one.call("is_there", commit), one.call("is_there", f"{place.name}/named")
    assert one.call("restore", run) == 1
    assert one.call("load", f"{place.name}/named", 2)
    assert remembered == (False, False), "this client forgets at once: nothing was shown"


def publish(alone, place, rounds):
    """Both guests publish each step at the same time."""
    one, other = alone
    run = f"{place.name}/raced"
    waiting = one.begin("race", run, rounds, None), other.begin("race", run, rounds, one.guest.address)
    outcomes = [asked.value(60 + 10 * rounds) for asked in waiting]
    for step, won in enumerate(zip(*outcomes, strict=True), 1):
        assert sorted(won) == ["Conflict", "won"], (step, won)
        winners = both(alone, "winner", f"{run}/step-{step:08}")
        assert winners == [won.index("won")] * 2, step


@pytest.mark.smoke
def test_of_two_that_publish_at_once_one_wins(alone, place):
    publish(alone, place, 3)


def test_of_two_that_publish_at_once_one_wins_each_time(alone, place):
    publish(alone, place, 100)


def test_a_run_is_continued_retained_and_swept_on_another_machine(alone, place):
    one, other = alone
    run = f"{place.name}/run"
    assert one.call("train", run, 1, 4, 2) == 0
    assert other.call("train", run, 5, 7, 2) == 4
    assert one.call("train", run, 8, 9, 2) == 7
    assert other.call("restore", run) == 9
    for worker in alone:
        code, listed, _ = worker.call("command", "ls", run)
        steps = [line.split()[:2] for line in listed.splitlines()[2:]]
        assert code == 0 and [step for step, status in steps if status == "committed"] == ["8", "9"], listed

    # What a saver that died has left is removed by the other machine.
    left = "step-00000010/model/.tmp-0123456789abcdef"
    other.call("leave", run, left, 10)
    code, said, errors = one.call("command", "sweep", run, "--older-than", "6h")
    assert code == 0 and "removed 1 file, 4 B" in said, (said, errors)
    assert not other.call("is_there", f"{run}/{left}")
    assert other.call("restore", run) == 9


def test_doctor_tells_how_names_are_publish(alone, place):
    asked = alone[0].begin("command", "doctor", place.name, "--json")
    code, told, errors = asked.value(300)  # it imports torch
    found = {one["name"]: (one["status"], one["found"]) for one in json.loads(told)["findings"]}
    assert code == 0, (told, errors)
    assert found["file system"][1].startswith(f"{place.name}: nfs4, mounted at /tmp/share, "), found
    names = "a new one is published by a link; a machine may remember names and attributes for 60 s"
    assert found["names"] == ("ok", names)
    assert found["direct I/O"] == ("ok", "a direct write succeeded")
