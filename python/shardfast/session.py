"""The ranks of this job, brought together once: never through the training's process groups, devices or collectives.

The job's rendezvous store, in which its processes found each other, carries one small message: rank 0 tells where it
listens, and a secret. From then on ranks talk over connections of their own, from whatever thread.
"""

from __future__ import annotations

import datetime
import functools
import ipaddress
import os
import re
import secrets
import socket
import sys
import threading
import weakref
from typing import Any

from ._native import Session
from .errors import Error, Invalid, Unavailable

TIMEOUT_S = 600.0
"""How long ranks wait for each other by default: longer than one of them may compile or evaluate alone."""

STAGING_BYTES = "SHARDFAST_STAGING_BYTES"
"""The environment variable that bounds this process's staging memory: bytes, or a number of KiB, MiB or GiB.

It is read when the process's session is made. By default the ranks on a machine share a quarter of its memory.
"""

# A job's session lives as long as its default process group: torch says which that is now. Beside it, what is wrong
# with this rank's settings: the ranks have met, so that each operation can fail on all of them for that reason.
_sessions: weakref.WeakKeyDictionary[Any, tuple[Session, Invalid | None]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _in_forked_child() -> None:
    """Whoever held the lock is not here to give it back. Sessions know themselves whose they are."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_in_forked_child)


def current(timeout_s: float = TIMEOUT_S) -> Session:
    """The session of all ranks of this job; one process alone when ``torch.distributed`` is not initialised.

    Every rank must call it the first time; later calls are local.

    Raises:
        Unavailable: If the ranks do not find each other within ``timeout_s``.
        Invalid: If :data:`STAGING_BYTES` is no size, on every rank that begins an operation with this one.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return alone()
    group = distributed.group.WORLD
    with _lock:
        known = _sessions.get(group)
        if known is None:
            try:
                staging_bytes, problem = _staging_bytes(), None
            except Invalid as error:
                staging_bytes, problem = None, error
            known = _sessions[group] = _meet(distributed, timeout_s, staging_bytes), problem
    session, problem = known
    if problem is not None:
        session.refuse(Invalid.__name__, str(problem), timeout_s)
    return session


def alone() -> Session:
    """The session of this process alone, whatever job it belongs to.

    Raises:
        Invalid: If :data:`STAGING_BYTES` is no size.
    """
    return _solo(os.getpid())


@functools.cache
def _solo(process: int) -> Session:
    return Session.solo(staging_bytes=_staging_bytes())


def _staging_bytes() -> int | None:
    """What the environment says about staging memory."""
    text = os.environ.get(STAGING_BYTES)
    if text is None:
        return None
    size = re.fullmatch(r"([0-9]+) ?([KMG]iB)?", text)
    shift = {None: 0, "KiB": 10, "MiB": 20, "GiB": 30}[size[2]] if size else 0
    staging_bytes = int(size[1]) << shift if size and len(size[1]) < 20 else -1
    if not 0 <= staging_bytes < 1 << 63:
        raise Invalid(
            f"{STAGING_BYTES}={text!r}: expected a number of bytes, or one of KiB, MiB or GiB such as '512MiB'"
        )
    try:
        Session.solo(staging_bytes=staging_bytes)  # takes no memory yet
    except Error as error:
        raise Invalid(f"{STAGING_BYTES}={text!r}: {error}") from None
    return staging_bytes


def _meet(distributed: Any, timeout_s: float, staging_bytes: int | None) -> Session:
    rank, world = distributed.get_rank(), distributed.get_world_size()
    if world == 1:
        return Session.solo(staging_bytes=staging_bytes)
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    store = _store(distributed, timeout_s)
    # Which meeting this is: a store may outlive a process group, and every rank comes to each meeting once.
    meeting = store.add(f"meetings/{rank}", 1)
    key = f"meeting/{meeting}"
    host = _host(world)
    if rank == 0:
        token = secrets.token_hex(16)
        session = Session.serve(host, world, token, local_world=local_world, staging_bytes=staging_bytes)
        store.set(key, f"{session.address} {token}")
        return session
    try:
        store.wait([key], datetime.timedelta(seconds=timeout_s))
    except RuntimeError as error:  # torch's DistStoreError among them
        raise Unavailable(
            f"rank {rank} of {world}: rank 0 did not say within {timeout_s:g} s where it is: {error}"
        ) from error
    address, token = store.get(key).decode().split(" ")
    return Session.join(
        address, host, rank, world, token, timeout_s, local_world=local_world, staging_bytes=staging_bytes
    )


def _store(distributed: Any, timeout_s: float) -> Any:
    """The store in which the job's processes found each other."""
    try:
        store = distributed.distributed_c10d._get_default_store()
    except (AttributeError, ValueError, RuntimeError):
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        if host is None or port is None:
            raise Unavailable(
                "this torch does not give its rendezvous store, and MASTER_ADDR and MASTER_PORT do not say where it is"
            ) from None
        timeout = datetime.timedelta(seconds=timeout_s)
        store = distributed.TCPStore(host, int(port), is_master=False, timeout=timeout)
    return distributed.PrefixStore("shardfast", store)


def _host(world: int) -> str:
    """The address at which this rank can be reached by every other one."""
    master = os.environ.get("MASTER_ADDR", "")
    if os.environ.get("LOCAL_WORLD_SIZE") == str(world) or master == "localhost" or _is_loopback(master):
        return "127.0.0.1"
    # 192.0.2.1 (RFC 5737) is nobody's: the route to it is the default one. No packet is sent.
    for peer in (master, "192.0.2.1"):
        address = _route_to(peer)
        if address is not None and not _is_loopback(address):
            return address
    return "127.0.0.1"


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _route_to(peer: str) -> str | None:
    """This machine's address on the way to ``peer``."""
    if not peer:
        return None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None
