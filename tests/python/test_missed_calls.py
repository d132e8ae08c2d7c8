"""Ranks that do not all make a call: that call fails, the message names them, and the next call finds all together."""

import contextlib
import logging
import re
import time

import pytest
import shardfast as sf
import torch
import torch.distributed as dist
from shardfast import session

SHORT_S = 1.5
LONG_S = 40.0
SOON_S = 20.0  # on a busy machine, and long before LONG_S is over


def state(value=0):
    return {"model": {"w": torch.full((8,), float(value))}, "extra": {"n": value}}


def failure(call):
    """The error of a call that must fail, and how long it took."""
    started = time.monotonic()
    with pytest.raises(sf.Error) as caught:
        call()
    return type(caught.value).__name__, str(caught.value), time.monotonic() - started


def expect_saved(directory, names):
    """Each save works, and is what is loaded."""
    for value, name in enumerate(names):
        sf.save(f"{directory}/{name}", state(value), timeout_s=LONG_S)
        loaded = state(-1)
        sf.load(f"{directory}/{name}", loaded, timeout_s=LONG_S)
        assert loaded["extra"] == {"n": value}
        assert bool((loaded["model"]["w"] == value).all())


def check_alone(rank, world, directory, alone, calls, again, have_met):
    """Some ranks make calls that the others do not make."""
    seen = []
    if have_met:
        expect_saved(directory, ["before"])
    if rank in alone:
        for number in range(calls):
            began = time.monotonic()  # the same clock on all ranks
            call = failure(lambda n=number: sf.save(f"{directory}/alone-{n}", state(), timeout_s=SHORT_S))
            seen.append((*call, began))
    dist.barrier()
    if again:
        last = f"{directory}/alone-{calls - 1}"
        if not have_met and 0 not in alone:
            sf.save(last, state(), timeout_s=LONG_S)  # that rank waited for rank 0 outside of any call
        else:
            # A rank that calls it for the first time cannot be told from one that is late, and has another state.
            assert failure(lambda: sf.save(last, state(), timeout_s=LONG_S))[0] == "Unavailable"
    expect_saved(directory, ["first", "second"])
    return seen


@pytest.mark.parametrize("have_met", [True, False])
@pytest.mark.parametrize(
    ("world", "alone", "calls", "again"),
    [
        (2, (0,), 1, False),
        (2, (1,), 1, False),
        (2, (0,), 3, False),
        (2, (1,), 3, False),
        (2, (0,), 1, True),
        (2, (1,), 1, True),
        (3, (0, 2), 2, False),
        (3, (1,), 2, True),
    ],
)
def test_missed_saves_do_not_end_saving(ranks, tmp_path, world, alone, calls, again, have_met):
    seen = ranks(world)(check_alone, str(tmp_path), alone, calls, again, have_met)
    missing = [rank for rank in range(world) if rank not in alone]
    who = f"rank {missing[0]} has" if len(missing) == 1 else f"ranks {missing[0]}, {missing[1]} have"
    if missing == [1, 2] or missing == [0, 1]:
        who = f"ranks {missing[0]}-{missing[1]} have"
    # The rank that waits first ends the wait of those that come later.
    first = [min(began for *_, began in same) for same in zip(*(seen[rank] for rank in alone), strict=True)]
    for rank in alone:
        for number, (kind, message, seconds, began) in enumerate(seen[rank]):
            assert kind == "Unavailable"
            assert began + seconds - first[number] > SHORT_S * 0.9
            assert seconds < SOON_S
            if not have_met and 0 in missing:
                assert f"rank {rank} of {world}: rank 0 did not report its address within 1.5 s" in message
                continue
            behind = "1 call" if number == 0 else f"{number + 1} calls"
            assert f"{who} not called save ({behind} behind)" in message, message
            assert f"alone-{number}" in message


def check_late(rank, world, directory, pause):
    """Rank 1 makes the call that rank 0 has given up; rank 0 goes on to another one, at once or later."""
    expect_saved(directory, ["before"])
    if rank == 0:
        first = failure(lambda: sf.save(f"{directory}/late", state(), timeout_s=SHORT_S))
    dist.barrier()
    if rank == 1:
        first = failure(lambda: sf.save(f"{directory}/late", state(), timeout_s=LONG_S))
    elif pause:
        time.sleep(2)
    expect_saved(directory, ["first", "second"])
    return first


@pytest.mark.parametrize("pause", [False, True])
def test_a_rank_that_comes_late_is_told_so_at_once_and_is_with_the_others_again(ranks, tmp_path, pause):
    early, late = ranks(2)(check_late, str(tmp_path), pause)
    assert early[0] == late[0] == "Unavailable"
    assert "rank 1 has not called save" in early[1]
    assert "rank 1 called save too late" in late[1], late[1]
    assert late[2] < SOON_S


def check_retried(rank, world, directory):
    """Rank 1's late call and rank 0's next try go to one place, with states of different steps."""
    expect_saved(directory, ["before"])
    if rank == 0:
        failure(lambda: sf.save(f"{directory}/latest", state(1), timeout_s=SHORT_S))
    dist.barrier()
    error = failure(lambda: sf.save(f"{directory}/latest", {"mine": {"step": sf.PerRank(2 - rank)}}, timeout_s=5))
    expect_saved(directory, ["first"])
    return error


def test_a_late_call_does_not_mix_its_state_with_a_later_try(ranks, tmp_path):
    for kind, _, _ in ranks(2)(check_retried, str(tmp_path)):
        assert kind == "Unavailable"
    assert not (tmp_path / "latest" / "COMMIT").exists()


def check_mixed(rank, world, directory):
    sf.save(f"{directory}/old", state(7), timeout_s=LONG_S)
    if rank == 0:
        seen = failure(lambda: sf.save(f"{directory}/new", state(), timeout_s=LONG_S))
    else:
        seen = failure(lambda: sf.load(f"{directory}/old", state(), timeout_s=LONG_S))
    expect_saved(directory, ["new", "newer"])
    return seen


def test_ranks_that_make_different_calls_are_told_both_and_meet_again(ranks, tmp_path):
    one, other = ranks(2)(check_mixed, str(tmp_path))
    assert one[:2] == other[:2]
    assert one[0] == "Invalid"
    assert re.search(r"rank 0 calls `save .*/new`, rank 1 calls `open .*/old`", one[1]), one[1]
    assert max(one[2], other[2]) < SOON_S


def check_out_of_step(rank, world, directory):
    """Rank 1 leaves one save out while rank 0 still waits in it: they are one call apart, and stay so no longer."""
    names = ["a", "b", "c", "d", "e"]
    outcomes = []
    for name in names:
        if rank == 1 and name == "a":
            continue
        try:
            sf.save(f"{directory}/{name}", state(), timeout_s=LONG_S)
            outcomes.append(name)
        except sf.Error as error:
            outcomes.append(str(error))
    return outcomes


def test_ranks_that_are_one_call_apart_find_together(ranks, tmp_path):
    one, other = ranks(2)(check_out_of_step, str(tmp_path))
    assert one[2:] == other[1:] == ["c", "d", "e"]
    assert "rank 0 calls `save" in one[0] == other[0]
    assert "rank 0 is behind the other ranks" in one[1], one[1]


def check_checkpointer(rank, world, directory):
    """Rank 0's run saves once more than the other's."""
    ckpt = sf.Checkpointer(f"{directory}/run", every=sf.steps(1), timeout_s=LONG_S)
    raised = []
    for step in range(1, 7):
        if step == 2:
            if rank == 0:
                ckpt._timeout_s = SHORT_S
                ckpt.step(step, state(step))
                ckpt._timeout_s = LONG_S
                with pytest.raises(sf.Unavailable) as caught:
                    ckpt.wait()
                raised.append(str(caught.value))
            else:
                ckpt.wait()
            dist.barrier()
            continue
        ckpt.step(step, state(step))
        ckpt.wait()
    ckpt.close()
    loaded = state(-1)
    again = sf.Checkpointer(f"{directory}/run", timeout_s=LONG_S)
    assert again.restore(loaded) == 6
    assert loaded["extra"] == {"n": 6}
    return raised


def test_a_checkpointer_goes_on_after_a_missed_call(ranks, tmp_path):
    raised, _ = ranks(2)(check_checkpointer, str(tmp_path))
    assert len(raised) == 1
    assert "rank 1 has not called save (1 call behind)" in raised[0]


def check_overlapping(rank, world, directory):
    """Saves in the background, of which rank 1 leaves the first out."""
    pendings = []
    for name in ["a", "b", "c", "d"]:
        if rank == 0 or name != "a":
            pendings.append((name, sf.save_async(f"{directory}/{name}", state(), timeout_s=5)))
        with contextlib.suppress(sf.Error):
            pendings[-1][1].committed() if name in "bd" and pendings else None
    for _, pending in pendings:
        with contextlib.suppress(sf.Error):
            pending.committed()
    dist.barrier()
    expect_saved(directory, ["x", "y"])


def test_saves_in_the_background_find_together_again(ranks, tmp_path):
    ranks(2)(check_overlapping, str(tmp_path))


def check_warned(rank, world, directory, alone):
    session.PATIENCE_S = 2.0
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append((record.levelname, record.getMessage()))
    logging.getLogger("shardfast").addHandler(handler)
    expect_saved(directory, ["before"])
    if rank != alone:
        time.sleep(8)
    sf.save(f"{directory}/one", state(), timeout_s=60)
    return records


@pytest.mark.parametrize("alone", [0, 1])
def test_a_warning_comes_long_before_the_failure(ranks, tmp_path, alone):
    records = ranks(2)(check_warned, str(tmp_path), alone)
    assert records[1 - alone] == []
    (level, message), *more = records[alone]
    assert level == "WARNING" and not more
    assert f"rank {1 - alone} has not called save" in message
    assert f"{tmp_path}/one" in message


def check_warned_first(rank, world, directory):
    session.PATIENCE_S = 2.0
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("shardfast").addHandler(handler)
    if rank == 0:
        time.sleep(6)
    expect_saved(directory, ["one"])
    return records


def test_a_warning_comes_before_the_ranks_have_ever_met(ranks, tmp_path):
    first, second = ranks(2)(check_warned_first, str(tmp_path))
    assert first == []
    assert len(second) == 1 and "rank 1 of 2: rank 0 has not made this call" in second[0]


def check_unfit(rank, world, directory):
    """A call that cannot be made, on one rank alone."""
    seen = None
    if rank == 0:
        seen = failure(lambda: sf.save(f"{directory}/unfit", {"model": object()}, timeout_s=SHORT_S))
    dist.barrier()
    if rank == 1:
        # It is told why, as all that came in time would have been.
        seen = failure(lambda: sf.save(f"{directory}/unfit", state(), timeout_s=LONG_S))
    expect_saved(directory, ["first", "second"])
    return seen


def test_a_call_that_fails_on_the_only_rank_that_makes_it(ranks, tmp_path):
    for kind, message, _ in ranks(2)(check_unfit, str(tmp_path)):
        assert kind == "Invalid"
        assert "rank 0: " in message and "rank 1: it did not contribute" in message, message


def check_waits(rank, world, directory):
    sf.save(f"{directory}/zero", {"extra": {"n": 1}}, timeout_s=30)
    dist.barrier()
    waits = {
        "save": lambda: sf.save(f"{directory}/one", {"extra": {"n": 1}}, timeout_s=0.2),
        "load": lambda: sf.load(f"{directory}/zero", {"extra": {"n": 1}}, timeout_s=0.2),
        "restore": lambda: sf.Checkpointer(f"{directory}/run", timeout_s=0.2).restore({"extra": {"n": 1}}),
    }
    seen = {}
    if rank == 0:
        for name, wait in waits.items():
            started = time.monotonic()
            with pytest.raises(sf.Unavailable) as caught:
                wait()
            seen[name] = (str(caught.value), time.monotonic() - started)
    dist.barrier()
    return seen


def test_every_wait_has_an_end(ranks, tmp_path):
    """A rank that never comes is named after the time that the caller gave."""
    seen = ranks(2)(check_waits, str(tmp_path))[0]
    for name, (message, seconds) in seen.items():
        verb = "save" if name == "save" else "restore" if name == "restore" else "load"
        assert f"rank 1 has not called {verb} (" in message, name
        assert "within 200ms" in message, name
        assert seconds < 20, name
