"""A training of NumPy arrays on the tasks of ``srun``, without PyTorch.

``train.sbatch`` beside it is the job. It is told to stop before its time is over, and goes on when it runs again::

    srun -n 2 python examples/slurm/train.py runs/slurm 2000
"""

from __future__ import annotations

import sys
import time

import numpy as np
import shardfast as sf


def main(run: str, steps: int) -> None:
    state = {"model": {"w": np.zeros(1000)}}
    # SIGUSR1 comes before the time limit, SIGTERM when another job needs the nodes.
    with sf.Checkpointer(run, every=sf.steps(50), keep=sf.last(3), on_signal=["SIGUSR1", "SIGTERM"]) as ckpt:
        for step in range(ckpt.restore(state) + 1, steps + 1):
            time.sleep(0.01)  # the work of a step
            state["model"]["w"] += step
            ckpt.step(step, state)
            if ckpt.stopping:
                print(f"told to stop: step {step} is durable", flush=True)
                return
    print(f"step {steps}: {state['model']['w'][0]:.0f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
