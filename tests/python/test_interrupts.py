"""Ctrl-C ends a call that waits, be it for other ranks or for storage."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import shardfast as sf
import torch
import torch.distributed as dist

PROMPT_S = 10
TIMEOUT_S = 300


@contextlib.contextmanager
def interrupted(after_s=1.0):
    """Ctrl-C comes after that time, and the block ends with it soon."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    press = threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT))
    press.start()
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
        assert time.monotonic() - began < after_s + PROMPT_S
    finally:
        press.cancel()
        signal.signal(signal.SIGINT, handler)


def loads(state, run):
    sf.load(f"{run}/step-00000001", state, timeout_s=TIMEOUT_S)


def restores(state, run):
    with sf.Checkpointer(run, timeout_s=TIMEOUT_S) as ckpt:
        ckpt.restore(state)


def saves(state, run):
    sf.save(f"{run}/step-00000002", state, timeout_s=TIMEOUT_S)


def waits_alone(rank, world, run, call, alone):
    state = {"model": {"w": torch.arange(1000.0)}}
    sf.save(f"{run}/step-00000001", state, step=1)
    if rank == alone:
        with interrupted():
            call(state, run)
    dist.barrier()
    late = None
    if rank != alone:
        began = time.monotonic()
        try:
            call(state, run)
        except sf.Error as error:
            late = str(error)
        assert time.monotonic() - began < PROMPT_S
    dist.barrier()
    loaded = {"model": {"w": torch.zeros(1000)}}
    loads(loaded, run)
    assert torch.equal(loaded["model"]["w"], state["model"]["w"])
    return late


@pytest.mark.parametrize("alone", [0, 2])
@pytest.mark.parametrize("call", [loads, restores, saves])
def test_a_rank_that_waits_for_others_can_be_interrupted(ranks, tmp_path, call, alone):
    late = ranks(3)(waits_alone, str(tmp_path / "run"), call, alone)
    # A save goes on without its caller.
    assert [message is not None for message in late] == [call is not saves and rank != alone for rank in range(3)], late
    assert all("until one of them was interrupted" in message for message in late if message), late


def closes_alone(rank, world, run, is_block):
    state = {"model": {"w": torch.arange(1000.0)}}
    ckpt = sf.Checkpointer(run, timeout_s=TIMEOUT_S)
    ckpt.save(1, state)
    dist.barrier()
    if rank == 0:
        with interrupted():
            if is_block:
                with ckpt:
                    ckpt.save(2, state)
                    ckpt.wait()
            else:
                ckpt.save(2, state)
                ckpt.close()
    dist.barrier()
    if rank != 0:
        ckpt.save(2, state)
        ckpt.close()
    loaded = {"model": {"w": torch.zeros(1000)}}
    sf.load(f"{run}/step-00000002", loaded)
    assert torch.equal(loaded["model"]["w"], state["model"]["w"])


@pytest.mark.parametrize("is_block", [False, True])
def test_a_run_that_waits_for_others_at_its_end_can_be_interrupted(ranks, tmp_path, is_block):
    ranks(2)(closes_alone, str(tmp_path / "run"), is_block)


def waits_for_a_stopped_rank(rank, world, run, pids):
    state = {"model": {"w": torch.arange(1000.0)}}
    sf.save(f"{run}/step-00000001", state, step=1)
    found = [None] * world
    dist.all_gather_object(found, os.getpid())
    if rank == 1:
        os.kill(found[0], signal.SIGSTOP)
        try:
            with interrupted():
                loads(state, run)
        finally:
            os.kill(found[0], signal.SIGCONT)


def test_a_rank_that_waits_for_a_stopped_one_can_be_interrupted(ranks, tmp_path):
    ranks(2)(waits_for_a_stopped_rank, str(tmp_path / "run"), None)


AWAY = """
import os, signal, sys, threading, time
import shardfast as sf
signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT)).start()
began = time.monotonic()
try:
    sf.load("s3://bucket/run/step-00000001", {"w": None}, timeout_s=300)
except KeyboardInterrupt:
    print("interrupted", time.monotonic() - began < 11.5)
"""


def test_a_load_that_tries_storage_again_can_be_interrupted():
    away = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    environment = {**os.environ, **away, "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true"}
    done = subprocess.run([sys.executable, "-c", AWAY], env=environment, capture_output=True, text=True, timeout=100)
    assert done.stdout.split() == ["interrupted", "True"], (done.stdout, done.stderr)
