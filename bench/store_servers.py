"""The servers of the measurements, MinIO or HDFS on loopback, and a TCP proxy before them that makes connections slow.

The proxy is this file as a process of its own. It moves bytes with ``splice``, from socket to socket through a pipe, so
that it takes little processor time from what is measured beside it. Bytes pass unchanged, so signatures stay valid.

    store_servers.py --to HOST:PORT... --with PID --rate BYTES --delay SECONDS --quantum BYTES [--at ADDRESS]

prints its ports, which are those of the servers with ``--at``, on this address.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import heapq
import itertools
import json
import os
import select
import socket
import subprocess
import sys
import time
import urllib.request
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from ranks import MIB, ROOT, TICKS_PER_SECOND

SCRIPT = ROOT / "scripts" / "servers.sh"
REGION = "us-east-1"
MINIO, HDFS = "minio", "hdfs"


@dataclass(frozen=True)
class Link:
    """The slowness of each connection.

    Attributes:
        rate: Bytes per second and direction.
        delay_s: Before an answer begins, and before the first request of a connection.
        quantum_bytes: Bytes that a connection moves at once; more of them take less processor time.
    """

    rate: float
    delay_s: float
    quantum_bytes: int = 64 << 10


SLOW = Link(20e6, 0.03)
"""A connection as to a distant service."""

SLOW_STREAM = Link(20e6, 0.0, quantum_bytes=256 << 10)
"""A connection to a DataNode, on which one stream moves at 20 MB/s."""


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
        return cpu_s_of(self.pid)


DATANODES = ("datanode0", "datanode1", "datanode2")
BY_NAME = "127.0.0.2"
"""Address that DataNodes give as their host name: a client that uses names reaches what listens there."""

OF_DATANODES = {
    *("SendHeartbeat", "BlockReport", "BlockReceivedAndDeleted", "VersionRequest", "RegisterDatanode", "(external)"),
    "RenewLease",
}
"""Calls that DataNodes make, and those that a client makes by the clock."""


@dataclass(frozen=True)
class Cluster:
    """An HDFS of a NameNode and three DataNodes, as a client sees it whose configuration is in ``configuration``.

    Attributes:
        root: The URL of an empty directory.
        directory: The folder of the servers.
        http: Host and port of the NameNode's REST interface.
        configuration: A folder with Hadoop's files for a client.
    """

    root: str
    directory: Path
    http: str
    configuration: Path

    @property
    def environment(self) -> dict[str, str]:
        """The variables in which clients find their configuration."""
        return {"HADOOP_CONF_DIR": str(self.configuration), "HADOOP_USER_NAME": self.user}

    @property
    def user(self) -> str:
        return self.directory.owner()

    @property
    def server(self) -> str:
        """The URL without a path."""
        return self.root[: -len(urlsplit(self.root).path)]

    def path(self, prefix: str) -> str:
        return f"{urlsplit(self.root).path}/{prefix}"

    def url(self, prefix: str) -> str:
        """A place below it for Shardfast and fsspec."""
        return f"{self.root}/{prefix}"

    def cpu_s(self) -> float:
        """User and system seconds of all nodes."""
        return sum(self.cpu_s_by_node().values())

    def cpu_s_by_node(self) -> dict[str, float]:
        nodes = ("namenode", *DATANODES)
        return {node: cpu_s_of(int((self.directory / f"{node}.pid").read_text())) for node in nodes}

    def calls(self) -> dict[str, int]:
        """Clients' calls that the NameNode has counted by kind; an error's name stands for a call that failed.

        The NameNode answers from a cache for ten seconds. Calls over its REST interface are not in it.
        """
        query = "Hadoop:service=NameNode,name=RpcDetailedActivityForPort*"
        with urllib.request.urlopen(f"http://{self.http}/jmx?qry={query}") as answer:
            beans = json.load(answer)["beans"]
        ending = "NumOps"
        counts = {
            name.removesuffix(ending): int(count)
            for bean in beans
            for name, count in bean.items()
            if name.endswith(ending) and not name.startswith("Overall")
        }
        return {name: count for name, count in counts.items() if name not in OF_DATANODES}


def cpu_s_of(process: int) -> float:
    """User and system seconds of a process."""
    stat = Path(f"/proc/{process}/stat").read_text()
    fields = stat[stat.rindex(")") + 2 :].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND


def missing(name: str = MINIO) -> str | None:
    """Installs the server; why that does not work here."""
    installed = subprocess.run([SCRIPT, "install", name], check=False, stderr=subprocess.PIPE, text=True)
    return installed.stderr.strip() if installed.returncode else None


@contextmanager
def _started(name: str) -> Iterator[dict[str, str]]:
    """Starts a server, which ends with this process at the latest; yields what the script prints of it."""
    start = [SCRIPT, "start", "--with", str(os.getpid()), name]
    line = subprocess.run(start, check=True, stdout=subprocess.PIPE, text=True).stdout
    values = dict(pair.split("=", 1) for pair in line.split())
    try:
        yield values
    finally:
        subprocess.run([SCRIPT, "stop", values["pid"]], check=True)


@contextmanager
def running() -> Iterator[Server]:
    """A new server."""
    with _started(MINIO) as values:
        yield Server(values["url"], values["bucket"], values["key"], values["secret"], int(values["pid"]))


@contextmanager
def running_hdfs(settings: dict[str, str]) -> Iterator[Cluster]:
    """A new HDFS whose clients have these settings."""
    with _started(HDFS) as values:
        directory = Path(values["dir"])
        root = f"{values['url']}/{values['bucket']}"
        yield configured(Cluster(root, directory, values["http"], directory / "conf"), "client", settings)


def configured(cluster: Cluster, name: str, settings: dict[str, str]) -> Cluster:
    """``cluster`` for clients that have these settings beside those that they had."""
    folder = cluster.directory / name
    folder.mkdir()
    for file in cluster.configuration.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    site = folder / "hdfs-site.xml"
    root = ET.parse(site).getroot()
    for one in list(root):
        if one.findtext("name") in settings:
            root.remove(one)
    for key, value in settings.items():
        one = ET.SubElement(root, "property")
        ET.SubElement(one, "name").text, ET.SubElement(one, "value").text = key, value
    site.write_bytes(ET.tostring(root))
    return replace(cluster, configuration=folder)


@contextmanager
def _proxied(servers: list[str], link: Link, *options: str) -> Iterator[list[int]]:
    """The ports of a proxy before ``servers``."""
    command = [sys.executable, __file__, "--to", *servers, "--with", str(os.getpid()), f"--rate={link.rate}"]
    command += [f"--delay={link.delay_s}", f"--quantum={link.quantum_bytes}", *options]
    proxy = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert proxy.stdout is not None
        yield [int(port) for port in proxy.stdout.readline().split()]
    finally:
        proxy.kill()
        proxy.wait()


@contextmanager
def behind(server: Server, link: Link) -> Iterator[Server]:
    """``server`` behind a proxy of its own."""
    with _proxied([urlsplit(server.endpoint).netloc], link) as ports:
        yield replace(server, endpoint=f"http://127.0.0.1:{ports[0]}")


@contextmanager
def datanodes_behind(cluster: Cluster, link: Link) -> Iterator[Cluster]:
    """``cluster`` for clients that reach its DataNodes through a proxy; the NameNode they reach directly."""
    addresses = [(cluster.directory / f"{node}.address").read_text().strip() for node in DATANODES]
    with _proxied(addresses, link, f"--at={BY_NAME}"):
        yield configured(cluster, "slow", {"dfs.client.use.datanode.hostname": "true"})


PARENT_CHECK_S = 1.0


class Flow:
    """One direction of a connection."""

    def __init__(self, link: Link, source: socket.socket, sink: socket.socket) -> None:
        self.rate, self.quantum_bytes, self.source, self.sink = link.rate, link.quantum_bytes, source, sink
        self._out, self._in = os.pipe2(os.O_NONBLOCK)
        with contextlib.suppress(PermissionError):  # what a user's pipes may hold together is limited
            fcntl.fcntl(self._in, fcntl.F_SETPIPE_SZ, MIB)
        self._in_pipe = 0
        self.free_at = 0.0
        self.is_ended = False

    def flush(self) -> bool:
        """Whether nothing is left in the pipe."""
        while self._in_pipe:
            try:
                self._in_pipe -= os.splice(self._out, self.sink.fileno(), self._in_pipe)
            except BlockingIOError:
                return False
        return True

    def take(self, now: float) -> None:
        """Moves up to a quantum of bytes from the source, or what says that there are no more.

        Raises:
            BlockingIOError: If the source has none at present.
        """
        taken = os.splice(self.source.fileno(), self._in, self.quantum_bytes)
        if taken == 0:
            self.is_ended = True
            self.sink.shutdown(socket.SHUT_WR)
            return
        self._in_pipe = taken
        # A pause is no credit beyond one quantum.
        self.free_at = max(self.free_at, now - self.quantum_bytes / self.rate) + taken / self.rate
        self.flush()

    def close(self) -> None:
        os.close(self._out)
        os.close(self._in)


class Connection:
    """A client's connection, and the one to the server for it."""

    def __init__(self, link: Link, client: socket.socket, server: socket.socket) -> None:
        self.link, self.client, self.server = link, client, server
        self.requests, self.answers = Flow(link, client, server), Flow(link, server, client)
        self.is_answer_due = False
        self.request_at = time.monotonic() + link.delay_s
        self.answer_at = 0.0

    def advance(self, now: float) -> float | None:
        """Moves what may move; when to try again, None: when a socket becomes ready.

        Raises:
            OSError: If the connection has ended. A side that has closed still gets what the other one sends.
        """
        wakes = [*self._requests(now), *self._answers(now)]
        if self.requests.is_ended and self.answers.is_ended:
            raise ConnectionError("both sides have closed")
        return min(wakes, default=None)

    def _requests(self, now: float) -> Iterator[float]:
        flow = self.requests
        while not flow.is_ended and flow.flush():
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
        while not flow.is_ended and flow.flush():
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

    def __init__(self, link: Link, servers: list[tuple[str, int]], at: str | None) -> None:
        self.link = link
        self._epoll = select.epoll()
        self._by_descriptor: dict[int, Connection] = {}
        self._wakes: list[tuple[float, int, Connection]] = []
        self._number = itertools.count()
        self._listeners: dict[int, tuple[socket.socket, tuple[str, int]]] = {}
        for server in servers:
            here = (at, server[1]) if at else ("127.0.0.1", 0)
            listener = socket.create_server(here, backlog=1024)
            self._listeners[listener.fileno()] = (listener, server)
            self._epoll.register(listener, select.EPOLLIN)
        self.ports = [listener.getsockname()[1] for listener, _ in self._listeners.values()]

    def serve(self, parent: int) -> None:
        while os.path.exists(f"/proc/{parent}"):
            now = time.monotonic()
            until = self._wakes[0][0] - now if self._wakes else PARENT_CHECK_S
            due: dict[int, Connection] = {}
            for descriptor, _ in self._epoll.poll(min(max(until, 0), PARENT_CHECK_S)):
                if descriptor in self._listeners:
                    self._accept(*self._listeners[descriptor])
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
            for one in (connection.client, connection.server):
                del self._by_descriptor[one.fileno()]
            connection.close()
            return
        if wake is not None:
            heapq.heappush(self._wakes, (wake, next(self._number), connection))

    def _accept(self, listener: socket.socket, to: tuple[str, int]) -> None:
        client, _ = listener.accept()
        server = socket.create_connection(to)
        connection = Connection(self.link, client, server)
        for one in (client, server):
            one.setblocking(False)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._by_descriptor[one.fileno()] = connection
            self._epoll.register(one, select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", required=True, nargs="+")
    parser.add_argument("--with", type=int, required=True, dest="parent")
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--delay", type=float, required=True)
    parser.add_argument("--quantum", type=int, required=True)
    parser.add_argument("--at")
    args = parser.parse_args()
    servers = [(host, int(port)) for host, port in (one.rsplit(":", 1) for one in args.to)]
    proxy = Proxy(Link(args.rate, args.delay, args.quantum), servers, args.at)
    print(*proxy.ports, flush=True)
    proxy.serve(args.parent)


if __name__ == "__main__":
    main()
