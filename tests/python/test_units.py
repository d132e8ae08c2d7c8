"""The rule by which units of work are dealt out: each to exactly one piece, in order and evenly."""

import itertools
import os
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shardfast.state import units
from shardfast.state.catalog import Refused

WEIGHTS = st.lists(st.integers(0, 50), max_size=40)

HISTORIES = int(os.environ.get("SHARDFAST_UNIT_HISTORIES", "500"))


@settings(deadline=None)
@given(WEIGHTS, st.integers(1, 12))
def test_each_unit_goes_to_one_piece_in_order_and_evenly(weights, count):
    dealt = units.dealt(weights, count, splits=False)
    assert len(dealt) == count
    assert [share.unit for shares in dealt for share in shares] == list(range(len(weights)))
    assert all(share.parts == 1 for shares in dealt for share in shares)
    mean = sum(weights) / count
    for shares in dealt:
        assert abs(sum(weights[share.unit] for share in shares) - mean) <= max(weights, default=0)


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(1, 12))
def test_units_are_split_where_there_are_fewer_than_pieces(weights, count):
    dealt = units.dealt(weights, count, splits=True)
    shares = [share for of in dealt for share in of]
    assert [(share.unit, share.part) for share in shares] == sorted((share.unit, share.part) for share in shares)
    for unit, weight in enumerate(weights):
        parts = [share for share in shares if share.unit == unit]
        assert [share.part for share in parts] == list(range(parts[0].parts))
        assert parts[0].parts <= max(weight, 1)
    if sum(weights) >= count > len(weights):
        assert all(len(of) == 1 for of in dealt)


class Job:
    """Readers of ranges of numbers, each unit a range."""

    def __init__(self, pieces):
        self.pieces = pieces

    def read(self, dice):
        """What each piece reads before the next save: the number of numbers differs."""
        found = []
        for state in self.pieces:
            for _ in range(dice.randrange(6)):
                if state:
                    first, last = state[0]["range"]
                    found.append(first)
                    state[0] = {"range": (first + 1, last), "weight": last - first - 1}
                    if first + 1 == last:
                        del state[0]
        return found

    def again(self, count):
        """The job with another number of pieces, as a load makes it."""
        every = [unit for state in self.pieces for unit in state]
        dealt = units.dealt([units.weight_of(unit) for unit in every], count, splits=True)
        return Job(
            [
                [
                    unit
                    for share in shares
                    for unit in (
                        [every[share.unit]]
                        if share.parts == 1
                        else units.split(every[share.unit], share.parts, cut)[share.part : share.part + 1]
                    )
                ]
                for shares in dealt
            ]
        )


def cut(unit, count):
    first, last = unit["range"]
    size = -(-(last - first) // count)
    cuts = [(at, min(at + size, last)) for at in range(first, last, size)]
    return [{"range": one, "weight": one[1] - one[0]} for one in cuts]


@pytest.mark.parametrize("seed", range(HISTORIES))
def test_a_history_of_saves_kills_and_layouts_reads_each_number_once(seed):
    dice = random.Random(seed)
    total = dice.randrange(1, 200)
    edges = sorted({0, total, *(dice.randrange(total) for _ in range(dice.randrange(5)))})
    ranges = [{"range": (one, other), "weight": other - one} for one, other in itertools.pairwise(edges)]
    saved, read = Job([ranges]), []
    while any(saved.pieces):
        job = saved.again(dice.randrange(1, 9))
        for _ in range(dice.randrange(1, 4)):
            seen = job.read(dice)
            if dice.random() < 0.25:
                break  # killed: what was read since the save is read again
            read += seen
            saved = Job([list(state) for state in job.pieces])
    assert sorted(read) == list(range(total))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"units": [], "other": 1, "replicated": 0}, 'expected {"replicated"'),
        ({"units": {}, "replicated": 0}, "found a dict as units"),
        ({"units": []}, 'no other key: it lacks "replicated", which is {} if pieces share nothing'),
        ({"units": [], "own": 1}, 'no other key: it lacks "replicated"'),
        ({"units": [{"weight": -1}], "replicated": 0}, "expected a whole number from 0 on"),
        ({"units": [{"weight": True}], "replicated": 0}, "expected a whole number from 0 on"),
        ({"units": [{"id": [1]}, {"id": [1]}], "replicated": 0}, r"units 0 and 1 have one id, \[1\]"),
    ],
)
def test_other_forms_are_refused(state, message):
    with pytest.raises(Refused, match=message):
        units.expect_units(state)


def test_a_split_that_changes_samples_is_refused():
    unit = {"weight": 10}
    with pytest.raises(Refused, match="of weight 9 of one of weight 10"):
        units.split(unit, 2, lambda unit, n: [{"weight": 5}, {"weight": 4}])
    with pytest.raises(Refused, match="made 3 units"):
        units.split(unit, 2, lambda unit, n: [{"weight": 5}, {"weight": 4}, {"weight": 1}])
    with pytest.raises(
        Refused, match=r"split\(unit, 2\): of the parts, units 0 and 1 have one id, 7: .* give each an id"
    ):
        units.split(unit, 2, lambda unit, n: [{"id": 7, "weight": 5}, {"id": 7, "weight": 5}])
    assert units.split({"id": 7, "weight": 1}, 2, lambda unit, n: [unit]) == [{"id": 7, "weight": 1}]
