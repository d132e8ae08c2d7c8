"""The ranks of this job, brought together once: never through the training's process groups, devices or collectives.

Ranks talk through a tree of connections of their own, from whatever thread; every rank but rank 0 joins through the
one above it. They find each other in one of two ways:

* Through the job's rendezvous store, in which its processes found each other for ``torch.distributed``: rank 0 tells
  the shape of the tree and a secret, and each rank that others join through tells where it listens.
* Through the environment, without ``torch.distributed``: ``RANK``, ``WORLD_SIZE``, ``LOCAL_WORLD_SIZE``,
  :data:`ROOT` and :data:`TOKEN`. Rank 0 listens at :data:`ROOT`, and tells every rank where the one above it does.
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
import time
import weakref
from collections.abc import Callable
from typing import Any

from ._native import Place, Session
from .errors import Error, Invalid, Unavailable

TIMEOUT_S = 600.0
"""How long ranks wait for each other by default: longer than one of them may compile or evaluate alone."""

STAGING_BYTES = "SHARDFAST_STAGING_BYTES"
"""The environment variable that bounds this process's staging memory: bytes, or a number of KiB, MiB or GiB.

It is read when the process's session is made. By default the ranks on a machine share a quarter of its memory.
"""

ROOT = "SHARDFAST_ROOT"
"""The environment variable that says where rank 0 listens, ``host:port``, in a job without ``torch.distributed``."""

TOKEN = "SHARDFAST_TOKEN"
"""The environment variable with a secret of the job, the same on all its ranks, that goes with :data:`ROOT`."""

FANOUT = "SHARDFAST_FANOUT"
"""The environment variable that bounds how many ranks join through one; the same on all ranks."""

TLS_CERT = "SHARDFAST_TLS_CERT"
"""The environment variable that names the PEM file of this rank's certificate, valid for the name ``shardfast``."""

TLS_KEY = "SHARDFAST_TLS_KEY"
"""The environment variable that names the PEM file of that certificate's private key."""

TLS_CA = "SHARDFAST_TLS_CA"
"""The environment variable that names the PEM file of the authority that signed the certificates of all ranks."""

_FAILED = "! "
"""Begins what a rank says in the store that others cannot join through."""

# A job's session lives as long as its default process group (torch says which that is now), or as this process. Beside
# it, what is wrong with this rank's settings: the ranks have met, so that each operation can fail on all of them for
# that reason.
_sessions: weakref.WeakKeyDictionary[Any, tuple[Session, Invalid | None]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _in_forked_child() -> None:
    """Whoever held the lock is not here to give it back. Sessions know themselves whose they are."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_in_forked_child)


def current(timeout_s: float = TIMEOUT_S) -> Session:
    """The session of all ranks of this job.

    One process alone when ``torch.distributed`` is not initialised and :data:`ROOT` is not set.

    Every rank must call it the first time; later calls are local.

    Raises:
        Unavailable: If the ranks do not find each other within ``timeout_s``.
        Invalid: If :data:`STAGING_BYTES` is no size or :data:`FANOUT` no fan-out, on every rank that begins an
            operation with this one; if what this rank's environment says of the job or of certificates cannot be used.
    """
    distributed = sys.modules.get("torch.distributed")
    job: Any
    meet: Callable[[float, int | None], tuple[Session, Invalid | None]]
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        job, meet = distributed.group.WORLD, functools.partial(_met_by_store, distributed)
    elif ROOT in os.environ:
        job, meet = _environment(), _met_by_environment
    else:
        return alone()
    with _lock:
        known = _sessions.get(job)
        if known is None:
            try:
                staging_bytes, problem = _staging_bytes(), None
            except Invalid as error:
                staging_bytes, problem = None, error
            session, other = meet(timeout_s, staging_bytes)
            known = _sessions[job] = session, problem or other
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


class _Environment:
    """Stands for the job that the environment describes."""


@functools.cache
def _environment() -> _Environment:
    return _Environment()


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


def _fan_out() -> int | None:
    """What the environment says about the tree's fan-out."""
    text = os.environ.get(FANOUT)
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < 2:
        raise Invalid(f"{FANOUT}={text!r}: expected a number, at least 2")
    return int(text)


def _tls() -> tuple[str, str, str] | None:
    """The files of this rank's certificate, its key, and the authority that signed those of all ranks."""
    files = [os.environ.get(name) for name in (TLS_CERT, TLS_KEY, TLS_CA)]
    if not any(files):
        return None
    cert, key, authority = files
    if cert and key and authority:
        return cert, key, authority
    missing = [name for name, file in zip((TLS_CERT, TLS_KEY, TLS_CA), files, strict=True) if not file]
    raise Invalid(f"{' and '.join(missing)}: not set; TLS needs all of {TLS_CERT}, {TLS_KEY} and {TLS_CA}")


def _number(name: str, least: int, default: int | None = None) -> int:
    text = os.environ.get(name, default)
    if text is None:
        raise Invalid(f"{name}: not set; a job without torch.distributed needs it beside {ROOT}")
    if not re.fullmatch(r"[0-9]{1,9}", str(text)) or int(text) < least:
        raise Invalid(f"{name}={text!r}: expected a number, at least {least}")
    return int(text)


def _met_by_store(distributed: Any, timeout_s: float, staging_bytes: int | None) -> tuple[Session, Invalid | None]:
    rank, world = distributed.get_rank(), distributed.get_world_size()
    if world == 1:
        return Session.solo(staging_bytes=staging_bytes), None
    try:
        fan_out, problem = _fan_out(), None
    except Invalid as error:
        fan_out, problem = None, error
    local_world = _number("LOCAL_WORLD_SIZE", 1, 1)
    store = _store(distributed, timeout_s)
    # Which meeting this is: a store may outlive a process group, and every rank comes to each meeting once.
    meeting = f"meeting/{store.add(f'meetings/{rank}', 1)}"
    if rank == 0:
        # What rank 0 says is the tree, so that all have the same.
        token, tree = secrets.token_hex(16), (local_world, fan_out)
        store.set(meeting, f"{token} {local_world} {fan_out or 0}")
    else:
        token, *numbers = _told(store, meeting, timeout_s, f"rank {rank} of {world}: rank 0").split(" ")
        tree = int(numbers[0]), int(numbers[1]) or None
        if problem is None and fan_out is not None and fan_out != tree[1]:
            other = f"has {tree[1]}" if tree[1] else "has not set it"
            problem = Invalid(f"{FANOUT}={fan_out} on rank {rank}, rank 0 {other}: all ranks must have the same")
    host = _host(world, os.environ.get("MASTER_ADDR", ""))
    try:
        place = Place(host, rank, world, token, local_world=tree[0], fan_out=tree[1], tls=_tls())
    except Error as error:
        store.set(f"{meeting}/{rank}", f"{_FAILED}{error}")  # those that join through it need not wait
        raise
    if place.address is not None:
        store.set(f"{meeting}/{rank}", place.address)
    parent = None
    if place.parent is not None:
        who = f"rank {rank} of {world}: rank {place.parent}, through which it joins,"
        parent = _told(store, f"{meeting}/{place.parent}", timeout_s, who)
    return place.join(parent, timeout_s, local_world=local_world, staging_bytes=staging_bytes), problem


def _told(store: Any, key: str, timeout_s: float, who: str) -> str:
    """What another rank says in the store."""
    try:
        store.wait([key], datetime.timedelta(seconds=timeout_s))
    except RuntimeError as error:  # torch's DistStoreError among them
        raise Unavailable(f"{who} did not say within {timeout_s:g} s where it is: {error}") from error
    text = str(store.get(key).decode())
    if text.startswith(_FAILED):
        raise Unavailable(f"{who} cannot be joined: {text.removeprefix(_FAILED)}")
    return text


def _met_by_environment(timeout_s: float, staging_bytes: int | None) -> tuple[Session, Invalid | None]:
    root, token = os.environ[ROOT], os.environ.get(TOKEN)
    world, local_world = _number("WORLD_SIZE", 1), _number("LOCAL_WORLD_SIZE", 1, 1)
    rank = _number("RANK", 0)
    if world == 1:
        return Session.solo(staging_bytes=staging_bytes), None
    host, _, port = root.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise Invalid(f"{ROOT}={root!r}: expected rank 0's host and port, such as 'node-7:29600'")
    if token is None:
        raise Invalid(f"{TOKEN}: not set; expected a secret that all ranks of this job have, and nobody else")
    if rank == 0:
        place = Place(host, 0, world, token, local_world=local_world, fan_out=_fan_out(), port=int(port), tls=_tls())
        return place.join(None, timeout_s, local_world=local_world, staging_bytes=staging_bytes), None
    own = _host(world, host.strip("[]"))
    place = Place(own, rank, world, token, local_world=local_world, fan_out=_fan_out(), tls=_tls())
    started = time.monotonic()
    parent = place.find_parent(root, timeout_s)
    left = max(0.0, timeout_s - (time.monotonic() - started))
    return place.join(parent, left, local_world=local_world, staging_bytes=staging_bytes), None


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


def _host(world: int, master: str) -> str:
    """The address at which this rank can be reached by every other one; ``master`` is where rank 0 can."""
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
