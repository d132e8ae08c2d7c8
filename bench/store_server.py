"""The object store of the measurements, MinIO on loopback, and proxies before it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ranks import TICKS_PER_SECOND

SCRIPT = Path(__file__).parent.parent / "scripts" / "servers.sh"
PROXY = Path(__file__).parent / "store_proxy.py"
DISCARD = Path(__file__).parent / "store_discard.py"
REGION = "us-east-1"
NAME = "minio"
SLOW = {"rate": 20e6, "delay": 0.03}
"""A connection as to a distant service: bytes per second, seconds until an answer begins."""


@dataclass(frozen=True)
class Server:
    """An S3 server with an empty bucket, as a client sees it: directly, or through a proxy.

    Attributes:
        endpoint: Its URL.
        bucket: The bucket.
        key: The access key.
        secret: The secret key.
        pid: The process of the server, also behind a proxy.
        control: The port at which the proxy tells its requests; None: no proxy.
    """

    endpoint: str
    bucket: str
    key: str
    secret: str
    pid: int
    control: int | None = None

    @property
    def environment(self) -> dict[str, str]:
        """What the clients of the ranks find their credentials and the server with."""
        return {
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def url(self, prefix: str) -> str:
        """A place below it for Shardfast."""
        return f"s3://{self.bucket}/{prefix}?endpoint={self.endpoint}"

    def cpu_s(self) -> float:
        """User and system seconds of the server."""
        stat = Path(f"/proc/{self.pid}/stat").read_text()
        fields = stat[stat.rindex(")") + 2 :].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND

    def exchanges(self) -> list[dict[str, Any]]:
        """The requests since the last call, in the order in which they began."""
        assert self.control is not None, "no proxy"
        with socket.create_connection(("127.0.0.1", self.control)) as connection:
            found = b"".join(iter(lambda: connection.recv(1 << 20), b""))
        exchanges: list[dict[str, Any]] = json.loads(found)
        return exchanges


def missing() -> str | None:
    """Installs the server; why that does not work here."""
    installed = subprocess.run([SCRIPT, "install", NAME], check=False, stderr=subprocess.PIPE, text=True)
    return installed.stderr.strip() if installed.returncode else None


@contextmanager
def running() -> Iterator[Server]:
    """A new server; it ends with this process at the latest."""
    start = [SCRIPT, "start", "--with", str(os.getpid()), NAME]
    line = subprocess.run(start, check=True, stdout=subprocess.PIPE, text=True).stdout
    values = dict(pair.split("=", 1) for pair in line.split())
    server = Server(values["url"], values["bucket"], values["key"], values["secret"], int(values["pid"]))
    try:
        yield server
    finally:
        subprocess.run([SCRIPT, "stop", str(server.pid)], check=True)


@contextmanager
def behind(server: Server, **options: float) -> Iterator[Server]:
    """``server`` behind a proxy of its own with these options of ``store_proxy.py``."""
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    command = [sys.executable, str(PROXY), "--to", urlsplit(server.endpoint).netloc, "--with", str(os.getpid())]
    proxy = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert proxy.stdout is not None
        port, control = map(int, proxy.stdout.readline().split())
        yield Server(f"http://127.0.0.1:{port}", server.bucket, server.key, server.secret, server.pid, control)
    finally:
        proxy.kill()
        proxy.wait()


@contextmanager
def discarding() -> Iterator[Server]:
    """A server that discards what it is sent; it ends with this process at the latest."""
    command = [sys.executable, str(DISCARD), "--with", str(os.getpid())]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        yield Server(f"http://127.0.0.1:{port}", "discarded", "key", "secret", process.pid)
    finally:
        process.kill()
        process.wait()
