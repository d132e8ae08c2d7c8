"""Ray's elastic groups of workers: a machine is lost, one joins, and the training goes on in parts of other sizes."""

import json
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray
import ray_jobs
from ray.cluster_utils import Cluster
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from shardfast.integrations.ray import url_of
from test_ray import ENVIRONMENT, expect_sound, listed

STEPS = 120


@pytest.fixture
def machines(monkeypatch):
    """Two of Ray's nodes of two processors each."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    small = {"num_cpus": 2, "object_store_memory": 100 << 20}
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        monkeypatch.setenv("HOME", folder)
        # Where Ray notes which cluster is this machine's: in a directory that it does not make.
        monkeypatch.setenv("RAY_TMPDIR", folder)
        (Path(folder) / "ray").mkdir()
        cluster = Cluster(
            initialize_head=True, head_node_args={**small, "include_dashboard": False, "temp_dir": folder}
        )
        second = cluster.add_node(**small)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="warning")
        try:
            yield cluster, second, small
        finally:
            ray.shutdown()
            cluster.shutdown()


def wait_for(folder, count):
    """Waits until so many workers have begun, and for some steps more."""
    until = time.monotonic() + 180
    while sum("start" in line for line in lines(folder)) < count:
        assert time.monotonic() < until, lines(folder)
        time.sleep(0.1)
    time.sleep(4)


def lines(folder):
    notes = folder / "notes"
    return [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []


def test_a_machine_is_lost_and_another_joins(machines, tmp_path):
    """Steps last a second until the group has its first size again."""
    cluster, second, small = machines
    trainer = TorchTrainer(
        ray_jobs.train_sharded,
        train_loop_config={"folder": str(tmp_path), "steps": STEPS, "pause": 1.0},
        scaling_config=ScalingConfig(num_workers=(1, 4), elastic_resize_monitor_interval_s=1.0),
        run_config=RunConfig(
            name="one",
            storage_path=str(tmp_path / "ray"),
            failure_config=FailureConfig(max_failures=10),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    with ThreadPoolExecutor(1) as beside:  # Ray makes nodes on the main thread
        fitting = beside.submit(trainer.fit)
        try:
            wait_for(tmp_path, 4)
            cluster.remove_node(second, allow_graceful=False)
            wait_for(tmp_path, 6)
            cluster.add_node(**small)
            wait_for(tmp_path, 10)
        finally:
            (tmp_path / "hurry").touch()
        result = fitting.result()
    begun = [(line["world"], line["start"]) for line in lines(tmp_path) if "start" in line]
    worlds = [world for world, _ in dict.fromkeys(begun)]
    assert worlds[0] == 4
    assert min(worlds) < 4
    assert worlds[-1] == 4, "it grew again"
    starts = [start for _, start in dict.fromkeys(begun)]
    assert starts == sorted(starts)
    assert starts[-1] > starts[0] == 0
    losses = next(line["losses"] for line in lines(tmp_path) if "losses" in line)
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] / 3, "no restart began anew"
    assert url_of(result.checkpoint) == f"{tmp_path}/ray/one/shardfast/step-{STEPS:08d}"
    assert listed(tmp_path / "ray/one/shardfast") == {"pinned": [STEPS - 2, STEPS]}
    expect_sound(url_of(result.checkpoint))
