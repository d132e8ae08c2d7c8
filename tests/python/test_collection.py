import gc

import pytest
from shardfast.collection import Paused


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


def test_what_was_made_meanwhile_is_not_looked_at_again_at_once():
    with Paused():
        made = [[] for _ in range(1000)]
    young = {id(thing) for thing in gc.get_objects(generation=0)}
    assert not any(id(thing) in young for thing in made)
    assert gc.get_freeze_count() == 0
    # Old, and not out of sight.
    assert {id(thing) for thing in made} <= {id(thing) for thing in gc.get_objects()}


def test_what_the_program_froze_stays_frozen():
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        assert frozen > 0
        with Paused():
            pass
        assert gc.get_freeze_count() == frozen
    finally:
        gc.unfreeze()
