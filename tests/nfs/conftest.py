"""Two guests and a server of NFS, which scripts/guests.sh makes ready; else no test is collected."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

collect_ignore_glob = [] if "SHARDFAST_TEST_GUESTS" in os.environ else ["test_*.py"]

from guests import PROGRAMS_SERVER, SERVER, Export, Ganesha, Guest, Namespace, Worker, mounts_of_host  # noqa: E402

SHARE = "/tmp/share"
READ_ONLY = "Access_Type = RO; Squash = No_Root_Squash;"


class Machines(NamedTuple):
    """Two guests, whose directory SHARE is one of this machine's, and their server."""

    guests: list[Guest]
    server: Ganesha
    share: Path
    namespace: Namespace


class Place(NamedTuple):
    """A directory of the share: what guests call it, and where it lies on the server's disk."""

    name: str
    here: Path


@pytest.fixture(scope="session")
def machines(tmp_path_factory) -> Iterator[Machines]:
    directory = tmp_path_factory.mktemp("nfs")
    share = directory / "share"
    share.mkdir()
    namespace = Namespace()
    try:
        programs = [Export(path, f"/host{path}".rstrip("/"), READ_ONLY) for path in mounts_of_host()]
        Ganesha(namespace, PROGRAMS_SERVER, directory / "programs", programs)
        given = [Export(share, "/share"), *exports(namespace, directory)]
        server = Ganesha(namespace, SERVER, directory / "server", given)
        guests = [Guest(namespace, directory, number) for number in range(2)]
        for guest in guests:
            guest.wait_until_ready()
            guest.mount("/share", SHARE)
        yield Machines(guests, server, share, namespace)
    finally:
        namespace.end()


def exports(namespace: Namespace, directory: Path) -> list[Export]:
    """Directories in which nothing can be saved, each for its own reason."""
    made = [directory / name for name in ("readonly", "squashed", "full")]
    for path in made:
        path.mkdir(mode=0o755)
    readonly, squashed, full = made
    namespace.run("mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", full)
    return [
        Export(readonly, "/readonly", READ_ONLY),
        Export(squashed, "/squashed", "Access_Type = RW; Squash = Root_Squash;"),
        Export(full, "/full"),
    ]


@pytest.fixture
def place(machines, request) -> Place:
    """A directory of the share for this test."""
    name = request.node.name.replace("[", "-").replace("]", "")
    (machines.share / name).mkdir()
    return Place(f"{SHARE}/{name}", machines.share / name)


def started(guests: list[Guest], port: int, ranks: int) -> list[Worker]:
    workers = [Worker(guest, port, ranks) for guest in guests]
    for worker in workers:
        worker.wait_until_ready()
    return workers


@pytest.fixture(scope="session")
def alone(machines) -> list[Worker]:
    """A process in each guest, each a job of its own."""
    return started(machines.guests, 100, 1)


@pytest.fixture(scope="session")
def ranks(machines) -> list[Worker]:
    """The two ranks of a job, one in each guest."""
    return started(machines.guests, 101, 2)
