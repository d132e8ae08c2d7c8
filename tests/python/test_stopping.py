"""A training that is told to stop by a signal: all ranks stop after one step, and that step is durable."""

import logging
import os
import pickle
import random
import re
import signal
import threading
import time

import pytest
import shardfast as sf
import torch
import torch.distributed as dist

SEEDS = 6
STEPS_MAX = 400


def state_of(step) -> dict:
    return {"model": {"w": torch.full((1000,), float(step))}, "extra": {"step": step}}


def trains(rank, world, run, told, options, seed=0):
    """Trains until it is told to stop; ``told`` gives how often each rank is, and at which moment of which step."""
    dice = random.Random(f"{seed} {rank}")
    ckpt = sf.Checkpointer(run, every=sf.steps(1000), **options)
    first = ckpt.restore(state_of(0))
    for step in range(first + 1, first + STEPS_MAX):
        dist.all_reduce(torch.ones(1))
        time.sleep(dice.random() * 2e-3)
        for at, pause_s in told.get(rank, ()):
            if at == step - first:
                threading.Timer(pause_s, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        try:
            ckpt.step(step, state_of(step))
        except sf.Stopping as stopping:
            assert options["raise_stopping"] and stopping.step == step
            break
        if ckpt.stopping:
            assert not options.get("raise_stopping")
            break
    assert ckpt.stopping and ckpt.committed == step
    ckpt.close()
    state = state_of(0)
    again = sf.Checkpointer(run)
    assert again.restore(state) == step == state["extra"]["step"]
    again.close()
    return step


OF_RANKS = {
    "rank 0": {0: [(3, 0.0)]},
    "the last rank": {2: [(3, 0.0)]},
    "all": {rank: [(3, 0.0)] for rank in range(3)},
    "all but rank 0, at several steps": {1: [(2, 0.0)], 2: [(5, 0.0)]},
    "twice": {1: [(2, 0.0), (2, 0.01), (3, 0.0)], 0: [(3, 0.002)]},
}


@pytest.mark.parametrize("who", OF_RANKS)
def test_all_ranks_stop_after_one_step_whoever_is_told(ranks, tmp_path, who):
    told = OF_RANKS[who]
    options = {"on_signal": "SIGUSR1", "raise_stopping": who == "all"}
    steps = ranks(3)(trains, str(tmp_path / "run"), told, options)
    assert len(set(steps)) == 1, steps
    first = min(at for each in told.values() for at, _ in each)
    assert first <= steps[0] < first + 100


def trains_often(rank, world, place):
    stopped = []
    for seed in range(SEEDS):
        dice = random.Random(seed)
        told = {of: [(dice.randrange(1, 6), dice.random() * 5e-3)] for of in range(world) if dice.random() < 0.6}
        told = told or {0: [(1, 0.0)]}
        stopped.append(trains(rank, world, f"{place}/{seed}", told, {"on_signal": ["SIGUSR1", "SIGUSR2"]}, seed))
    return stopped


def test_moments_of_chance(ranks, tmp_path):
    stopped = ranks(3)(trains_often, str(tmp_path))
    assert all(one == stopped[0] for one in stopped), stopped


def differs(rank, world, run, options):
    ckpt = sf.Checkpointer(run, **options[rank])
    with pytest.raises(sf.Invalid) as caught:
        ckpt.step(1, state_of(1))
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([{"on_signal": "SIGUSR1"}, {}], "rank 1 was given on_signal=None, and rank 0 on_signal='SIGUSR1'"),
        ([{"every": sf.steps(2)}, {"every": sf.steps(3)}], "rank 1 was given every=Steps(count=3), and rank 0 every="),
        (
            [{"every": sf.optimal(mtbf="6h")}, {"every": sf.optimal(mtbf="3h")}],
            "rank 1 was given every=optimal(mtbf=10800.0, at_least=1, at_most=None), and rank 0 every=optimal(mtbf=2",
        ),
    ],
)
def test_ranks_that_were_told_otherwise_are_refused_at_once(ranks, tmp_path, options, said):
    for error in ranks(2)(differs, str(tmp_path / "run"), options):
        assert said in error, error


@pytest.fixture
def handled():
    """The handler of the signal is that of before again."""
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def test_a_rank_alone_and_the_handler_that_was_there(tmp_path, handled):
    calls = []

    def before(number, frame):
        calls.append(number)

    signal.signal(signal.SIGUSR1, before)
    with sf.Checkpointer(tmp_path / "run", on_signal=["SIGUSR1", signal.SIGUSR1]) as ckpt:
        assert not ckpt.step(1, state_of(1)) and not ckpt.stopping
        os.kill(os.getpid(), signal.SIGUSR1)
        assert ckpt.step(2, state_of(2)) and ckpt.stopping and ckpt.committed == 2
        os.kill(os.getpid(), signal.SIGUSR1)
    assert calls == [signal.SIGUSR1] * 2
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_signal_that_is_repeated_after_the_end_ends_nothing(tmp_path, handled):
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    with sf.Checkpointer(tmp_path / "run", on_signal="SIGUSR1") as ckpt:
        os.kill(os.getpid(), signal.SIGUSR1)
        ckpt.step(1, state_of(1))
        assert ckpt.stopping
    os.kill(os.getpid(), signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    sf.Checkpointer(tmp_path / "run", on_signal="SIGUSR1").close()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def test_a_signal_before_the_first_step_counts(tmp_path, handled):
    with sf.Checkpointer(tmp_path / "run", on_signal="SIGUSR1", raise_stopping=True) as ckpt:
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(sf.Stopping, match=r"step 1 of .* is durable") as caught:
            ckpt.step(1, state_of(1))
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.step, str(copy)) == (1, str(caught.value))
    assert sf.Checkpointer(tmp_path / "run").restore(state_of(0)) == 1


def test_a_worker_that_was_forked_goes_on(tmp_path, handled):
    with sf.Checkpointer(tmp_path / "run", on_signal="SIGUSR1") as ckpt:
        ckpt.step(1, state_of(1))
        worker = os.fork()
        if worker == 0:
            time.sleep(0.5)
            os._exit(17)
        time.sleep(0.1)
        os.kill(worker, signal.SIGUSR1)
        assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == 17
        ckpt.step(2, state_of(2))
        assert not ckpt.stopping


def test_a_save_that_lasts_too_long_is_said_at_once(tmp_path, handled, caplog):
    with sf.Checkpointer(tmp_path / "run", every=sf.steps(1), on_signal="SIGUSR1", within=1e-6) as ckpt:
        ckpt.step(1, state_of(1))
        ckpt.wait()
        os.kill(os.getpid(), signal.SIGUSR1)
        with caplog.at_level(logging.WARNING, "shardfast"):
            ckpt.step(2, state_of(2))
    said = [record.getMessage() for record in caplog.records]
    assert any("told to stop, and its time is over: all ranks save step 2" in text for text in said), said
    assert any("step 2 will not be durable in time: a save of this run takes about" in text for text in said), said


def test_the_end_of_a_job_of_slurm_is_known(tmp_path, handled, caplog, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 90))
    with sf.Checkpointer(tmp_path / "run", on_signal="SIGUSR1") as ckpt:
        os.kill(os.getpid(), signal.SIGUSR1)
        with caplog.at_level(logging.WARNING, "shardfast"):
            ckpt.step(1, state_of(1))
    said = [record.getMessage() for record in caplog.records]
    assert any(re.search(r"told to stop, in [89][0-9.]* s: all ranks save step 1", text) for text in said), said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"on_signal": "SIGNOTHING"}, "on_signal='SIGNOTHING': expected the name of a signal, such as 'SIGUSR1'"),
        ({"on_signal": 4711}, "on_signal=4711: expected the name of a signal"),
        ({"on_signal": []}, r"on_signal=\[\]: expected the name of a signal"),
        ({"on_signal": 1.5}, "on_signal=1.5: expected the name of a signal"),
        ({"on_signal": "SIGKILL"}, "on_signal='SIGKILL': no program can catch it"),
        ({"on_signal": "SIGUSR1", "within": "soon"}, "within="),
        ({"on_signal": "SIGUSR1", "within": 0}, "within=0: expected how long"),
    ],
)
def test_what_is_no_signal_is_refused(tmp_path, handled, options, said):
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(sf.Invalid, match=said):
        sf.Checkpointer(tmp_path / "run", **options)
    assert signal.getsignal(signal.SIGUSR1) is before


def test_handlers_are_those_of_the_main_thread(tmp_path):
    errors = []

    def elsewhere():
        try:
            sf.Checkpointer(tmp_path / "run", on_signal="SIGUSR1")
        except sf.Invalid as error:
            errors.append(str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert errors and "in the main thread: make it there" in errors[0], errors
