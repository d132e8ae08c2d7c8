"""Where checkpoints go: what a path means, what is refused, what something else removes, what is never deleted."""

import contextlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import shardfast as sf
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

COMMAND = Path(sys.executable).parent / "shardfast"


def state_of(step: int) -> dict:
    model = nn.Linear(30, 20)
    with torch.no_grad():
        model.weight.fill_(step)
    return {"model": model, "extra": {"step": step}}


def loaded(url: object) -> int:
    into = state_of(0)
    sf.load(url, into)
    assert torch.equal(into["model"].weight, torch.full((20, 30), float(into["extra"]["step"])))
    return into["extra"]["step"]


def files_below(directory: Path) -> dict[str, bytes]:
    """All files but the records of saves, which may come at any time, by path."""
    files = (path for path in directory.rglob("*") if path.is_file() and ".telemetry" not in path.parts)
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


# Paths


def test_a_relative_run_stays_where_it_was_whatever_the_program_does_then(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    ckpt = sf.Checkpointer("run", every=sf.steps(1))
    assert ckpt.url == str(tmp_path / "a" / "run")
    ckpt.step(1, state_of(1))
    monkeypatch.chdir(tmp_path / "b")
    ckpt.step(2, state_of(2))
    ckpt.close()
    pending = sf.save_async("one", state_of(3))
    monkeypatch.chdir(tmp_path)
    pending.committed()
    made = sorted(path.name for path in (tmp_path / "a" / "run").iterdir())
    assert made == [".jobs", ".telemetry", "step-00000001", "step-00000002"]
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["one"]
    assert pending.url == str(tmp_path / "b" / "one")
    with sf.mapped("b/one") as checkpoint:
        monkeypatch.chdir("/")
        assert checkpoint["model/weight"][0, 0] == 3


def test_a_question_mark_is_part_of_a_path_and_begins_the_options_of_a_url(tmp_path):
    run = tmp_path / "what?is=this"
    with sf.Checkpointer(run, every=sf.steps(1)) as ckpt:
        ckpt.step(3, state_of(3))
    url = f"file://{tmp_path}/what%3Fis=this"
    with sf.Checkpointer(url, every=sf.steps(1)) as ckpt:
        into = state_of(0)
        assert ckpt.restore(into) == 3
        ckpt.step(4, into)
    assert [path.name for path in tmp_path.iterdir()] == ["what?is=this"]
    assert loaded(run / "step-00000004") == loaded(f"{url}/step-00000003") == 3
    for place in (run, url):
        listed = subprocess.run([COMMAND, "ls", place], capture_output=True, text=True, check=True).stdout
        assert "2 committed" in listed, listed
    with pytest.raises(sf.Invalid, match=r'file:// has no options; found "is" \(a "\?" in a name is written %3F\)'):
        sf.Checkpointer(f"file://{run}")


SECRETS = [
    "memory://joe:hunter2@bucket/run",
    "memory://bucket/run?access_key=hunter2",
    "s3://joe:hunter2@bucket/run?token=hunter2",
]


@pytest.mark.parametrize("url", SECRETS)
def test_secrets_in_a_url_are_refused_and_not_repeated(url):
    save, load = (lambda url: sf.save(url, state_of(1))), (lambda url: sf.load(url, state_of(1)))
    for verb in (sf.Checkpointer, save, load, sf.mapped):
        with pytest.raises((sf.Invalid, sf.Unsupported)) as caught:
            verb(url)
        assert "hunter2" not in str(caught.value) and "joe" not in str(caught.value)


def test_a_tilde_is_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    sf.save("~/one", state_of(1))
    assert (tmp_path / "home" / "one" / "COMMIT").exists()
    assert loaded(Path("~/one")) == 1
    assert sf.Checkpointer("~").url == str(tmp_path / "home")
    with pytest.raises(sf.Invalid, match=r"~no-user-of-that-name/x: there is no home directory"):
        sf.save("~no-user-of-that-name/x", state_of(1))
    sf.save("./~x", state_of(2))
    assert loaded("./~x") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "~x"]


@pytest.mark.parametrize(
    ("url", "kind", "message"),
    [
        ("", sf.Invalid, "expected a path or a URL"),
        (b"bytes", sf.Invalid, "expected a path or a URL, found a bytes"),
        ("ftp://host/x", sf.Unsupported, "file://"),
        ("file:relative", sf.Invalid, "//"),
        ("memory:x", sf.Invalid, "//"),
    ],
)
def test_a_url_that_is_none_is_refused_when_the_verb_begins(url, kind, message):
    for call in (
        lambda: sf.save(url, state_of(1)),
        lambda: sf.save_async(url, state_of(1)),
        lambda: sf.load(url, state_of(1)),
        lambda: sf.plan_load(url, state_of(1)),
        lambda: sf.mapped(url),
        lambda: sf.Checkpointer(url),
    ):
        with pytest.raises(kind, match=message):
            call()


def test_a_directory_that_is_gone(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(sf.Invalid, match="current directory"):
        sf.save("x", state_of(1))


# Places that are refused


@pytest.mark.parametrize("spell", ["path", "file url", "relative"])
def test_a_place_that_holds_other_things_is_refused_and_left_as_it_was(tmp_path, monkeypatch, spell):
    project = tmp_path / "project"
    (project / "model").mkdir(parents=True)
    (project / "model" / "net.py").write_text("class Net: ...")
    (project / "train.py").write_text("import shardfast")
    url = {"path": str(project), "file url": f"file://{project}", "relative": "project"}[spell]
    monkeypatch.chdir(tmp_path)
    before = files_below(project)
    for save in (sf.save, lambda url, state: sf.save_async(url, state).committed()):
        with pytest.raises(sf.Invalid, match=r"expected a new or empty directory.*found train\.py"):
            save(url, state_of(1))
    assert files_below(project) == before
    assert sorted(path.name for path in project.iterdir()) == ["model", "train.py"], "nothing was made there"
    # What is deeper is found, too.
    (project / "train.py").unlink()
    with pytest.raises(sf.Invalid, match=r"found model/net\.py"):
        sf.save(url, state_of(1))
    assert files_below(project) == {"model/net.py": before["model/net.py"]}


@pytest.mark.parametrize("url", ["/", "file:///", "//"])
def test_the_root_of_the_file_system_is_refused(url):
    before = sorted(os.listdir("/"))
    with pytest.raises(sf.Invalid, match="this is the root directory: save to a directory of its own"):
        sf.save(url, {"no-such-key": {"a": 1}})
    with pytest.raises(sf.Invalid, match="root of the file system"):
        sf.Checkpointer(url)
    assert sorted(os.listdir("/")) == before


@pytest.mark.parametrize("url", [".", "./", "sub/..", "{here}", "file://{here}"])
def test_the_current_directory_is_refused_though_it_is_empty(tmp_path, monkeypatch, url):
    monkeypatch.chdir(tmp_path)
    for save in (sf.save, lambda url, state: sf.save_async(url, state).committed()):
        with pytest.raises(sf.Invalid, match="this is the current directory: save to a directory of its own"):
            save(url.format(here=tmp_path), state_of(1))
    assert not list(tmp_path.iterdir())


def test_a_run_is_no_place_for_one_checkpoint(tmp_path):
    for step in (1, 2):
        sf.save(tmp_path / f"run/step-{step:08d}", {"n": step}, step=step)
    sf.save(tmp_path / "one", {"n": 9})
    said = r"save .*/run: expected a new or empty directory, found a run, with step-00000001 in it"
    with pytest.raises(sf.Invalid, match=said):
        sf.save(tmp_path / "run", {"n": 9})
    command = [COMMAND, "copy", f"{tmp_path}/one", f"{tmp_path}/run"]
    copied = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert copied.returncode != 0
    assert re.search(said, copied.stderr), copied.stderr
    assert sf.Checkpointer(tmp_path / "run").restore({"n": None}) == 2


def test_a_checkpoint_under_another_steps_name_is_not_taken_for_that_step(tmp_path):
    for step in (1, 2):
        sf.save(tmp_path / f"step-{step:08d}", {"n": step}, step=step)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000009")
    state = {"n": None}
    for asked in ({}, {"step": 9}, {"older": True}):
        with pytest.raises(sf.Invalid, match=r"step-00000009: expected .* step 9, found that of step 1, "):
            sf.Checkpointer(tmp_path).restore(state, **asked)
        assert state == {"n": None}
    shutil.rmtree(tmp_path / "step-00000009")
    assert sf.Checkpointer(tmp_path).restore(state) == 2
    assert state == {"n": 2}


def test_memory_is_held_to_the_same():
    sf.save("memory://places/run/step", state_of(1))
    with pytest.raises(sf.Invalid, match="found step/COMMIT"):
        sf.save("memory://places/run", state_of(1))
    assert loaded("memory://places/run/step") == 1


def test_what_a_save_that_was_cut_off_left_is_no_hindrance(tmp_path):
    place = tmp_path / "one"
    sf.save(place, state_of(1))
    (place / "COMMIT").unlink()
    (place / ".tmp-0123456789abcdef").write_text("a commit that was being written")
    (place / "model" / ".tmp-0123456789abcdef").write_text("an index that was being written")
    (place / "optimizer").mkdir()
    sf.save(place, state_of(2))
    assert loaded(place) == 2
    with pytest.raises(sf.Conflict, match="committed there already"):
        sf.save(place, state_of(3))
    (place / "eval.json").write_text("{}")
    with pytest.raises(sf.Conflict, match="committed there already"):
        sf.save(place, state_of(3))
    assert loaded(place) == 2


def test_a_run_may_lie_among_other_things(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.log").write_text("step 1")
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "events").write_text("...")
    with sf.Checkpointer(".", every=sf.steps(1), keep=sf.last(1)) as ckpt:
        assert ckpt.restore(state_of(0)) == 0
        for step in (1, 2, 3):
            ckpt.step(step, state_of(step))
    assert committed(tmp_path) == ["step-00000003"]
    assert (tmp_path / "train.log").exists()
    assert (tmp_path / "tensorboard" / "events").exists()


# What something else removes


def committed(run: Path) -> list[str]:
    return sorted(path.parent.name for path in run.glob("*/COMMIT"))


def sweep(run: Path, stop: threading.Event, between: threading.Lock) -> None:
    """A home-made sweep: what has no COMMIT is rubbish. Who holds the lock sees no half of a round."""
    while not stop.is_set():
        with between:
            for directory in run.glob("*"):
                if not (directory / "COMMIT").exists():
                    shutil.rmtree(directory, ignore_errors=True)
        time.sleep(0.002)


def test_a_sweep_during_saves_leaves_no_hollow_checkpoint(tmp_path):
    saved, failed = [], []
    with sf.Checkpointer(tmp_path, keep=sf.last(1)) as ckpt:
        ckpt.save(0, state_of(0))
        ckpt.wait()
        stop, between = threading.Event(), threading.Lock()
        sweeper = threading.Thread(target=sweep, args=(tmp_path, stop, between))
        sweeper.start()
        try:
            for step in range(1, 600):
                if step > 60 and failed:
                    break
                try:
                    ckpt.save(step, state_of(step))
                    ckpt.wait()
                    saved.append(step)
                except sf.Error as error:
                    failed.append(error)
                # What was said to be saved is whole, and so is what is there when the sweeper has done what it began.
                newest = max(saved, default=0)
                into = state_of(-1)
                with between:
                    assert sf.Checkpointer(tmp_path).restore(into) == newest
                assert into["extra"]["step"] == newest
        finally:
            stop.set()
            sweeper.join()
    assert failed, "the sweep never met a save"


def test_what_is_removed_in_the_middle_of_a_save_fails_it_by_name(tmp_path):
    place, stop = tmp_path / "one", threading.Event()

    def remove_data() -> None:
        while not stop.is_set():
            with contextlib.suppress(FileNotFoundError):  # the directory may be removed at the same time
                for file in place.glob("model/*.safetensors"):
                    file.unlink()

    remover = threading.Thread(target=remove_data)
    remover.start()
    try:
        with pytest.raises(sf.Error) as failure:
            for _ in range(200):
                sf.save(place, {"model": {"w": torch.ones(3_000_000)}, "extra": {"step": 1}})
                with contextlib.suppress(sf.Corrupt):  # the remover went on after the commit
                    sf.load(place, {"model": {"w": torch.zeros(3_000_000)}, "extra": {"step": 0}})
                shutil.rmtree(place, ignore_errors=True)  # of files that the remover takes away meanwhile
    finally:
        stop.set()
        remover.join()
    assert isinstance(failure.value, sf.Corrupt)
    assert "model/00000-000-" in str(failure.value)
    assert "removed or changed" in str(failure.value)
    assert not (place / "COMMIT").exists()


def test_no_older_checkpoint_is_deleted_while_the_newest_is_hollow(tmp_path):
    with sf.Checkpointer(tmp_path) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state_of(step))
            ckpt.wait()
    hollow = next((tmp_path / "step-00000003" / "model").glob("*.safetensors"))
    hollow.unlink()
    before = files_below(tmp_path)
    with pytest.raises(sf.Corrupt, match="no older one was deleted") as failure:
        sf._native.Retention(str(tmp_path), last=1, every=None, best=[], timeout_s=60).retain([])
    assert hollow.name in str(failure.value)
    assert "step-00000003 is the newest checkpoint" in str(failure.value)
    assert files_below(tmp_path) == before
    into = state_of(0)
    hollow_again = sf.Checkpointer(tmp_path)
    with pytest.raises(sf.Corrupt):
        hollow_again.restore(into)
    assert sf.Checkpointer(tmp_path).restore(into, older=True) == 2


# What is not ours


def test_a_file_of_the_users_keeps_its_checkpoint_with_one_warning(tmp_path, caplog):
    with (
        caplog.at_level(logging.WARNING, logger="shardfast"),
        sf.Checkpointer(tmp_path, keep=sf.last(1)) as ckpt,
    ):
        for step in range(1, 8):
            ckpt.save(step, state_of(step))
            ckpt.wait()
            directory = tmp_path / f"step-{step:08d}"
            if step == 2:
                (directory / "eval.json").write_text(json.dumps({"loss": 1}))
            if step == 4:
                (directory / "model" / "notes").mkdir()
                (directory / "model" / "notes" / "mine.txt").write_text("good one")
    assert committed(tmp_path) == ["step-00000002", "step-00000004", "step-00000007"]
    assert (tmp_path / "step-00000002" / "eval.json").exists()
    assert [loaded(tmp_path / f"step-0000000{step}") for step in (2, 4, 7)] == [2, 4, 7]
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == 2, warned
    assert "step-00000002" in warned[0]
    assert "eval.json" in warned[0]
    assert "model/notes/mine.txt" in warned[1]
    # Without it the rule holds again.
    (tmp_path / "step-00000002" / "eval.json").unlink()
    with sf.Checkpointer(tmp_path, keep=sf.last(1)) as ckpt:
        ckpt.save(8, state_of(8))
    assert committed(tmp_path) == ["step-00000004", "step-00000008"]


def test_leftovers_of_other_attempts_go_with_the_checkpoint(tmp_path):
    run = tmp_path / "run"
    with sf.Checkpointer(run, keep=sf.last(1)) as ckpt:
        ckpt.save(1, state_of(1))
        ckpt.wait()
        first = run / "step-00000001"
        (first / "manifest-00000000000000ab").write_text("of a crashed attempt")
        (first / "gone").mkdir()
        (first / "gone" / "00000-000-00000000000000ab.safetensors").write_text("of a crashed attempt")
        (first / "gone" / ".tmp-00000000000000ab").write_text("of a crashed attempt")
        (first / "empty").mkdir()
        ckpt.save(2, state_of(2))
    assert committed(run) == ["step-00000002"]
    assert list(run.rglob("*00000000000000ab*")) == []


def test_a_link_to_a_checkpoint_elsewhere_is_left_alone(tmp_path, caplog):
    run, archive = tmp_path / "run", tmp_path / "archive"
    with sf.Checkpointer(run) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step))
    archive.mkdir()
    (run / "step-00000001").rename(archive / "best")
    (run / "step-00000001").symlink_to(archive / "best")
    with caplog.at_level(logging.WARNING, logger="shardfast"), sf.Checkpointer(run, keep=sf.last(1)) as ckpt:
        ckpt.save(3, state_of(3))
    assert committed(run) == ["step-00000001", "step-00000003"]
    assert loaded(archive / "best") == 1
    assert "step-00000001" in caplog.text
    assert "link" in caplog.text


# What others saved


def foreign(tmp_path: Path) -> list[tuple[Path, type[sf.Error], str]]:
    model = nn.Linear(3, 2)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    torch.save(model.state_dict(), tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    shutil.copy(tmp_path / "model.pt", tmp_path / "nameless")
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "hf").mkdir()
    shutil.copy(tmp_path / "model.safetensors", tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "config.json").write_text("{}")
    (tmp_path / "lightning").mkdir()
    shutil.copy(tmp_path / "model.pt", tmp_path / "lightning" / "last.ckpt")
    sf.save(tmp_path / "ours", state_of(1))
    data = next((tmp_path / "ours" / "model").glob("0*.safetensors"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("x")
    return [
        (tmp_path / "dcp", sf.NotFound, r"torch\.distributed\.checkpoint.*1 `\.distcp` files.*sf\.save"),
        (tmp_path / "model.pt", sf.Invalid, r"found a file that `torch\.save` wrote: load it with `torch\.load`"),
        (tmp_path / "old.pth", sf.Invalid, r"found a file that `torch\.save` wrote"),
        (tmp_path / "nameless", sf.Invalid, r"found a file that `torch\.save` wrote"),
        (tmp_path / "model.safetensors", sf.Invalid, r"found a file of plain safetensors: load it with `safetensors"),
        (tmp_path / "hf", sf.NotFound, r"config\.json, model\.safetensors: files of plain safetensors"),
        (tmp_path / "lightning", sf.NotFound, r"last\.ckpt: files that `torch\.save` wrote"),
        (data, sf.Invalid, rf"a data file of a checkpoint: name the checkpoint's directory, {tmp_path}/ours$"),
        (tmp_path / "ours" / "COMMIT", sf.Invalid, rf"a file of a checkpoint: name its directory, {tmp_path}/ours$"),
        (tmp_path / "ours" / "model", sf.NotFound, r"one key's directory of a checkpoint"),
        (tmp_path / "other", sf.NotFound, r"it holds notes\.txt and no COMMIT"),
    ]


def test_what_others_saved_is_named_with_what_to_do(tmp_path):
    for place, kind, message in foreign(tmp_path):
        for call in (
            lambda place=place: sf.load(place, state_of(0)),
            lambda place=place: sf.plan_load(place, state_of(0)),
            lambda place=place: sf.mapped(place),
        ):
            with pytest.raises(kind, match=message):
                call()
        for verb in ("inspect", "ls", "verify"):
            done = subprocess.run([COMMAND, verb, place], capture_output=True, text=True, timeout=240)
            assert done.returncode == {sf.NotFound: 3, sf.Invalid: 2}[kind], (verb, place, done.stderr)
            assert re.search(message, done.stderr, re.MULTILINE), (verb, place, done.stderr)
    with pytest.raises(sf.Invalid, match=r"expected a run.*torch\.distributed\.checkpoint"):
        sf.Checkpointer(tmp_path / "dcp").restore(state_of(0))


# A COMMIT that is no file


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [a_pipe, Path.mkdir, a_device], ids=["pipe", "directory", "device"])
def test_a_commit_that_is_no_file_is_damage_and_not_passed_over(tmp_path, make):
    with sf.Checkpointer(tmp_path) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step))
    newest = tmp_path / "step-00000002"
    (newest / "COMMIT").unlink()
    make(newest / "COMMIT")
    for call in (
        lambda: sf.Checkpointer(tmp_path).restore(state_of(0)),
        lambda: sf.load(newest, state_of(0)),
        lambda: sf.mapped(newest),
        lambda: sf.save(newest, state_of(3)),
    ):
        with pytest.raises(sf.Corrupt, match="COMMIT: expected a file, found something else"):
            call()
    assert sf.Checkpointer(tmp_path).restore(state_of(0), older=True) == 1
    done = subprocess.run([COMMAND, "ls", tmp_path], capture_output=True, text=True, timeout=240)
    assert "unreadable" in done.stdout
    with sf.Checkpointer(tmp_path, keep=sf.last(1)) as ckpt:
        ckpt.save(3, state_of(3))
    assert committed(tmp_path) == ["step-00000002", "step-00000003"]


# Ranks


def check_directories_differ(rank: int, world: int, directory: str) -> str:
    os.makedirs(f"{directory}/{rank}")
    os.chdir(f"{directory}/{rank}")
    with pytest.raises(sf.Invalid) as failure:
        sf.save("run", {"model": {"w": torch.ones(10)}}, timeout_s=30)
    return str(failure.value)


def test_ranks_whose_relative_paths_mean_different_places_are_told(ranks, tmp_path):
    messages = ranks(2)(check_directories_differ, str(tmp_path / "ranks"))
    assert messages[0] == messages[1]
    assert all(f"{tmp_path}/ranks/{rank}/run" in messages[0] for rank in (0, 1))
    assert files_below(tmp_path / "ranks") == {}
