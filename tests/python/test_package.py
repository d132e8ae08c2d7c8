"""What is installed, and what wrong calls are told."""

import importlib.metadata
import importlib.resources
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import shardfast as sf
import torch
from shardfast import _native

PROGRAM = Path(sys.executable).with_name("shardfast")


def command(*arguments, **environment):
    done = [PROGRAM, *map(str, arguments)]
    return subprocess.run(done, capture_output=True, text=True, timeout=60, env={**os.environ, **environment})


def test_one_version_and_nothing_else_is_required():
    version = importlib.metadata.version("shardfast")
    assert _native.__version__ == sf.__version__ == version
    assert command("--version").stdout.split() == ["shardfast", version]
    required = importlib.metadata.requires("shardfast") or []
    assert [line for line in required if "extra ==" not in line] == [], "frameworks are the user's choice"
    assert importlib.resources.files("shardfast").joinpath("py.typed").is_file()


def state():
    return {"model": {"w": torch.arange(6.0)}, "extra": {"n": 1}}


@pytest.fixture
def saved(tmp_path):
    sf.save(tmp_path / "one", state())
    return tmp_path / "one"


def test_the_command_needs_no_framework_and_answers_programs(tmp_path, saved):
    """Even where importing one fails; exit codes are those of its help."""
    for name in ("torch", "numpy"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('no {name} here')")
    here = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    sf.save(tmp_path / "other", {"model": {"w": torch.arange(6.0) + 1}, "extra": {"n": 1}})
    inspected = json.loads(command("inspect", saved, "--json", **here).stdout)
    assert [leaf["leaf"] for leaf in inspected["leaves"]] == ["extra/n", "model/w"]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "model.safetensors").touch()
    codes = {
        ("ls", saved): 0,
        ("inspect", saved, "--values"): 0,
        ("verify", saved): 0,
        ("diff", saved, saved): 0,
        ("diff", saved, tmp_path / "other"): 1,
        ("export", saved, tmp_path / "out"): 0,
        ("export", saved, tmp_path / "full"): 5,
        ("export", saved, tmp_path / "out2", "--key", "nothing"): 3,
        ("verify", tmp_path / "nothing"): 3,
        ("verify",): 2,
    }
    done = {arguments: command(*arguments, **here) for arguments in codes}
    assert {arguments: one.returncode for arguments, one in done.items()} == codes, done
    (manifest,) = saved.glob("manifest-*")
    manifest.write_bytes(manifest.read_bytes()[:-1])
    broken = command("inspect", saved, **here)
    assert broken.returncode == 4
    assert "manifest-" in broken.stderr


def findings(*arguments, **environment):
    done = command("doctor", *arguments, "--json", **environment)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}


def test_doctor_tells_of_frameworks_whether_they_can_be_imported(tmp_path):
    code, found = findings(tmp_path)
    assert code == 0
    assert (found["torch"]["status"], found["torch"]["found"]) == ("ok", torch.__version__)
    assert (found["numpy"]["status"], found["numpy"]["found"]) == ("ok", np.__version__)
    (tmp_path / "torch.py").write_text("raise OSError('libtorch_cpu.so: cannot open shared object file')")
    (tmp_path / "numpy.py").write_text("__version__ = '1.26.4'")
    _, found = findings(tmp_path, PYTHONPATH=str(tmp_path), PYTHONDONTWRITEBYTECODE="1")
    assert (found["torch"]["status"], found["numpy"]["status"]) == ("limited", "limited")
    assert "libtorch_cpu.so" in found["torch"]["found"]
    assert "the oldest version that is tested is 2.4" in found["numpy"]["follows"]
    for version, status in {"2.7.0": "limited", "2.7.1": "ok", "2.15.0+cpu": "ok"}.items():
        (tmp_path / "torch.py").write_text(f"__version__ = {version!r}")
        # Written again within a second: byte code would be that of the text before.
        _, found = findings(tmp_path, PYTHONPATH=str(tmp_path), PYTHONDONTWRITEBYTECODE="1")
        assert found["torch"]["status"] == status, version
    assert list(tmp_path.glob(".*")) == []


def test_doctor_tells_what_the_environment_sets_and_what_is_wrong_with_it(tmp_path):
    for name in ("torch", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not imported: this test is about settings')")

    def told(**environment):
        return findings(tmp_path, PYTHONPATH=str(tmp_path), **environment)

    code, found = told(SHARDFAST_STAGING_BYTES="8MiB", MASTER_ADDR="127.0.0.1")
    assert (code, found["staging budget"]["status"]) == (0, "ok")
    assert found["staging budget"]["found"].startswith("8.0 MiB for each process")
    assert (found["address"]["found"], found["address"]["status"]) == ("127.0.0.1", "limited")
    nowhere = dict.fromkeys(
        ("SHARDFAST_TLS_CERT", "SHARDFAST_TLS_KEY", "SHARDFAST_TLS_CA"), str(tmp_path / "nowhere.pem")
    )
    wrong = {
        "SHARDFAST_STAGING_BYTES='lots'": {"SHARDFAST_STAGING_BYTES": "lots"},
        "SHARDFAST_FANOUT='1'": {"SHARDFAST_FANOUT": "1"},
        str(tmp_path / "nowhere.pem"): nowhere,
        "SHARDFAST_TLS_KEY and SHARDFAST_TLS_CA": {"SHARDFAST_TLS_CERT": "cert.pem"},
    }
    for expected, environment in wrong.items():
        code, found = told(**environment)
        assert (code, found["settings"]["status"], found["settings"]["found"]) == (1, "failed", expected)


CALLS = {
    "no place": (lambda url: sf.save(None, state()), r"url: expected a path or a URL, found a NoneType"),
    "an empty place": (lambda url: sf.save("", state()), r"expected a path or a URL"),
    "a file as a place": (lambda url: sf.save(url / "COMMIT", state()), r"COMMIT: expected a directory"),
    "no state": (lambda url: sf.save(url / "x", torch.nn.Linear(1, 1)), r"the state is a Linear: expected a dict"),
    "a key that is no name": (lambda url: sf.save(url / "x", {1: 2}), r"the state's key 1: expected a name"),
    "a key with a slash": (lambda url: sf.save(url / "x", {"a/b": 2}), r'key "a/b" holds'),
    "a key that hides": (lambda url: sf.save(url / "x", {".a": 2}), r"key \"\.a\" starts with '\.'"),
    "a key of our own": (lambda url: sf.save(url / "x", {"COMMIT": 2}), r'key "COMMIT" is the name of one of the'),
    "a negative step": (lambda url: sf.save(url / "x", state(), step=-1), r"step=-1: expected the number of"),
    "half a step": (lambda url: sf.save(url / "x", state(), step=0.5), r"step=0\.5: expected the number of"),
    "an endless step": (lambda url: sf.save(url / "x", state(), step=1 << 64), r"expected the number of training"),
    "a note that is no text": (lambda url: sf.save(url / "x", state(), user={"a": 1}), r"\{'a': 1\}: expected texts"),
    "a note with half a character": (lambda url: sf.save(url / "x", state(), user={"a": "\ud800"}), r"expected texts"),
    "a note of such a name": (lambda url: sf.save(url / "x", state(), user={"\ud800": "a"}), r"expected texts by name"),
    "half a character": (lambda url: sf.save("\ud800", state()), r"url: expected text that UTF-8 can encode"),
    "half a character of a run": (lambda url: sf.Checkpointer("\ud800"), r"url: expected text that UTF-8 can encode"),
    "half a character to map": (lambda url: sf.mapped("\ud800"), r"url: expected text that UTF-8 can encode"),
    "a rule and a number": (lambda url: sf.last(3) | 5, r"keep: .*last=3.* \| 5: expected two rules"),
    "notes without end": (lambda url: sf.save(url / "x", state(), user={"a": "x" * (2 << 20)}), r"at most 1048576 b"),
    "a time of the past": (lambda url: sf.save(url / "x", state(), timeout_s=-1), r"timeout_s=-1: expected"),
    "a choice unknown": (lambda url: sf.load(url, state(), per_rank="first"), r"per_rank='first': expected \"error\""),
    "names in a list": (lambda url: sf.load(url, state(), rename=["a"]), r"rename=\['a'\]: expected a dict"),
    "a name unknown": (
        lambda url: sf.load(url, state(), rename={"a/b": "c/d"}),
        r"rename: the checkpoint has no leaf a/b",
    ),
    "half a name": (
        lambda url: sf.load(url, state(), rename={"model/w": "w"}),
        r"expected a name of the form key/name",
    ),
    "two of one name": (lambda url: sf.load(url, state(), rename={"model/w": "extra/n"}), r"both become extra/n"),
    "a part of nothing": (lambda url: sf.load(url, state(), only="optimizer"), r"only: 'optimizer' selects nothing"),
    "an interval": (lambda url: sf.Checkpointer(url / "run", every=3), r"every=3: expected when to save"),
    "a number to keep": (lambda url: sf.Checkpointer(url / "run", keep=3), r"keep=3: expected what to keep"),
    "no run": (lambda url: sf.Checkpointer(3), r"url: expected a path or a URL, found a int"),
    "a step in words": (lambda url: sf.Checkpointer(url / "run").save("3", state()), r"step='3': expected the number"),
    "a checkpoint as a run": (lambda url: sf.Checkpointer(url).restore(state()), r"expected a run"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_is_told_what_was_expected(saved, name):
    call, message = CALLS[name]
    before = {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()}
    with pytest.raises(sf.Invalid, match=message):
        call(saved)
    assert {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()} == before
    sf.load(saved, state())


def test_stores_that_are_not_offered(saved):
    offered = "file://, memory://, az://, gs://, hdfs://, s3://, keeper://, viewfs://"
    for url in ("ftp://host/run", "nosuch://x"):
        with pytest.raises(sf.Unsupported, match=f"{offered}; found scheme"):
            sf.save(url, state())


def test_places_may_be_said_in_every_way(saved, monkeypatch):
    monkeypatch.chdir(saved.parent)
    for place in (saved, str(saved), f"file://{saved}", "one", Path("one"), f"{saved}/"):
        loaded = state()
        loaded["model"]["w"].zero_()
        sf.load(place, loaded)
        assert loaded["model"]["w"].tolist() == [0, 1, 2, 3, 4, 5]


def test_arrays_and_tensors_load_into_each_other(saved):
    loaded = {"model": {"w": np.zeros(6, dtype=np.float32)}, "extra": {"n": None}}
    sf.load(saved, loaded)
    assert loaded["model"]["w"].tolist() == [0, 1, 2, 3, 4, 5]


def test_a_closed_checkpointer_saves_no_more(tmp_path):
    ckpt = sf.Checkpointer(tmp_path, every=sf.steps(1))
    ckpt.step(1, state())
    ckpt.close()
    ckpt.close()
    for call in (lambda: ckpt.step(2, state()), lambda: ckpt.save(2, state())):
        with pytest.raises(sf.Invalid, match="step 2 cannot be saved: this checkpointer is closed"):
            call()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".jobs", ".telemetry", "step-00000001"]


def test_an_error_in_the_block_counts_for_more_than_one_of_its_last_save(tmp_path, caplog):
    def fails(ckpt):
        """Its second save fails: something has the name of its COMMIT."""
        ckpt.save(1, state())
        (tmp_path / ckpt.url / "step-00000002" / "COMMIT").mkdir(parents=True)
        ckpt.save(2, state())

    with pytest.raises(sf.Corrupt), sf.Checkpointer(tmp_path / "one") as ckpt:
        fails(ckpt)
    assert caplog.text == "", "it was raised"
    with (
        caplog.at_level(logging.ERROR, logger="shardfast"),
        pytest.raises(ZeroDivisionError),
        sf.Checkpointer(tmp_path / "other") as ckpt,
    ):
        fails(ckpt)
        raise ZeroDivisionError
    assert caplog.text.count("the last save failed") == 1
    assert len(caplog.records) == 1


def test_a_save_says_what_it_did(tmp_path):
    pending = sf.save_async(tmp_path / "one", state(), step=7, user={"note": "first"})
    pending.staged()
    pending.committed(30)
    assert pending.done()
    assert pending.url == str(tmp_path / "one")
    assert pending.report["files_written"] == 2
    assert pending.report["bytes_written"] == sum(p.stat().st_size for p in tmp_path.rglob("*.safetensors"))
    assert list(pending.report["phases_ms"]) != []
    shown = json.loads(command("inspect", pending.url, "--json").stdout)
    assert (shown["step"], shown["user"]) == (7, {"note": "first"})
