"""Real servers of object storage, which `scripts/servers.sh` installs and starts; they end with this process."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "servers.sh"


class Server:
    """A server with an empty bucket."""

    def __init__(self, line: str) -> None:
        values = dict(pair.split("=", 1) for pair in line.split())
        self.endpoint, self.bucket, self.pid = values["url"], values["bucket"], int(values["pid"])
        self.key, self.secret = values["key"], values["secret"]

    def s3(self, prefix: str) -> str:
        return f"s3://{self.bucket}/{prefix}?endpoint={self.endpoint}"

    @property
    def environment(self) -> dict[str, str]:
        return {"AWS_ACCESS_KEY_ID": self.key, "AWS_SECRET_ACCESS_KEY": self.secret}


@contextmanager
def running(name: str) -> Iterator[Server]:
    """The server of that name; skips the test where it cannot be installed, but not in CI, which has all it needs."""
    installed = subprocess.run([SCRIPT, "install", name], check=False, capture_output=True, text=True)
    if installed.returncode != 0:
        assert "CI" not in os.environ, installed.stderr
        pytest.skip(f"{name} cannot be installed on this machine: {installed.stderr.strip()}")
    start = [SCRIPT, "start", "--with", str(os.getpid()), name]
    server = Server(subprocess.run(start, check=True, stdout=subprocess.PIPE, text=True).stdout)
    try:
        yield server
    finally:
        subprocess.run([SCRIPT, "stop", str(server.pid)], check=True)
