"""A job says once in its log that a save took far longer than those before it."""

import logging
import random

import pytest
import shardfast as sf
from nets import net
from shardfast.capture.durations import Durations
from shardfast.capture.in_flight import Pending


def of(saves):
    durations = Durations()
    return [durations.noticed({"staged": staged, "committed": committed}) for staged, committed in saves]


@pytest.mark.parametrize("seed", range(50))
def test_healthy_saves_are_not_noticed(seed):
    dice = random.Random(seed)
    scale, stall = 10 ** dice.uniform(1, 5), dice.uniform(0.01, 0.5)
    saves = [(scale * stall * dice.uniform(0.5, 1.5), scale * dice.uniform(0.7, 1.4)) for _ in range(200)]
    assert of(saves) == [None] * 200


def test_the_first_slow_save_is_noticed_and_no_other():
    usual = (400.0, 9_800.0)
    assert of([usual] * 4 + [(400.0, 60_000.0)]) == [None] * 5, "too few saves before"
    *before, first, second, third = of([usual] * 5 + [(400.0, 31_000.0), usual, (400.0, 90_000.0)])
    assert before == [None] * 5 and (second, third) == (None, None)
    assert first == "it was durable after 31.0 s, in the median of the saves before after 9.8 s"
    assert of([usual] * 5 + [(400.0, 29_000.0)])[-1] is None, "less than three times the median"
    assert of([(1.0, 20.0)] * 5 + [(1.0, 900.0)])[-1] is None, "less than a second"
    assert of([usual] * 5 + [(5_100.0, 9_800.0)])[-1].startswith("the state could change after 5.1 s")
    assert of([usual] * 5 + [(4_900.0, 9_800.0)])[-1] is None, "less than 5 s"
    assert of([(600.0, 9_800.0)] * 5 + [(5_900.0, 9_800.0)])[-1] is None, "less than ten times the median"


def test_the_log_says_it_once(tmp_path, monkeypatch, caplog):
    real = Pending.report.fget

    def report(pending):
        found = real(pending)
        if pending.url.endswith(("7", "9")) and "committed" in found["phases_ms"]:
            found["phases_ms"]["committed"] += 60_000
        return found

    monkeypatch.setattr(Pending, "report", property(report))
    model = net()
    with caplog.at_level(logging.WARNING, logger="shardfast"), sf.Checkpointer(tmp_path, every=sf.steps(1)) as ckpt:
        for step in range(1, 11):
            ckpt.step(step, {"model": model})
            ckpt.wait()
    said = [record.getMessage() for record in caplog.records if f"the save of {tmp_path}/" in record.getMessage()]
    assert len(said) == 1 and said[0].startswith(f"the save of {tmp_path}/step-00000007: it was durable after 60."), (
        said
    )
    assert said[0].endswith(f"; `shardfast report {tmp_path}` says more")
