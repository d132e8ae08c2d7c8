import gc
import weakref

import pytest
import shardfast as sf
import torch
from shardfast.collection import Paused, paused


@pytest.fixture(autouse=True)
def collector():
    yield
    gc.enable()


def test_the_collector_rests_and_goes_on_whatever_happens():
    with Paused():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(KeyError), Paused():
        raise KeyError
    assert gc.isenabled()


def test_a_collector_that_the_program_stopped_stays_stopped():
    gc.disable()
    with Paused(), Paused():
        assert not gc.isenabled()
    assert not gc.isenabled()


class Cycle:
    """Garbage that only the collector finds."""

    def __init__(self):
        self.itself = self


def test_the_programs_garbage_stays_as_young_as_it_is(monkeypatch):
    """What is taken for old is not looked at again before the next full collection, which may never come."""
    for name in ("freeze", "unfreeze", "get_freeze_count", "collect"):
        monkeypatch.setattr(gc, name, lambda *args, name=name: pytest.fail(f"gc.{name} was called"))
    garbage = Cycle()
    with Paused():
        pass
    assert any(thing is garbage for thing in gc.get_objects(generation=0))


def test_a_program_that_saves_at_each_step_does_not_keep_its_garbage(tmp_path):
    model = torch.nn.Linear(4, 4)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "extra": {"step": 0}}
    gone = []
    with sf.Checkpointer("memory://collection/run", every=sf.steps(1), keep=sf.last(1)) as ckpt:
        ckpt.step(1, state)
        gc.collect()
        for step in range(2, 60):
            state["extra"]["step"] = step
            ckpt.step(step, state)
            gone.append(weakref.ref(Cycle()))
            rubbish = [Cycle() for _ in range(200)]
            del rubbish
    left = sum(cycle() is not None for cycle in gone)
    assert left < 30, f"{left} of {len(gone)}"


def test_a_function_that_pauses_the_collector_lets_it_go_on():
    @paused
    def look(fails):
        assert not gc.isenabled()
        if fails:
            raise KeyError
        return 7

    assert look(False) == 7
    with pytest.raises(KeyError):
        look(True)
    assert gc.isenabled()
