"""The ranks of this job, brought together once: never through the training's process groups, devices or collectives.

The job's rendezvous store, in which its processes found each other, carries one small message: rank 0 tells where it
listens, and a secret. From then on ranks talk over connections of their own, from whatever thread.
"""

from __future__ import annotations

import datetime
import functools
import ipaddress
import os
import secrets
import socket
import sys
import threading
import weakref
from typing import Any

from ._native import Session
from .errors import Unavailable

TIMEOUT_S = 600.0
"""How long ranks wait for each other by default: longer than one of them may compile or evaluate alone."""

# A job's session lives as long as its default process group: torch says which that is now.
_sessions: weakref.WeakKeyDictionary[Any, Session] = weakref.WeakKeyDictionary()
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
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return _solo(os.getpid())
    group = distributed.group.WORLD
    with _lock:
        session = _sessions.get(group)
        if session is None:
            session = _sessions[group] = _meet(distributed, timeout_s)
        return session


@functools.cache
def _solo(process: int) -> Session:
    return Session.solo()


def _meet(distributed: Any, timeout_s: float) -> Session:
    rank, world = distributed.get_rank(), distributed.get_world_size()
    if world == 1:
        return Session.solo()
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    store = _store(distributed, timeout_s)
    # Which meeting this is: a store may outlive a process group, and every rank comes to each meeting once.
    meeting = store.add(f"meetings/{rank}", 1)
    key = f"meeting/{meeting}"
    if rank == 0:
        token = secrets.token_hex(16)
        session = Session.serve(_host(world), world, token, local_world=local_world)
        store.set(key, f"{session.address} {token}")
        return session
    try:
        store.wait([key], datetime.timedelta(seconds=timeout_s))
    except RuntimeError as error:  # torch's DistStoreError among them
        raise Unavailable(
            f"rank {rank} of {world}: rank 0 did not say within {timeout_s:g} s where it is: {error}"
        ) from error
    address, token = store.get(key).decode().split(" ")
    return Session.join(address, rank, world, token, timeout_s, local_world=local_world)


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
    """The address at which rank 0 can be reached by every other rank."""
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
