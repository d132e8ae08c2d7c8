import gc

import pytest
from shardfast.collection import paused


@pytest.fixture(autouse=True)
def collector():
    yield
    gc.enable()


def test_the_collector_rests_and_goes_on_whatever_happens():
    with paused():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(KeyError), paused():
        raise KeyError
    assert gc.isenabled()


def test_a_collector_that_the_program_stopped_stays_stopped():
    gc.disable()
    with paused(), paused():
        assert not gc.isenabled()
    assert not gc.isenabled()
