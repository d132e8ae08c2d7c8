"""The object store of the measurements: MinIO on loopback, and a TCP proxy before it that makes connections slow.

The proxy is this file as a process of its own. It moves bytes with ``splice``, from socket to socket through a pipe, so
that it takes little processor time from what is measured beside it. Bytes pass unchanged, so signatures stay valid.

    store_servers.py --to HOST:PORT --with PID --rate BYTES --delay SECONDS

prints its port.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import heapq
import itertools
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from ranks import MIB, ROOT, TICKS_PER_SECOND

SCRIPT = ROOT / "scripts" / "servers.sh"
REGION = "us-east-1"
NAME = "minio"


@dataclass(frozen=True)
class Link:
    """The slowness of each connection.

    Attributes:
        rate: Bytes per second and direction.
        delay_s: Before an answer begins, and before the first request of a connection.
    """

    rate: float
    delay_s: float


SLOW = Link(20e6, 0.03)
"""A connection as to a distant service."""


@dataclass(frozen=True)
class Server:
    """An S3 server with an empty bucket, as a client sees it: directly, or through a proxy.

    Attributes:
        endpoint: Its URL.
        bucket: The bucket.
        key: The access key.
        secret: The secret key.
        pid: The process of the server, also behind a proxy.
    """

    endpoint: str
    bucket: str
    key: str
    secret: str
    pid: int

    @property
    def environment(self) -> dict[str, str]:
        """The variables in which the clients of the ranks find their credentials and the server."""
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
def behind(server: Server, link: Link) -> Iterator[Server]:
    """``server`` behind a proxy of its own."""
    command = [sys.executable, __file__, "--to", urlsplit(server.endpoint).netloc, "--with", str(os.getpid())]
    command += [f"--rate={link.rate}", f"--delay={link.delay_s}"]
    proxy = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert proxy.stdout is not None
        yield replace(server, endpoint=f"http://127.0.0.1:{int(proxy.stdout.readline())}")
    finally:
        proxy.kill()
        proxy.wait()


QUANTUM_BYTES = 64 << 10
"""Bytes that a connection moves at once: 3 ms at 20 MB/s."""

PARENT_CHECK_S = 1.0


class Flow:
    """One direction of a connection."""

    def __init__(self, rate: float, source: socket.socket, sink: socket.socket) -> None:
        self.rate, self.source, self.sink = rate, source, sink
        self._out, self._in = os.pipe2(os.O_NONBLOCK)
        with contextlib.suppress(PermissionError):  # what a user's pipes may hold together is limited
            fcntl.fcntl(self._in, fcntl.F_SETPIPE_SZ, MIB)
        self._in_pipe = 0
        self.free_at = 0.0

    def flush(self) -> bool:
        """Whether nothing is left in the pipe."""
        while self._in_pipe:
            try:
                self._in_pipe -= os.splice(self._out, self.sink.fileno(), self._in_pipe)
            except BlockingIOError:
                return False
        return True

    def take(self, now: float) -> None:
        """Moves up to a quantum of bytes from the source.

        Raises:
            BlockingIOError: If the source has none at present.
            ConnectionError: If the source has closed.
        """
        taken = os.splice(self.source.fileno(), self._in, QUANTUM_BYTES)
        if taken == 0:
            raise ConnectionError("a side has closed")
        self._in_pipe = taken
        # A pause is no credit beyond one quantum.
        self.free_at = max(self.free_at, now - QUANTUM_BYTES / self.rate) + taken / self.rate
        self.flush()

    def close(self) -> None:
        os.close(self._out)
        os.close(self._in)


class Connection:
    """A client's connection, and the one to the server for it."""

    def __init__(self, link: Link, client: socket.socket, server: socket.socket) -> None:
        self.link, self.client, self.server = link, client, server
        self.requests, self.answers = Flow(link.rate, client, server), Flow(link.rate, server, client)
        self.is_answer_due = False
        self.request_at = time.monotonic() + link.delay_s
        self.answer_at = 0.0

    def advance(self, now: float) -> float | None:
        """Moves what may move; when to try again, None: when a socket becomes ready."""
        wakes = [*self._requests(now), *self._answers(now)]
        return min(wakes, default=None)

    def _requests(self, now: float) -> Iterator[float]:
        flow = self.requests
        while flow.flush():
            wake = max(flow.free_at, self.request_at)
            if wake > now:
                yield wake
                return
            try:
                flow.take(now)
            except BlockingIOError:
                return
            self.is_answer_due = True

    def _answers(self, now: float) -> Iterator[float]:
        flow = self.answers
        while flow.flush():
            try:
                if self.is_answer_due:
                    self.server.recv(1, socket.MSG_PEEK)
                    self.answer_at = now + self.link.delay_s
                    self.is_answer_due = False
                wake = max(flow.free_at, self.answer_at)
                if wake > now:
                    yield wake
                    return
                flow.take(now)
            except BlockingIOError:
                return

    def close(self) -> None:
        for one in (self.requests, self.answers, self.client, self.server):
            one.close()


class Proxy:
    """All connections, in one thread."""

    def __init__(self, link: Link, to: tuple[str, int]) -> None:
        self.link, self.to = link, to
        self._epoll = select.epoll()
        self._by_descriptor: dict[int, Connection] = {}
        self._wakes: list[tuple[float, int, Connection]] = []
        self._number = itertools.count()
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self._epoll.register(self.listener, select.EPOLLIN)

    def serve(self, parent: int) -> None:
        while os.path.exists(f"/proc/{parent}"):
            now = time.monotonic()
            until = self._wakes[0][0] - now if self._wakes else PARENT_CHECK_S
            due: dict[int, Connection] = {}
            for descriptor, _ in self._epoll.poll(min(max(until, 0), PARENT_CHECK_S)):
                if descriptor == self.listener.fileno():
                    self._accept()
                elif descriptor in self._by_descriptor:
                    connection = self._by_descriptor[descriptor]
                    due[id(connection)] = connection
            now = time.monotonic()
            while self._wakes and self._wakes[0][0] <= now:
                connection = heapq.heappop(self._wakes)[2]
                due[id(connection)] = connection
            for connection in due.values():
                if connection.client.fileno() >= 0:
                    self._advance(connection)

    def _advance(self, connection: Connection) -> None:
        try:
            wake = connection.advance(time.monotonic())
        except OSError:
            # A side that closes ends both; a client that reads on after it has closed its own side is none of S3's.
            for one in (connection.client, connection.server):
                del self._by_descriptor[one.fileno()]
            connection.close()
            return
        if wake is not None:
            heapq.heappush(self._wakes, (wake, next(self._number), connection))

    def _accept(self) -> None:
        client, _ = self.listener.accept()
        server = socket.create_connection(self.to)
        connection = Connection(self.link, client, server)
        for one in (client, server):
            one.setblocking(False)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._by_descriptor[one.fileno()] = connection
            self._epoll.register(one, select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", required=True)
    parser.add_argument("--with", type=int, required=True, dest="parent")
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--delay", type=float, required=True)
    args = parser.parse_args()
    host, port = args.to.rsplit(":", 1)
    proxy = Proxy(Link(args.rate, args.delay), (host, int(port)))
    print(proxy.listener.getsockname()[1], flush=True)
    proxy.serve(args.parent)


if __name__ == "__main__":
    main()
