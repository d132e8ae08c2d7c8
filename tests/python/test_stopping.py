"""A training that is told to stop by a signal: all ranks stop after one step, and that step is durable."""

import logging
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import shardfast as sf
import torch
import torch.distributed as dist

SEEDS = int(os.environ.get("SHARDFAST_STOP_SEEDS", "6"))
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


def test_a_handler_that_is_set_later_is_called_too(tmp_path, handled):
    """Trainers set their own when they begin, without a call of the one that was there; some call that."""
    called = []
    with sf.Checkpointer(tmp_path / "run", every=sf.steps(100), on_signal=["SIGUSR1", "SIGUSR2"]) as ckpt:
        ckpt.step(1, state_of(1))
        signal.signal(signal.SIGUSR1, lambda number, frame: called.append("alone"))
        ours = signal.getsignal(signal.SIGUSR2)

        def calls_ours(number, frame):
            called.append("with ours")
            ours(number, frame)

        signal.signal(signal.SIGUSR2, calls_ours)
        ckpt.step(2, state_of(2))
        assert not ckpt.stopping
        os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGUSR1)
        ckpt.step(3, state_of(3))
        assert ckpt.stopping and sorted(called) == ["alone", "with ours"]
    assert signal.getsignal(signal.SIGUSR2) is calls_ours
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)


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


def test_a_time_that_no_save_fits_is_said_after_the_first_save(tmp_path, handled, caplog):
    def saves(within):
        caplog.clear()
        with sf.Checkpointer(tmp_path / f"{within}", every=sf.steps(1), on_signal="SIGUSR1", within=within) as ckpt:
            for step in (1, 2):
                ckpt.step(step, state_of(step))
        return [record.getMessage() for record in caplog.records if "within= leaves" in record.getMessage()]

    (said,) = saves(1e-6)
    assert said.startswith(f"{tmp_path}/1e-06: a save of this run takes about"), said
    assert saves(600) == []


def test_the_end_of_a_job_of_slurm_is_known(tmp_path, handled, caplog, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 90))
    with sf.Checkpointer(tmp_path / "run", on_signal="SIGUSR1") as ckpt:
        os.kill(os.getpid(), signal.SIGUSR1)
        with caplog.at_level(logging.WARNING, "shardfast"):
            ckpt.step(1, state_of(1))
    said = [record.getMessage() for record in caplog.records]
    assert any(re.search(r"told to stop, in [89][0-9.]* s: all ranks save step 1", text) for text in said), said


LATE = """
import os, signal, sys
import numpy as np, shardfast as sf

class Late:
    def __del__(self):  # the interpreter has taken its handlers away by then
        os.kill(os.getpid(), signal.SIGUSR1)

late = Late()
with sf.Checkpointer(sys.argv[1], on_signal="SIGUSR1") as ckpt:
    os.kill(os.getpid(), signal.SIGUSR1)
    ckpt.step(1, {"model": {"w": np.zeros(4)}})
    assert ckpt.stopping
"""


def test_a_signal_that_comes_while_the_program_ends_is_ignored(tmp_path):
    done = subprocess.run([sys.executable, "-c", LATE, tmp_path / "run"], timeout=60, check=False)
    assert done.returncode == 0


def test_a_signal_after_the_last_step_is_for_the_next_checkpointer(tmp_path, handled, caplog):
    with caplog.at_level(logging.WARNING, "shardfast"):
        with sf.Checkpointer(tmp_path / "first", on_signal=["SIGUSR1", "SIGTERM"]) as ckpt:
            ckpt.step(1, state_of(1))
            os.kill(os.getpid(), signal.SIGUSR1)
        said = [record.getMessage() for record in caplog.records]
        assert any("SIGUSR1 came after the last step of this checkpointer" in one for one in said)
        with sf.Checkpointer(tmp_path / "another", on_signal="SIGTERM") as ckpt:
            ckpt.step(1, state_of(1))
            assert not ckpt.stopping, "SIGTERM did not come"
        with sf.Checkpointer(tmp_path / "second", on_signal=["SIGTERM", "SIGUSR1"]) as ckpt:
            ckpt.step(1, state_of(1))
            assert ckpt.stopping
        with sf.Checkpointer(tmp_path / "third", on_signal="SIGUSR1") as ckpt:
            ckpt.step(1, state_of(1))
            assert not ckpt.stopping


@pytest.mark.parametrize("text", ["nan", "inf", "tomorrow"])
def test_an_end_that_is_no_time_is_told_of_once(tmp_path, handled, caplog, monkeypatch, text):
    monkeypatch.setenv("SLURM_JOB_END_TIME", text)
    ends = tmp_path / "ends"
    ends.write_text(text)
    with sf.Checkpointer(tmp_path / "run", on_signal="SIGUSR1", within=ends) as ckpt:
        os.kill(os.getpid(), signal.SIGUSR1)
        with caplog.at_level(logging.WARNING, "shardfast"):
            ckpt.step(1, state_of(1))
        assert ckpt.stopping
    said = [record.getMessage() for record in caplog.records]
    for name in ("SLURM_JOB_END_TIME", f"within={str(ends)!r}"):
        assert said.count(f"{name}: expected a time in seconds since 1970, found {text!r}: it is ignored") == 1, said
    assert any("told to stop: all ranks save step 1" in one for one in said), said


def test_a_pipe_that_nobody_writes_to_tells_no_end(tmp_path, handled):
    os.mkfifo(tmp_path / "ends")
    with sf.Checkpointer(tmp_path / "run", on_signal="SIGUSR1", within=tmp_path / "ends") as ckpt:
        os.kill(os.getpid(), signal.SIGUSR1)
        ckpt.step(1, state_of(1))
        assert ckpt.stopping


def test_the_end_may_stand_in_a_file_by_then(tmp_path, handled, caplog):
    ends = tmp_path / "ends"
    with sf.Checkpointer(tmp_path / "run", on_signal="SIGUSR1", within=ends) as ckpt:
        ends.write_text(f"{time.time() + 90}\n")
        os.kill(os.getpid(), signal.SIGUSR1)
        with caplog.at_level(logging.WARNING, "shardfast"):
            ckpt.step(1, state_of(1))
    said = [record.getMessage() for record in caplog.records]
    assert any(re.search(r"told to stop, in [89][0-9.]* s: all ranks save step 1", text) for text in said), said


class Moments:
    """Sends the signal to this rank from within what Shardfast or the training does."""

    def __init__(self, moment: str, is_told: bool) -> None:
        self.moment, self.is_told, self.sent = moment, is_told, False

    def come(self, moment: str) -> None:
        if moment == self.moment and self.is_told and not self.sent:
            self.sent = True
            os.kill(os.getpid(), signal.SIGUSR1)

    def state_dict(self) -> dict:
        self.come("in a save")
        return {"n": 1}

    def load_state_dict(self, state: dict) -> None:
        self.come("in a load")


def is_told_within(rank, world, run, moment, told):
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 6)
    optimizer = torch.optim.AdamW(model.parameters())
    moments = Moments(moment, rank == told)
    state = {"model": model, "optimizer": optimizer, "extra": {"moments": moments}}
    ckpt = sf.Checkpointer(run, every=sf.steps(2), on_signal="SIGUSR1")
    first = ckpt.restore(state)
    model.register_forward_hook(lambda *_: moments.come("in the forward pass"))
    optimizer.register_step_pre_hook(lambda *_: moments.come("in the optimizer"))
    for step in range(first + 1, first + 50):
        dist.barrier()
        loss = model(torch.ones(2, 6)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ckpt.step(step, state)
        if ckpt.stopping or (moment == "in close" and step == first + 3):
            break
    moments.come("in close")
    ckpt.close()
    again = sf.Checkpointer(run)
    kept = torch.nn.Linear(6, 6)
    assert again.restore({**state, "model": kept, "optimizer": torch.optim.AdamW(kept.parameters())}) == step
    again.close()
    assert torch.equal(kept.weight, model.weight)
    return step - first


MOMENTS = ["in a load", "in the forward pass", "in the optimizer", "in a save", "in close"]


@pytest.mark.parametrize("told", [0, 2])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_within_what_is_done(ranks, tmp_path, moment, told):
    run = str(tmp_path / "run")
    torch.manual_seed(1)
    model = torch.nn.Linear(6, 6)
    state = {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "extra": {"moments": Moments("", False)},
    }
    sf.save(f"{run}/step-00000003", state, step=3)
    steps = ranks(3)(is_told_within, run, moment, told)
    assert len(set(steps)) == 1 and steps[0] <= 8, steps


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"on_signal": "SIGNOTHING"}, "on_signal='SIGNOTHING': expected the name of a signal, such as 'SIGUSR1'"),
        ({"on_signal": 4711}, "on_signal=4711: expected the name of a signal"),
        ({"on_signal": []}, r"on_signal=\[\]: expected the name of a signal"),
        ({"on_signal": 1.5}, "on_signal=1.5: expected the name of a signal"),
        ({"on_signal": "SIGKILL"}, "on_signal='SIGKILL': no program can catch it"),
        ({"on_signal": True}, "on_signal=True: expected a signal that others send"),
        ({"on_signal": ["SIGUSR1", "SIGSEGV"]}, "on_signal='SIGSEGV': expected a signal that others send"),
        ({"within": "90s"}, "within=: expected on_signal= beside it"),
        ({"raise_stopping": True}, "raise_stopping=: expected on_signal= beside it"),
        ({"on_signal": "SIGUSR1", "within": "soon"}, "within="),
        ({"on_signal": "SIGUSR1", "within": 0}, "within=0: expected how long"),
    ],
)
def test_what_is_no_signal_is_refused(tmp_path, handled, options, said):
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(sf.Invalid, match=said):
        sf.Checkpointer(tmp_path / "run", **options)
    assert signal.getsignal(signal.SIGUSR1) is before


CLOSING = """
import os, signal, sys, threading, numpy as np, shardfast as sf
state = {"w": np.zeros(5_000_000)}
ckpt = sf.Checkpointer(sys.argv[1], every=sf.steps(1), on_signal="SIGTERM", **eval(sys.argv[3]))
for step in (1, 2):
    state["w"][:] = step
    ckpt.step(step, state)
threading.Timer(float(sys.argv[2]), os.kill, (os.getpid(), signal.SIGTERM)).start()
ckpt.close()
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
print("closed", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("after_ms", [0, 1, 3, 10])
@pytest.mark.parametrize("near", [False, True])
def test_a_signal_while_a_checkpointer_is_closed_loses_nothing(tmp_path, after_ms, near):
    options = {"local": str(tmp_path / "near"), "drain": "80MB/s"} if near else {}
    command = [sys.executable, "-c", CLOSING, tmp_path / "run", f"{after_ms / 1000}", repr(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    # A signal that comes once all is closed ends the program as it would without.
    assert done.returncode in (0, -signal.SIGTERM), done.stderr
    assert done.returncode == 0 or near is False
    state = {"w": np.zeros(5_000_000)}
    assert sf.Checkpointer(tmp_path / "run").restore(state) == 2
    assert (state["w"] == 2).all()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_signals_are_given_back_in_whatever_order_checkpointers_close(tmp_path, handled, order):
    before = signal.getsignal(signal.SIGTERM)
    made = [sf.Checkpointer(tmp_path / f"{number}", on_signal="SIGTERM") for number in range(3)]
    for number in order:
        made[number].close()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_for_a_checkpointer_that_was_never_closed_is_for_the_next(tmp_path, handled):
    lost = sf.Checkpointer(tmp_path / "run", on_signal="SIGUSR1")
    lost.step(1, state_of(1))
    os.kill(os.getpid(), signal.SIGUSR1)
    with sf.Checkpointer(tmp_path / "run", on_signal="SIGUSR1") as ckpt:
        ckpt.step(2, state_of(2))
        assert ckpt.stopping
    lost.close()


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
