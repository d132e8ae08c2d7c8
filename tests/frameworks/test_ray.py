"""Ray Train and Ray Tune: Ray names the checkpoints that Shardfast saved, and copies, loses and breaks none of them.

A real Ray of this machine, which all tests of this file share.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray
import ray.train
import ray.tune
import ray_jobs
import shardfast as sf
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.tune.schedulers import PopulationBasedTraining
from servers import running
from shardfast.integrations import ray_places as places
from shardfast.integrations.ray import url_of

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SHARDFAST = Path(sys.executable).parent / "shardfast"
BEST = CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="score", checkpoint_score_order="max")
SMALL_BYTES = 100_000
"""Ray's own records of a run of these tests; a checkpoint is larger."""

ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
    "OMP_NUM_THREADS": "1",
    # Ray hears of a report, and of a death, when it asks: every 2 s unless told.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",
    # What costs starts of processes, and no test needs.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_ENABLE_STATE_ACTOR_RECONCILIATION": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray runs workers with niceness 15 unless told, and other tests of this machine would go first.
    "RAY_worker_niceness": "0",
}


@pytest.fixture(scope="module")
def cluster():
    """Ray on this machine; at the end none of its processes is left."""
    # Short: sockets lie below it, and their paths have a limit.
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setenv("HOME", folder)  # Ray writes a secret there
        patch.delenv("RAY_ADDRESS", raising=False)
        others = psutil.Process().children(recursive=True)  # of tests before these
        found = ray.init(
            num_cpus=4, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False,
            logging_level="warning", _temp_dir=folder,
        )  # fmt: skip
        ours = set(psutil.Process().children(recursive=True)).difference(others)
        assert len(ours) >= 2, "the store of objects and the scheduler, at least"
        try:
            yield found.address_info["address"]
            ours.update(set(psutil.Process().children(recursive=True)).difference(others))
        finally:
            ray.shutdown()
        _, alive = psutil.wait_procs(ours, timeout=20)
        assert alive == []


def notes(folder):
    """What workers told, in order."""
    return [json.loads(line) for line in (folder / "notes").read_text().splitlines()]


def fitted(
    folder,
    function=ray_jobs.train_sharded,
    *,
    kind=TorchTrainer,
    workers=2,
    keep=BEST,
    storage=None,
    failures=2,
    environment=None,
    **config,
):
    """What Ray says of a training of 12 steps."""
    return kind(
        function,
        train_loop_config={"folder": str(folder), "steps": 12, **config},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            name="one",
            storage_path=str(storage or folder / "ray"),
            failure_config=FailureConfig(max_failures=failures),
            checkpoint_config=keep,
            worker_runtime_env={"env_vars": environment} if environment else None,
        ),
    ).fit()


def listed(run):
    """The steps of a run by what the command says of them."""
    done = subprocess.run([SHARDFAST, "ls", "--json", run], check=True, capture_output=True, text=True)
    found = {}
    for line in json.loads(done.stdout)["checkpoints"]:
        found.setdefault("pinned" if line.get("pinned") is not None else line["status"], []).append(line["step"])
    return found


def copied_bytes(storage):
    """Bytes below Ray's storage that are in no run of Shardfast's."""
    files = [path for path in storage.rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files if not any(part.startswith("shardfast") for part in path.parts))


def expect_sound(place):
    subprocess.run([SHARDFAST, "verify", place], check=True, capture_output=True)


@pytest.fixture(scope="module")
def uninterrupted(cluster, tmp_path_factory):
    """The losses of a training that nothing stops."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    fitted(folder)
    return next(line["losses"] for line in notes(folder) if "losses" in line)


def expect_consistent(folder, result, losses):
    """Ray's and Shardfast's records agree after a training of 12 steps, whatever happened in it."""
    run = folder / "ray" / "one" / "shardfast"
    ended = next(line for line in notes(folder) if "losses" in line)
    assert ended["losses"] == losses
    assert url_of(result.checkpoint) == f"{run}/step-00000012"
    assert ray_jobs.inodes(result.checkpoint.path) == ended["inodes"], "the files that the training has saved"
    named = {url_of(result.checkpoint), *(url_of(one) for one, _ in result.best_checkpoints)}
    assert {f"{run}/step-{step:08d}" for step in listed(run)["pinned"]} == named
    for one in named:
        expect_sound(one)
    best = {metrics["step"] for _, metrics in result.best_checkpoints}
    started = {line["start"] for line in notes(folder) if "start" in line}
    # A death between a commit and its pin loses the report, and the training goes on from that step.
    assert len(best) == 2 and {6, 8} - best <= started, (best, started)
    for one, metrics in result.best_checkpoints:
        assert places.step_of(one.path) == metrics["step"], "its own metrics"
    assert copied_bytes(folder / "ray") < SMALL_BYTES
    assert sf.Checkpointer(run, keep=sf.last(1)).restore({"extra": {"losses": None}}, only="extra", strict=False) == 12


@pytest.mark.smoke
def test_ray_names_what_was_saved_and_a_killed_worker_costs_the_steps_since_the_newest_save(cluster, tmp_path):
    result = fitted(tmp_path, kill=[10, 1, 1.0], waits=True)
    begun = [line for line in notes(tmp_path) if "start" in line]
    assert [(line["start"], line["world"]) for line in begun] == [(0, 2), (0, 2), (10, 2), (10, 2)]
    assert begun[2]["named"] == str(tmp_path / "ray/one/shardfast/step-00000010")
    losses = next(line["losses"] for line in notes(tmp_path) if "losses" in line)
    assert len(losses) == 12
    expect_consistent(tmp_path, result, losses)
    assert listed(tmp_path / "ray/one/shardfast") == {"pinned": [6, 8, 12]}, "Ray has deleted the others, whole"


@pytest.mark.parametrize("moment", range(10))
def test_a_worker_is_killed_at_any_moment(cluster, tmp_path, uninterrupted, moment):
    """Steps last 50 ms, and a save follows every second one; the death comes within those."""
    result = fitted(tmp_path, kill=[1 + moment, moment % 2, moment * 0.017], pause=0.05)
    assert [line["start"] for line in notes(tmp_path) if "start" in line][-1] in range(0, 13, 2)
    expect_consistent(tmp_path, result, uninterrupted)


def test_workers_without_a_process_group_save_as_ranks_of_one_job(cluster, tmp_path):
    keep = CheckpointConfig(num_to_keep=1)
    result = fitted(tmp_path, ray_jobs.train_arrays, kind=DataParallelTrainer, keep=keep, steps=3)
    said = sorted(notes(tmp_path), key=lambda line: line["rank"])
    assert [(line["rank"], line["start"], line["world"]) for line in said] == [(0, 0, 2), (1, 0, 2)]
    assert [line["named"] for line in said] == [[[2], [3]]] * 2, "named once it is pinned; the call has returned before"
    run = said[0]["url"]
    assert url_of(result.checkpoint) == f"{run}/step-00000003"
    state = {"model": {"w": np.zeros(8)}, "extra": {"rank": None}}
    sf.load(url_of(result.checkpoint), state, per_rank="rank0")
    assert state["model"]["w"].tolist() == [3.0] * 8
    assert listed(run) == {"pinned": [3]}

    # Ray's own directory as the run's is refused at the start, by all.
    with pytest.raises(ray.train.WorkerGroupError):
        fitted(
            tmp_path, ray_jobs.train_arrays, kind=DataParallelTrainer, keep=keep, failures=0, steps=4,
            url=str(tmp_path / "ray/one"),
        )  # fmt: skip
    errors = {line["rank"]: line["error"] for line in notes(tmp_path) if "error" in line}
    assert sorted(errors) == [0, 1]
    assert set(errors.values()) == {
        f"Invalid: restore: expected a run below {tmp_path}/ray/one, Ray's directory, found {tmp_path}/ray/one, in "
        "which Ray keeps its own files: pass shardfast.integrations.ray.run_url() to Checkpointer, or give RunConfig "
        "another storage_path"
    }


def test_a_run_in_an_object_store(cluster, tmp_path, monkeypatch):
    """Ray has the server and credentials from its own URL; Shardfast takes the server from there, no credentials."""
    with running("versitygw") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        scheme, _, host = server.endpoint.partition("://")
        storage = f"s3://{server.key}:{server.secret}@{server.bucket}/ray?scheme={scheme}&endpoint_override={host}"
        storage += "&region=us-east-1"
        result = fitted(tmp_path, storage=storage, environment=server.environment, kill=[10, 1, 1.0], waits=True)
        begun = [line for line in notes(tmp_path) if "start" in line]
        assert [line["start"] for line in begun] == [0, 0, 10, 10]
        url = url_of(result.checkpoint)
        assert (
            url == f"s3://{server.bucket}/ray/one/shardfast/step-00000012?region=us-east-1&endpoint={server.endpoint}"
        )
        for one, metrics in result.best_checkpoints:
            expect_sound(url_of(one))
            assert places.step_of(one.path) == metrics["step"]
        state = {"extra": {"losses": None}}
        sf.load(url, state, only="extra", strict=False)
        assert state["extra"]["losses"] == next(line["losses"] for line in notes(tmp_path) if "losses" in line)
        assert listed(url.replace("/step-00000012", "")) == {"pinned": [6, 8, 12]}


@pytest.mark.smoke
def test_a_trial_that_exploits_another_goes_on_from_its_checkpoint(cluster, tmp_path):
    """Two trials, of which the slower one takes over the faster one's state."""
    results = ray.tune.Tuner(
        ray_jobs.trial,
        param_space={
            "folder": str(tmp_path), "steps": 6, "rate": ray.tune.grid_search([0.1, 1.0]),
        },
        tune_config=ray.tune.TuneConfig(
            metric="value", mode="max",
            scheduler=PopulationBasedTraining(
                time_attr="step", perturbation_interval=2, quantile_fraction=0.5, synch=True,
                hyperparam_mutations={"rate": [0.1, 1.0]}, resample_probability=0.0, log_config=False,
            ),
        ),
        run_config=ray.tune.RunConfig(
            name="population", storage_path=str(tmp_path / "ray"), verbose=0,
            checkpoint_config=ray.tune.CheckpointConfig(num_to_keep=3),
        ),
    ).fit()  # fmt: skip
    assert not results.errors
    begun = notes(tmp_path)
    first = {Path(line["url"]).parent: line for line in begun if line["start"] == 0}
    assert len(first) == 2
    exploited = [line for line in begun if line["named"] and Path(line["named"]).parent != Path(line["url"])]
    assert exploited, "no trial has exploited another"
    for line in exploited:
        step, other = places.step_of(line["named"]), first[Path(line["named"]).parents[1]]
        assert (line["start"], other["rate"]) == (step, 1.0), "the slower one takes over the faster one's state"
        assert line["value"] == step, "the faster one's value at this step"
        assert re.fullmatch(r"shardfast-\d+", Path(line["url"]).name), "its earlier steps stay where they are"
    for result in results:
        state = {"model": {"value": np.zeros(1)}}
        sf.load(url_of(result.checkpoint), state, only="model", strict=False)
        assert state["model"]["value"][0] == pytest.approx(result.metrics["value"])
        assert places.step_of(result.checkpoint.path) == result.metrics["step"] == 6
        for one, _ in result.best_checkpoints:
            expect_sound(url_of(one))
    assert not list((tmp_path / "ray").rglob("checkpoint_0*")), "a directory of Ray's with a copy"


def test_the_example_goes_on_where_it_stopped_on_another_number_of_workers(cluster, tmp_path):
    storage, found = tmp_path / "ray", []
    for arguments in (["--steps", "10"], ["--steps", "20", "--workers", "1"]):
        done = subprocess.run(
            [sys.executable, str(ROOT / "examples" / "ray_train.py"), str(storage), *arguments],
            env={**os.environ, "RAY_ADDRESS": cluster},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(re.search(r"^best: step (\d+), loss (\S+), (\S+)$", done.stdout, re.MULTILINE))
        assert found[-1], done.stdout
        expect_sound(found[-1][3])
    assert int(found[0][1]) <= 10 < int(found[1][1]), "the loss falls"
    (records,) = {path.parent for path in storage.rglob("*-load-00000010.safetensors")}
    assert records.name == ".telemetry", "the second call has loaded step 10"
