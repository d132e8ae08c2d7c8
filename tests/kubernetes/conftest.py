"""Tests with programs of Kubernetes that scripts/kubernetes.sh builds and names; else none is collected."""

import os
import sys
from pathlib import Path

import pytest

collect_ignore_glob = [] if "SHARDFAST_TEST_KUBERNETES" in os.environ else ["test_*.py"]

sys.path.append(str(Path(__file__).parents[1] / "python"))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """A cluster without nodes."""
    from cluster import Cluster

    with Cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture
def namespace(cluster, request):
    """A namespace of the test's own."""
    return cluster.namespace(request.node.name)
