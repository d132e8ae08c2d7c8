"""Calls that meet: of threads, of a signal's handler with what it interrupts, of a program that ends."""

import signal
import subprocess
import sys
import threading

import pytest
import shardfast as sf
import torch
from torch import nn


class Slow:
    """Its state is not there before ``may_go``."""

    def __init__(self, may_go):
        self.may_go, self.is_asked = may_go, threading.Event()

    def state_dict(self):
        self.is_asked.set()
        assert self.may_go.wait(60)
        return {"n": 1}

    def load_state_dict(self, said):
        pass


def test_threads_that_share_a_checkpointer_wait_for_each_other(tmp_path):
    held, ended, failed = Slow(threading.Event()), [], []
    checkpointer = sf.Checkpointer(tmp_path, every=sf.steps(1))

    def made(call):
        try:
            call()
            ended.append(call)
        except Exception as error:
            failed.append(error)

    def save():
        checkpointer.save(1, {"held": held})

    threads = [threading.Thread(target=made, args=[call]) for call in (save, checkpointer.wait)]
    threads[0].start()
    assert held.is_asked.wait(60)
    threads[1].start()
    threads[1].join(0.5)
    assert ended == [], "the second call ends in the middle of the first one"
    held.may_go.set()
    for thread in threads:
        thread.join()
    assert failed == []
    assert ended == [save, checkpointer.wait]
    checkpointer.close()
    assert checkpointer.committed == 1


CALLS = {
    "save": lambda place, model: sf.save(place / "b", {"model": model}),
    "save_async": lambda place, model: sf.save_async(place / "b", {"model": model}),
    "load": lambda place, model: sf.load(place / "a", {"model": model}),
    "plan_load": lambda place, model: sf.plan_load(place / "a", {"model": model}),
    "Checkpointer.save": lambda place, model: sf.Checkpointer(place / "run").save(1, {"model": model}),
}


class Interrupted:
    """A signal comes while its state is asked for."""

    def state_dict(self):
        signal.raise_signal(signal.SIGUSR1)
        return {"n": 1}

    def load_state_dict(self, said):
        pass


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("outer", ["save", "Checkpointer.step"])
def test_a_call_of_a_signals_handler_inside_of_another_call_is_refused(tmp_path, name, outer):
    model, seen = nn.Linear(4, 4), []
    sf.save(tmp_path / "a", {"model": model})

    def handler(number, frame):
        with pytest.raises(sf.Invalid, match=rf"^{name}\(\) was called while the same thread is in {outer}\(\), as a"):
            CALLS[name](tmp_path, model)
        seen.append(number)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        state = {"model": model, "interrupted": Interrupted()}
        if outer == "save":
            sf.save(tmp_path / "c", state)
        else:
            with sf.Checkpointer(tmp_path / "other", every=sf.steps(1)) as checkpointer:
                checkpointer.step(1, state)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen
    CALLS[name](tmp_path, model)  # in no other call


def test_a_handler_that_meets_the_check_of_changed_tensors_is_refused(tmp_path):
    """What a hook of an optimizer waits for holds a lock that each save needs."""
    model, said = nn.Linear(64, 64), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pending = sf.save_async(tmp_path / "a", {"model": model, "optimizer": optimizer})
    confirm = pending._confirm

    def interrupted():
        try:
            sf.save(tmp_path / "b", {"model": model})
        except sf.Invalid as error:
            said.append(str(error))
        confirm()

    pending._confirm = interrupted
    pending.mind()
    assert said, "this thread's check is the first, or that of the one which watches saves"
    assert all("in a check whether tensors changed, as a" in one for one in said)
    pending.committed()


ENDING = """
import atexit, sys
import shardfast as sf
checkpointer = sf.Checkpointer(sys.argv[1], every=sf.steps(1))
def last():
    try:
        checkpointer.save(2, {"n": 2})
    except sf.Invalid as error:
        print(error)
atexit.register(last)
checkpointer.step(1, {"n": 1})
"""


def test_a_save_at_the_end_of_the_interpreter_is_refused_by_name(tmp_path):
    run = subprocess.run([sys.executable, "-c", ENDING, tmp_path], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "step 2 cannot be saved: the interpreter ends, and runs what was registered with atexit" in run.stdout
    assert {path.name for path in tmp_path.iterdir()} - {".jobs", ".telemetry"} == {"step-00000001"}
