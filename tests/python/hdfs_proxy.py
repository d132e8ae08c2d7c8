"""Proxies before the nodes of an HDFS.

One before a NameNode's RPC port spoils one call: refused, cut before or after it is carried out, silent. One before
DataNodes cuts one connection in the middle of its bytes.
"""

import contextlib
import socket
import threading

WAYS = ("refused", "cut before", "cut after", "silent")
BY_NAME = "127.0.0.2"
"""Name of all DataNodes, where a client finds a proxy in their place."""

PREFACE = 7  # "hrpc", a version, a service class, and how to authenticate


class Proxy:
    """Forwards connections to a NameNode, and spoils the call with number `spoiled` in that way, once.

    Calls of all connections are counted together, in their order; heartbeats of leases are not counted.
    """

    def __init__(self, namenode: str) -> None:
        host, port = namenode.rsplit(":", 1)
        self._namenode = (host, int(port))
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._lock = threading.Lock()
        self.arm(None, "")
        threading.Thread(target=self._accept, daemon=True).start()

    def arm(self, spoiled: int | None, way: str) -> None:
        """Counts calls anew, from 0 on, and says which one is spoiled."""
        with self._lock:
            self.calls, self.methods, self._spoiled, self._way = 0, [], spoiled, way

    def close(self) -> None:
        self._server.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError), socket.create_connection(self._namenode) as server:
            answers = threading.Event()
            state = {"drops": False}
            back = threading.Thread(target=self._answer, args=(server, client, state, answers), daemon=True)
            server.sendall(_exactly(client, PREFACE))
            back.start()
            while True:
                head = _exactly(client, 4)
                frame = _exactly(client, int.from_bytes(head, "big"))
                way = self._way_of(frame)
                if way == "cut before":
                    return
                if way == "refused":
                    # A connection that is refused is one that the client cannot use from the beginning.
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                    return
                if way in ("cut after", "silent"):
                    state["drops"] = True
                server.sendall(head + frame)
                if way == "cut after":
                    answers.wait(20)
                    return

    def _answer(self, server, client, state, answers) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                if state["drops"]:
                    answers.set()
                    continue
                client.sendall(data)
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)

    def _way_of(self, frame: bytes) -> str | None:
        method = method_of(frame)
        if method in (None, "renewLease"):
            return None
        with self._lock:
            number, self.calls = self.calls, self.calls + 1
            self.methods.append(method)
            if number != self._spoiled:
                return None
            self._spoiled = None
            return self._way


class DataProxy:
    """Forwards connections to DataNodes, for clients that reach them by name, and cuts the one that is at some byte."""

    def __init__(self, datanodes: list[str]) -> None:
        self._lock = threading.Lock()
        self.arm(None, "")
        addresses = [(host, int(port)) for host, port in (node.rsplit(":", 1) for node in datanodes)]
        self._servers = [socket.create_server((BY_NAME, port)) for _, port in addresses]
        for server, address in zip(self._servers, addresses, strict=True):
            threading.Thread(target=self._accept, args=(server, address), daemon=True).start()

    def arm(self, at_byte: int | None, way: str) -> None:
        """Counts bytes anew, and says with which one `up` to DataNodes or `down` from them a connection is cut."""
        with self._lock:
            self.bytes, self.cuts, self._at_byte, self._way = {"up": 0, "down": 0}, 0, at_byte, way

    def close(self) -> None:
        for server in self._servers:
            server.close()

    def _accept(self, server, address) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = server.accept()
                node = socket.create_connection(address)
                for ends, way in (((client, node), "up"), ((node, client), "down")):
                    threading.Thread(target=self._pass_on, args=(*ends, way), daemon=True).start()

    def _pass_on(self, source, sink, way) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 15):
                passes = self._passes(len(data), way)
                sink.sendall(data[:passes])
                if passes < len(data):
                    for end in (source, sink):
                        end.shutdown(socket.SHUT_RDWR)
                    return
        with contextlib.suppress(OSError):
            # The other direction may go on.
            sink.shutdown(socket.SHUT_WR)

    def _passes(self, count: int, way: str) -> int:
        """How many of these bytes go on."""
        with self._lock:
            before = self.bytes[way]
            self.bytes[way] += count
            if self._at_byte is None or way != self._way or before + count <= self._at_byte:
                return count
            passes, self._at_byte = max(self._at_byte - before, 0), None
            self.cuts += 1
            return passes


METHODS = (
    *("create", "addBlock", "complete", "rename2", "delete", "getFileInfo", "getBlockLocations", "getListing"),
    *("mkdirs", "getServerDefaults", "renewLease", "abandonBlock", "updateBlockForPipeline", "updatePipeline"),
)


def method_of(frame: bytes) -> str | None:
    """The method that a call's header names: a text behind its length."""
    for method in METHODS:
        if bytes([len(method)]) + method.encode() in frame[:200]:
            return method
    return None


def _exactly(connection: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        piece = connection.recv(length - len(data))
        if not piece:
            raise ConnectionError
        data += piece
    return data
