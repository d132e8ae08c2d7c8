"""Elastic `torchrun` on three machines, one of which dies, is cut off, or is stopped and runs again, at any moment.

The groups of ranks that follow each other lose nothing: the losses are bit for bit those of a training that was
resumed by hand in the same layouts. ``SHARDFAST_ELASTIC_MOMENTS`` is the number of moments.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist
from elastic_rank import PATIENCE_S, trains
from machines import Machines, machines

MOMENTS = int(os.environ.get("SHARDFAST_ELASTIC_MOMENTS", "1"))
AWAY_S = float(os.environ.get("SHARDFAST_ELASTIC_AWAY_S", "10"))
"""Time for which a machine is cut off or stopped."""

COUNT = 3
DEADLINE_S = 180.0
KINDS = ["stopped", "killed", "cut off"]
RENDEZVOUS = (
    "is_host=0,last_call_timeout=2,join_timeout=120,keep_alive_interval=1,keep_alive_max_attempt=3,read_timeout=8"
)
RANK = Path(__file__).with_name("elastic_rank.py")


class Cluster:
    """Machines, each with an agent of the same elastic job."""

    def __init__(self, machines: Machines, run: Path, losses: Path) -> None:
        self.machines, self.run, self.losses = machines, run, losses
        # Outside of the machines, since each of them may go.
        self.store = dist.TCPStore(machines.here, 0, is_master=True, wait_for_workers=False)
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        self.logs = run.parent / "logs"
        self.logs.mkdir()

    def start(self, at: int) -> None:
        """Starts a machine's agent, with processes of its own."""
        arguments = (
            f"--nnodes=1:{COUNT}",
            "--nproc-per-node=1",
            "--max-restarts=50",
            "--monitor-interval=0.1",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={self.machines.here}:{self.store.port}",
            "--rdzv-id=job",
            f"--rdzv-conf={RENDEZVOUS}",
            f"--local-addr={self.machines.address(at)}",
            *(RANK, self.run, self.losses, 0),
        )
        command = [sys.executable, "-m", "torch.distributed.run"]
        environment = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            # Else agents of PyTorch 2.15 keep the address of the first group's rank 0, whose machine may be gone.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        with (self.logs / f"node-{at}").open("ab") as log:
            self.agents[at] = subprocess.Popen(
                [*self.machines.entering(at, dies_as_one=True), *command, *map(str, arguments)],
                env=environment,
                stdout=log,
                stderr=log,
            )

    def processes(self, at: int) -> list[int]:
        """All processes of a machine."""
        agent = self.agents[at].pid
        (first,) = map(int, Path(f"/proc/{agent}/task/{agent}/children").read_text().split())
        space = os.readlink(f"/proc/{first}/ns/pid")
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(entry / "ns" / "pid") == space:
                    found.append(int(entry.name))
            except OSError:
                continue  # it has ended
        return found

    def signal(self, at: int, number: signal.Signals) -> None:
        for process in self.processes(at):
            os.kill(process, number)

    def kill(self, at: int) -> None:
        """Ends a machine, all of whose processes end with its first one."""
        agent = self.agents[at]
        agent.kill()
        agent.wait()

    def said(self) -> list[dict]:
        lines = self.losses.read_text().splitlines() if self.losses.exists() else []
        return [json.loads(line) for line in lines]

    def wait_for(self, what: str, happened) -> None:
        """Waits for it, and starts agents anew that have given up."""
        until = time.monotonic() + DEADLINE_S
        while not happened(self.said()):
            for at, agent in self.agents.items():
                if agent.poll() is not None:
                    self.start(at)
            if time.monotonic() > until:
                logs = {log.name: log.read_text()[-3000:] for log in sorted(self.logs.iterdir())}
                pytest.fail(
                    f"{what}: not within {DEADLINE_S:g} s: " + "\n\n".join(f"{n}: {t}" for n, t in logs.items())
                )
            time.sleep(0.05)

    def stale(self, at: int) -> Path:
        """File in which the rank of a machine says what came of a save once its group is over."""
        return Path(f"{self.run}.stale-node-{at}")

    def close(self) -> None:
        for at, agent in self.agents.items():
            if agent.poll() is None:
                self.kill(at)


@contextmanager
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as ends:
        made = Cluster(ends.enter_context(machines(COUNT)), tmp_path / "run", tmp_path / "losses")
        ends.callback(made.close)
        yield made


def steps_of(said: list[dict], world: int) -> int:
    """Steps that the newest group has made, if it has so many ranks."""
    group = said[-1]["group"] if said else None
    return sum(one["group"] == group for one in said) if said and said[-1]["world"] == world else 0


def goes_away(cluster: Cluster, kind: str, at: int, for_s: float) -> None:
    """Takes a machine away for a while; the others go on without it."""
    if kind == "killed":
        cluster.kill(at)
        without = dict(cluster.agents)
        del cluster.agents[at]
        cluster.wait_for(f"two ranks once {at} is {kind}", lambda said: steps_of(said, COUNT - 1) > 3)
        cluster.agents = without
        cluster.start(at)
    elif kind == "cut off":
        cluster.machines.plug(at, is_in=False)
        time.sleep(for_s)
        cluster.machines.plug(at, is_in=True)
    else:
        cluster.signal(at, signal.SIGSTOP)
        cluster.wait_for(f"two ranks once {at} is {kind}", lambda said: steps_of(said, COUNT - 1) > 3)
        time.sleep(for_s - PATIENCE_S)
        cluster.stale(at).touch()
        cluster.signal(at, signal.SIGCONT)


def trains_again(rank: int, world: int, *arguments) -> None:
    trains(*arguments)


def by_hand(ranks, groups: list[list[dict]], tmp_path: Path) -> list[dict]:
    """What a training says that is resumed by hand in the layouts of these groups."""
    losses = tmp_path / "by-hand"
    for group, behind in zip(groups, [*groups[1:], None], strict=True):
        last = behind[0]["start"] if behind else group[-1]["step"]
        if last > group[0]["start"]:
            ranks(group[0]["world"])(trains_again, str(tmp_path / "again"), str(losses), last)
    return [json.loads(line) for line in losses.read_text().splitlines()]


@pytest.mark.parametrize("seed", range(MOMENTS))
def test_a_machine_that_goes_and_comes_back_costs_no_step_and_no_bit(ranks, tmp_path, seed):
    dice = random.Random(f"elastic {seed}")
    kind, at = KINDS[seed % len(KINDS)], dice.randrange(COUNT)
    with cluster(tmp_path) as job:
        for machine in range(COUNT):
            job.start(machine)
        steps = dice.randrange(1, 40)
        job.wait_for(f"{steps} steps of {COUNT} ranks", lambda said: steps_of(said, COUNT) >= steps)
        time.sleep(dice.random() * 0.1)
        goes_away(job, kind, at, AWAY_S)
        # One that was cut off may be back before the others have met without it.
        job.wait_for(f"{COUNT} ranks again", lambda said: steps_of(said, COUNT) > 6 and len(groups_of(said)) > 1)
        Path(f"{job.run}.end").touch()
        ended = time.monotonic() + DEADLINE_S
        for machine, agent in job.agents.items():
            code, log = agent.wait(ended - time.monotonic()), (job.logs / f"node-{machine}").read_text()[-3000:]
            # An agent that meets others anew at the moment when their job ends finds the rendezvous closed.
            assert code == 0 or "RendezvousClosedError" in log, log
        said = job.said()
        stale = job.stale(at).read_text() if kind == "stopped" else ""
    assert stale.split(":")[0] in ("", "Unavailable", "Conflict"), stale  # nothing where its agent ended it first
    groups = groups_of(said)
    print(stale)
    print(kind, at, [(group[0]["world"], group[0]["start"], group[-1]["step"]) for group in groups])
    expected = by_hand(ranks, groups, tmp_path)
    found = {(one["step"], one["world"], one["loss"]) for one in said}
    assert [one for one in expected if (one["step"], one["world"], one["loss"]) not in found] == []
    assert [one["step"] for one in expected] == list(range(1, said[-1]["step"] + 1))
    command = [Path(sys.executable).with_name("shardfast"), "ls", tmp_path / "run"]
    assert subprocess.run(command, capture_output=True, text=True).returncode == 0


def groups_of(said: list[dict]) -> list[list[dict]]:
    """What each group of ranks has said, in the order of their begins."""
    groups: dict[str, list[dict]] = {}
    for one in said:
        groups.setdefault(one["group"], []).append(one)
    return [groups[group] for group in sorted(groups, key=lambda group: int(group.split()[0]))]
