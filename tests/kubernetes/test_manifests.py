"""The API server accepts each manifest and refuses changed ones; controllers make the pods that are expected."""

import copy

import pytest
from cluster import Refused, manifest

MANIFESTS = ["jobset-pvc", "jobset-s3", "trainjob-pvc", "trainjob-s3"]


def inside(one: dict, *path: str | int) -> dict:
    for name in path:
        one = one[name]
    return one


JOB_OF = {
    "JobSet": ("spec", "replicatedJobs", 0, "template", "spec"),
    "TrainingRuntime": ("spec", "template", "spec", "replicatedJobs", 0, "template", "spec"),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_server_accepts_a_manifest(cluster, namespace, name):
    for one in manifest(name):
        cluster.create(one, namespace, dry_run=True)
        made = cluster.create(one, namespace)
        assert made["metadata"]["uid"]


def misspelt(job: dict) -> None:
    job["template"]["spec"]["terminationGracePeriodSecond"] = 5


def wrong_type(job: dict) -> None:
    job["template"]["spec"]["terminationGracePeriodSeconds"] = "120s"


def unknown_policy(job: dict) -> None:
    job["podFailurePolicy"]["rules"][0]["onPodCondition"] = []


def text_for_list(job: dict) -> None:
    job["template"]["spec"]["containers"][0]["command"] = "torchrun"


def no_container(job: dict) -> None:
    del job["template"]["spec"]["containers"]


BROKEN = {
    misspelt: 'unknown field \\"spec',
    wrong_type: "terminationGracePeriodSeconds",
    unknown_policy: "onPodCondition",
    text_for_list: "command",
    no_container: "containers",
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
@pytest.mark.parametrize("name", MANIFESTS)
def test_the_server_refuses_a_broken_manifest(cluster, name, broken):
    (one,) = (copy.deepcopy(one) for one in manifest(name) if one["kind"] in JOB_OF)
    broken(inside(one, *JOB_OF[one["kind"]]))
    with pytest.raises(Refused) as refused:
        cluster.create(one, dry_run=True)
    assert BROKEN[broken] in str(refused.value)


def test_a_failure_policy_that_jobset_does_not_know_is_refused(cluster):
    one = manifest("jobset-pvc")[1]
    one["spec"]["failurePolicy"]["rules"][0]["onJobFailureReasons"] = ["PodFailurePolicies"]
    with pytest.raises(Refused, match="PodFailurePolicies"):
        cluster.create(one, dry_run=True)


def options_of(pod: dict) -> dict[str, object]:
    """What torchrun reads of the environment."""
    (container,) = pod["spec"]["containers"]
    return {
        one["name"]: one.get("value") or one["valueFrom"]["fieldRef"]["fieldPath"]
        for one in container["env"]
        if one["name"].startswith("PET_")
    }


@pytest.mark.parametrize("name", MANIFESTS)
def test_pods_are_those_that_the_training_expects(cluster, namespace, name):
    for one in manifest(name):
        cluster.create(one, namespace)
    pods = cluster.pods(namespace, 2)
    names = {cluster_name(pod) for pod in pods}
    expected = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_NODE_RANK": "metadata.annotations['batch.kubernetes.io/job-completion-index']",
        "PET_MASTER_ADDR": cluster_name(pods[0]),
        "PET_MASTER_PORT": "29500",
    }
    for index, pod in enumerate(pods):
        spec, (container,) = pod["spec"], pod["spec"]["containers"]
        assert options_of(pod) | {"PET_MASTER_PORT": "29500"} == expected
        assert pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"] == str(index)
        assert (spec["restartPolicy"], spec["terminationGracePeriodSeconds"]) == ("Never", 120)
        assert container["command"][:2] == ["/app/pod.sh", "/app/train.py"]
    assert len(names) == 2
    # A name of a pod is the service's, which has no address of its own.
    (service,) = (one for one in cluster.every("Service", "v1", namespace) if one["spec"]["clusterIP"] == "None")
    assert service["metadata"]["name"] == pods[0]["spec"]["subdomain"]
    assert service["spec"]["publishNotReadyAddresses"]


def cluster_name(pod: dict) -> str:
    return f"{pod['spec']['hostname']}.{pod['spec']['subdomain']}"
