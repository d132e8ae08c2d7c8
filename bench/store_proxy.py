"""A TCP proxy before an object store: slow connections, late answers, and a list of all requests.

It is a process of its own. It moves bytes with ``splice``, from socket to socket through a pipe, so that it takes
little processor time from what is measured beside it. Bytes pass unchanged, so signatures stay valid. It reads the
heads of requests to know where they end; a body needs a ``Content-Length``, which all clients here send.

    store_proxy.py --to HOST:PORT --with PID [--rate BYTES] [--delay SECONDS] [--late-every N --late SECONDS]

It prints its port, and the port that answers each connection with the requests since the last one, as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import heapq
import itertools
import json
import os
import re
import select
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

HEAD_BYTES_MAX = 64 << 10
PIPE_BYTES = 1 << 20
QUANTUM_BYTES = 64 << 10
"""Bytes that a slow connection moves at once: 3 ms at 20 MB/s."""

PARENT_CHECK_S = 1.0
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class Link:
    """What the proxy does to each connection.

    Attributes:
        rate: Bytes per second and direction; 0: as fast as it goes.
        delay_s: Before an answer begins, and before the first request of a connection.
        late_every: One answer in so many is late; 0: none.
        late_s: By how much.
    """

    rate: float
    delay_s: float
    late_every: int
    late_s: float


@dataclass
class Exchange:
    """A request and its answer: bytes of both, heads included."""

    method: str
    target: str
    sent: int = 0
    received: int = 0
    is_late: bool = False


class Flow:
    """One direction of a connection."""

    def __init__(self, rate: float, source: socket.socket, sink: socket.socket) -> None:
        self.rate, self.source, self.sink = rate, source, sink
        self._out, self._in = os.pipe2(os.O_NONBLOCK)
        with contextlib.suppress(PermissionError):  # what a user's pipes may hold together is limited
            fcntl.fcntl(self._in, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
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

    def take(self, most: int, now: float) -> int:
        """Moves up to ``most`` bytes from the source; how many, 0 at its end.

        Raises:
            BlockingIOError: If the source has none at present.
        """
        taken = os.splice(self.source.fileno(), self._in, min(most, QUANTUM_BYTES if self.rate else PIPE_BYTES))
        self._in_pipe = taken
        if self.rate:
            # A pause is no credit beyond one quantum.
            self.free_at = max(self.free_at, now - QUANTUM_BYTES / self.rate) + taken / self.rate
        self.flush()
        return taken

    def close(self) -> None:
        os.close(self._out)
        os.close(self._in)


class Connection:
    def __init__(self, link: Link, client: socket.socket, server: socket.socket, proxy: Proxy) -> None:
        self.link, self.client, self.server, self.proxy = link, client, server, proxy
        self.requests, self.answers = Flow(link.rate, client, server), Flow(link.rate, server, client)
        self.exchange: Exchange | None = None
        self.left = 0  # bytes of the request
        self.turned = False  # whether an answer is due to what was sent
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
                if self.left == 0 and not self._begin():
                    return
                taken = flow.take(self.left, now)
            except BlockingIOError:
                return
            if taken == 0:
                raise ConnectionError("the client went away in the middle of a request")
            assert self.exchange is not None
            self.left -= taken
            self.exchange.sent += taken
            self.turned = True
            if self.left == 0:
                self.exchange.is_late = self.proxy.is_late()

    def _begin(self) -> bool:
        """Reads the head of the next request, which stays in the socket; whether it is all there."""
        head = self.client.recv(HEAD_BYTES_MAX, socket.MSG_PEEK)
        if not head:
            raise ConnectionError("the client has no more requests")
        end = head.find(b"\r\n\r\n")
        if end < 0:
            if len(head) == HEAD_BYTES_MAX:
                raise ConnectionError("the head of a request is too long")
            return False
        length = LENGTH.search(head, 0, end + 2)
        self.left = end + 4 + (int(length[1]) if length else 0)
        method, target, _ = head[: head.index(b"\r\n")].decode("latin-1").split(" ", 2)
        self.exchange = Exchange(method, target)
        self.proxy.exchanges.append(self.exchange)
        return True

    def _answers(self, now: float) -> Iterator[float]:
        flow = self.answers
        while flow.flush():
            try:
                if self.turned:
                    self.server.recv(1, socket.MSG_PEEK)
                    assert self.exchange is not None
                    is_late = self.left == 0 and self.exchange.is_late
                    self.answer_at = now + self.link.delay_s + (self.link.late_s if is_late else 0)
                    self.turned = False
                wake = max(flow.free_at, self.answer_at)
                if wake > now:
                    yield wake
                    return
                taken = flow.take(PIPE_BYTES, now)
            except BlockingIOError:
                return
            if taken == 0:
                raise ConnectionError("the server has closed")
            if self.exchange is not None:
                self.exchange.received += taken

    def close(self) -> None:
        for one in (self.requests, self.answers, self.client, self.server):
            one.close()


class Proxy:
    def __init__(self, link: Link, to: tuple[str, int]) -> None:
        self.link, self.to = link, to
        self.exchanges: list[Exchange] = []
        self.answered = 0
        self._epoll = select.epoll()
        self._by_descriptor: dict[int, Connection] = {}
        self._wakes: list[tuple[float, int, Connection]] = []
        self._number = itertools.count()
        self.listener, self.control = _listener(), _listener()
        for listener in (self.listener, self.control):
            self._epoll.register(listener, select.EPOLLIN)

    def is_late(self) -> bool:
        """Whether the answer to the request that has just ended is late: the middle one of each run of so many."""
        every = self.link.late_every
        self.answered += 1
        return every > 0 and self.answered % every == every // 2

    def serve(self, parent: int) -> None:
        while os.path.exists(f"/proc/{parent}"):
            now = time.monotonic()
            until = self._wakes[0][0] - now if self._wakes else PARENT_CHECK_S
            due: dict[int, Connection] = {}
            for descriptor, _ in self._epoll.poll(min(max(until, 0), PARENT_CHECK_S)):
                if descriptor == self.listener.fileno():
                    self._accept()
                elif descriptor == self.control.fileno():
                    self._tell()
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
        connection = Connection(self.link, client, server, self)
        for one in (client, server):
            one.setblocking(False)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._by_descriptor[one.fileno()] = connection
            self._epoll.register(one, select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET)

    def _tell(self) -> None:
        asker, _ = self.control.accept()
        with asker:
            asker.sendall(json.dumps([asdict(exchange) for exchange in self.exchanges]).encode())
        self.exchanges = []


def _listener() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0), backlog=1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", required=True)
    parser.add_argument("--with", type=int, required=True, dest="parent")
    parser.add_argument("--rate", type=float, default=0)
    parser.add_argument("--delay", type=float, default=0)
    parser.add_argument("--late-every", type=int, default=0)
    parser.add_argument("--late", type=float, default=0)
    args = parser.parse_args()
    host, port = args.to.rsplit(":", 1)
    proxy = Proxy(Link(args.rate, args.delay, args.late_every, args.late), (host, int(port)))
    print(proxy.listener.getsockname()[1], proxy.control.getsockname()[1], flush=True)
    proxy.serve(args.parent)


if __name__ == "__main__":
    main()
