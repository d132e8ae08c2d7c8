"""The interval that wastes least: what is measured, what follows, and that all ranks save at the same steps."""

import json
import math
import random
import time
from dataclasses import replace

import pytest
import shardfast as sf
import torch
from shardfast.interval import NOTE, Costs, Figure, Record, spoken
from shardfast.schedule import FIRST, Optimal


class Clock:
    """A clock that stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    "mtbf", [0, -1, 0.0, math.nan, math.inf, True, None, b"6h", 10**400, "0h", "soon", "", "6 hours", "-2h"]
)
def test_a_mean_time_that_is_none_is_refused(mtbf):
    with pytest.raises(sf.Invalid, match=r"^mtbf=.*: expected .*above zero.*6h"):
        sf.optimal(mtbf=mtbf)


@pytest.mark.parametrize(
    ("bounds", "says"),
    [
        ({"at_least": 0}, "at_least=0: expected a number of steps of at least 1"),
        ({"at_least": True}, "at_least=True: expected a number of steps"),
        ({"at_most": 1.5}, "at_most=1.5: expected a number of steps"),
        ({"at_most": -3}, "at_most=-3: expected a number of steps"),
        ({"at_most": 2**63}, "at_most=9223372036854775808: expected a number of steps"),
        ({"at_least": 9, "at_most": 8}, "at_least=9, at_most=8: expected at_least to be the smaller one"),
    ],
)
def test_bounds_that_are_none_are_refused(bounds, says):
    with pytest.raises(sf.Invalid, match=says):
        sf.optimal(mtbf="6h", **bounds)


def test_schedules_say_beforehand_when_a_save_is_due():
    every = sf.steps(5)
    assert [every.next_due(step) for step in (0, 4, 5, 6)] == [5, 5, 10, 10]
    assert str(every) == "every 5 steps"
    assert [sf.optimal(mtbf=60.0).next_due(step) for step in (0, 49)] == [50, 50]
    assert sf.optimal(mtbf="6h", at_most=20).next_due(0) == 20
    assert sf.optimal(mtbf="6h", at_least=80).next_due(0) == 80
    every = sf.optimal(mtbf="6h")
    assert not every.due(49)
    assert every.due(50)
    assert every.next_due(50) is None, "known when the save begins, and every rank knows how earlier ones ended"
    every.save_begun(50)
    assert every.next_due(50) == 100


def test_extremes_are_intervals_all_the_same():
    for mtbf, bounds in ((5e-324, {}), (1.7e308, {}), ("1h", {"at_least": 2**63 - 1})):
        every = sf.optimal(mtbf=mtbf, **bounds)
        every.step_ended(1, in_flight=False)
        every.save_begun(1)
        every.waited(1.0)
        every.step_ended(2, in_flight=True)
        record = Record.read(every.notes()[NOTE])
        assert record is not None
        assert record.figure.steps >= bounds.get("at_least", 1)


def test_times_are_spoken():
    found = [spoken(seconds) for seconds in (0, 0.00025, 0.45, 1, 119, 120, 7199, 7200, 21600, 172800)]
    assert found == ["0 ms", "0.25 ms", "450 ms", "1 s", "119 s", "2 min", "120 min", "2 h", "6 h", "2 d"]


# What a save costs


def measured(steps, saves, *, noise=0.0, stall=0.0, slower=0.0, flight=10, evaluation=None, seed=1):
    """What :class:`Costs` finds if a save begins every so many steps of 1 s; seconds are those of a step."""
    clock, dice = Clock(), random.Random(seed)
    costs = Costs(clock)
    for number in range(steps * saves):
        since = number % steps
        clock.now += 1.0 + dice.lognormvariate(0, 1) * noise
        clock.now += slower if 0 <= since < flight and number >= steps else 0.0
        clock.now += evaluation[1] if evaluation and number % evaluation[0] == 0 else 0.0
        costs.step_ended(in_flight=number >= steps and since + 1 < flight)
        if number >= steps - 1 and since == steps - 1:
            costs.save_begun()
            clock.now += stall
            costs.waited(stall)
            costs.committed(float(flight))
    return costs.measured()


def test_slowdown_counts_as_well_as_stall():
    assert measured(40, 8, stall=0.5) == pytest.approx((1.0, 0.5, 10.0))
    assert measured(40, 8, slower=0.2) == pytest.approx((1.0, 2.0, 10.0))
    assert measured(40, 8, stall=0.5, slower=0.2) == pytest.approx((1.0, 2.5, 10.0))


@pytest.mark.parametrize("seed", range(20))
def test_noise_neither_makes_a_cost_nor_a_negative_one(seed):
    _, none, _ = measured(60, 12, noise=0.05, seed=seed)
    assert 0 <= none < 0.6, "of 10 steps of 1.08 s, whose sum has a standard deviation of 0.34 s"
    _, cost, _ = measured(60, 12, noise=0.05, stall=2.0, slower=0.1, seed=seed)
    assert 2.4 < cost < 3.6


def test_an_evaluation_now_and_then_is_no_cost():
    step_s, cost, _ = measured(40, 12, stall=0.5, evaluation=(130, 300.0))
    assert (step_s, cost) == pytest.approx((1.0, 0.5))


def test_without_quiet_steps_the_waits_count():
    clock = Clock()
    costs = Costs(clock)
    assert costs.measured() is None
    for _ in range(30):
        costs.save_begun()
        costs.waited(0.25)
        clock.now += 1.5
        costs.step_ended(in_flight=True)
    step_s, cost, lag = costs.measured()
    assert (step_s, cost) == (1.5, 0.25)
    assert lag == 1.5, "the save in flight has lasted that long"


# What a checkpoint notes

FIGURE = Figure(steps=57, step_s=0.45, cost_s=0.8, lag_s=12.0, mtbf_s=21600.0, waste=0.019, limit="waste")


def test_a_record_survives_as_a_note():
    for record in (Record(), Record(2, 3600.5, 4.0, FIGURE)):
        assert Record.read(record.text()) == record


@pytest.mark.parametrize(
    "change",
    [{"steps": 0}, {"steps": 1.5}, {"steps": "9"}, {"waste": math.nan}, {"cost_s": -1}, {"lag_s": None}, {"more": 1}],
)
def test_a_note_that_is_none_is_no_record(change):
    found = json.loads(Record(figure=FIGURE).text())
    assert Record.read(json.dumps({**found, "figure": {**found["figure"], **change}})) is None
    for text in (None, "", "[]", "7", "{}", '"text"', "{", json.dumps({**found, "restarts": -1})):
        assert Record.read(text) is None


def test_a_schedule_says_in_words_what_it_does():
    every = sf.optimal(mtbf="6h")
    said = "every 50 steps until saves are measured; one failure in 6 h is expected; the next save is due at step 50"
    assert str(every) == said
    every.restored(100, {NOTE: Record(1, 7200.0, 4.0, FIGURE).text()}, 3.0)
    # Three failures and the expected one's time: 8 h / 3.
    assert str(every) == (
        "every 274 steps (2.06 min): a save costs 800 ms and commits after 12 s; one failure in 2.67 h is expected "
        "(2 restarts in 2 h); expected waste 1.46%; the next save is due at step 150"
    )
    # Soon, by what the checkpoint notes and as without it: it does not know of this restart.
    assert every.next_due(100) == 150


@pytest.mark.parametrize(("noted", "due"), [(57, 150), (20, 120), (50_000, 150)])
def test_the_first_saves_after_a_restart_come_soon(noted, due):
    """A wrong guess of the mean time between failures would put them off beyond the next failure, again and again."""
    every = sf.optimal(mtbf="35d")
    every.restored(100, {NOTE: Record(0, 7200.0, 4.0, replace(FIGURE, steps=noted)).text()}, 3.0)
    assert every.next_due(100) == due
    every.step_ended(due, in_flight=False)
    every.save_begun(due)
    assert every.next_due(due) - due in (20, 50)


def test_what_a_restarted_run_says_follows_from_its_own_arguments():
    notes = {NOTE: Record(0, 7200.0, 4.0, FIGURE).text()}
    bounded, hasty = sf.optimal(mtbf="6h", at_most=10), sf.optimal(mtbf="10s")
    for every in (bounded, hasty):
        every.restored(100, notes, 3.0)
    assert "every 10 steps (4.5 s), since at_most=10" in str(bounded)
    assert "(1 restart in 2 h)" in str(hasty) and "one failure in 60.1 min" in str(hasty)


def test_a_window_is_a_part_of_its_save():
    """Steps in which part of a save is captured ahead of it are none of the quiet ones: they are its cost."""
    clock = Clock()
    costs = Costs(clock)

    def steps(count, seconds, in_flight):
        for _ in range(count):
            clock.now += seconds
            costs.step_ended(in_flight=in_flight)

    steps(20, 1.0, in_flight=False)
    for _ in range(3):
        costs.capture_begun()
        steps(3, 1.5, in_flight=True)
        costs.save_begun()
        steps(2, 1.25, in_flight=True)
        steps(1, 1.0, in_flight=False)
        costs.committed(2.5)
        steps(20, 1.0, in_flight=False)
    step_s, cost_s, _ = costs.measured()
    assert (step_s, cost_s) == (1.0, 3 * 0.5 + 2 * 0.25)
    # One that was let go is no save.
    costs.capture_begun()
    steps(2, 9.0, in_flight=True)
    steps(1, 9.0, in_flight=False)
    assert costs.measured()[1] == cost_s


# Simulated runs


class Failures:
    """When a job fails: drawn once, so that every schedule meets the same failures."""

    def __init__(self, truth, wall_s, restart_s, seed):
        dice, self.times, now = random.Random(seed), [], 0.0
        while now < wall_s:
            now += dice.expovariate(1.0 / truth(now)[2])
            self.times.append(now)
            now += restart_s


def fixed(steps, truth, failures, restart_s):
    """The waste of saves every so many steps of 1 s."""
    now = useful = 0.0
    for failure in failures.times:
        cost, lag, _ = truth(now)
        lifetime = failure - now
        useful += steps * max(0, math.floor((lifetime - lag - steps) / (steps + cost)) + 1)
        now = failure + restart_s
    return now / useful - 1


def scheduled(mtbf, truth, failures, restart_s, seed):
    """The waste of the schedule, which knows nothing of the truth: it measures steps that differ by a tenth."""
    clock, dice = Clock(), random.Random(seed)
    start = clock.now
    saved, notes, useful = 0, {}, 0
    for failure in failures.times:
        every = Optimal(mtbf, 1, None, clock=clock)
        if saved:
            every.restored(saved, notes, restart_s)
        step, flights, end = saved, [], start + failure
        while True:
            cost, lag, _ = truth(clock.now - start)
            clock.now += dice.uniform(0.9, 1.1) + (cost / 2 / max(lag, 1.0) if flights else 0.0)
            if clock.now > end:
                break
            step += 1
            every.step_ended(step, in_flight=bool([at for at, *_ in flights if at > clock.now]))
            while flights and flights[0][0] <= clock.now:
                _, saved, number, took = flights.pop(0)
                notes = every.notes()
                every.committed(number, notes, took)
            if every.due(step):
                flights.append((clock.now + lag, step, every.save_begun(step), lag))
                clock.now += cost / 2
                every.waited(cost / 2)
        clock.now = end + restart_s
        useful = saved
    return (clock.now - start) / useful - 1


def steady(_):
    return 2.0, 4.0, 300.0


WALL_S = 300_000.0


@pytest.mark.parametrize(
    ("mtbf", "truth"),
    [
        pytest.param(300.0, steady, id="steady"),
        pytest.param(3000.0, steady, id="fails ten times as often as expected"),
        pytest.param(300.0, lambda now: (0.5 if now < WALL_S / 2 else 4.5, 4.0, 300.0), id="the cost changes midway"),
        pytest.param(600.0, lambda now: (2.0, 4.0, 600.0 if now < WALL_S / 2 else 150.0), id="the rate changes midway"),
    ],
)
def test_the_schedule_wastes_little_more_than_the_best_fixed_interval(mtbf, truth):
    failures = Failures(truth, WALL_S, 20.0, seed=1)
    sweep = {
        steps: fixed(steps, truth, failures, 20.0) for steps in (8, 11, 14, 18, 22, 26, 30, 34, 40, 47, 55, 65, 80)
    }
    best = min(sweep, key=sweep.get)
    assert best not in (8, 80), sweep
    found = scheduled(mtbf, truth, failures, 20.0, seed=2)
    assert found <= 1.05 * sweep[best], f"{found:.4f}, every {best} steps {sweep[best]:.4f}"


# All ranks at the same steps


class Job:
    """Ranks that train step by step, each with a schedule and a clock of its own, whose steps all take another time.

    A save commits if all ranks begin it at the same step, and it is not to fail. Its outcome reaches each rank at
    another step, at the latest when the rank begins the save after next; it never reaches those that lose it.
    """

    def __init__(self, world, seed, fails=0.0, loses=0.0):
        self.dice, self.fails, self.loses = random.Random(seed), fails, loses
        self.clocks = [Clock() for _ in range(world)]
        self.schedules = [Optimal(300.0, 1, None, clock=clock) for clock in self.clocks]
        self.outcomes = [{} for _ in range(world)]
        self.step, self.saved, self.notes, self.lost_at, self.apart = 0, 0, {}, None, []

    def receive(self, rank, until, step):
        """Rank ``rank`` gets the outcomes that have arrived, and all up to save ``until``."""
        for number, (arrives, notes) in sorted(self.outcomes[rank].items()):
            if number <= until or arrives <= step:
                self.schedules[rank].committed(number, notes, self.dice.uniform(1.0, 9.0))
                del self.outcomes[rank][number]

    def train(self, steps):
        for _ in range(steps):
            self.step += 1
            due = []
            for rank, (clock, schedule) in enumerate(zip(self.clocks, self.schedules, strict=True)):
                clock.now += self.dice.uniform(0.5, 1.5)
                self.receive(rank, 0, self.step)
                schedule.step_ended(self.step, in_flight=bool(self.outcomes[rank]))
                due.append(schedule.due(self.step))
            if any(due):
                self.save(due)

    def save(self, due):
        numbers = {}
        for rank, (is_due, schedule) in enumerate(zip(due, self.schedules, strict=True)):
            if is_due:
                self.receive(rank, schedule._number - 1, self.step)
                numbers[rank] = schedule.save_begun(self.step)
                schedule.waited(self.dice.uniform(0.0, 4.0))
        if not all(due):
            self.apart.append(self.step)
        elif self.dice.random() >= self.fails:
            self.saved, self.notes = self.step, self.schedules[0].notes()
            loses = self.dice.random() < self.loses
            for rank, number in numbers.items():
                if loses and self.lost_at is None and rank == len(due) - 1:
                    self.lost_at = self.step
                else:
                    self.outcomes[rank][number] = (self.step + self.dice.randrange(30), self.notes)

    def restart(self):
        self.step = self.saved
        self.outcomes = [{} for _ in self.schedules]
        self.schedules = [Optimal(300.0, 1, None, clock=clock) for clock in self.clocks]
        if self.saved:
            for schedule in self.schedules:
                schedule.restored(self.saved, self.notes, self.dice.uniform(1.0, 9.0))


@pytest.mark.parametrize("seed", range(40))
def test_ranks_are_never_apart_whatever_fails_and_restarts(seed):
    job = Job(4, seed, fails=0.2)
    intervals = set()
    for _ in range(5):
        job.train(600)
        assert job.apart == []
        intervals |= {schedule.next_due(job.step) for schedule in job.schedules}
        assert len({schedule.next_due(job.step) for schedule in job.schedules}) == 1
        job.restart()
    assert len(intervals) > 1
    assert any(step % FIRST for step in intervals), "not only the fixed steps"


@pytest.mark.parametrize("seed", range(40))
def test_ranks_meet_again_after_an_outcome_reached_only_some(seed):
    job = Job(4, seed, fails=0.1, loses=0.2)
    job.train(4000)
    assert job.lost_at is not None
    assert job.apart, "the rank that does not know the interval saves at the fixed steps, and not in silence"
    assert max(job.apart) - min(job.apart) < 10 * FIRST
    assert job.saved > 3500
    assert len({schedule.next_due(job.step) for schedule in job.schedules}) == 1


class Troubled:
    """Something whose own code fails once on one rank."""

    def __init__(self, is_bad):
        self.is_bad = is_bad

    def state_dict(self):
        if self.is_bad:
            raise RuntimeError("no state today")
        return {"a": 1}

    def load_state_dict(self, state):
        pass


def train(rank, world, url, steps):
    """Trains twice, the second time from what the first one saved; when each rank awaits the next save at each step.

    The third save of the first training fails. Saves are at most 107 steps apart, so that each rank, at whatever pace,
    learns of it before its last save, and the second training saves at least once, however long saves take.
    """
    seen, failures, said = [], 0, []
    for is_first in (True, False):
        trouble, saves = Troubled(False), 0
        state = {"model": {"w": torch.ones(1000)}, "trouble": trouble}
        with sf.Checkpointer(url, every=sf.optimal(mtbf="2s", at_most=107), timeout_s=20) as ckpt:
            start = ckpt.restore(state)
            for step in range(start + 1, start + steps + 1):
                time.sleep(0.001 * (1 + rank))
                trouble.is_bad = is_first and rank == 1 and saves == 2
                try:
                    saves += ckpt.step(step, state)
                except (sf.Error, RuntimeError):
                    saves += 1
                    failures += 1
                seen.append((step, ckpt.every.next_due(step)))
        said.append(str(ckpt.every))
    return seen, failures, said


def test_ranks_save_at_the_same_steps_also_after_a_failure_and_a_restart(ranks, tmp_path):
    (seen, failures, said), *others = ranks(3)(train, str(tmp_path), 500)
    assert [(found, words) for found, _, words in others] == [(seen, said)] * 2
    assert failures >= 1
    assert [count for _, count, _ in others] == [failures] * 2
    assert [due for _, due in seen[:150:50]] == [50, 100, 150]
    assert any(due % FIRST for _, due in seen), "the figure of rank 0 has reached all of them"
    assert "0 restarts" in said[0]
    assert "1 restart in" in said[1]


def test_a_checkpoint_notes_the_run_and_keeps_the_users_metrics(tmp_path):
    state = {"model": {"w": torch.ones(10)}}
    with sf.Checkpointer(tmp_path, every=sf.optimal(mtbf="6h", at_most=2), keep=sf.best("loss")) as ckpt:
        for step in range(1, 7):
            ckpt.step(step, state, metrics={"loss": 1.0 / step})
        schedule = ckpt.every
    assert str(schedule).startswith("every 2 steps")
    assert "at_most=2" in str(schedule)
    again = sf.Checkpointer(tmp_path, every=schedule)
    assert str(again.every).startswith("every 2 steps until"), "a schedule begins anew with each run"
    assert again.restore(state) == 6
    assert "1 restart in" in str(again.every)
    assert again.every.notes()[NOTE] == Record.read(again.every.notes()[NOTE]).text()
    assert Record.read(again.every.notes()[NOTE]).restarts == 1


def test_a_run_that_was_saved_by_another_schedule_starts_with_fixed_steps(tmp_path):
    state = {"model": {"w": torch.ones(10)}}
    with sf.Checkpointer(tmp_path, every=sf.steps(3)) as ckpt:
        assert [ckpt.step(step, state) for step in (1, 2, 3)] == [False, False, True]
        assert ckpt.every == sf.steps(3)
    with sf.Checkpointer(tmp_path, every=sf.optimal(mtbf="6h")) as ckpt:
        ckpt.restore(state)
        assert ckpt.every.next_due(3) == FIRST
    with sf.Checkpointer(tmp_path) as ckpt:
        assert ckpt.restore(state) == 3
        assert ckpt.every is None
        assert not ckpt.step(4, state)


def test_going_back_by_hand_does_not_leave_a_run_without_saves():
    every = sf.optimal(mtbf="6h")
    every.restored(4000, {NOTE: Record(figure=FIGURE).text()}, 1.0)
    every.step_ended(4001, in_flight=False)
    every.step_ended(320, in_flight=False)
    assert every.next_due(320) == 350


def test_what_is_no_schedule_is_refused(tmp_path):
    with pytest.raises(sf.Invalid, match=r"every='6h': expected when to save, such as sf.steps\(200\)"):
        sf.Checkpointer(tmp_path, every="6h")
