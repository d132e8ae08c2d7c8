"""A service with S3's protocol in this process's memory, at which a test sees each request before it is answered.

Each rank of a job reaches it at a port of its own, so that a fault can hit the requests of one rank. It does what the
store asks of S3, and nothing else; signatures and checksums are not looked at.
"""

import contextlib
import email.utils
import re
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

BUCKET = "bucket"


class Request(NamedTuple):
    """A request of a rank.

    ``kind`` is ``list``, ``uploads``, ``get``, ``head``, ``put``, ``create``, ``part``, ``begin``, ``complete``,
    ``abort`` or ``delete``; ``name`` is the object's, or a list's prefix.
    """

    rank: int
    kind: str
    name: str
    bytes: int


class Stored(NamedTuple):
    """An object, in the parts in which it came: the service copies none of them to complete an upload."""

    parts: tuple[bytes, ...]
    etag: str
    token: str | None
    modified: float

    @property
    def size(self) -> int:
        return sum(map(len, self.parts))


class Answer(NamedTuple):
    """What the service answers."""

    status: int
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()


def refused(status: int, code: str) -> Answer:
    return Answer(status, f"<Error><Code>{code}</Code><Message>from the double</Message></Error>".encode())


class S3Double:
    """The service. ``fault`` gets each request; it may wait, and returns the answer in place of the service's, if any.

    ``rate`` is the bytes that the link of each rank moves in a second, one request after the other.
    """

    def __init__(self, ranks: int, host: str = "127.0.0.1") -> None:
        self.objects: dict[str, Stored] = {}
        self.fault: Callable[[Request], Answer | None] | None = None
        self.rate: float | None = None
        self._uploads: dict[str, dict[int, bytes]] = {}
        self._number = 0
        self._lock = threading.Lock()
        self._servers = [_Server(self, rank, host) for rank in range(ranks + 1)]
        self.endpoints = [f"http://{host}:{server.server_address[1]}" for server in self._servers]

    def environment(self, rank: int = -1) -> dict[str, str]:
        """The variables with which a rank reaches it; by default those of a command, whose requests are no rank's."""
        return {
            "AWS_ENDPOINT_URL_S3": self.endpoints[rank],
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }

    def close(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def forget(self, prefix: str) -> None:
        """Removes the objects below a prefix."""
        with self._lock:
            for name in [name for name in self.objects if name.startswith(prefix)]:
                del self.objects[name]

    def answer(self, request: Request, query: dict[str, str], headers: "_Headers", body: bytes) -> Answer:
        if self.fault is not None and (instead := self.fault(request)) is not None:
            return instead
        with self._lock:
            self._number += 1
            if request.kind in ("list", "uploads"):
                return self._listed(request, query.get("delimiter", ""))
            if request.kind in ("get", "head"):
                return self._read(request, headers.get("range"))
            return self._changed(request, query, headers, body)

    def _listed(self, request: Request, delimiter: str) -> Answer:
        if request.kind == "uploads":
            return Answer(200, b"<ListMultipartUploadsResult></ListMultipartUploadsResult>")
        said, directories = [], set()
        for name in sorted(name for name in self.objects if name.startswith(request.name)):
            stored = self.objects[name]
            rest = name[len(request.name) :]
            if delimiter and delimiter in rest:
                directories.add(request.name + rest.split(delimiter)[0] + delimiter)
                continue
            modified = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(stored.modified))
            said.append(
                f"<Contents><Key>{escape(name)}</Key><Size>{stored.size}</Size>"
                f"<LastModified>{modified}</LastModified><ETag>{escape(stored.etag)}</ETag></Contents>"
            )
        said += [f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in sorted(directories)]
        text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(said)}</ListBucketResult>"
        return Answer(200, text.encode())

    def _read(self, request: Request, asked: str | None) -> Answer:
        stored = self.objects.get(request.name)
        if stored is None:
            return refused(404, "NoSuchKey")
        headers = [("etag", stored.etag), ("last-modified", email.utils.formatdate(stored.modified, usegmt=True))]
        if stored.token is not None:
            headers.append(("x-amz-meta-shardfasttoken", stored.token))
        if request.kind == "head":
            return Answer(200, b"", (*headers, ("content-length", str(stored.size))))
        data = stored.parts[0] if len(stored.parts) == 1 else b"".join(stored.parts)
        if asked is None:
            return Answer(200, data, tuple(headers))
        first, last = (int(number) for number in asked.removeprefix("bytes=").split("-"))
        if first >= len(data):
            return refused(416, "InvalidRange")
        body = data[first : last + 1]
        headers.append(("content-range", f"bytes {first}-{first + len(body) - 1}/{len(data)}"))
        return Answer(206, body, tuple(headers))

    def _changed(self, request: Request, query: dict[str, str], headers: "_Headers", body: bytes) -> Answer:
        etag, upload = f'"{self._number:032x}"', query.get("uploadId", "")
        if request.kind == "begin":
            self._uploads[f"upload-{self._number}"] = {}
            text = f"<InitiateMultipartUploadResult><UploadId>upload-{self._number}</UploadId>"
            return Answer(200, f"{text}</InitiateMultipartUploadResult>".encode())
        if request.kind == "part":
            self._uploads[upload][int(query["partNumber"])] = body
            return Answer(200, b"", (("etag", etag),))
        if request.kind == "complete":
            parts = self._uploads.pop(upload)
            self.objects[request.name] = Stored(tuple(parts[n] for n in sorted(parts)), etag, None, time.time())
            text = f"<CompleteMultipartUploadResult><ETag>{escape(etag)}</ETag></CompleteMultipartUploadResult>"
            return Answer(200, text.encode())
        if request.kind == "abort":
            self._uploads.pop(upload, None)
            return Answer(204)
        if request.kind == "delete":
            named = [unescape(key) for key in re.findall(r"<Key>(.*?)</Key>", body.decode())] or [request.name]
            for name in named:
                self.objects.pop(name, None)
            return Answer(200, b"<DeleteResult></DeleteResult>") if body else Answer(204)
        if request.kind == "create" and request.name in self.objects:
            return refused(412, "PreconditionFailed")
        self.objects[request.name] = Stored((body,), etag, headers.get("x-amz-meta-shardfasttoken"), time.time())
        return Answer(200, b"", (("etag", etag),))


class _Headers(dict[str, str]):
    """The headers of a request, by their names in lower case."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, double: S3Double, rank: int, host: str) -> None:
        super().__init__((host, 0), _Handler)
        self.double, self.rank, self.link = double, rank, threading.Lock()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def handle_error(self, request: object, client_address: object) -> None:
        """Says nothing: a client that ends closes its connections."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True
    server: _Server

    def answers(self) -> None:
        """Answers a request of any method."""
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        headers = _Headers({name.lower(): value for name, value in self.headers.items()})
        body = self.rfile.read(int(headers.get("content-length", "0")))
        name = unquote(url.path).removeprefix(f"/{BUCKET}").removeprefix("/")
        kind = self._kind(name, query, headers)
        request = Request(self.server.rank, kind, name if name else query.get("prefix", ""), len(body))
        answer = self.server.double.answer(request, query, headers, body)
        if (rate := self.server.double.rate) is not None:
            with self.server.link:
                time.sleep((len(body) + len(answer.body)) / rate)
        self.send_response_only(answer.status)
        if all(name != "content-length" for name, _ in answer.headers):
            self.send_header("content-length", str(len(answer.body)))
        for name, value in answer.headers:
            self.send_header(name, value)
        with contextlib.suppress(OSError):
            self.end_headers()
            self.wfile.write(answer.body)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = answers

    def _kind(self, name: str, query: dict[str, str], headers: _Headers) -> str:
        match self.command:
            case "GET" if not name:
                return "uploads" if "uploads" in query else "list"
            case "PUT" if "partNumber" in query:
                return "part"
            case "PUT":
                return "create" if headers.get("if-none-match") == "*" else "put"
            case "POST" if "uploads" in query:
                return "begin"
            case "POST":
                return "complete" if "uploadId" in query else "delete"
            case "DELETE":
                return "abort" if "uploadId" in query else "delete"
        return self.command.lower()

    def finish(self) -> None:
        with contextlib.suppress(OSError):
            super().finish()

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
