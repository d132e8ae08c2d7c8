"""A run's checkpoints: which one is restored, what is passed over, what is kept, and what is said about it."""

import logging
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import shardfast as sf
import torch
from shardfast.state import description
from torch import nn

RECORDS = ".telemetry"


def state_of(step: int) -> dict:
    model = nn.Linear(300, 200)
    with torch.no_grad():
        model.weight.fill_(step)
        model.bias.fill_(-step)
    return {"model": model, "extra": {"step": step}}


def saved(run: Path, *steps: int, keep: object = None) -> None:
    with sf.Checkpointer(run, every=sf.steps(1), keep=keep) as ckpt:
        for step in steps:
            assert ckpt.step(step, state_of(step))


def command(*arguments: object) -> str:
    program = Path(sys.executable).with_name("shardfast")
    return subprocess.run([program, *map(str, arguments)], check=True, capture_output=True, text=True).stdout


def restored(run: Path, **options: object) -> int:
    into = state_of(0)
    step = sf.Checkpointer(run).restore(into, **options)
    assert_state(into, step)
    return step


def assert_state(state: dict, step: int) -> None:
    assert torch.equal(state["model"].weight, torch.full((200, 300), float(step)))
    assert torch.equal(state["model"].bias, torch.full((200,), -float(step)))
    assert state["extra"]["step"] == step


def steps(run: Path) -> list[int]:
    """The committed steps."""
    return sorted(int(path.parent.name.removeprefix("step-")) for path in run.glob("step-*/COMMIT"))


def data_file(run: Path, step: int) -> Path:
    (file,) = (run / f"step-{step:08d}" / "model").glob("*.safetensors")
    return file


def flip(file: Path, offset: int) -> None:
    data = bytearray(file.read_bytes())
    data[offset] ^= 1
    file.write_bytes(data)


def test_a_run_that_never_saved_starts_at_0(tmp_path):
    assert restored(tmp_path / "none") == 0
    assert not (tmp_path / "none").exists(), "reading must create nothing"


def test_the_first_save_after_a_restore_finds_the_state_described(tmp_path, monkeypatch):
    saved(tmp_path, 1)
    into = state_of(0)
    with sf.Checkpointer(tmp_path, every=sf.steps(1)) as ckpt:
        ckpt.restore(into)
        monkeypatch.setattr(description, "_described", None)  # describing once more would raise
        into["extra"]["step"] = 2
        with torch.no_grad():
            into["model"].weight.fill_(2)
            into["model"].bias.fill_(-2)
        ckpt.step(2, into)
    assert restored(tmp_path) == 2


def test_the_first_save_of_a_run_finds_the_state_described_by_an_earlier_step(tmp_path, monkeypatch):
    state = state_of(3)
    with sf.Checkpointer(tmp_path, every=sf.steps(3)) as ckpt:
        assert ckpt.restore(state) == 0
        assert not ckpt.step(1, state)
        monkeypatch.setattr(description, "_described", None)  # describing once more would raise
        assert not ckpt.step(2, state)
        assert ckpt.step(3, state)
    assert restored(tmp_path) == 3


def test_a_state_that_can_be_restored_but_not_saved_is_refused_by_the_save(tmp_path):
    class Reader:
        position = 0

        def load_state_dict(self, state):
            self.position = state["position"]

        def state_dict(self):
            if self.position:
                raise RuntimeError("the reader is closed")
            return {"position": 5}

    with sf.Checkpointer(tmp_path, every=sf.steps(1)) as ckpt:
        ckpt.step(1, {"reader": Reader()})
    into = {"reader": Reader()}
    with sf.Checkpointer(tmp_path, every=sf.steps(1)) as ckpt:
        assert ckpt.restore(into) == 1 and into["reader"].position == 5
        with pytest.raises(RuntimeError, match="the reader is closed"):
            ckpt.step(2, into)


def test_the_newest_committed_checkpoint_is_restored_and_what_is_cut_off_is_named(tmp_path, caplog):
    saved(tmp_path, 1, 2, 30)
    (tmp_path / "step-00000030" / "COMMIT").unlink()
    (tmp_path / "step-00000040").mkdir()
    with caplog.at_level(logging.WARNING, logger="shardfast"):
        assert restored(tmp_path) == 2
    assert "step-00000030: not committed" in caplog.text
    assert "step-00000040: not committed" in caplog.text


@pytest.mark.parametrize("what", ["COMMIT", "manifest", "header", "data"])
def test_a_damaged_newest_checkpoint_is_an_error_unless_an_older_one_is_allowed(tmp_path, what):
    saved(tmp_path, 1, 2, 3)
    newest = tmp_path / "step-00000003"
    file = {
        "COMMIT": newest / "COMMIT",
        "manifest": next(newest.glob("manifest-*")),
        "header": data_file(tmp_path, 3),
        "data": data_file(tmp_path, 3),
    }[what]
    flip(file, file.stat().st_size - 1 if what == "data" else 40)
    with pytest.raises(sf.Corrupt) as failure:
        restored(tmp_path)
    assert "step-00000003" in str(failure.value)
    if what == "data":
        assert "model/weight" in str(failure.value) or "model/bias" in str(failure.value)
    assert restored(tmp_path, older=True) == 2


def contents(run):
    """All files of a run but the records of its saves, by path."""
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and RECORDS not in path.parts}


def test_when_every_checkpoint_is_damaged_nothing_is_restored_in_silence(tmp_path):
    saved(tmp_path, 1, 2)
    for step in (1, 2):
        flip(data_file(tmp_path, step), -1)
    with pytest.raises(sf.Corrupt):
        sf.Checkpointer(tmp_path).restore(state_of(0), older=True)


def test_an_existing_step_is_never_overwritten(tmp_path):
    saved(tmp_path, 1)
    before = contents(tmp_path)
    ckpt = sf.Checkpointer(tmp_path, every=sf.steps(1))
    with pytest.raises(sf.Conflict, match="a restart would restore it instead"):
        ckpt.step(1, state_of(9))
        ckpt.wait()
    assert contents(tmp_path) == before
    assert ckpt.step(2, state_of(2))
    ckpt.close()
    assert restored(tmp_path) == 2


def begun(run, step, **options):
    """The step that a restart finds after a training has saved there at one step."""
    with sf.Checkpointer(run, every=sf.steps(1), **options) as ckpt:
        ckpt.step(step, state_of(step))
    return restored(run)


@pytest.mark.parametrize("how", ["a new training", "back to an earlier step", "back within the training"])
def test_a_run_with_later_steps_is_begun_only_on_the_users_word(tmp_path, how):
    saved(tmp_path, 5, 6, 7, 8)
    before = contents(tmp_path)

    def training(**options):
        ckpt = sf.Checkpointer(tmp_path, every=sf.steps(1), keep=sf.last(2), **options)
        state = state_of(0)
        if how == "a new training":
            return ckpt, state, 1
        if how == "back within the training":
            assert ckpt.restore(state) == 8
        assert ckpt.restore(state, step=6) == 6
        assert_state(state, 6)
        return ckpt, state, 7

    ckpt, state, step = training()
    remedies = rf"a restart would restore (it|them) instead.*another directory.*--to {step - 1}.*rewind=True"
    for call in (ckpt.step, ckpt.save, ckpt.step):
        with pytest.raises(sf.Conflict, match=remedies):
            call(step, state)
    ckpt.close()
    assert contents(tmp_path) == before

    ckpt, state, step = training(rewind=True)
    assert ckpt.step(step, state_of(step))
    ckpt.close()
    kept, moved = ([1], [5, 6, 7, 8]) if step == 1 else ([6, 7], [7, 8])
    assert steps(tmp_path) == kept
    place = tmp_path / f"abandoned-from-{step:08d}"
    assert steps(place) == moved
    for moved_step in moved:
        state = state_of(0)
        sf.load(place / f"step-{moved_step:08d}", state)
        assert_state(state, moved_step)
    assert f"abandoned, in a run of their own: {place}" in command("ls", tmp_path)
    assert f"{len(moved)} steps, {len(moved)} committed" in command("ls", place)
    assert restored(tmp_path) == step


def test_a_run_is_gone_on_with_behind_its_newest_step_without_a_question(tmp_path):
    saved(tmp_path, 1, 2)
    assert begun(tmp_path, 3) == 3
    ckpt = sf.Checkpointer(tmp_path, every=sf.steps(1))
    assert ckpt.restore(state_of(0)) == 3
    with pytest.raises(sf.Conflict, match="up to step 3"):
        ckpt.step(2, state_of(2))
    assert ckpt.step(4, state_of(4))
    ckpt.close()


def test_a_step_to_go_back_to_is_one_of_the_run(tmp_path):
    saved(tmp_path, 1, 2)
    ckpt = sf.Checkpointer(tmp_path)
    with pytest.raises(sf.NotFound, match="step-00000003"):
        ckpt.restore(state_of(0), step=3)
    with pytest.raises(sf.Invalid, match="step=-1"):
        ckpt.restore(state_of(0), step=-1)
    with pytest.raises(sf.Invalid, match="older=True"):
        ckpt.restore(state_of(0), step=1, older=True)


def test_steps_move_out_of_the_way_with_the_command(tmp_path):
    saved(tmp_path, 1, 2, 3)
    flip(data_file(tmp_path, 3), -1)
    command("pin", tmp_path / "step-00000002", "--note", "spike")
    place = tmp_path / "abandoned-from-00000002"
    assert command("rewind", tmp_path, "--to", "1") == f"{tmp_path}: moved 2 steps (2, 3) to {place}\n"
    assert (steps(tmp_path), steps(place)) == ([1], [2, 3])
    assert "pinned: spike" in command("ls", place)
    assert "no committed step behind that one" in command("rewind", tmp_path, "--to", "1")
    saved(tmp_path, 2)
    assert f"{place}-2\n" in command("rewind", tmp_path, "--to", "1")
    (tmp_path / "step-00000001" / "notes").write_text("mine")
    with pytest.raises(subprocess.CalledProcessError) as refused:
        command("rewind", tmp_path, "--to", "0")
    assert "files that are not a checkpoint's (notes)" in refused.value.stderr
    assert steps(tmp_path) == [1]


def test_damaged_steps_that_a_restore_passed_over_move_when_the_training_goes_on(tmp_path):
    saved(tmp_path, 1, 2, 3)
    flip(data_file(tmp_path, 3), -1)
    with sf.Checkpointer(tmp_path, every=sf.steps(1), keep=sf.last(1)) as ckpt:
        assert ckpt.restore(state_of(0), older=True) == 2
        for step in (3, 4):
            assert ckpt.step(step, state_of(step))
    assert steps(tmp_path / "abandoned-from-00000003") == [3]
    assert restored(tmp_path) == 4


def test_a_step_whose_save_was_cut_off_can_be_saved_again(tmp_path):
    saved(tmp_path, 1, 2)
    (tmp_path / "step-00000002" / "COMMIT").unlink()
    flip(data_file(tmp_path, 2), -1)
    with sf.Checkpointer(tmp_path) as ckpt:
        ckpt.save(2, state_of(2))
    assert restored(tmp_path) == 2


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        (None, [1, 2, 3, 4, 5, 6]),
        (sf.last(2), [5, 6]),
        (sf.every(2), [2, 4, 6]),
        (sf.last(1) | sf.every(3), [3, 6]),
        (sf.last(3) | sf.every(2), [2, 4, 5, 6]),
    ],
    ids=str,
)
def test_the_rule_says_what_stays(tmp_path, keep, expected):
    saved(tmp_path, *range(1, 7), keep=keep)
    assert steps(tmp_path) == expected
    assert restored(tmp_path) == 6


def test_what_leaves_is_deleted_when_the_next_save_begins(tmp_path):
    with sf.Checkpointer(tmp_path, keep=sf.last(1)) as ckpt:
        for step in range(1, 4):
            ckpt.save(step, state_of(step))
            ckpt.wait()
            assert steps(tmp_path) == [step]
            left = [f"step-{step - 1:08d}"] if step > 1 else []
            found = sorted(name for name in os.listdir(tmp_path) if not name.startswith("."))
            assert found == [*left, f"step-{step:08d}"]
        assert data_file(tmp_path, 2).exists()
    # The next process finds by itself what leaves.
    saved(tmp_path, 4, keep=sf.last(1))
    assert sorted(os.listdir(tmp_path)) == [".jobs", RECORDS, "step-00000003", "step-00000004"]


def test_the_best_stay_and_so_does_what_is_pinned(tmp_path):
    losses = [3.0, 1.0, 2.0, torch.tensor(1.0), math.nan, 5]
    with sf.Checkpointer(tmp_path, every=sf.steps(1), keep=sf.last(1) | sf.best("loss", 2)) as ckpt:
        for step, loss in enumerate(losses, 1):
            ckpt.step(step, state_of(step), metrics={"loss": loss, "other": step})
            ckpt.wait()
            if step == 1:
                assert "pinned" in command("pin", tmp_path / "step-00000001", "--note", "first")
    assert steps(tmp_path) == [1, 2, 4, 6]
    assert "metric.loss = 1.0" in command("inspect", tmp_path / "step-00000004")
    listed = command("ls", tmp_path)
    assert "1  pinned" in listed
    assert "3  leaving" not in listed, "the next saves have deleted it"
    assert "5  leaving" in listed
    assert "pinned: first" in listed
    assert "no longer pinned" in command("pin", tmp_path / "step-00000001", "--remove")
    with sf.Checkpointer(tmp_path, keep=sf.best("loss", mode="max")) as ckpt:
        ckpt.save(7, state_of(7), metrics={"loss": 4})
    assert steps(tmp_path) == [6, 7]


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (None, r"metrics=\{\}: keep=sf.best\('loss'\) needs this metric at each save"),
        ({"lost": 1.0}, r"keep=sf.best\('loss'\) needs this metric"),
        ({"loss": "1"}, r"metrics=\{'loss': '1'\}: expected numbers by name"),
        ({"loss": b"1"}, r"expected numbers by name"),
        ({"loss": "low"}, r"metrics=\{'loss': 'low'\}: expected numbers by name"),
        ({"loss": torch.ones(2)}, r"expected numbers by name"),
        ({"loss": 10**400}, r"expected numbers by name"),
        ({"loss": 1.0, 3: 1.0}, r"metrics=\{3: 1.0\}: expected numbers by name"),
    ],
)
def test_metrics_that_are_missing_or_no_numbers_are_refused(tmp_path, metrics, message):
    with sf.Checkpointer(tmp_path, keep=sf.best("loss")) as ckpt, pytest.raises(sf.Invalid, match=message):
        ckpt.save(1, state_of(1), metrics=metrics)


def test_retention_leaves_alone_what_is_not_committed(tmp_path):
    saved(tmp_path, 1, 2)
    (tmp_path / "step-00000002" / "COMMIT").unlink()
    saved(tmp_path, 3, 4, keep=sf.last(1))
    assert steps(tmp_path) == [4]
    assert data_file(tmp_path, 2).exists()


def test_a_failure_in_the_background_is_raised_by_the_next_call_and_training_goes_on(tmp_path):
    ckpt = sf.Checkpointer(tmp_path / "run", every=sf.steps(1))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step-00000001").write_text("in the way")
    with pytest.raises(sf.Error, match="step-00000001"):
        for last in range(1, 1000):
            ckpt.step(last, state_of(last))
    ckpt.step(last + 1, state_of(last + 1))
    ckpt.close()
    assert restored(tmp_path / "run") == last + 1


def test_a_path_that_is_no_run(tmp_path):
    sf.save(tmp_path / "one", state_of(1))
    with pytest.raises(sf.Invalid, match="expected a run"):
        restored(tmp_path / "one")
    saved(tmp_path / "run", 1)
    with pytest.raises(sf.NotFound, match="it is a run"):
        sf.load(tmp_path / "run", state_of(0))
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(sf.Invalid, match="directory"):
        restored(tmp_path / "file")


def test_the_end_of_the_process_waits_for_the_last_save(tmp_path):
    code = (
        "import sys, torch, shardfast as sf; ckpt = sf.Checkpointer(sys.argv[1], every=sf.steps(1)); "
        "ckpt.step(1, {'model': torch.nn.Linear(1000, 1000)})"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=240)
    assert (tmp_path / "step-00000001" / "COMMIT").exists()


def test_the_command_works_where_there_is_no_torch(tmp_path):
    saved(tmp_path / "run", 1, 2)
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    (tmp_path / "numpy.py").write_text("raise ImportError('no numpy here')")
    environment = dict(os.environ, PYTHONPATH=str(tmp_path))
    command = Path(sys.executable).parent / "shardfast"
    for arguments in (["ls"], ["inspect"], ["verify", "--all"], ["ls", "--json"]):
        done = subprocess.run(
            [command, *arguments, str(tmp_path / "run")], env=environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout
    flip(data_file(tmp_path / "run", 2), -1)
    done = subprocess.run([command, "verify", str(tmp_path / "run")], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "model/" in done.stdout


def test_what_a_first_save_needs_is_there_before_it(tmp_path):
    code = f"""
import os, sys, threading, torch, shardfast as sf
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
ckpt = sf.Checkpointer({str(tmp_path / "run")!r}, every=sf.steps(1))
from shardfast import session
threads = [thread.name for thread in threading.enumerate()]
print("shardfast-watch" in threads, session._solo.cache_info().currsize)
before = set(sys.modules)
ckpt.step(1, {{"model": model, "optimizer": optimizer, "extra": {{"step": 1}}}})
print(sorted(name for name in set(sys.modules) - before if name.startswith("shardfast")))
ckpt.close()
"""
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ran.stdout.splitlines() == ["True 1", "[]"]


def test_making_one_waits_for_no_other_rank_and_raises_nothing_of_the_job(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    ckpt = sf.Checkpointer(tmp_path / "run")
    with pytest.raises(sf.Invalid, match="WORLD_SIZE=2"):
        ckpt.save(1, {"extra": {"step": 1}})


def test_what_restores_nothing_says_what_is_there(tmp_path, caplog):
    caplog.set_level("INFO", logger="shardfast")
    run = tmp_path / "run"
    assert sf.Checkpointer(run).restore(state_of(0)) == 0
    (said,) = caplog.messages
    assert said == f"{run}: no checkpoint there, so nothing is restored and the training begins at step 0"
    assert caplog.records[0].levelname == "INFO"
    saved(run, 3)
    saved(run, 4)
    for step in (3, 4):
        (run / f"step-{step:08}" / "COMMIT").unlink()
    caplog.clear()
    assert sf.Checkpointer(run).restore(state_of(0)) == 0
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert record.getMessage() == (
        f"{run}: nothing is restored and the training begins at step 0, though the run has 2 steps: the newest is "
        "step-00000004: not committed (its save was cut off, or is still running)"
    )


def test_a_step_behind_a_save_in_flight_is_refused(tmp_path):
    state = {"w": torch.zeros(3_000_000)}
    with sf.Checkpointer(tmp_path) as ckpt:
        assert ckpt.restore(state) == 0
        ckpt.save(10, state)
        with pytest.raises(sf.Conflict, match="a training at step 5 cannot save there"):
            ckpt.save(5, state)
        ckpt.save(11, state)


def test_a_restore_waits_for_saves_of_a_checkpointer_that_was_dropped(tmp_path):
    state = {"model": {"w": torch.zeros(4_000_000)}}
    for step in range(1, 9):
        ckpt = sf.Checkpointer(tmp_path, every=sf.steps(1))
        assert ckpt.restore(state) == step - 1
        ckpt.step(step, state)
        del ckpt
    assert sf.Checkpointer(tmp_path).restore(state) == 8
