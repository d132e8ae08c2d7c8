"""A training on the tasks of Slurm's ``srun``, with NumPy alone: its losses follow from the steps that it makes.

It writes into the current directory: ``losses-<rank>``, a line for each step that was made, those that are made again
too; ``starts-<rank>``, a line for each time it was started; ``finished-<rank>`` at its end. It needs what a checkpoint
holds: the rank's generator of random numbers goes on where it was.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

import numpy as np
import shardfast as sf

LENGTH = 10_000

WAITS_S = 60.0
"""Time for which a job waits for another one, if it is to be there at the same time."""


def note(name: str, line: str) -> None:
    with open(f"{name}-{os.environ['SLURM_PROCID']}", "a") as file:
        file.write(f"{line}\n")


def wait_for(other: str) -> None:
    """Waits until another job has made two steps, and so has begun to save; one that was refused makes none."""
    until = time.monotonic() + WAITS_S
    while time.monotonic() < until:
        with contextlib.suppress(FileNotFoundError):
            if len(Path(other).read_text().splitlines()) > 1:
                return
        time.sleep(0.05)


def main(run: str, steps: int, every: int, pause_s: float, slow_from: int, on_signal: str) -> None:
    """Trains until it is done, or told to stop.

    A job that was not requeued yet makes a step in ``pause_s``, and in a second from step ``slow_from`` on, so that it
    is still there when it is to be ended.
    """
    rank, is_first = int(os.environ["SLURM_PROCID"]), "SLURM_RESTART_COUNT" not in os.environ
    random = np.random.default_rng(rank)
    basis = np.linspace(-1.0, 1.0, LENGTH)
    other = os.environ.get("WAITS_FOR")
    state = {"model": {"w": np.zeros(LENGTH)}, "random": sf.PerRank(random.bit_generator.state)}
    schedule = sf.steps(every)
    with sf.Checkpointer(run, every=schedule, keep=sf.last(3), on_signal=on_signal.split(","), timeout_s=60) as ckpt:
        begin = ckpt.restore(state)
        random.bit_generator.state = state["random"].value
        note("starts", f"{begin}")
        for step in range(begin + 1, steps + 1):
            if is_first:
                time.sleep(pause_s if step < slow_from else 1.0)
            state["model"]["w"] += np.sin(step) * basis
            loss = float(np.square(state["model"]["w"] - basis).mean() + random.normal())
            state["random"] = sf.PerRank(random.bit_generator.state)
            note("losses", f"{step} {loss.hex()}")
            ckpt.step(step, state)
            if other is not None and step == every + 2:
                wait_for(other)
            if ckpt.stopping:
                return
    note("finished", f"{steps}")


if __name__ == "__main__":
    place, steps, every, pause, slow_from, on_signal = sys.argv[1:]
    main(place, int(steps), int(every), float(pause), int(slow_from), on_signal)
