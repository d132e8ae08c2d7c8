"""Trainings as jobs of a real Slurm: told to stop, requeued, preempted, beside each other; no loss differs.

Most of their time is spent waiting, so that all jobs which the chosen tests need begin at once.
"""

import os
import queue
import random
import shlex
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from servers import Slurm, running_slurm

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parents[1] / "examples" / "slurm"

MOMENTS = int(os.environ.get("SHARDFAST_SLURM_MOMENTS", "2"))
"""Jobs that are ended in each way, each at a moment of its own."""

STEPS, EVERY, SLOW_FROM = 120, 10, 100
ALL = list(range(1, STEPS + 1))

TWO = ("--ntasks=2", "--nodelist=node0")
NODES = ("node1", "node2", "node3", "node4")
"""Nodes that are taken from their jobs; all other jobs are on node0, or on this one and node5."""

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "")
DEADLINE_S = 240.0
LOOK_S = 0.05
AT_ONCE = 16
"""Jobs that run beside each other."""


def training(run: str, pause_s: float = 0.0, on_signal: str = "SIGUSR1", slow_from: int = STEPS + 1) -> str:
    """The command of a training into this run, from which losses are written into its current directory."""
    arguments = (run, STEPS, EVERY, pause_s, slow_from, on_signal)
    return shlex.join(map(str, (sys.executable, HERE / "slurm_training.py", *arguments)))


def said(place: Path) -> str:
    """What the jobs of this directory, and of those in it, have printed."""
    return "\n".join(path.read_text() for path in (*place.glob("out"), *place.glob("*/out")))


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def wait_until(done: Callable[[], bool], place: Path) -> None:
    """Waits; shows what the jobs of this directory printed if that lasts too long."""
    until = time.monotonic() + DEADLINE_S
    while not done():
        assert time.monotonic() < until, said(place)
        time.sleep(LOOK_S)


def wait_for_step(place: Path, step: int = 1) -> None:
    wait_until(lambda: len(lines(place / "losses-0")) >= step, place)


def wait_for_jobs(slurm: Slurm, place: Path, *jobs: str) -> list[str]:
    """The states in which these jobs ended."""
    seen: list[list[str]] = [[], []]

    def all_ended() -> bool:
        time.sleep(0.4)
        # One that is requeued is shown as ended for a moment.
        seen.append([slurm.state(job)[0] for job in jobs])
        return seen[-1] == seen[-2] == seen[-3] and all(state in ENDED for state in seen[-1])

    wait_until(all_ended, place)
    return seen[-1]


def expect_completed(slurm: Slurm, place: Path, *jobs: str) -> None:
    states = wait_for_jobs(slurm, place, *jobs)
    assert states == ["COMPLETED"] * len(jobs), f"{states}\n{said(place)}"


def losses(place: Path) -> list[list[tuple[int, str]]]:
    """Steps and losses of both ranks, in the order in which they were made."""
    made = []
    for rank in range(2):
        words = map(str.split, lines(place / f"losses-{rank}"))
        made.append([(int(step), loss) for step, loss in words])
    return made


def expect_same(place: Path, expected: list[dict[int, str]]) -> None:
    """Expects that each step that was made here has the loss that it has in one piece."""
    for made, right in zip(losses(place), expected, strict=True):
        assert made == [(step, right[step]) for step, _ in made]


class Way(NamedTuple):
    """A way in which the first life of a job ends."""

    end: Callable[[Slurm, str, str], object] | None
    """Ends it, given its number and its node; ``None`` if Slurm does so by itself."""
    options: tuple[str, ...] = ()
    is_told: bool = True
    """Whether the training is told to stop: no step is made again."""
    on_signal: str = "SIGUSR1"
    pause_s: float = 0.03
    takes_node: bool = False
    """Whether it takes the node from all jobs there."""
    by_shell: bool = False
    """Whether the batch script gets the signal, and passes it on."""
    tasks: int = 0
    """Tasks of the array; 0 if it is none."""


def signal_tasks(slurm: Slurm, job: str, node: str) -> None:
    slurm.call("scancel", "--signal=USR1", job)


def requeue(slurm: Slurm, job: str, node: str) -> None:
    slurm.call("scontrol", "requeue", job)


def preempt(slurm: Slurm, job: str, node: str) -> None:
    options = ("--partition=high", f"--nodelist={node}", "--exclusive", "--output=/dev/null")
    slurm.call("sbatch", *options, "--chdir=/", "--wrap=sleep 1")


def lose_node(slurm: Slurm, job: str, node: str) -> None:
    slurm.call("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
    time.sleep(1)
    slurm.call("scontrol", "update", f"NodeName={node}", "State=IDLE")


ON_TWO = ("--nodes=2", "--nodelist=node0,node5")

# Slurm looks at time limits every 30 s: the signal comes 20 to 50 s after the start. One that comes before the program
# has its handler would end it.
WAYS = {
    "before the time limit": Way(None, ("--time=1", "--signal=USR1@40"), pause_s=0.4),
    "before the time limit, by the shell": Way(None, ("--time=1", "--signal=B:USR1@40"), pause_s=0.4, by_shell=True),
    "scancel --signal": Way(signal_tasks, ON_TWO),
    "scontrol requeue": Way(requeue, ON_TWO, is_told=False),
    "an array": Way(signal_tasks, tasks=2),
    "preempted": Way(preempt, on_signal="SIGTERM", takes_node=True),
    "its node is lost": Way(lose_node, is_told=False, takes_node=True),
}

# A job that was told to stop runs again, and one that failed does not.
AGAIN = '[[ -e finished-0 ]] || scontrol requeue "$SLURM_JOB_ID"'
BY_SHELL = "srun {train} & step=$!; trap 'kill -USR1 $step' USR1; wait $step || wait $step"


def live(slurm: Slurm, place: Path, way: Way, node: str, seed: int) -> list[Path]:
    """Trains as a job whose first life ends in this way, until the training is done; the directories of losses."""
    dice = random.Random(seed)
    train = training("run", way.pause_s, way.on_signal, SLOW_FROM)
    run = BY_SHELL.format(train=train) if way.by_shell else f"srun {train}"
    options = (f"--nodelist={node}", "--ntasks=2", "--requeue", *way.options)
    places = [place]
    if way.tasks:
        options += (f"--array=0-{way.tasks - 1}",)
        places = [place / f"{task}" for task in range(way.tasks)]
        run = f"cd $SLURM_ARRAY_TASK_ID; {run}"
    for one in places:
        one.mkdir(parents=True, exist_ok=True)
    job = slurm.submit(place, f"{run}\n{AGAIN}", *options)
    jobs = [f"{job}_{task}" for task in range(way.tasks)] or [job]
    for one, number in zip(places, jobs, strict=True):
        if way.end is not None:
            wait_for_step(one, dice.randrange(1, SLOW_FROM))
            time.sleep(dice.random() * way.pause_s)
            way.end(slurm, number, node)
    expect_completed(slurm, place, *jobs)
    return places


SCENES: dict[str, Callable[[Slurm, Path], object]] = {}
"""What the test of the same name looks at: jobs, and a directory in which they work."""


def scene(function: Callable[[Slurm, Path], object]) -> Callable[[Slurm, Path], object]:
    SCENES[function.__name__] = function
    return function


class Cluster(NamedTuple):
    """A Slurm, and what has been begun in it."""

    slurm: Slurm
    scenes: dict[str, tuple[Path, Future]]
    lives: dict[str, list[Future[list[Path]]]]


def begun(slurm: Slurm, place: Path, pool: ThreadPoolExecutor, names: set[str], ways: set[str]) -> Cluster:
    """Begins scenes and lives."""
    free: queue.SimpleQueue[str] = queue.SimpleQueue()
    for node in NODES:
        free.put(node)

    def live_on_a_node(name: str, number: int, seed: int) -> list[Path]:
        at, way = place / name.replace(" ", "-") / f"{number}", WAYS[name]
        if not way.takes_node:
            return live(slurm, at, way, "node0", seed)
        node = free.get()
        try:
            return live(slurm, at, way, node, seed)
        finally:
            free.put(node)

    dice = random.Random(1)
    lives: dict[str, list[Future[list[Path]]]] = {name: [] for name in WAYS if name in ways}
    scenes = {}
    for name, futures in lives.items():
        for number in range(MOMENTS):
            futures.append(pool.submit(live_on_a_node, name, number, dice.randrange(1 << 30)))
    for name in sorted(names):
        (place / name).mkdir()
        scenes[name] = place / name, pool.submit(SCENES[name], slurm, place / name)
    return Cluster(slurm, scenes, lives)


@pytest.fixture(scope="module")
def cluster(request, tmp_path_factory):
    """A Slurm in which everything has begun that the chosen tests look at."""
    chosen = [item for item in request.session.items if item.module is request.module]
    names = {item.name.removeprefix("test_") for item in chosen} & {*SCENES} | {"one_piece"}
    ways = {item.callspec.params["way"] for item in chosen if "way" in item.fixturenames}
    with running_slurm() as slurm, ThreadPoolExecutor(AT_ONCE) as pool:
        yield begun(slurm, tmp_path_factory.mktemp("slurm"), pool, names, ways)


@pytest.fixture
def place(request, cluster) -> Path:
    """The directory of the test's scene, when its jobs have ended."""
    place, ends = cluster.scenes[request.node.name.removeprefix("test_")]
    ends.result()
    return place


@scene
def one_piece(slurm: Slurm, place: Path) -> None:
    expect_completed(slurm, place, slurm.submit(place, f"srun {training('run')}", *TWO))


@pytest.fixture(scope="module")
def expected(cluster) -> list[dict[int, str]]:
    """The losses of a training in one piece, by rank and step."""
    place, ends = cluster.scenes["one_piece"]
    ends.result()
    made = losses(place)
    assert [[step for step, _ in of_rank] for of_rank in made] == [ALL] * 2
    return [dict(of_rank) for of_rank in made]


@scene
def steps_of_neighbours_do_not_meet(slurm: Slurm, place: Path) -> None:
    """Two steps of each of two jobs, where the numbers of job and step have one sum, as in an array with many steps."""
    script = (
        "until [[ -s ../target ]]; do sleep 0.05; done\n"
        "for ((number = SLURM_JOB_ID; number < $(<../target); number++)); do srun --ntasks=1 true; done\n"
        "mkdir a b\n"
        f"for at in a b; do srun --exact --ntasks=2 --chdir=$PWD/$at {training('run', 0.02)} & done\n"
        "wait -n; wait -n"
    )
    jobs = []
    for name in ("first", "second"):
        (place / name).mkdir()
        jobs.append(slurm.submit(place / name, script, "--ntasks=4", "--nodelist=node0"))
    (place / "target").write_text(jobs[-1])
    expect_completed(slurm, place, *jobs)


def test_steps_of_neighbours_do_not_meet(expected, place):
    for name in ("first/a", "first/b", "second/a", "second/b"):
        assert lines(place / name / "finished-1"), name
        expect_same(place / name, expected)


def expect_one_writer(slurm: Slurm, place: Path, *jobs: str) -> None:
    """Of two jobs with one run one is refused on both ranks, and the other goes on; a later one goes on from there."""
    states = wait_for_jobs(slurm, place, *jobs)
    assert sorted(states) == ["COMPLETED", "FAILED"], f"{states}\n{said(place)}"
    assert said(place).count("shardfast.Conflict: ") == 2, said(place)
    (place / "last").mkdir()
    expect_completed(slurm, place, slurm.submit(place / "last", f"srun {training('../run')}", *TWO))


@scene
def of_two_jobs_with_one_run_one_is_refused(slurm: Slurm, place: Path) -> None:
    jobs = []
    for name in ("0", "1"):
        (place / name).mkdir()
        # The first one is still there when the second one begins.
        waits = "WAITS_FOR=../1/losses-0 " if name == "0" else ""
        jobs.append(slurm.submit(place / name, f"{waits}srun {training('../run')}", *TWO))
        wait_for_step(place / "0", EVERY + 2)
    expect_one_writer(slurm, place, *jobs)


@scene
def of_two_tasks_of_an_array_with_one_run_one_is_refused(slurm: Slurm, place: Path) -> None:
    for name in ("0", "1"):
        (place / name).mkdir()
    other = "../$((1 - SLURM_ARRAY_TASK_ID))/losses-0"
    # Both have begun before one commits: a commit that the newer job has not restored fails both.
    script = f"cd $SLURM_ARRAY_TASK_ID; WAITS_FOR={other} srun {training('../run', 0.2)}"
    job = slurm.submit(place, script, "--array=0-1", *TWO)
    expect_one_writer(slurm, place, f"{job}_0", f"{job}_1")


def expect_one_training(place: Path, expected: list[dict[int, str]]) -> None:
    for name in ("0", "1", "last"):
        expect_same(place / name, expected)
    assert lines(place / "last" / "starts-1") == [f"{STEPS}"]


def test_of_two_jobs_with_one_run_one_is_refused(expected, place):
    expect_one_training(place, expected)


def test_of_two_tasks_of_an_array_with_one_run_one_is_refused(expected, place):
    expect_one_training(place, expected)


@scene
def a_job_waits_for_the_other_of_its_name(slurm: Slurm, place: Path) -> None:
    """With `--dependency=singleton`, as the guide says."""
    jobs = []
    for name in ("0", "1"):
        (place / name).mkdir()
        options = ("--job-name=gpt", "--dependency=singleton", *TWO)
        jobs.append(slurm.submit(place / name, f"srun {training('../run', 0.03)}", *options))
    wait_for_step(place / "0")
    assert slurm.state(jobs[1]) == ("PENDING", "Dependency")
    expect_completed(slurm, place, *jobs)


def test_a_job_waits_for_the_other_of_its_name(expected, place):
    expect_same(place / "0", expected)
    assert lines(place / "0" / "starts-1") == ["0"] and lines(place / "1" / "starts-1") == [f"{STEPS}"]


@scene
def a_program_without_srun_is_refused_unless_it_is_alone(slurm: Slurm, place: Path) -> None:
    refused, alone = training("refused"), training("run")
    expect_completed(slurm, place, slurm.submit(place, f"{refused} || WORLD_SIZE=1 {alone}", *TWO))


def test_a_program_without_srun_is_refused_unless_it_is_alone(expected, place):
    assert lines(place / "losses-0") == [f"{step} {loss}" for step, loss in expected[0].items()]
    assert not lines(place / "losses-1") and not list(place.glob("refused/step-*"))
    assert "SLURM_NTASKS=2: the job has 2 tasks, and its batch script has started this process alone" in said(place)


CONTRADICTIONS = {
    "WORLD_SIZE=2": "WORLD_SIZE=2: this process is one of 2, and does not know the others",
    "WORLD_SIZE=1": "WORLD_SIZE=1, but srun has started 2 tasks (SLURM_STEP_NUM_TASKS): unset WORLD_SIZE",
    "SHARDFAST_ROOT=node0:29999": "RANK: not set; this job needs it beside SHARDFAST_ROOT",
    "RANK=2 WORLD_SIZE=2 SHARDFAST_ROOT=node0:29999 SHARDFAST_TOKEN=x": "rank 2 is not below the world's size, 2",
}


@scene
def contradictions_are_refused_on_all_ranks(slurm: Slurm, place: Path) -> None:
    steps = [f"srun --label env {given} {training('run')} || true" for given in CONTRADICTIONS]
    of_one_rank = "srun --label --kill-on-bad-exit env RANK=0 WORLD_SIZE=2 SHARDFAST_ROOT=node0:29998 SHARDFAST_TOKEN=x"
    steps.append(f"{of_one_rank} {training('run')} || true")
    expect_completed(slurm, place, slurm.submit(place, "\n".join(steps), *TWO))


def test_contradictions_are_refused_on_all_ranks(place):
    printed = said(place).splitlines()
    for expected in CONTRADICTIONS.values():
        for rank in range(2):
            assert any(line.startswith(f"{rank}: shardfast.Invalid: {expected}") for line in printed), expected
    of_two = [line for line in printed if 'rank 0 of 2: cannot listen on "node0", port 29998: ' in line]
    assert len(of_two) == 1 and of_two[0].endswith("and only one of them RANK=0"), printed
    assert not (place / "run").exists()


@scene
def the_example_stops_and_goes_on(slurm: Slurm, place: Path) -> None:
    """As it stands, but for the number of steps."""
    (place / "examples").symlink_to(EXAMPLE.parent)
    script = (EXAMPLE / "train.sbatch").read_text()
    assert script.count(" 20000 ") == 1
    (place / "train.sbatch").write_text(script.replace(" 20000 ", " 600 "))
    options = ("--parsable", "--chdir", place, "--output", "out", "--nodelist=node0", "train.sbatch")
    path = f"{Path(sys.executable).parent}:{slurm.environment['PATH']}"
    job = slurm.call("env", f"--chdir={place}", f"PATH={path}", "sbatch", *options)
    wait_until(lambda: bool(list(place.glob("runs/slurm/step-*/COMMIT"))), place)
    slurm.call("scancel", "--signal=USR1", job)
    expect_completed(slurm, place, job)


def test_the_example_stops_and_goes_on(place):
    printed = lines(place / "train.log")
    assert len(printed) == 4 and printed[0] == printed[1] and printed[0].startswith("told to stop: step "), printed
    assert printed[2:] == [f"step 600: {600 * 601 // 2}"] * 2


@pytest.mark.parametrize("way", WAYS)
def test_no_loss_differs_after(cluster, expected, way):
    for life in cluster.lives[way]:
        for place in life.result():
            expect_same(place, expected)
            begins = [int(line) for line in lines(place / "starts-0")]
            assert len(begins) > 1 and begins == [int(line) for line in lines(place / "starts-1")], begins
            for made in losses(place):
                steps = [step for step, _ in made]
                assert steps == ALL if WAYS[way].is_told else sorted({*steps}) == ALL, (begins, steps)
            if not WAYS[way].is_told:
                assert all(begin % EVERY == 0 for begin in begins), begins
