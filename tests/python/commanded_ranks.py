"""A rank on NumPy's arrays that saves and loads what the lines of its standard input say, and the job of such ranks."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import shardfast as sf
from ports import free_ports

DEADLINE_S = 120.0


class Slow(dict):
    """Part of a state at which a rank stops when it reads it, if it is told to, until another process has it go on."""

    stops = False

    def items(self):
        if self.stops:
            self.stops = False
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().items()


def state_of(rank: int, said: dict, value: float) -> dict:
    """Arrays of a rank's own, arrays that all ranks hold, values of a rank's own, and keys of a loader."""
    kib = said.get("more_kib", {}).get(str(rank), said["kib"])
    own = {f"of-{rank}.{n}": np.full(kib * 64, value) for n in range(2)}
    state: dict = {"model": own, "extra": {"rank": sf.PerRank(value + rank), "noise": sf.PerRank(bytes(2000))}}
    if said.get("shared"):
        state["shared"] = {"w": np.full(50_000, value)}
    if said.get("slow"):
        state["slow"] = Slow(w=np.full(10, value))
    for key in range(said.get("keys", 0)):
        state[f"loader{key:04}"] = {"position": sf.PerRank(f"{rank} {key}")}
    return state


def obeys() -> None:
    """Does what each line says, and answers with a line."""
    rank, states = int(os.environ["RANK"]), {}
    for line in sys.stdin:
        said = json.loads(line)
        key = (said["do"], json.dumps(said["state"]))
        if key not in states:
            states.clear()
            states[key] = state_of(rank, said["state"], 1.5 if said["do"] == "save" else 0.0)
        state = states[key]
        if "slow" in state:
            state["slow"].stops = said.get("stops") == rank
        if said["do"] == "prepare":
            pass
        elif said["do"] == "load":
            sf.load(said["url"], state)
            assert all(array[0] == array[-1] == 1.5 for array in state["model"].values())
        elif said.get("asynchronous"):
            sf.save_async(said["url"], state, step=said["step"], prove=said.get("prove")).committed()
        else:
            sf.save(said["url"], state, step=said["step"], prove=said.get("prove"))
        print("done", flush=True)


class Job:
    """Ranks in processes of their own. ``environments`` has what differs in each rank's; ``around`` the command in
    front of each rank's, such as one that enters a network namespace."""

    def __init__(
        self, environments: list[dict[str, str]], around: list[list[str]] | None = None, host: str = "127.0.0.1"
    ) -> None:
        world, port = len(environments), free_ports(1)
        self.ranks: list[subprocess.Popen[str]] = []
        for rank, own in enumerate(environments):
            environment = {
                **os.environ,
                "OPENBLAS_NUM_THREADS": "1",
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(world),
                "LOCAL_RANK": str(rank),
                "SHARDFAST_ROOT": f"{host}:{port}",
                "SHARDFAST_TOKEN": "secret",
                **own,
            }
            command = [*(around[rank] if around else []), sys.executable, __file__]
            self.ranks.append(
                subprocess.Popen(
                    command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
                )
            )

    def tell(self, **said: object) -> None:
        """Has all ranks do something, and waits until they have done it."""
        line = json.dumps(said) + "\n"
        for process in self.ranks:
            process.stdin.write(line)
            process.stdin.flush()
        waiting, until = (
            {process.stdout: rank for rank, process in enumerate(self.ranks)},
            time.monotonic() + DEADLINE_S,
        )
        while waiting:
            ready, _, _ = select.select(list(waiting), [], [], max(0.0, until - time.monotonic()))
            assert ready, f"ranks {sorted(waiting.values())} have not done {said} in {DEADLINE_S:g} s"
            for pipe in ready:
                assert pipe.readline() == "done\n", f"rank {waiting[pipe]} failed: its traceback is above"
                del waiting[pipe]

    def close(self) -> None:
        for process in self.ranks:
            process.stdin.close()
        for process in self.ranks:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()


def reported(run: str, environment: dict[str, str]) -> dict:
    """What the command says of a run."""
    command = [Path(sys.executable).with_name("shardfast"), "report", run, "--json"]
    done = subprocess.run(command, env={**os.environ, **environment}, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


if __name__ == "__main__":
    obeys()
