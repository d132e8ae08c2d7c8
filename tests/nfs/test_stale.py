"""Another machine exchanges a directory in which this one has files open: its handles are stale."""

import os
import time

import jobs
import pytest
from guests import wait_until

LENGTH = 64 << 20
MOMENTS = int(os.environ.get("SHARDFAST_NFS_MOMENTS", "2"))


def test_a_training_goes_on_in_a_run_that_was_exchanged(alone, place):
    one, other = alone
    run = f"{place.name}/run"
    assert one.call("begin_run", run) == 0
    one.call("step_run", run, 1)
    for step in range(2, 6):
        other.call("exchange", run if step % 2 else place.name)
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
    other.call("exchange", name)
    found = asked.outcome(100)
    assert found.get("value") or found["kind"] in ("Unavailable", "NotFound", "Corrupt"), found
    assert one.call("load", name, 1, LENGTH)


@pytest.mark.parametrize("moment", range(MOMENTS))
def test_a_directory_that_is_removed_under_a_save(alone, place, moment):
    one, other = alone
    usual_s = one.begin("save", f"{place.name}/before", 1, LENGTH).outcome()["seconds"]
    name = f"{place.name}/run/one"
    asked = one.begin("save", name, 1, LENGTH)
    wait_until("the save writes", lambda: list(place.here.glob("run/one/model/*.safetensors")), 30)
    time.sleep(usual_s * moment / MOMENTS / 2)
    other.call("remove", f"{place.name}/run")
    found = asked.outcome(100)
    if "kind" in found:  # else it was faster, and its checkpoint is gone
        assert found["kind"] in ("Unavailable", "NotFound", "Corrupt") and name in found["message"], found
    for worker in alone:
        assert worker.begin("load", name, 1, LENGTH).outcome()["kind"] == "NotFound"
    one.call("save", f"{place.name}/run/two", 1, LENGTH)
    assert other.call("load", f"{place.name}/run/two", 1, LENGTH)


def restarted_with(machines, change):
    """The server comes back, and a directory is another one: what was open in it is stale."""
    machines.server.kill()
    change()
    machines.server.start()


def test_a_load_whose_files_are_stale(machines, alone, place):
    one, other = alone
    name, here = f"{place.name}/one", place.here / "one"
    other.call("save", name, 1, LENGTH)
    usual_s = one.begin("load", name, 1, LENGTH).outcome()["seconds"]
    asked = one.begin("load", name, 1, LENGTH)
    time.sleep(usual_s / 3)
    restarted_with(machines, lambda: jobs.exchange(here))
    found = asked.outcome(100)
    assert found.get("value") or found["kind"] == "Unavailable", found
    assert one.begin("load", name, 1, LENGTH).value(100)


def test_a_save_whose_files_are_stale(machines, alone, place):
    one, other = alone
    name = f"{place.name}/run/one"
    asked = one.begin("save", name, 1, LENGTH)
    wait_until("the save writes", lambda: list(place.here.glob("run/one/model/*.safetensors")), 30)
    restarted_with(machines, lambda: jobs.remove(place.here / "run"))
    found = asked.outcome(100)
    assert found["kind"] == "Unavailable" and name in found["message"], found
    for worker in alone:
        assert worker.begin("load", name, 1, LENGTH).outcome(100)["kind"] == "NotFound"
    one.begin("save", f"{place.name}/run/two", 1, LENGTH).value(100)
    assert other.begin("load", f"{place.name}/run/two", 1, LENGTH).value(100)
