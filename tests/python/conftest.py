"""Ranks for tests: real processes, forked from this one, that find each other as those of a job do."""

import faulthandler
import importlib
import os
import pickle
import select
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from older import IS_OLDER, TABLE

# Children are forked from this process: a pool of threads made here would be missing there.
torch.set_num_threads(1)

# What torch imports when first used, and slowly: once here instead of in every rank.
IMPORTED_FOR_RANKS = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel")

DEADLINE_S = 60.0
STACKS_S = 0.5  # to write where all threads stand
GRACE_S = 5.0  # for the ranks that wait for one that failed


class Rank:
    """A forked process and what it sent."""

    def __init__(self, number: int, world: int, rendezvous: str, function: Callable, args: tuple) -> None:
        self.number = number
        self.received = bytearray()
        self.status: int | None = None
        self.pipe, sending = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.pipe)
            run(number, world, rendezvous, function, args, sending)
        os.close(sending)

    def outcome(self) -> tuple[bool, object]:
        """Whether it did what it should, and the result or the traceback."""
        if self.received:
            return pickle.loads(self.received)
        how = "" if self.status is None else f", status {os.waitstatus_to_exitcode(self.status)}"
        return False, f"rank {self.number} died without a word{how}"

    def end(self) -> None:
        """Kills it if it has not ended by itself; it then shows first where it stands."""
        if not self.received:
            os.kill(self.pid, signal.SIGUSR1)
            time.sleep(STACKS_S)
        os.kill(self.pid, signal.SIGKILL)
        self.status = os.waitpid(self.pid, 0)[1]
        os.close(self.pipe)


def run(number: int, world: int, rendezvous: str, function: Callable, args: tuple, sending: int) -> None:
    """What a child does; never returns."""
    faulthandler.register(signal.SIGUSR1, file=2)
    try:
        torch.set_num_threads(1)  # also renews torch's pool after the fork, before autograd's threads race to do so
        os.environ.update(RANK=str(number), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), LOCAL_RANK=str(number))
        timeout = timedelta(seconds=DEADLINE_S)
        dist.init_process_group("gloo", init_method=rendezvous, rank=number, world_size=world, timeout=timeout)
        result = function(number, world, *args)
        if dist.is_initialized():
            dist.barrier()
            if not IS_OLDER:  # PyTorch 2.7 holds the interpreter's lock while it waits for a thread that needs it
                dist.destroy_process_group()
        message = pickle.dumps((True, result))
    except BaseException:
        message = pickle.dumps((False, traceback.format_exc()))
    try:
        with os.fdopen(sending, "wb") as pipe:
            pipe.write(message)
    finally:
        os._exit(0)


def collect(processes: list[Rank], deadline: float) -> None:
    """Receives until every rank has ended or the deadline is over; a failure leaves the others little time."""
    waiting = {process.pipe: process for process in processes}
    while waiting and time.monotonic() < deadline:
        ready, _, _ = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))
        for pipe in ready:
            piece = os.read(pipe, 1 << 20)
            waiting[pipe].received += piece
            if not piece:
                process = waiting.pop(pipe)
                if not process.outcome()[0]:
                    deadline = min(deadline, time.monotonic() + GRACE_S)


@pytest.fixture(params=["with the table", "without the table"])
def table(request, monkeypatch):
    """Runs a test twice: where tensors lie is asked by way of DLPack's exchange table, and as in a torch without it."""
    if request.param == "without the table":
        monkeypatch.delattr(torch.Tensor, TABLE, raising=False)
    elif not hasattr(torch.Tensor, TABLE):
        pytest.skip(f"torch {torch.__version__} has no exchange table of DLPack")
    return request.param


@pytest.fixture
def ranks(tmp_path):
    """``ranks(n)(function, *args)`` calls ``function(rank, world, *args)`` in ``n`` processes, gloo initialised.

    The results by rank. The first failing rank's traceback fails the test; so does a rank that is not done in time.
    """
    for module in IMPORTED_FOR_RANKS:
        importlib.import_module(module)
    calls = 0

    def of(world: int, deadline_s: float = DEADLINE_S) -> Callable:
        def call(function: Callable, *args: object) -> list:
            nonlocal calls
            calls += 1
            rendezvous = f"file://{tmp_path}/rendezvous-{calls}"
            processes = [Rank(number, world, rendezvous, function, args) for number in range(world)]
            try:
                collect(processes, time.monotonic() + deadline_s)
            finally:
                for process in processes:
                    process.end()
            outcomes = [process.outcome() for process in processes]
            failures = [f"rank {rank}:\n{text}" for rank, (done, text) in enumerate(outcomes) if not done]
            told = [text for text in failures if "died without a word" not in text]
            assert not failures, "\n".join([*told, *(text for text in failures if text not in told)][:1])
            return [result for _, result in outcomes]

        return call

    return of
