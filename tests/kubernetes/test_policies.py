"""What JobSet, Kubeflow Trainer and the controller of jobs make of how pods end."""

import pytest
from cluster import Cluster, condition, manifest, wait_for

JOBSET, TRAINER = "jobset.x-k8s.io/v1alpha2", "trainer.kubeflow.org/v1alpha1"
MAX_RESTARTS = 3


class Training:
    """A training of two pods in a namespace of its own."""

    def __init__(self, cluster: Cluster, namespace: str, name: str) -> None:
        self.cluster, self.namespace, self.is_train_job = cluster, namespace, name.startswith("trainjob")
        for one in manifest(name):
            cluster.create(one, namespace)
        self._seen: set[str] = set()

    def pods(self) -> list[dict]:
        """The pods of the next attempt."""
        found = self.cluster.pods(self.namespace, 2, (*self._seen,))
        self._seen |= {pod["metadata"]["uid"] for pod in found}
        return found

    def jobset(self) -> dict:
        return self.cluster.get("JobSet", JOBSET, self.namespace, "train")

    def restarts(self) -> tuple[int, int]:
        """How often all pods were started anew, and how often that counted."""
        status = self.jobset()["status"]
        return status.get("restarts", 0), status.get("restartsCountTowardsMax", 0)

    def wait_for_end(self, jobset: str, train_job: str) -> None:
        """Waits until the training has ended in this way."""
        wait_for(jobset, lambda: condition(self.jobset(), jobset))
        if self.is_train_job:
            read = lambda: self.cluster.get("TrainJob", TRAINER, self.namespace, "train")  # noqa: E731
            wait_for(train_job, lambda: condition(read(), train_job))


@pytest.fixture(params=["jobset-pvc", "trainjob-s3"])
def training(request, cluster, namespace):
    return Training(cluster, namespace, request.param)


@pytest.mark.parametrize("told", [0, 1])
def test_a_pod_that_is_preempted_starts_all_anew_and_does_not_count(training, told):
    for attempt in range(MAX_RESTARTS + 2):
        pods = training.pods()
        training.cluster.end(pods[1 - told], 0)
        training.cluster.end(pods[told], 1, is_disrupted=True)
        wait_for("a restart", lambda attempt=attempt: training.restarts() == (attempt + 1, 0))
    for pod in training.pods():
        training.cluster.end(pod, 0)
    training.wait_for_end("Completed", "Complete")


def test_pods_that_fail_start_all_anew_and_the_last_time_fails_the_training(training):
    for attempt in range(MAX_RESTARTS):
        training.cluster.end(training.pods()[attempt % 2], 1)
        wait_for("a restart", lambda attempt=attempt: training.restarts() == (attempt + 1, attempt + 1))
    training.cluster.end(training.pods()[0], 1)
    training.wait_for_end("Failed", "Failed")


@pytest.mark.parametrize("status", [2, 126, 127])
def test_a_command_that_cannot_work_fails_the_training_at_once(training, status):
    training.cluster.end(training.pods()[1], status)
    training.wait_for_end("Failed", "Failed")
    assert training.restarts() == (0, 0)


def test_a_pod_that_was_told_and_ends_with_0_would_be_complete(training):
    """Whatever its condition is: for this `pod.sh` ends with 1."""
    pods = training.pods()
    training.cluster.end(pods[0], 0)
    training.cluster.end(pods[1], 0, is_disrupted=True)
    training.wait_for_end("Completed", "Complete")
