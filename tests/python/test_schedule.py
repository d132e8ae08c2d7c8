import pytest
import shardfast as sf


def test_steps_are_due_at_multiples():
    assert [step for step in range(1, 13) if sf.steps(5).due(step)] == [5, 10]


def test_keep_rules_add_up():
    keep = sf.last(3) | sf.every(10_000)
    assert (keep.last, keep.every) == (3, 10_000)
    keep = sf.last(3) | sf.last(5) | sf.every(1000) | sf.every(4000)
    assert (keep.last, keep.every) == (5, 1000)  # every multiple of 4000 is one of 1000


def test_intervals_that_cannot_be_one_rule_are_refused():
    with pytest.raises(sf.Invalid, match=r"every\(1000\) \| every\(1500\): neither interval is a multiple"):
        sf.every(1000) | sf.every(1500)


def test_the_best_add_up():
    keep = sf.best("loss") | sf.last(1) | sf.best("loss", 3) | sf.best("loss", mode="max") | sf.best("score", 2)
    assert (keep.last, keep.best) == (1, (("loss", 3, False), ("loss", 1, True), ("score", 2, False)))


def test_the_best_of_nothing_is_refused():
    with pytest.raises(sf.Invalid, match=r"best\(''\): expected the name of a metric"):
        sf.best("")
    with pytest.raises(sf.Invalid, match=r"best\('loss', mode='low'\): expected 'min' or 'max'"):
        sf.best("loss", mode="low")
    with pytest.raises(sf.Invalid, match=r"best\(0\): expected a number of at least 1"):
        sf.best("loss", 0)


@pytest.mark.parametrize("rule", [sf.steps, sf.last, sf.every])
@pytest.mark.parametrize("count", [0, -1, True, 2.0, None])
def test_counts_are_positive_whole_numbers(rule, count):
    with pytest.raises(sf.Invalid, match=rule.__name__):
        rule(count)
