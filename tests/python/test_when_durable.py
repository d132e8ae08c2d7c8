"""Work of the user's on a checkpoint that has just become durable, before a rule of retention can take it back."""

import threading
import time

import numpy as np
import pytest
import shardfast as sf


def state_of(step: int) -> dict:
    return {"model": {"w": np.full(4, float(step))}}


def test_it_gets_the_newest_checkpoint_once_that_is_durable(tmp_path):
    with sf.Checkpointer(tmp_path) as ckpt:
        assert ckpt.saved is None
        ckpt.save(1, state_of(1))
        ckpt.save(2, state_of(2))
        assert ckpt.saved == 2
        seen = ckpt.when_durable(lambda url: (url, (tmp_path / "step-00000002" / "COMMIT").exists()))
        assert seen.result(60) == (f"{tmp_path}/step-00000002", True)
        ckpt.wait()
        late = ckpt.when_durable(lambda url: url)
        assert late.result(60) == f"{tmp_path}/step-00000002"


@pytest.mark.parametrize("turn", range(10))
def test_no_rule_takes_a_checkpoint_back_whose_work_goes_on(tmp_path, turn):
    """The next save becomes durable meanwhile, often before the end of the first is told, and a rule keeps one."""
    go_on, commits = threading.Event(), [tmp_path / f"step-{step:08d}" / "COMMIT" for step in (1, 2, 3)]

    def work(url: str) -> bool:
        assert go_on.wait(60)
        return commits[0].exists()

    with sf.Checkpointer(tmp_path, keep=sf.last(1)) as ckpt:
        ckpt.save(1, state_of(1))
        was_there = ckpt.when_durable(work)
        ckpt.save(2, state_of(2))
        until = time.monotonic() + 60
        while not commits[1].exists():
            assert time.monotonic() < until
            time.sleep(0.01)
        go_on.set()
        ckpt.save(3, state_of(3))
    assert was_there.result(0)
    assert [commit.exists() for commit in commits] == [False, False, True]


def test_close_waits_for_it(tmp_path):
    done = []
    ckpt = sf.Checkpointer(tmp_path)
    ckpt.save(1, state_of(1))
    ckpt.when_durable(lambda url: (time.sleep(0.3), done.append(url)))
    ckpt.close()
    assert done == [f"{tmp_path}/step-00000001"]


@pytest.mark.parametrize("is_known", [False, True])
def test_it_is_not_called_for_a_save_that_failed(tmp_path, is_known):
    (tmp_path / "step-00000001").write_text("in the way")
    ckpt, called = sf.Checkpointer(tmp_path), []
    ckpt.save(1, state_of(1))
    if is_known:
        with pytest.raises(sf.Error):
            ckpt.wait()
    future = ckpt.when_durable(called.append)
    with pytest.raises(sf.Error, match="step-00000001"):
        future.result(60)
    assert called == []
    if not is_known:
        with pytest.raises(sf.Error, match="step-00000001"):
            ckpt.close()


def test_its_own_error_is_the_futures(tmp_path):
    with sf.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state_of(1))
        future = ckpt.when_durable(lambda url: 1 // 0)
        ckpt.save(2, state_of(2))
    assert isinstance(future.exception(0), ZeroDivisionError)


def test_a_restored_checkpoint_is_no_save_of_this_object(tmp_path):
    with sf.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state_of(1))
    again = sf.Checkpointer(tmp_path)
    assert again.restore(state_of(0)) == 1
    assert again.saved is None
    with pytest.raises(sf.Invalid, match="expected a save by this checkpointer"):
        again.when_durable(lambda url: url)


@pytest.mark.parametrize("method", ["wait", "close"])
def test_work_that_calls_its_checkpointer_is_refused(tmp_path, method):
    ckpt = sf.Checkpointer(tmp_path / "run")
    ckpt.save(1, {"extra": {"n": 1}})
    future = ckpt.when_durable(lambda url: getattr(ckpt, method)())
    with pytest.raises(sf.Invalid, match=rf"{method}\(\) in the work of when_durable"):
        future.result(60)
    ckpt.close()


def test_a_step_that_save_has_saved_is_not_saved_twice(tmp_path):
    with sf.Checkpointer(tmp_path / "run", every=sf.steps(2)) as ckpt:
        ckpt.save(2, {"extra": {"n": 1}})
        assert not ckpt.step(2, {"extra": {"n": 1}})
        assert ckpt.step(4, {"extra": {"n": 1}})
    assert ckpt.committed == 4


def test_a_step_whose_save_has_failed_is_saved_again(tmp_path):
    run = tmp_path / "run"
    with sf.Checkpointer(run, every=sf.steps(2)) as ckpt:
        ckpt.save(1, {"extra": {"n": 1}})
        ckpt.wait()
        (run / "step-00000002").write_text("in the way")
        with pytest.raises(sf.Error):
            ckpt.save(2, {"extra": {"n": 1}})
            ckpt.wait()
        (run / "step-00000002").unlink()
        assert ckpt.step(2, {"extra": {"n": 1}})
    assert ckpt.committed == 2
