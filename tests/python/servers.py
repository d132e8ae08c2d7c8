"""Real storage servers, which `scripts/servers.sh` installs and starts; they end with this process."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "servers.sh"


VARIABLE = "variable:"


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


@contextmanager
def started(name: str) -> Iterator[str]:
    installed = subprocess.run([SCRIPT, "install", name], check=False, capture_output=True, text=True)
    if installed.returncode != 0:
        assert "CI" not in os.environ, installed.stderr
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
