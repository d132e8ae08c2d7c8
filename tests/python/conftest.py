"""Ranks for tests: real processes that find each other as those of a job do."""

import os
import pickle
import select
import signal
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from older import TABLE
from rank_server import Rank, RankServer

# A pool of threads made here would be missing in the children that some tests fork.
torch.set_num_threads(1)

DEADLINE_S = 240.0  # what takes that long on a busy machine hangs
STACKS_S = 0.5  # to write where all threads stand
GRACE_S = 5.0  # for the ranks that wait for one that failed


class Process:
    """A process that calls a function, and what it sent."""

    def __init__(self, server: RankServer, function: Callable, args: tuple, rank: Rank | None = None) -> None:
        self.name = "the process" if rank is None else f"rank {rank.number}"
        self.received = bytearray()
        self.status: int | None = None
        self.server, self.function = server, function
        self.pid, self.pipe = server.start(function, args, rank)

    def outcome(self) -> tuple[bool, object]:
        """Whether it did what it should, and the result or the traceback."""
        if self.received:
            return pickle.loads(self.received)
        how = "" if self.status is None else f", status {os.waitstatus_to_exitcode(self.status)}"
        return False, f"{self.name} died without a word{how}"

    def end(self) -> None:
        """Kills it if it has not ended by itself; it then shows first where it stands."""
        if not self.received:
            os.kill(self.pid, signal.SIGUSR1)
            time.sleep(STACKS_S)
        self.status = self.server.end(self.function, self.pid)
        os.close(self.pipe)


def collect(processes: list[Process], deadline: float) -> None:
    """Receives until every process has ended or the deadline is over; a failure leaves the others little time."""
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


def outcomes(processes: list[Process], deadline_s: float) -> list[tuple[bool, object]]:
    """How each of these ended, in time or not."""
    try:
        collect(processes, time.monotonic() + deadline_s)
    finally:
        for process in processes:
            process.end()
    return [process.outcome() for process in processes]


@pytest.fixture(params=["with the table", "without the table"])
def table(request, monkeypatch):
    """Runs a test twice: where tensors lie is asked by way of DLPack's exchange table, and as in a torch without it."""
    if request.param == "without the table":
        monkeypatch.delattr(torch.Tensor, TABLE, raising=False)
    elif not hasattr(torch.Tensor, TABLE):
        pytest.skip(f"torch {torch.__version__} has no exchange table of DLPack")
    return request.param


@pytest.fixture(scope="session")
def rank_server() -> Iterator[RankServer]:
    server = RankServer()
    yield server
    server.close()


@pytest.fixture
def alone(rank_server) -> Callable:
    """``alone(function, *args)`` is what the function returns in a process of its own, in which nothing ran before.

    An error there fails the test; so does a process that is not done in time.
    """

    def call(function: Callable, *args: object) -> object:
        ((is_done, result),) = outcomes([Process(rank_server, function, args)], DEADLINE_S)
        assert is_done, result
        return result

    return call


@pytest.fixture
def ranks(rank_server, tmp_path):
    """``ranks(n)(function, *args)`` calls ``function(rank, world, *args)`` in ``n`` processes, gloo initialised.

    The results by rank. The first failing rank's traceback fails the test; so does a rank that is not done in time.
    The function stands in a module, and what a test has changed in this process is not changed there, but for the
    environment's variables and the directory.
    """
    calls = 0

    def of(world: int, deadline_s: float = DEADLINE_S) -> Callable:
        def call(function: Callable, *args: object, is_again: bool = False) -> list:
            nonlocal calls
            calls += 1
            meet = f"file://{tmp_path}/rendezvous-{calls}"
            processes: list[Process] = []
            try:
                for number in range(world):
                    processes.append(Process(rank_server, function, args, Rank(number, world, meet, DEADLINE_S)))
            except BaseException:
                for process in processes:
                    process.end()
                raise
            ended = outcomes(processes, deadline_s)
            failures = [f"rank {rank}:\n{text}" for rank, (done, text) in enumerate(ended) if not done]
            if any("NoStart" in str(text) for text in failures) and not is_again:
                return call(function, *args, is_again=True)  # such a start alone is tried once more
            told = [text for text in failures if "died without a word" not in text]
            assert not failures, "\n".join([*told, *(text for text in failures if text not in told)][:1])
            return [result for _, result in ended]

        return call

    return of
