"""The server ends under a save and under a load, and comes back: they complete or fail in bounded time."""

import os
import time

import pytest

LENGTH = 64 << 20
DOWN_S = 1.0
ANSWER_S_MAX = 100.0
MOMENTS = int(os.environ.get("SHARDFAST_NFS_MOMENTS", "2"))


def outcomes(asked):
    return [one.outcome(ANSWER_S_MAX) for one in asked]


def interrupted(machines, workers, moment_s, verb, *arguments, down_s=DOWN_S):
    """What the ranks return or raise in a call during which the server is killed and started again."""
    asked = [worker.begin(verb, *arguments) for worker in workers]
    time.sleep(moment_s)
    machines.server.kill()
    time.sleep(down_s)
    machines.server.start()
    return outcomes(asked)


def kinds_of(found):
    return [one.get("kind") for one in found]


def expect_whole_or_invisible(ranks, name, was_saved):
    found = outcomes([rank.begin("load", name, 1, LENGTH) for rank in ranks])
    if was_saved:
        assert [one.get("value") for one in found] == [True, True], found
    else:
        assert kinds_of(found) == ["NotFound"] * 2 or [one.get("value") for one in found] == [True, True], found


@pytest.mark.parametrize("moment", range(MOMENTS))
def test_a_save_outlives_a_server_that_comes_back(machines, ranks, place, moment):
    began = time.monotonic()
    outcomes([rank.begin("save", f"{place.name}/before", 1, LENGTH) for rank in ranks])
    usual_s = time.monotonic() - began

    name = f"{place.name}/one"
    found = interrupted(machines, ranks, usual_s * (moment + 0.5) / MOMENTS, "save", name, 1, LENGTH)
    was_saved = kinds_of(found) == [None, None]
    assert was_saved or kinds_of(found) == ["Unavailable"] * 2, found
    expect_whole_or_invisible(ranks, name, was_saved)
    expect_whole_or_invisible(ranks, f"{place.name}/before", True)


@pytest.mark.parametrize("moment", range(MOMENTS))
def test_a_load_outlives_a_server_that_comes_back(machines, ranks, place, moment):
    name = f"{place.name}/one"
    outcomes([rank.begin("save", name, 1, LENGTH) for rank in ranks])
    began = time.monotonic()
    outcomes([rank.begin("load", name, 1, LENGTH) for rank in ranks])
    usual_s = time.monotonic() - began

    found = interrupted(machines, ranks, usual_s * (moment + 0.5) / MOMENTS, "load", name, 1, LENGTH)
    assert kinds_of(found) in ([None, None], ["Unavailable"] * 2), found
    expect_whole_or_invisible(ranks, name, True)


def test_a_server_that_stays_away_for_longer_than_the_deadline(machines, ranks, place):
    name = f"{place.name}/one"
    found = interrupted(machines, ranks, 0.5, "save", name, 1, LENGTH, 10, down_s=25)
    was_saved = kinds_of(found) == [None, None]
    assert was_saved or kinds_of(found) == ["Unavailable"] * 2, found
    expect_whole_or_invisible(ranks, name, was_saved)
    saved = outcomes([rank.begin("save", f"{place.name}/two", 1, LENGTH) for rank in ranks])
    assert kinds_of(saved) == [None, None], saved
