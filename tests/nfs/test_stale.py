"""Another machine exchanges a directory in which this one has files open: its handles are stale."""

import os
import time

import pytest

LENGTH = 64 << 20
MOMENTS = int(os.environ.get("SHARDFAST_NFS_MOMENTS", "2"))


def test_a_training_goes_on_in_a_run_that_was_exchanged(alone, place):
    one, other = alone
    run = f"{place.name}/run"
    assert one.call("begin_run", run) == 0
    one.call("step_run", run, 1)
    for step in range(2, 6):
        assert other.call("exchange", run if step % 2 else place.name) == 0
        one.call("step_run", run, step)
        assert other.call("restore", run) == step
    assert one.call("restore", run) == 5


@pytest.mark.parametrize("moment", range(MOMENTS))
def test_a_checkpoint_that_is_exchanged_under_a_load(alone, place, moment):
    one, other = alone
    name = f"{place.name}/one"
    other.call("save", name, 1, LENGTH)
    usual_s = one.begin("load", name, 1, LENGTH).outcome()["seconds"]
    asked = one.begin("load", name, 1, LENGTH)
    time.sleep(usual_s * (moment + 0.5) / MOMENTS)
    assert other.call("exchange", name) == 0
    found = asked.outcome(100)
    print(found)
    assert found.get("value") or found["kind"] in ("Unavailable", "NotFound", "Corrupt"), found
    assert one.call("load", name, 1, LENGTH)


@pytest.mark.parametrize("moment", range(MOMENTS))
def test_a_directory_that_is_exchanged_under_a_save(alone, place, moment):
    one, other = alone
    usual_s = one.begin("save", f"{place.name}/before", 1, LENGTH).outcome()["seconds"]
    name = f"{place.name}/run/one"
    asked = one.begin("save", name, 1, LENGTH)
    time.sleep(usual_s * (moment + 0.5) / MOMENTS)
    exchanged = other.begin("exchange", f"{place.name}/run").outcome(100)
    found = asked.outcome(100)
    print(exchanged, found)
    loads = [worker.begin("load", name, 1, LENGTH).outcome(100) for worker in alone]
    if "kind" in found:
        assert found["kind"] in ("Unavailable", "NotFound", "Corrupt"), found
        assert [load.get("kind") for load in loads] == ["NotFound"] * 2, loads
    else:
        assert [load.get("value") for load in loads] == [True] * 2, loads
    one.call("save", f"{place.name}/run/two", 1, LENGTH)
    assert other.call("load", f"{place.name}/run/two", 1, LENGTH)
