"""An S3 server that discards what it is sent: the processor time of uploads is then their client's alone.

It keeps objects up to 1 MiB, and of longer ones only their sizes. It verifies nothing and serves one bucket. The kernel
drops bodies without a copy (``MSG_TRUNC``).

    store_discard.py --with PID

prints its port.
"""

from __future__ import annotations

import argparse
import contextlib
import email.utils
import itertools
import os
import re
import socket
import threading
import time
from dataclasses import dataclass
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

KEPT_BYTES_MAX = 1 << 20
CHUNK_BYTES = 1 << 20
PARENT_CHECK_S = 1.0
REASONS = {200: "OK", 204: "No Content", 404: "Not Found", 412: "Precondition Failed", 501: "Not Implemented"}
PART_NUMBER = re.compile(rb"<PartNumber>(\d+)</PartNumber>")
KEY = re.compile(rb"<Key>(.*?)</Key>")


@dataclass
class Kept:
    """An object: its size, its bytes if it is short, what its client said of it."""

    size: int
    body: bytes | None
    metadata: dict[str, str]
    etag: str


@dataclass
class Request:
    method: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]
    size: int
    body: bytes | None


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes = b""


class Objects:
    """What the server remembers."""

    def __init__(self) -> None:
        self._objects: dict[str, Kept] = {}
        self._uploads: dict[str, dict[int, int]] = {}
        self._number = itertools.count(1)
        self._lock = threading.Lock()

    def answer(self, request: Request) -> Answer:
        with self._lock:
            query, method = request.query, request.method
            if method == "POST" and "uploads" in query:
                return self._begin(request)
            if method == "POST" and "uploadId" in query:
                return self._complete(request)
            if method == "POST" and "delete" in query:
                for key in KEY.findall(request.body or b""):
                    self._objects.pop(key.decode(), None)
                return _xml("<DeleteResult/>")
            if method == "PUT" and "uploadId" in query:
                self._uploads[query["uploadId"]][int(query["partNumber"])] = request.size
                return self._stored(request)
            if method == "PUT":
                return self._put(request)
            if method == "DELETE":
                self._objects.pop(request.key, None)
                return Answer(204, {})
            if method == "GET" and not request.key:
                return self._list(query)
            if method in ("GET", "HEAD"):
                return self._get(request)
            return Answer(501, {})

    def _etag(self) -> str:
        return f'"{next(self._number):032x}"'

    def _stored(self, request: Request) -> Answer:
        checksums = {name: value for name, value in request.headers.items() if name.startswith("x-amz-checksum-")}
        return Answer(200, {"ETag": self._etag(), **checksums})

    def _begin(self, request: Request) -> Answer:
        upload = f"upload-{next(self._number)}"
        self._uploads[upload] = {}
        key = escape(request.key)
        return _xml(
            f"<InitiateMultipartUploadResult><Bucket>b</Bucket><Key>{key}</Key><UploadId>{upload}</UploadId>"
            "</InitiateMultipartUploadResult>"
        )

    def _complete(self, request: Request) -> Answer:
        parts = self._uploads.pop(request.query["uploadId"])
        listed = [int(number) for number in PART_NUMBER.findall(request.body or b"")]
        etag = self._etag()
        self._objects[request.key] = Kept(sum(parts[number] for number in listed), None, {}, etag)
        return _xml(
            f"<CompleteMultipartUploadResult><Key>{escape(request.key)}</Key><ETag>{escape(etag)}</ETag>"
            "</CompleteMultipartUploadResult>"
        )

    def _put(self, request: Request) -> Answer:
        if request.headers.get("if-none-match") == "*" and request.key in self._objects:
            return Answer(412, {})
        source = request.headers.get("x-amz-copy-source")
        if source is not None:
            _, _, from_key = unquote(source).lstrip("/").partition("/")
            if from_key not in self._objects:
                return _absent(request)
            self._objects[request.key] = self._objects[from_key]
            etag = escape(self._objects[from_key].etag)
            return _xml(f"<CopyObjectResult><ETag>{etag}</ETag></CopyObjectResult>")
        metadata = {name: value for name, value in request.headers.items() if name.startswith("x-amz-meta-")}
        answer = self._stored(request)
        self._objects[request.key] = Kept(request.size, request.body, metadata, answer.headers["ETag"])
        return answer

    def _get(self, request: Request) -> Answer:
        kept = self._objects.get(request.key)
        if kept is None:
            return _absent(request)
        now = email.utils.formatdate(time.time(), usegmt=True)
        headers = {**kept.metadata, "ETag": kept.etag, "Last-Modified": now}
        if request.method == "HEAD":
            return Answer(200, {**headers, "Content-Length": str(kept.size)})
        if kept.body is None:
            return Answer(501, {})
        return Answer(200, headers, kept.body)

    def _list(self, query: dict[str, str]) -> Answer:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        folders: set[str] = set()
        entries: list[str] = []
        now = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
        for key, kept in sorted(self._objects.items()):
            if not key.startswith(prefix):
                continue
            folder, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            if found:
                folders.add(prefix + folder + delimiter)
            else:
                entries.append(
                    f"<Contents><Key>{escape(key)}</Key><Size>{kept.size}</Size><ETag>{escape(kept.etag)}</ETag>"
                    f"<LastModified>{now}</LastModified><StorageClass>STANDARD</StorageClass></Contents>"
                )
        common = "".join(f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in sorted(folders))
        return _xml(
            f"<ListBucketResult><Name>b</Name><Prefix>{escape(prefix)}</Prefix><IsTruncated>false</IsTruncated>"
            f"<KeyCount>{len(entries) + len(folders)}</KeyCount>{''.join(entries)}{common}</ListBucketResult>"
        )


def _absent(request: Request) -> Answer:
    body = b"" if request.method == "HEAD" else b"<Error><Code>NoSuchKey</Code></Error>"
    return Answer(404, {"x-amz-request-id": "1"}, body)


def _xml(body: str) -> Answer:
    return Answer(200, {"Content-Type": "application/xml"}, f'<?xml version="1.0"?>{body}'.encode())


def serve(connection: socket.socket, objects: Objects) -> None:
    """Answers the requests of one connection until its client closes it."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    scratch = bytearray(CHUNK_BYTES)
    got = b""
    with connection, contextlib.suppress(ConnectionError):
        while True:
            while b"\r\n\r\n" not in got:
                more = connection.recv(16 << 10)
                if not more:
                    return
                got += more
            head, _, got = got.partition(b"\r\n\r\n")
            first, *lines = head.decode("latin-1").split("\r\n")
            method, target, _ = first.split(" ", 2)
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            if headers.get("expect", "").lower() == "100-continue":
                connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            length = int(headers.get("content-length", 0))
            body, got = _body(connection, got, length, scratch)
            split = urlsplit(target)
            _, _, key = unquote(split.path).lstrip("/").partition("/")
            query = {name: values[0] for name, values in parse_qs(split.query, keep_blank_values=True).items()}
            size = int(headers.get("x-amz-decoded-content-length", length))
            answer = objects.answer(Request(method, key, query, headers, size, body))
            answer.headers.setdefault("Content-Length", str(len(answer.body)))
            text = "".join(f"{name}: {value}\r\n" for name, value in answer.headers.items())
            reason = REASONS[answer.status]
            connection.sendall(f"HTTP/1.1 {answer.status} {reason}\r\n{text}\r\n".encode() + answer.body)


def _body(connection: socket.socket, got: bytes, length: int, scratch: bytearray) -> tuple[bytes | None, bytes]:
    """The body if it is short, and what was received beyond it; bytes of a long one are dropped."""
    if length <= KEPT_BYTES_MAX:
        while len(got) < length:
            more = connection.recv(length - len(got))
            if not more:
                raise ConnectionError("the client went away in the middle of a body")
            got += more
        return got[:length], got[length:]
    left = length - len(got)
    while left:
        dropped = connection.recv_into(scratch, min(left, CHUNK_BYTES), socket.MSG_TRUNC)
        if not dropped:
            raise ConnectionError("the client went away in the middle of a body")
        left -= dropped
    return None, b""


def end_with(parent: int) -> None:
    while os.path.exists(f"/proc/{parent}"):
        time.sleep(PARENT_CHECK_S)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--with", type=int, required=True, dest="parent")
    args = parser.parse_args()
    objects = Objects()
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    print(listener.getsockname()[1], flush=True)
    threading.Thread(target=end_with, args=(args.parent,), daemon=True).start()
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=serve, args=(connection, objects), daemon=True).start()


if __name__ == "__main__":
    main()
