"""Megatron's training loop with `--save s3://…`, at a real server."""

import os

import pytest
import shardfast as sf

pytest.importorskip(
    "megatron.training",
    reason="megatron.training cannot be imported: megatron-core has it from 0.17 on, before 0.19 with more packages",
)

import loops
from servers import running


@pytest.fixture(scope="module")
def service():
    with running(os.environ.get("SHARDFAST_TEST_S3", "versitygw")) as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server


def newest(training):
    """Iteration 2 is saved; then a third one begins and does not commit; a resume takes iteration 2."""
    args = training.args
    for iteration in (1, 2):
        training.step(iteration)
        training.save(iteration)
    weights = training.weights()
    training.step(3)
    args.load = args.save
    assert training.load() == (2, 2000)
    assert loops.same(training.weights(), weights)
    args.ckpt_step = 1
    assert training.load() == (1, 1000)
    args.ckpt_step = None
    return training.error_of(training.save, 2)


@pytest.mark.campaign
def test_an_object_store(ranks, service):
    place = service.s3("run")
    arguments = ["--save", place, "--save-interval", "2"]
    for conflict in ranks(2)(loops.call, newest, arguments):
        assert "Conflict" in conflict and "iter_0000002" in conflict
    # The tracker is a run of one small checkpoint.
    tracker = service.s3("run/latest_checkpointed_iteration")
    named = {"newest": {"name": None}}
    assert sf.Checkpointer(tracker).restore(named) == 2
    assert named == {"newest": {"name": "2"}}
    asynchronous = ["--async-save", "--use-persistent-ckpt-worker", "--load", place, *arguments]
    resumed = ranks(2)(loops.train, asynchronous)
    assert [len(losses) for losses, _ in resumed] == [4, 4]
    assert sf.Checkpointer(tracker).restore(named) == 6
    assert named == {"newest": {"name": "6"}}
