"""Pods of `examples/kubernetes` as far as a machine without a cluster has them: process 1 gets SIGTERM.

Each pod is a network namespace and a PID namespace. What Kubernetes makes of the statuses is in `tests/kubernetes`.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from machines import Machines, machines

yaml = pytest.importorskip("yaml")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "kubernetes"
MANIFESTS = ["jobset-pvc", "jobset-s3", "trainjob-pvc", "trainjob-s3"]

DEADLINE_S = 180.0
LOOK_S = 0.02
ENDLESS = 1_000_000
"""Steps of a training that ends only if it is told to stop."""


PROGRAMS = Path(sys.executable).parent
POD = f'exec {EXAMPLE / "pod.sh"} "$@"'
"""The first process of the manifests' pods."""


def documents(name: str) -> dict[str, dict]:
    """The objects of a manifest by their kinds."""
    return {one["kind"]: one for one in yaml.safe_load_all((EXAMPLE / f"{name}.yaml").read_text())}


def job_of(objects: dict[str, dict]) -> dict:
    """The job's specification, in a JobSet or in the runtime of a TrainJob."""
    outer = objects["JobSet"] if "JobSet" in objects else objects["TrainingRuntime"]["spec"]["template"]
    (replicated,) = outer["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]


def container_of(objects: dict[str, dict]) -> dict:
    (container,) = job_of(objects)["template"]["spec"]["containers"]
    return container


def command_of(objects: dict[str, dict]) -> list[str]:
    return (
        objects["TrainJob"]["spec"]["trainer"]["command"] if "TrainJob" in objects else container_of(objects)["command"]
    )


class Pod:
    """A pod of the JobSet whose first process is its container's command."""

    def __init__(self, command: list[str], log: Path) -> None:
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out)

    def said(self) -> list[str]:
        """What the ranks say of their ends."""
        return [line for line in self.log.read_text().splitlines() if line.startswith(("told to stop", "done"))]

    def first_process(self) -> int:
        return child_of(self.process.pid)

    def terminate(self) -> None:
        """Sends SIGTERM to process 1, from outside, as a kubelet does."""
        os.kill(self.first_process(), signal.SIGTERM)

    def wait(self) -> int:
        return self.process.wait(DEADLINE_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def children_of(process: int) -> list[int]:
    return [*map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())]


def child_of(process: int) -> int:
    (child,) = children_of(process)
    return child


def wait_until(happened: Callable[[], bool], *pods: Pod) -> None:
    """Waits for it while these pods run."""
    until = time.monotonic() + DEADLINE_S
    while not happened():
        is_over = time.monotonic() > until or any(pod.process.poll() is not None for pod in pods)
        assert not is_over or happened(), "\n\n".join(pod.log.read_text()[-3000:] for pod in pods)
        time.sleep(LOOK_S)


class Group:
    """Pods of one job with the manifest's environment, below a directory."""

    def __init__(self, made: Machines, place: Path, ends: ExitStack) -> None:
        self.machines, self.place, self.run, self._ends = made, place, place / "run", ends
        self.objects = documents("jobset-pvc")

    def environment(self, at: int, count: int) -> dict[str, str]:
        given = {one["name"]: one.get("value", str(at)) for one in container_of(self.objects)["env"]}
        given["PET_MASTER_ADDR"] = self.machines.address(0)  # no name server is here
        given["PET_NNODES"] = str(count)
        return {**given, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}

    def start(self, at: int, steps: int | str, count: int = 1, first: str = POD, **changed: str) -> Pod:
        """Starts pod ``at`` of ``count``. ``first`` is the script of its first process, with torchrun's arguments."""
        assert command_of(self.objects)[:2] == ["/app/pod.sh", "/app/train.py"]
        command = ["sh", "-c", first, "sh", str(EXAMPLE / "train.py"), str(self.run), str(steps)]
        variables = {"PATH": f"{PROGRAMS}:{os.environ['PATH']}", **self.environment(at, count), **changed}
        set_ones = ["env", *(f"{name}={value}" for name, value in variables.items())]
        entering = self.machines.entering(at, dies_as_one=True)
        pod = Pod([*entering, *set_ones, *command], self.place / f"pod-{at}-{len([*self.place.iterdir()])}")
        self._ends.callback(pod.close)
        return pod

    def wait_for_commit(self, *pods: Pod) -> None:
        """Waits until a step of these pods is durable."""
        wait_until(lambda: any(self.run.glob("step-*/COMMIT")), *pods)


@pytest.fixture(scope="module")
def network():
    """Two machines for all tests: the kernel takes down links after the command for that has returned."""
    with machines(2) as made:
        yield made


@pytest.fixture
def group(network, tmp_path):
    with ExitStack() as ends:
        (tmp_path / "pods").mkdir()
        yield Group(network, tmp_path / "pods", ends)


def step_of(line: str) -> int:
    return int(re.fullmatch(r"told to stop: step (\d+) is durable", line)[1])


campaign = pytest.mark.campaign


@pytest.mark.parametrize("told", [pytest.param(0, marks=campaign), 1])
def test_one_pod_is_told_and_all_stop_after_one_step_and_go_on(group, told):
    pods = [group.start(at, ENDLESS, count=2) for at in range(2)]
    group.wait_for_commit(*pods)
    pods[told].terminate()
    assert pods[told].wait() == 1, pods[told].log.read_text()
    other = pods[1 - told]
    wait_until(lambda: len(other.said()) == 1)
    if told == 0:
        # The store of the rendezvous went with pod 0, so that torchrun waits no more.
        assert other.wait() == 0, other.log.read_text()
    else:
        # Its torchrun waits 300 s for the other one, and heeds no signal then. Kubernetes takes the pods away before.
        other.terminate()
        assert other.wait() == 1, other.log.read_text()
    (step,) = {step_of(line) for pod in pods for line in pod.said()}
    assert (group.run / f"step-{step:08}" / "COMMIT").exists()

    again = [group.start(at, step + 60, count=2) for at in range(2)]
    assert [pod.wait() for pod in again] == [0, 0], [pod.log.read_text() for pod in again]
    assert [pod.said() for pod in again] == [[f"done: step {step + 60} is durable"]] * 2


TWO_RANKS = {"PET_NPROC_PER_NODE": "2"}


@campaign
def test_the_ranks_have_the_whole_grace_period(group):
    """However long `torchrun` would give them."""
    pod = group.start(0, ENDLESS, **TWO_RANKS, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="0")
    group.wait_for_commit(pod)
    pod.terminate()
    pod.terminate()
    assert pod.wait() == 1
    assert len(pod.said()) == 2 and len({*map(step_of, pod.said())}) == 1, pod.log.read_text()


@campaign
def test_a_pod_that_is_told_before_its_ranks_begin_ends(group):
    pod = group.start(0, ENDLESS, first=POD.replace("exec", "echo begins; exec"), **TWO_RANKS)
    wait_until(lambda: "begins" in pod.log.read_text(), pod)
    wait_until(lambda: children_of(pod.first_process()) != [], pod)
    pod.terminate()
    assert pod.wait() == 1
    assert pod.said() == []


@campaign
def test_a_rank_that_fails_makes_the_pod_fail(group):
    pod = group.start(0, "not-a-number", **TWO_RANKS)
    assert pod.wait() == 1
    assert "ValueError" in pod.log.read_text()


@pytest.mark.parametrize(("first", "status"), [('exec {} --no-such-option "$@"', 2), ('PATH=/bin exec {} "$@"', 127)])
def test_a_command_that_cannot_work_fails_the_job_at_once(group, first, status):
    (rule,) = (one for one in job_of(group.objects)["podFailurePolicy"]["rules"] if "onExitCodes" in one)
    pod = group.start(0, 1, first=first.format(EXAMPLE / "pod.sh"))
    assert pod.wait() == status and status in rule["onExitCodes"]["values"]


@campaign
def test_another_shell_as_first_process_keeps_the_signal_to_itself(group):
    pod = group.start(0, 1500, first='torchrun "$@"; exit $?', **TWO_RANKS)
    group.wait_for_commit(pod)
    pod.terminate()
    assert pod.wait() == 0
    assert pod.said() == ["done: step 1500 is durable"] * 2


@campaign
def test_torchrun_as_first_process_kills_ranks_that_take_longer_than_it_waits(group):
    """The page says so: 30 s, and before PyTorch 2.12 no variable changes that."""
    pod = group.start(0, ENDLESS, first='exec torchrun "$@"', **TWO_RANKS, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="0")
    group.wait_for_commit(pod)
    pod.terminate()
    assert pod.wait() == 1
    assert pod.said() == []


@campaign
def test_ranks_that_are_told_without_their_torchrun_make_the_pod_succeed(group):
    """A preStop hook that tells them would do so: the page says why the manifests have none."""
    pod = group.start(0, ENDLESS, first='exec torchrun "$@"', **TWO_RANKS)
    group.wait_for_commit(pod)
    os.kill(children_of(pod.first_process())[0], signal.SIGTERM)
    assert pod.wait() == 0
    assert len(pod.said()) == 2


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_save_has_less_time_than_the_pod(name):
    within = int(re.search(r'within="(\d+)s"', (EXAMPLE / "train.py").read_text())[1])
    assert 30 < within < job_of(documents(name))["template"]["spec"]["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_differ_in_what_they_are_for_alone(name):
    """One job in all of them, but for the storage, and for what Kubeflow adds by itself."""
    objects, reference = documents(name), documents("jobset-pvc")
    found, expected = job_of(objects), job_of(reference)
    assert found["podFailurePolicy"] == expected["podFailurePolicy"] and found["backoffLimit"] == 0
    outer = objects["JobSet"] if "JobSet" in objects else objects["TrainingRuntime"]["spec"]["template"]
    assert outer["spec"]["failurePolicy"] == reference["JobSet"]["spec"]["failurePolicy"]
    assert command_of(objects) == [*command_of(reference)[:2], PLACES[name.split("-")[1]], *command_of(reference)[3:]]
    pod, account = found["template"]["spec"], objects.get("ServiceAccount")
    assert pod.get("serviceAccountName") == (account and account["metadata"]["name"])
    claims = [one["persistentVolumeClaim"]["claimName"] for one in pod["volumes"] if "persistentVolumeClaim" in one]
    assert claims == [one["metadata"]["name"] for kind, one in objects.items() if kind == "PersistentVolumeClaim"]
    assert (account is None) != (claims == [])


PLACES = {"pvc": "/runs/gpt", "s3": "s3://bucket/runs/gpt"}


@pytest.mark.parametrize("name", ["jobset-pvc", "jobset-s3"])
def test_pod_0_is_named_as_jobset_names_it(name):
    jobset = documents(name)["JobSet"]
    (replicated,) = jobset["spec"]["replicatedJobs"]
    names = {one["name"]: one.get("value") for one in container_of({"JobSet": jobset})["env"]}
    set_name = jobset["metadata"]["name"]
    assert names["PET_MASTER_ADDR"] == f"{set_name}-{replicated['name']}-0-0.{set_name}"
    job = replicated["template"]["spec"]
    assert names["PET_NNODES"] == str(job["parallelism"]) == str(job["completions"])


def test_a_train_job_names_the_runtime_beside_it():
    for name in ("trainjob-pvc", "trainjob-s3"):
        objects = documents(name)
        reference = objects["TrainJob"]["spec"]["runtimeRef"]
        runtime = objects["TrainingRuntime"]
        assert reference["name"] == runtime["metadata"]["name"] and reference["kind"] == runtime["kind"]
        assert runtime["apiVersion"].startswith(f"{reference['apiGroup']}/")
