"""Three runs with a slow save each, and their reports: the pictures of the guide's page "Why was this save slow?".

Four ranks without torch save a NumPy state three times. In the second save of each run something is wrong:

* ``late``: rank 2 comes half a second after the others, as if it had waited for its data.
* ``keys``: the state of each rank has hundreds of keys with a value each, and each key has files of its own.
* ``stopped``: rank 1 is stopped for a while when it has begun to write, as by a machine that swaps.

It prints what ``shardfast report`` says, and writes each report as a page. ``scripts/site.sh`` runs it for the guide::

    python examples/slow_saves.py target/site/reports
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RANKS = 4
SLOW = 2  # the step of the slow save
FAULTS = ("late", "keys", "stopped")
COMMAND = Path(sys.executable).with_name("shardfast")


def train(fault: str, run: str) -> None:
    """What each rank does."""
    import numpy as np
    import shardfast as sf

    rank = int(os.environ["RANK"])
    model = {f"layer-{number}": np.full(1_000_000, float(number)) for number in range(16)}
    with sf.Checkpointer(run, every=sf.steps(1)) as ckpt:
        for step in (1, SLOW, 3):
            state: dict[str, Any] = {"model": model, "step": step}
            if step == SLOW and fault == "late" and rank == 2:
                time.sleep(0.5)
            if step == SLOW and fault == "keys":
                state |= {f"worker-{number}": sf.PerRank(number) for number in range(400)}
            ckpt.step(step, state)
            if step == SLOW and fault == "stopped" and rank == 1:
                stop(0.7)
            ckpt.wait()


def stop(seconds: float) -> None:
    """Stops this process for a while."""
    me = os.getpid()
    continues = f"import os, signal, time; time.sleep({seconds}); os.kill({me}, signal.SIGCONT)"
    with subprocess.Popen([sys.executable, "-c", continues]):
        os.kill(me, signal.SIGSTOP)


def start(fault: str, run: str) -> None:
    """Runs all ranks of a job to their end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        root = f"127.0.0.1:{probe.getsockname()[1]}"
    job = {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "SHARDFAST_ROOT": root}
    job["SHARDFAST_TOKEN"] = secrets.token_hex(16)
    command = [sys.executable, __file__, "--train", fault, run]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **job, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(RANKS)
    ]
    failed = [rank for rank in ranks if rank.wait() != 0]
    if failed:
        sys.exit(f"a rank of the run '{fault}' failed: its error is above")


def report(run: str, *options: str) -> None:
    subprocess.run([COMMAND, "report", run, *options], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", help="the directory into which the pages are written")
    parser.add_argument("run", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--train", metavar="FAULT", choices=FAULTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        return train(arguments.train, arguments.pages)
    pages = Path(arguments.pages)
    pages.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        for fault in FAULTS:
            run = str(Path(directory, fault))
            start(fault, run)
            page = pages / f"{fault}.html"
            page.unlink(missing_ok=True)
            report(run, "--step", str(SLOW), "--out", str(page))
    return None


if __name__ == "__main__":
    main()
