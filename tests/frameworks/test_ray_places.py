"""Where Ray's checkpoints lie: URLs of its storage, the run's place in it, pins of jobs that died. No Ray starts."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import shardfast as sf
from pyarrow.fs import FileSystem, FSSpecHandler, LocalFileSystem, PyFileSystem, SubTreeFileSystem
from shardfast.integrations import ray_places as places

LOCAL = LocalFileSystem()
pytestmark = pytest.mark.smoke
SHARDFAST = Path(sys.executable).parent / "shardfast"


@pytest.mark.parametrize(
    ("storage", "url"),
    [
        ("/ckpt/what?%", "/ckpt/what?%"),
        ("file:///ckpt/ray", "/ckpt/ray"),
        ("s3://bucket/a/b?region=eu-central-1", "s3://bucket/a/b?region=eu-central-1"),
        (
            "s3://bucket/a/b?endpoint_override=localhost:9000&scheme=http&region=us-east-1",
            "s3://bucket/a/b?region=us-east-1&endpoint=http://localhost:9000",
        ),
        (
            "s3://bucket/a/b?endpoint_override=https%3A//minio.example&region=us-east-1",
            "s3://bucket/a/b?region=us-east-1&endpoint=https://minio.example",
        ),
        ("s3://key:secret@bucket/a/b?region=us-east-1", "s3://bucket/a/b?region=us-east-1"),
        ("s3://bucket/a%3Fb?region=us-east-1", "s3://bucket/a%3Fb?region=us-east-1"),
        ("gs://bucket/a", "gs://bucket/a"),
    ],
)
def test_a_place_of_rays_storage_is_a_url_of_ours(storage, url):
    filesystem, path = (LOCAL, storage) if storage.startswith("/") else FileSystem.from_uri(storage)
    assert places.url_of(filesystem, path) == url


def test_another_file_system_is_refused_by_name():
    with pytest.raises(sf.Unsupported, match=r"as RunConfig.storage_path, found the file system 'subtree'"):
        places.url_of(SubTreeFileSystem("/ckpt", LOCAL), "ray")
    fsspec = pytest.importorskip("fsspec")
    other = PyFileSystem(FSSpecHandler(fsspec.filesystem("memory")))
    with pytest.raises(sf.Unsupported, match="found the file system 'py::fsspec"):
        places.url_of(other, "/ray")


def test_a_run_is_below_rays_directory(tmp_path):
    ray = f"{tmp_path}/ray/one"
    (tmp_path / "ray/one/run").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "ray")
    for url in (f"{ray}/run", f"file://{ray}/run", f"{tmp_path}/link/one/run", f"{ray}/../one/run/"):
        assert places.run_of("report", url, LOCAL, ray) == f"{ray}/run"
    # Ray compares the beginnings of paths as texts.
    assert places.run_of("report", f"{ray}/run", LOCAL, f"{tmp_path}/link/one") == f"{tmp_path}/link/one/run"
    for url in (ray, f"{tmp_path}/ray", f"{tmp_path}/link/one"):
        with pytest.raises(sf.Invalid, match=rf"^restore: .* found {re.escape(url)}, in which Ray keeps its own files"):
            places.run_of("restore", url, LOCAL, ray)
    for url in (f"{tmp_path}/elsewhere", f"{ray}-two", "memory://run", "s3://bucket/run"):
        with pytest.raises(sf.Invalid, match=rf"below {re.escape(ray)}, Ray's directory, found {re.escape(url)}: pass"):
            places.run_of("report", url, LOCAL, ray)


def test_a_run_in_an_object_store_is_below_rays_directory_whatever_the_options():
    filesystem, path = FileSystem.from_uri("s3://bucket/ray/one?region=us-east-1")
    assert places.run_of("report", "s3://bucket/ray/one/run?endpoint=http://x", filesystem, path) == f"{path}/run"
    with pytest.raises(sf.Invalid, match="in which Ray keeps its own files"):
        places.run_of("report", "s3://bucket/ray/one", filesystem, path)
    with pytest.raises(sf.Invalid, match="pass"):
        places.run_of("report", "s3://other/ray/one/run", filesystem, path)


def test_a_fresh_place_is_the_first_at_which_nothing_is(tmp_path):
    path = f"{tmp_path}/shardfast"
    assert places.fresh(LOCAL, path) == path
    for expected in (f"{path}-2", f"{path}-3"):
        (tmp_path / places.fresh(LOCAL, path)).mkdir()
        assert places.fresh(LOCAL, path) == expected


def test_the_steps_of_paths():
    assert places.step_of(places.path_of_step("bucket/run", 12)) == 12
    assert places.step_of(places.path_of_step("/run", 1234567890)) == 1234567890
    for path in ("/run", "/run/checkpoint_000001", "/run/step-12/model"):
        with pytest.raises(sf.Invalid, match="expected a checkpoint of a run"):
            places.step_of(path)


def pinned_steps(run):
    return sorted(int(path.parent.name.removeprefix("step-")) for path in run.glob("step-*/.pinned"))


def test_what_was_pinned_and_not_named_is_found_and_no_other(tmp_path):
    """Steps 3 and 6 are to be reported again; 4 was never committed, 5 has metrics that are no data."""
    run = tmp_path / "run"
    assert places.lost(LOCAL, str(run), -1) == [], "nothing is there yet"
    metrics = {2: {"loss": 2.0}, 3: {"loss": np.float32(0.5)}, 5: {"model": object()}, 6: {"loss": float("inf")}}
    with sf.Checkpointer(run) as ckpt:
        for step in range(1, 8):
            ckpt.save(step, {"extra": {"step": step}})
            if step in metrics:
                ckpt.when_durable(lambda url, of=metrics[step]: places.pin(LOCAL, url, of))
    (run / "step-00000004" / "COMMIT").unlink()
    places.pin(LOCAL, str(run / "step-00000004"), {"loss": 1.0})
    (run / "step-00000007" / ".pinned").write_text("the one in the paper")
    assert pinned_steps(run) == [2, 3, 4, 5, 6, 7]
    found = places.lost(LOCAL, str(run), 2)
    assert found == [(f"{run}/step-{step:08d}", {"loss": loss}) for step, loss in ((3, 0.5), (6, float("inf")))]
    assert pinned_steps(run) == [2, 3, 6, 7]
    places.unpin(LOCAL, found[0][0])
    assert pinned_steps(run) == [2, 6, 7]


def test_a_pin_whose_metrics_do_not_fit_has_none(tmp_path):
    with sf.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"extra": {"step": 1}})
    places.pin(LOCAL, f"{tmp_path}/step-00000001", {"text": "x" * 4096})
    listed = subprocess.run([SHARDFAST, "ls", tmp_path], check=True, capture_output=True, text=True).stdout
    assert "pinned: Ray names this checkpoint" in listed
    assert places.lost(LOCAL, str(tmp_path), 0) == []
    assert pinned_steps(tmp_path) == []


def test_a_pin_holds_against_a_rule_that_keeps_less(tmp_path):
    with sf.Checkpointer(tmp_path, keep=sf.last(1)) as ckpt:
        for step in range(1, 6):
            ckpt.save(step, {"extra": {"step": step}})
            if step == 2:
                ckpt.when_durable(lambda url: places.pin(LOCAL, url, {"loss": 1.0}))
    assert sorted(path.parent.name for path in tmp_path.glob("step-*/COMMIT")) == ["step-00000002", "step-00000005"]
