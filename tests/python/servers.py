"""Real storage servers, which `scripts/servers.sh` installs and starts; they end with this process."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "servers.sh"


VARIABLE = "variable:"

MAY_BE_MISSING = ("slurm",)
"""Servers that CI lacks where it has no root, or another system than Debian 12."""


class Server:
    """A server with an empty bucket."""

    def __init__(self, line: str) -> None:
        values = dict(pair.split("=", 1) for pair in line.split())
        self.endpoint, self.bucket, self.pid = values["url"], values["bucket"], int(values["pid"])
        self.key, self.secret = values.get("key", ""), values.get("secret", "")
        self.values, self.directory = values, Path(values["dir"])

    def s3(self, prefix: str) -> str:
        return f"s3://{self.bucket}/{prefix}?endpoint={self.endpoint}"

    @property
    def environment(self) -> dict[str, str]:
        return {"AWS_ACCESS_KEY_ID": self.key, "AWS_SECRET_ACCESS_KEY": self.secret}


class Hdfs(Server):
    """A NameNode and three DataNodes; its bucket is a directory."""

    @property
    def namenode(self) -> str:
        """Host and port for calls."""
        return self.values["namenode"]

    @property
    def http(self) -> str:
        """Host and port of the NameNode's REST interface."""
        return self.values["http"]

    def hdfs(self, prefix: str) -> str:
        return f"{self.endpoint}/{self.bucket}/{prefix}"

    @property
    def environment(self) -> dict[str, str]:
        found = self.values.items()
        return {key.removeprefix(VARIABLE): value for key, value in found if key.startswith(VARIABLE)}

    def kill(self, node: str) -> None:
        """Kills a node, such as `namenode` or `datanode0`, which stays dead until `restart`."""
        os.kill(int((self.directory / f"{node}.pid").read_text()), signal.SIGKILL)

    def restart(self, node: str) -> None:
        """Starts a node again, with its data and its ports; kills it before, unless it is dead."""
        subprocess.run([SCRIPT, "restart", str(self.directory), node], check=True)

    def tool(self, *arguments: str) -> str:
        """What a tool of Hadoop's prints: its class, then its arguments."""
        command = [SCRIPT, "hadoop", str(self.directory), *arguments]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


class Slurm(Server):
    """A scheduler with six nodes, `node0` to `node5`, and the partitions `low` and `high`."""

    def __init__(self, line: str) -> None:
        super().__init__(line)
        self._asks, self._asked_at = threading.Lock(), 0.0
        self._states: dict[str, tuple[str, str]] = {}

    @property
    def environment(self) -> dict[str, str]:
        found = self.values.items()
        variables = {key.removeprefix(VARIABLE): value for key, value in found if key.startswith(VARIABLE)}
        return {**variables, "PATH": f"{self.values['programs']}:{os.environ['PATH']}"}

    def call(self, *command: object) -> str:
        """What a program of Slurm's prints."""
        environment = {**os.environ, **self.environment}
        called = subprocess.run([str(word) for word in command], capture_output=True, text=True, env=environment)
        assert called.returncode == 0, f"{command}: {called.stderr}"
        return called.stdout.strip()

    def submit(self, place: Path, script: str, *options: str) -> str:
        """The number of a new job, which works in this directory and adds to its file `out`."""
        (place / "job.sh").write_text(f"#!/bin/bash\nset -euo pipefail\n{script}\n")
        given = ("--chdir", place, "--output", "out", "--open-mode=append", "--time=5", *options)
        return self.call("sbatch", "--parsable", *given, place / "job.sh")

    def state(self, job: str) -> tuple[str, str]:
        """The state of a job, such as `PENDING`, and why it is in it; empty if it is no longer known."""
        with self._asks:  # many threads ask, and Slurm is asked three times a second
            if time.monotonic() > self._asked_at + 0.3:
                table = self.call("squeue", "--noheader", "--states=all", "--format=%i %T %r")
                self._states = {words[0]: (words[1], words[2]) for words in map(str.split, table.splitlines())}
                self._asked_at = time.monotonic()
            return self._states.get(job, ("", ""))


@contextmanager
def started(name: str) -> Iterator[str]:
    installed = subprocess.run([SCRIPT, "install", name], check=False, capture_output=True, text=True)
    if installed.returncode != 0:
        assert "CI" not in os.environ or name in MAY_BE_MISSING, installed.stderr
        pytest.skip(f"{name} cannot be installed on this machine: {installed.stderr.strip()}")
    start = [SCRIPT, "start", "--with", str(os.getpid()), name]
    line = subprocess.run(start, check=True, stdout=subprocess.PIPE, text=True).stdout
    try:
        yield line
    finally:
        subprocess.run([SCRIPT, "stop", str(Server(line).pid)], check=True)


@contextmanager
def running(name: str) -> Iterator[Server]:
    """The server of that name; skips the test where it cannot be installed, but not in CI, which has all it needs."""
    with started(name) as line:
        yield Server(line)


@contextmanager
def running_hdfs(name: str = "hdfs") -> Iterator[Hdfs]:
    """An HDFS, or `hdfs-ha` or `hdfs-kerberos`, as `running` does."""
    with started(name) as line:
        yield Hdfs(line)


@contextmanager
def running_slurm() -> Iterator[Slurm]:
    """A Slurm of its own, as `running` does, but also CI may lack it; its jobs end with it."""
    if os.geteuid() != 0:
        pytest.skip("Slurm runs in namespaces of its own, which takes root")
    with started("slurm") as line:
        yield Slurm(line)
