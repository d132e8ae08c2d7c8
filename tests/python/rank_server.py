"""Processes that fork the ranks of tests, and have imported torch and the tests' module and nothing else.

Ranks that are forked from the process of the tests hang by chance: it has threads, and a lock that one of them holds at
that moment stays held in the child. These processes have one thread. The first imports torch; it forks one for each
module of tests, which imports that module and forks the ranks that begin with a function of it.
"""

import array
import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

IMPORTED = ("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel")
"""Modules of torch that it imports when they are first used, and slowly: once here instead of in every rank."""

RENDEZVOUS = "RANKS_RENDEZVOUS"
"""Variable of a rank: address of the file in which its job's processes find each other."""

LENGTH = struct.Struct("<Q")
DESCRIPTORS_MAX = 3


class Rank(NamedTuple):
    """A rank of a job, and where the job meets."""

    number: int
    world: int
    rendezvous: str
    timeout_s: float


def send(connection: socket.socket, message: object, descriptors: list[int] | None = None) -> None:
    """Sends what can be pickled, and descriptors with it."""
    data = pickle.dumps(message)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    connection.sendmsg([LENGTH.pack(len(data))], rights)
    connection.sendall(data)


def receive(connection: socket.socket) -> tuple[object, list[int]]:
    """What ``send`` sent at the other end. EOFError when that end is closed."""
    head, descriptors, _, _ = socket.recv_fds(connection, LENGTH.size, DESCRIPTORS_MAX, socket.MSG_WAITALL)
    length = LENGTH.unpack(head)[0] if len(head) == LENGTH.size else 1
    data = connection.recv(length, socket.MSG_WAITALL) if length else b""
    if len(data) != length:
        raise EOFError
    return pickle.loads(data), descriptors


class RankServer:
    """The servers, as the process of the tests sees them. Ranks have its environment, its directory and its output."""

    def __init__(self) -> None:
        self._first, theirs = socket.socketpair()
        with theirs:
            # A pool of threads of numpy's would be missing in the ranks.
            environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
            command = [sys.executable, __file__, str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment
            )
        self._of_module: dict[str, socket.socket] = {}

    def start(self, function: Callable, args: tuple, rank: Rank | None = None) -> tuple[int, int]:
        """Calls a function of a module in a new process: the process's id, and a pipe that brings a pickled pair.

        The pair is ``(True, what the function returns)`` or ``(False, the traceback)``. The process is alone, or a rank
        with gloo initialised, whose function takes its number and that of all ranks first.
        """
        called = pickle.dumps((function, args))
        name = function.__module__
        if name not in self._of_module:
            told, descriptors = self._asked(self._first, (name, sys.path))
            self._of_module[name] = socket.socket(fileno=descriptors[0])
            assert not told, told
        reading, writing = os.pipe()
        try:
            asked = (called, rank, dict(os.environ), os.getcwd())
            return self._asked(self._of_module[name], asked, [writing, 1, 2])[0], reading
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)

    def end(self, function: Callable, pid: int) -> int:
        """Kills the process that runs this function unless it has ended; its status, as ``os.waitpid`` has it."""
        return self._asked(self._of_module[function.__module__], pid)[0]

    def close(self) -> None:
        """Ends the servers and their ranks."""
        for connection in (*self._of_module.values(), self._first):
            connection.shutdown(socket.SHUT_RDWR)  # also where a child that a test has forked holds it, too
            connection.close()
        self._process.wait()

    def _asked(self, connection: socket.socket, message: object, descriptors: list[int] | None = None) -> tuple:
        try:
            send(connection, message, descriptors)
            return receive(connection)
        except (EOFError, OSError) as error:
            raise AssertionError("a server of ranks has ended: its output says why") from error


class NoStart(Exception):
    """Gloo's processes have not found each other: by chance it closes a connection that it has just accepted."""


def make_group(name: str, number: int, world: int, timeout: timedelta | None = None) -> None:
    """Initialises gloo's process group of this name, at a rendezvous that no other call of ``ranks()`` has used."""
    import torch.distributed as dist

    at = os.environ[RENDEZVOUS] + name
    try:
        dist.init_process_group("gloo", init_method=at, rank=number, world_size=world, timeout=timeout)
    except RuntimeError as error:
        if "connectFullMesh failed" in str(error):
            raise NoStart from error
        raise


def in_job(rank: Rank, function: Callable, args: tuple) -> object:
    """What a rank's function returns."""
    import torch
    import torch.distributed as dist
    from older import IS_OLDER

    torch.set_num_threads(1)
    number, world = str(rank.number), str(rank.world)
    os.environ.update(RANK=number, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world, LOCAL_RANK=number)
    os.environ[RENDEZVOUS] = rank.rendezvous
    make_group("", rank.number, rank.world, timedelta(seconds=rank.timeout_s))
    result = function(rank.number, rank.world, *args)
    if dist.is_initialized():
        dist.barrier()
        if not IS_OLDER:  # PyTorch 2.7 holds the interpreter's lock while it waits for a thread that needs it
            dist.destroy_process_group()
    return result


def run(asked: tuple, descriptors: list[int]) -> None:
    """Calls the function in this new process; never returns."""
    called, rank, environment, directory = asked
    sending, output, errors = descriptors
    try:
        os.dup2(output, 1)
        os.dup2(errors, 2)
        faulthandler.register(signal.SIGUSR1, file=2)
        try:
            os.environ.clear()
            os.environ.update(environment)
            os.chdir(directory)
            function, args = pickle.loads(called)
            message = pickle.dumps((True, function(*args) if rank is None else in_job(rank, function, args)))
        except BaseException:
            message = pickle.dumps((False, traceback.format_exc()))
        sys.stdout.flush()
        sys.stderr.flush()
        with os.fdopen(sending, "wb") as pipe:
            pipe.write(message)
    finally:
        os._exit(0)


def serve_ranks(connection: socket.socket) -> None:
    """Forks a rank for each function that is sent, and ends each whose id is."""
    started: set[int] = set()
    while True:
        try:
            asked, descriptors = receive(connection)
        except EOFError:
            break
        if isinstance(asked, int):
            started.remove(asked)
            send(connection, ended(asked))
            continue
        pid = os.fork()
        if pid == 0:
            connection.close()
            os.setpgid(0, 0)
            run(asked, descriptors)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it may have done that, and ended
            os.setpgid(pid, pid)
        for descriptor in descriptors:
            os.close(descriptor)
        started.add(pid)
        send(connection, pid)
    for pid in started:
        ended(pid)


def ended(pid: int) -> int:
    """Kills a rank and the processes that it has started, such as workers of a library; its status."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def check_alone(after: str) -> None:
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"expected one thread after the import of {after}, found {len(threads)}"
    gc.freeze()  # collections in the ranks then touch, and so copy, nothing of this


def serve_modules(connection: socket.socket) -> None:
    """Forks a server of ranks for each module that is named; waits for them in the end."""
    started = []
    while True:
        try:
            (name, path), _ = receive(connection)
        except EOFError:
            break
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            connection.close()
            theirs.close()
            sys.path[:] = path
            try:
                importlib.import_module(name)
                check_alone(name)
                told = ""
            except BaseException:
                told = traceback.format_exc()
            send(ours, told)
            serve_ranks(ours)
            os._exit(0)
        started.append(pid)
        ours.close()
        told, _ = receive(theirs)
        send(connection, told, [theirs.fileno()])
        theirs.close()
    for pid in started:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    for module in IMPORTED:
        importlib.import_module(module)
    check_alone(", ".join(IMPORTED))
    serve_modules(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)  # without what libraries say when they are unloaded
