"""A rank on a machine of its own, which does what the lines of its standard input say, and its other end."""

import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import shardfast as sf

ANSWER_S = 240.0

JOBS = iter(range(20_000, 30_000))
"""A port for each job: each has its own, so that none meets ranks of the one before."""


def state_of(rank: int, number: int, elements: int) -> dict:
    """Arrays of a rank's own, one that all ranks hold, and a value; their bits follow from the number."""
    own = np.random.default_rng([number, rank]).integers(0, 256, elements, dtype=np.uint8)
    shared = np.random.default_rng(number).integers(0, 256, elements // 2, dtype=np.uint8)
    return {"model": {f"of-{rank}": own, "shared": shared}, "extra": {"number": number}}


def emptied(rank: int, elements: int) -> dict:
    state = state_of(rank, 0, elements)
    for array in state["model"].values():
        array.fill(0)
    return state


def same(one: dict, other: dict) -> bool:
    arrays = all(np.array_equal(array, other["model"][name]) for name, array in one["model"].items())
    return arrays and one["extra"] == other["extra"]


class Rank:
    """A rank, as its process has it."""

    def __init__(self) -> None:
        self.number = int(os.environ["RANK"])
        self.run: sf.Checkpointer | None = None

    def pid(self) -> int:
        """The process's number in the namespace of the servers."""
        return os.getpid()

    def save(self, url: str, number: int, elements: int, at: float = 0.0) -> None:
        """Saves, not before that time of the clock."""
        state = state_of(self.number, number, elements)
        time.sleep(max(0.0, at - time.time()))
        sf.save(url, state, step=number, timeout_s=60)

    def load(self, url: str, number: int, elements: int) -> bool:
        """Loads what that rank saved; returns whether all bits are right."""
        state = emptied(self.number, elements)
        sf.load(url, state, timeout_s=60)
        return same(state, state_of(self.number, number, elements))

    def steps(self, url: str, first: int, last: int, elements: int) -> int:
        """Saves each of these steps in a run that keeps two, and returns the newest that is durable."""
        with sf.Checkpointer(url, every=sf.steps(1), keep=sf.last(2), timeout_s=60) as run:
            for number in range(first, last + 1):
                run.step(number, state_of(self.number, number, elements))
        return run.committed

    def restore(self, url: str, elements: int) -> tuple[int, bool]:
        """Restores the newest checkpoint of a run; returns its step and whether all bits are right."""
        state = emptied(self.number, elements)
        step = sf.Checkpointer(url, timeout_s=60).restore(state)
        return step, same(state, state_of(self.number, step, elements))

    def clear(self, place: str) -> None:
        """Removes a checkpoint as any program does."""
        shutil.rmtree(place)

    def looks(self, path: str) -> bool:
        """Asks as any program does whether a path is there, and remembers with the client that it is not."""
        return os.path.exists(path)

    def obeys(self) -> None:
        """Does what each line says, and answers with a line: what it found, or which error."""
        for line in sys.stdin:
            words = json.loads(line)
            began = time.monotonic()
            try:
                answer = {"found": getattr(self, words.pop("do"))(**words)}
            except sf.Error as error:
                answer = {"error": type(error).__name__, "says": str(error)}
            print(json.dumps({**answer, "seconds": time.monotonic() - began}), flush=True)


class Job:
    """Ranks of one job, each on the machine whose number stands at its place."""

    def __init__(self, cluster, machines: list[int]) -> None:
        root = f"{cluster.machines[machines[0]].address}:{next(JOBS)}"
        self.ranks: list[subprocess.Popen[str]] = []
        for rank, machine in enumerate(machines):
            environment = {
                **os.environ,
                "OPENBLAS_NUM_THREADS": "1",
                "RANK": str(rank),
                "WORLD_SIZE": str(len(machines)),
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "SHARDFAST_ROOT": root,
                "SHARDFAST_TOKEN": "secret",
            }
            command = [*cluster.machines[machine].enter, sys.executable, Path(__file__).resolve()]
            self.ranks.append(
                subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )

    def tell(self, **words: object) -> None:
        """Has all ranks do something."""
        for process in self.ranks:
            process.stdin.write(json.dumps(words) + "\n")
            process.stdin.flush()

    def answers(self, within_s: float = ANSWER_S) -> list[dict]:
        """What each rank answers to what it was told."""
        answers, until = [], time.monotonic() + within_s
        for rank, process in enumerate(self.ranks):
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"rank {rank} has not answered within {within_s:g} s"
            line = process.stdout.readline()
            assert line, f"rank {rank} failed: its traceback is above"
            answers.append(json.loads(line))
        return answers

    def do(self, **words: object) -> list[object]:
        """What each rank found; none may fail."""
        self.tell(**words)
        answers = self.answers()
        assert all("found" in answer for answer in answers), answers
        return [answer["found"] for answer in answers]

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.ranks:
            process.stdin.close()
        for process in self.ranks:
            process.stdout.close()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:  # its child ends with the namespace
                process.kill()
                process.wait()


if __name__ == "__main__":
    Rank().obeys()
