"""A run that is saved in the memory of several machines, some of which are lost.

``SHARDFAST_MACHINE_KILLS`` is the number of trainings that are cut off at random moments.
"""

import ast
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from filled import steps
from machines import Machines, machines
from shardfast import native

COMMAND = Path(sys.executable).with_name("shardfast")
PORT = 20600
KILLS = int(os.environ.get("SHARDFAST_MACHINE_KILLS", "1"))
ROUNDS = 3
DEADLINE_S = 150.0

TRAINING = """
import os, sys, time, numpy as np, shardfast as sf
from shardfast import memory
memory.LINGER_S = float(os.environ.get("LINGERS", "600"))
run, last, every, copies = sys.argv[1], *map(int, sys.argv[2:5])
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
model = {f"w{n}": np.zeros(300_000, np.float32) for n in range(6) if n % world == rank}
state = {"model": model, "extra": {"step": 0}}
ckpt = sf.Checkpointer(
    run, every=sf.steps(every), memory=sf.steps(1), keep=sf.last(2), peers=sf.copies(copies) if copies else None,
    timeout_s=120,
)
start = ckpt.restore(state)
if start:
    assert state["extra"]["step"] == start, state["extra"]
    begun = float(os.environ.get("BEGUN", "0"))
    for name, array in model.items():
        assert (array == start * 10 + int(name[1:]) + begun).all(), (name, array[:3], start)
def goes_on(step):
    while "PACE" in os.environ:
        bound, is_last = open(os.environ["PACE"]).read().split()
        if step <= int(bound) or is_last == "True":
            return step <= int(bound)
        time.sleep(0.02)
    return True
print("restored", start, dict(ckpt.restored.sources) if start else {}, flush=True)
for step in range(start + 1, last + 1):
    if not goes_on(step):
        break
    for name, array in model.items():
        array[:] = step * 10 + int(name[1:]) + float(os.environ.get("ADDED", "0"))
    state["extra"] = {"step": step}
    ckpt.step(step, state)
    if "SLOW" in os.environ:
        ckpt.wait()
        print("saved", step, flush=True)
        time.sleep(float(os.environ["SLOW"]))
ckpt.wait()
print("waits", flush=True)
if "STAYS" in os.environ:
    time.sleep(600)
ckpt.close()
print("ended", flush=True)
"""


class Cluster:
    """Machines with a rank each, and the keepers there."""

    def __init__(self, machines: Machines, run: Path) -> None:
        self.machines, self.run, self.at = machines, run, 3
        self.ranks: dict[int, subprocess.Popen[str]] = {}

    def begin(self, at: list[int], last: int, *, every: int = 1000, copies: int = 1, **environment: str) -> None:
        """Starts a training with a rank on each of these machines."""
        for rank, machine in enumerate(at):
            own = {
                **{name: text for name, text in os.environ.items() if name != "LOCAL_RANK"},
                "RANK": f"{rank}",
                "WORLD_SIZE": f"{len(at)}",
                "LOCAL_WORLD_SIZE": "1",
                "SHARDFAST_ROOT": f"{self.machines.address(at[0])}:{PORT}",
                "SHARDFAST_TOKEN": "secret",
                **environment,
            }
            arguments = (sys.executable, "-c", TRAINING, self.run, last, every, copies)
            self.ranks[machine] = subprocess.Popen(
                [*self.machines.entering(machine), *map(str, arguments)],
                env=own,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )

    def pace(self, bound: int, *, is_last: bool = False) -> dict[str, str]:
        """Lets the ranks train up to this step, at which they wait for a later one unless it is the last."""
        path = self.run.with_suffix(".pace")
        path.with_suffix(".new").write_text(f"{bound} {is_last}")
        path.with_suffix(".new").rename(path)
        return {"PACE": f"{path}"}

    def train_until(self, at: int, other: dict) -> int:
        """Lets the ranks train until another keeper than that one has files at a machine, and the newest step is in
        memory; returns that step."""
        until = time.monotonic() + DEADLINE_S
        while True:
            now = self.status(at)
            is_another = now is not None and now["process"] != other["process"]
            if is_another and self.in_memory()[-1:] == [self.at]:
                return self.at
            assert time.monotonic() < until, now
            self.at += 1
            self.pace(self.at)
            time.sleep(0.2)

    def in_memory(self) -> list[int]:
        """The committed steps that the keepers have."""
        place = native.memory_place(str(self.run))[1]
        command = [*self.machines.entering(0), COMMAND, "ls", place, "--json"]
        listed = subprocess.run([str(word) for word in command], capture_output=True, text=True)
        found = json.loads(listed.stdout)["checkpoints"] if listed.returncode == 0 else []
        return [step["step"] for step in found if step["status"] == "committed"]

    def line(self, at: int) -> str:
        """The next line that the rank there says."""
        out = self.ranks[at].stdout
        assert out is not None
        line = out.readline()
        if not line:
            pytest.fail(self.ranks[at].communicate()[1][-3000:])
        return line.strip()

    def expect(self, said: str) -> list[str]:
        """What the ranks say, up to this line of each, which comes last."""
        lines = []
        for at in self.ranks:
            while True:
                lines.append(self.line(at))
                if re.fullmatch(said, lines[-1]):
                    break
        return lines

    def kill_ranks(self) -> None:
        for rank in self.ranks.values():
            rank.kill()
            rank.communicate()
        self.ranks.clear()

    def ended(self) -> list[str]:
        """Waits for the ranks' ends; returns what they wrote to the error stream."""
        ends = {at: rank.communicate(timeout=200) for at, rank in self.ranks.items()}
        codes = [rank.returncode for rank in self.ranks.values()]
        assert not any(codes), (codes, ends)
        self.ranks.clear()
        return [err for _, err in ends.values()]

    def told(self, at: int, *arguments: object) -> dict | None:
        """What the command says of the keeper there; ``None`` if it fails."""
        command = [*self.machines.entering(at), COMMAND, "keeper", *map(str, arguments), "--json"]
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
        return json.loads(done.stdout) if done.returncode == 0 else None

    def status(self, at: int) -> dict | None:
        return self.told(at, "status", self.run)

    def expect_copies(self, *at: int) -> None:
        """Waits until each file is in the memory of as many machines as asked."""
        until = time.monotonic() + DEADLINE_S
        for machine in at:
            while (status := self.status(machine)) is None or status["uncopied"] != 0:
                assert time.monotonic() < until, status
                time.sleep(0.2)

    def safe_step(self, at: int) -> int:
        """The newest step that the loss of any machine leaves, as the keeper there says; 0 without one."""
        held = (self.status(at) or {"steps": []})["steps"]
        return max((step["step"] for step in held if step["survives"]), default=0)

    def cut_off(self, kind: str, at: int, after_s: float) -> None:
        """Ends the training, some time after something happened to a machine or its rank."""
        if kind == "rank":
            self.ranks[at].kill()
        elif kind == "keeper" and (status := self.status(at)) is not None:
            os.kill(status["process"], signal.SIGKILL)
        elif kind == "machine":
            self.lose(at)
        elif kind == "cable":
            self.machines.plug(at, is_in=False)
        time.sleep(after_s)
        self.kill_ranks()
        if kind == "cable":
            self.machines.plug(at, is_in=True)

    def lose(self, at: int) -> None:
        """Ends the rank of a machine, and its keeper with all that it has."""
        if at in self.ranks:
            self.ranks[at].kill()
        status = self.status(at)
        assert status is not None
        os.kill(status["process"], signal.SIGKILL)

    def close(self) -> None:
        self.kill_ranks()
        for at in range(self.machines.count):
            status = self.status(at)
            if status is not None:
                os.kill(status["process"], signal.SIGKILL)


@contextmanager
def cluster(tmp_path: Path, count: int) -> Iterator[Cluster]:
    with ExitStack() as ends:
        made = Cluster(ends.enter_context(machines(count)), tmp_path / "run")
        ends.callback(made.close)
        yield made


def test_ranks_that_are_killed_go_on_from_the_memory_of_their_machines(tmp_path):
    with cluster(tmp_path, 3) as job:
        job.begin([0, 1, 2], 3, copies=0, STAYS="1")
        job.expect("waits")
        job.kill_ranks()
        assert steps(job.run) == []
        # Other numbers of ranks, at other places; a third machine has but its memory.
        job.begin([2, 0, 1], 5, copies=0)
        said = job.expect("restored .*")
        assert all(line.startswith("restored 3 {'memory': ") for line in said), said
        for rank, line in enumerate(said):
            # Each reads what it has saved from the machine where it was.
            sources = ast.literal_eval(line.removeprefix("restored 3 "))
            assert sources[f"peer {job.machines.address(rank)}"] >= 2 * 1_200_000 > sources["memory"], (rank, sources)
        job.ended()
        assert steps(job.run) == [5]
        until = time.monotonic() + DEADLINE_S
        while any(job.status(at) for at in range(3)):
            assert time.monotonic() < until
            time.sleep(0.1)


def test_a_machine_that_is_lost_costs_no_step_and_its_files_are_copied_again(tmp_path):
    with cluster(tmp_path, 3) as job:
        job.begin([0, 1, 2], 3, STAYS="1")
        job.expect("waits")
        job.expect_copies(0, 1, 2)
        assert job.status(0)["steps"][-1] == {"step": 3, "survives": 1}
        job.lose(1)
        job.kill_ranks()
        job.begin([0, 1, 2], 4, STAYS="1")  # machine 1 is another one now
        assert {line.split()[1] for line in job.expect("restored .*")} == {"3"}
        job.expect("waits")
        job.expect_copies(0, 1, 2)
        job.lose(0)
        job.kill_ranks()
        job.begin([1, 2], 6)
        assert {line.split()[1] for line in job.expect("restored .*")} == {"4"}
        job.ended()
        assert steps(job.run) == [6]


def test_what_only_memory_has_is_sent_once_when_all_ranks_are_gone(tmp_path):
    with cluster(tmp_path, 3) as job:
        job.begin([0, 1, 2], 3, copies=0, STAYS="1", LINGERS="1")
        job.expect("waits")
        job.kill_ranks()
        until = time.monotonic() + DEADLINE_S
        while any(job.status(at) for at in range(3)):
            assert time.monotonic() < until
            time.sleep(0.1)
        assert steps(job.run) == [3]
        job.begin([0], 3, copies=0)
        assert job.expect("restored .*")[0].startswith("restored 3 {'url': "), job.ended()


def test_without_a_copy_the_loss_of_a_machine_costs_what_only_its_memory_had(tmp_path):
    with cluster(tmp_path, 2) as job:
        job.begin([0, 1], 5, every=2, copies=0, STAYS="1")
        job.expect("waits")
        until = time.monotonic() + DEADLINE_S
        while steps(job.run)[-1:] != [4]:
            assert time.monotonic() < until
            time.sleep(0.1)
        job.lose(1)
        job.kill_ranks()
        job.begin([0, 1], 6, every=2, copies=0)
        assert {line.split()[1] for line in job.expect("restored .*")} == {"4"}
        assert any("step-00000005" in err for err in job.ended())
        assert steps(job.run)[-1] == 6


def test_a_keeper_that_dies_costs_the_saves_until_a_new_one_has_begun(tmp_path):
    with cluster(tmp_path, 2) as job:
        job.begin([0, 1], 10_000, every=10, SLOW="0", **job.pace(3))
        job.expect("saved 3")
        before = job.status(1)
        os.kill(before["process"], signal.SIGKILL)
        last = (job.train_until(1, before) // 10 + 2) * 10
        job.pace(last, is_last=True)
        job.expect("waits")
        assert any("the keeper" in err for err in job.ended())
        assert steps(job.run) == [last - 10, last]


def test_what_a_machine_has_that_was_away_when_the_training_went_on_leaves(tmp_path):
    with cluster(tmp_path, 3) as job:
        job.begin([0, 1, 2], 3, every=2, copies=0, STAYS="1")
        job.expect("waits")
        until = time.monotonic() + DEADLINE_S
        while steps(job.run) != [2]:
            assert time.monotonic() < until
            time.sleep(0.1)
        job.lose(0)
        job.lose(1)
        job.kill_ranks()
        # Another training of the run, in which step 3 is another one. Machine 2 knows nothing of it.
        job.begin([0, 1], 3, every=2, copies=0, STAYS="1", ADDED="1000")
        assert {line.split()[1] for line in job.expect("restored .*")} == {"2"}
        job.expect("waits")
        job.kill_ranks()
        job.begin([2, 0, 1], 4, every=2, copies=0, BEGUN="1000")
        assert {line.split()[1] for line in job.expect("restored .*")} == {"3"}
        job.ended()


def test_a_machine_that_is_cut_off_costs_no_step(tmp_path):
    with cluster(tmp_path, 3) as job:
        job.begin([0, 1, 2], 3, STAYS="1")
        job.expect("waits")
        job.expect_copies(0, 1, 2)
        job.machines.plug(2, is_in=False)
        job.kill_ranks()
        job.begin([0, 1], 4, STAYS="1")
        assert {line.split()[1] for line in job.expect("restored .*")} == {"3"}
        job.expect("waits")
        job.kill_ranks()
        job.machines.plug(2, is_in=True)
        job.begin([0, 1, 2], 5)
        assert {line.split()[1] for line in job.expect("restored .*")} == {"4"}
        job.ended()


@pytest.mark.parametrize(
    ("count", "domain", "said"),
    [
        (1, None, "peers=sf.copies(1): expected at least 2 machines, found 1"),
        (2, "rack-7", "peers=sf.copies(1): expected machines of at least 2 domains, found rack-7 (SHARDFAST_DOMAIN"),
    ],
)
def test_copies_that_machines_cannot_have_are_refused(tmp_path, count, domain, said):
    with cluster(tmp_path, count) as job:
        job.begin(list(range(count)), 3, **({} if domain is None else {"SHARDFAST_DOMAIN": domain}))
        for rank in job.ranks.values():
            assert said in rank.communicate(timeout=100)[1] and rank.returncode == 1
        assert steps(job.run) == []


def test_a_keeper_that_is_told_to_leave_in_a_training_costs_its_machine_no_later_step(tmp_path):
    with cluster(tmp_path, 3) as job:
        job.begin([0, 1, 2], 10_000, every=1000, copies=0, SLOW="0", **job.pace(3))
        job.expect("saved 3")
        first = job.status(0)["process"]
        for at, how in [(1, "leave"), (2, "term")]:
            before = job.status(at)
            if how == "leave":
                assert job.told(at, "leave", job.run) is not None
            else:
                os.kill(before["process"], signal.SIGTERM)
            last = job.train_until(at, before)
            assert job.status(0)["process"] == first, "another machine's keeper has left, too"
        job.pace(last, is_last=True)
        job.expect("waits")
        job.ended()
        assert steps(job.run)[-1] == last
        until = time.monotonic() + DEADLINE_S
        while any(job.status(at) for at in range(3)):
            assert time.monotonic() < until
            time.sleep(0.1)


def test_what_more_machines_are_lost_than_copies_cover_begins_at_step_0_and_says_so(tmp_path):
    with cluster(tmp_path, 2) as job:
        job.begin([0, 1], 3, copies=0, STAYS="1")
        job.expect("waits")
        job.lose(1)
        job.kill_ranks()
        job.begin([0, 1], 4, copies=0)
        assert {line.split()[1] for line in job.expect("restored .*")} == {"0"}
        assert any("begins at step 0" in err and "step-00000003" in err for err in job.ended())
        assert steps(job.run) == [4]


def test_a_step_with_copies_stays_until_a_newer_one_has_its_own(tmp_path):
    with cluster(tmp_path, 3) as job:
        job.begin([0, 1, 2], 2, SLOW="0.1", STAYS="1")
        job.expect("waits")
        job.expect_copies(0, 1, 2)
        job.kill_ranks()
        job.machines.limit(1, "2mbit")
        job.begin([0, 1, 2], 6, STAYS="1")
        job.expect("waits")
        job.lose(1)
        job.kill_ranks()
        job.begin([0, 2], 7)
        (restored,) = {int(line.split()[1]) for line in job.expect("restored .*")}
        assert restored >= 2
        job.ended()


def test_a_keeper_that_cannot_leave_serves_the_next_job(tmp_path):
    with cluster(tmp_path, 3) as job:
        began = time.monotonic()
        job.begin([0, 1, 2], 3, copies=1, STAYS="1")
        job.expect("restored .*")
        usual_s = time.monotonic() - began
        job.expect("waits")
        job.expect_copies(0, 1, 2)
        job.lose(0)
        job.lose(1)
        job.kill_ranks()
        assert job.told(2, "leave", job.run) is None
        assert job.status(2)["failure"] is not None
        began = time.monotonic()
        job.begin([0, 1, 2], 4, copies=1)
        job.expect("restored .*")
        assert time.monotonic() - began < usual_s + 25
        job.ended()
        assert steps(job.run) == [4]


@pytest.mark.parametrize("seed", range(KILLS))
def test_what_one_machine_loses_at_any_moment_costs_no_step_that_has_its_copies(tmp_path, seed):
    dice = random.Random(f"machines {seed}")
    with cluster(tmp_path, 3) as job:
        at, safe, log = [0, 1, 2], 0, []
        for is_last in [False] * ROUNDS + [True]:
            paced = job.pace(0) if is_last else {"SLOW": "0"}
            job.begin(at, 10**6, every=dice.choice([5, 1000]), **paced)
            restored = {int(line.split()[1]) for line in job.expect("restored .*")}
            log.append((at, restored))
            assert len(restored) == 1 and min(restored) >= max([safe, *steps(job.run)]), log
            if is_last:
                break
            until = time.monotonic() + DEADLINE_S
            while job.safe_step(at[0]) <= max(restored):
                assert time.monotonic() < until, (log, job.status(at[0]))
                time.sleep(0.05)
            time.sleep(dice.random())
            safe = job.safe_step(at[0])
            kind, lost = dice.choice(["ranks", "rank", "keeper", "machine", "cable"]), dice.choice(at)
            log.append((kind, lost, safe))
            job.cut_off(kind, lost, dice.random() * 0.5)
            # The next job has the machine again, without its memory if that was lost, or begins with the others.
            others = [machine for machine in range(3) if machine != lost]
            at = dice.choice([[0, 1, 2], [2, 0, 1], others, others])
        last = max(restored) + 3
        job.pace(last, is_last=True)
        job.ended()
        assert steps(job.run)[-1] == last, (log, last)
        until = time.monotonic() + DEADLINE_S
        while left := [machine for machine in at if job.status(machine)]:
            assert time.monotonic() < until, (log, left)
            time.sleep(0.1)
