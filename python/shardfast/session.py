"""The ranks of this job, connected once: never through the training's process groups, devices or collectives.

Ranks communicate through a tree of connections of their own, from any thread; every rank but rank 0 joins through its
parent. They find each other in one of two ways:

* Through the rendezvous store of ``torch.distributed``: rank 0 publishes the shape of the tree and a secret, and each
  rank with children publishes its address.
* Through the environment, without ``torch.distributed``: ``RANK``, ``WORLD_SIZE``, ``LOCAL_WORLD_SIZE``,
  :data:`ROOT` and :data:`TOKEN`, or what Slurm tells the processes of a step. Rank 0 listens at :data:`ROOT`, and sends
  every rank its parent's address.

The ranks of a process group are a job of their own, with a session of their own, in which they have their numbers in
the group.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import logging
import numbers
import os
import re
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from . import addresses
from .errors import Error, Invalid, Unavailable
from .launchers import MPI, Described, is_in_step, number, of_mpi, of_slurm, tasks_without_step
from .native import Place, Session

_log = logging.getLogger("shardfast")

TIMEOUT_S = 600.0
"""How long ranks wait for each other by default: longer than one of them may compile or evaluate alone."""

TIMEOUT_S_MAX = 1e9
"""The longest timeout: 31 years."""

TELLING_S = 5.0
"""How long a rank that fails in a call before the others have come waits to tell them."""

PATIENCE_S = 10.0
"""How long a call waits for the other ranks to make it before a warning names those that have not."""

GLANCE_S = 1.0
"""How often the watcher checks for waiting calls."""

STAGING_BYTES = "SHARDFAST_STAGING_BYTES"
"""The environment variable that bounds this process's staging memory: bytes, or a number of KiB, MiB or GiB.

It is read when the process's session is made. By default the ranks on a machine share a quarter of
its memory, or of what their control group may use.
"""

ROOT = "SHARDFAST_ROOT"
"""The environment variable that says where rank 0 listens, ``host:port``, in a job without ``torch.distributed``."""

TOKEN = "SHARDFAST_TOKEN"
"""The environment variable with a secret of the job, the same on all its ranks, that goes with :data:`ROOT`."""

TORCHRUN = "TORCHELASTIC_RUN_ID"
"""The environment variable that tells of ``torchrun``: each task of a step of Slurm may be a job of its own then."""

FANOUT = "SHARDFAST_FANOUT"
"""The environment variable that bounds how many ranks join through one; the same on all ranks."""

TLS_CERT = "SHARDFAST_TLS_CERT"
"""The environment variable that names the PEM file of this rank's certificate, valid for the name ``shardfast``."""

TLS_KEY = "SHARDFAST_TLS_KEY"
"""The environment variable that names the PEM file of that certificate's private key."""

TLS_CA = "SHARDFAST_TLS_CA"
"""The environment variable that names the PEM file of the authority that signed the certificates of all ranks."""

METRICS = "SHARDFAST_METRICS"
"""The environment variable ``host:port`` at which ranks serve what their saves and loads do, for Prometheus and people.

The ranks of a machine take ports in a row, the first of them this one. Others than those of this machine reach it only
if the host is theirs to reach: ``0.0.0.0`` is.
"""

EVENTS = "SHARDFAST_EVENTS"
"""The environment variable that names a file to which events of saves and loads are appended, as lines of JSON."""

_FAILED = "! "
"""Prefix of the error that a rank without an address publishes in the store."""

# A job's session lives as long as its process group (torch has the present one), or as this process. Beside it is the
# error of this rank's settings, if any: the ranks have met, so that each operation fails on all for that reason.
_sessions: weakref.WeakKeyDictionary[Any, tuple[Session, Invalid | None]] = weakref.WeakKeyDictionary()
_meetings: weakref.WeakKeyDictionary[Any, _Meeting] = weakref.WeakKeyDictionary()
_watched: weakref.WeakSet[Session] = weakref.WeakSet()
_served: weakref.WeakSet[Session] = weakref.WeakSet()
_listeners: set[int] = set()
_watch: threading.Thread | None = None
_lock = threading.Lock()


def _in_forked_child() -> None:
    """Makes a new lock: the holder of the old one does not exist here. Sessions check their process themselves."""
    global _lock, _watch
    _lock, _watch = threading.Lock(), None
    for listener in _listeners:  # a child that outlives this process would keep the port
        with contextlib.suppress(OSError):
            os.close(listener)
    _listeners.clear()


os.register_at_fork(after_in_child=_in_forked_child)


def expect_timeout(timeout_s: float) -> float:
    """Returns ``timeout_s`` if it is a time above zero; otherwise raises :class:`Invalid`."""
    if not isinstance(timeout_s, numbers.Real) or not 0 < timeout_s <= TIMEOUT_S_MAX:
        limits = f"more than 0 and at most {TIMEOUT_S_MAX:.0f}"
        raise Invalid(f"timeout_s={timeout_s!r}: expected a number of seconds, {limits}")
    return timeout_s


def current(timeout_s: float = TIMEOUT_S, process_group: Any = None) -> Session:
    """The session of all ranks of this job, or of those in ``process_group``.

    One process alone when ``torch.distributed`` is not initialised, :data:`ROOT` is not set and ``WORLD_SIZE`` is not
    above 1.

    Every rank must call it the first time; later calls are local. A rank whose wait timed out may call it again.

    Raises:
        Unavailable: If the ranks do not find each other within ``timeout_s``.
        Invalid: If ``timeout_s`` is no time above zero; if :data:`STAGING_BYTES` is no size or :data:`FANOUT` no
            fan-out, on every rank that begins an operation with this one; if what this rank's environment says of the
            job or of certificates cannot be used; if ``process_group`` is none that this rank is in; if this is a
            process of several that are in no process group and do not know rank 0's address.
    """
    try:
        expect_timeout(timeout_s)
        found = _job(process_group)
    except Invalid as error:
        _tell(error, process_group)
        raise
    if found is None:
        session = alone()
        _serve(session)
        return session
    job, meet = found
    with _lock:
        known = _sessions.get(job)
        if known is None:
            try:
                staging_bytes, problem = _staging_bytes(), None
            except Invalid as error:
                staging_bytes, problem = None, error
            session, other = meet(timeout_s, staging_bytes)
            known = _sessions[job] = session, problem or other
            _meetings.pop(job, None)
            _warn_of(session)
            _serve(session)
    session, problem = known
    if problem is not None:
        session.refuse(Invalid.__name__, str(problem), timeout_s)
    return session


def _tell(error: Invalid, process_group: Any) -> None:
    """Fails the other ranks, so that none waits for this one, whose arguments are wrong.

    This rank knows which session they call if the process group is not what is wrong, or if it has one session only.
    """
    session = met(process_group)
    if session is None and not _is_group(process_group):
        known = [session for session, _ in _sessions.values()]
        session = known[0] if len(known) == 1 else None
    if session is not None and session.world > 1:
        with contextlib.suppress(Error):
            session.refuse(Invalid.__name__, str(error), TELLING_S)


def _is_group(process_group: Any) -> bool:
    """Whether it is a process group, or stands for one that this rank is not in."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return False
    non_member = getattr(distributed.distributed_c10d.GroupMember, "NON_GROUP_MEMBER", None)
    is_other = type(process_group) is type(non_member) and process_group == non_member
    return is_other or isinstance(process_group, distributed.ProcessGroup)


def group_of(process_group: Any = None) -> Any:
    """The process group of the job, ``None`` without one: with another one the job is another one, too."""
    if process_group is not None:
        return process_group
    distributed = sys.modules.get("torch.distributed")
    return getattr(getattr(distributed, "group", None), "WORLD", None)


def met(process_group: Any = None) -> Session | None:
    """The session that :func:`current` returns, if the ranks have met or there is one process alone. Raises nothing."""
    with contextlib.suppress(Error):
        found = _job(process_group)
        return alone() if found is None else _sessions.get(found[0], (None, None))[0]
    return None


_Meet = Callable[[float, int | None], tuple[Session, Invalid | None]]
"""Connects the ranks of a job. Takes a timeout in seconds and a staging budget; returns also an error of this rank."""


def _job(process_group: Any) -> tuple[Any, _Meet] | None:
    """The job of this process and how its ranks meet; ``None`` for one process alone."""
    distributed = sys.modules.get("torch.distributed")
    is_initialized = distributed is not None and distributed.is_available() and distributed.is_initialized()
    members: _Members | None
    if process_group is not None:
        members = _members(distributed if is_initialized else None, process_group)
    else:
        members = _Members(distributed.group.WORLD, None) if distributed is not None and is_initialized else None
    if members is not None:
        return members.group, functools.partial(_met_by_store, distributed, members)
    if ROOT in os.environ:
        return _environment(), _met_by_environment
    _expect_one_process()
    if "WORLD_SIZE" not in os.environ:
        if is_in_step():
            return _environment(), _met_by_environment
        _expect_no_mpi()
        _expect_srun()
    return None


def prepare(process_group: Any = None) -> None:
    """Makes the session of a process that is alone, before :func:`current` asks for it.

    Waits for no other rank: the ranks of a job meet in their first call, which also raises errors.
    """
    with contextlib.suppress(Error):
        if _job(process_group) is None:
            alone()


def alone() -> Session:
    """The session of this process alone, whatever job it belongs to.

    Raises:
        Invalid: If :data:`STAGING_BYTES` is no size.
    """
    return _solo(os.getpid())


def _expect_one_process() -> None:
    """Refuses a process that is one of several and cannot find the others: each would save as a job of its own."""
    world = os.environ.get("WORLD_SIZE", "1")
    if re.fullmatch(r"[0-9]{1,9}", world) and int(world) > 1:
        raise Invalid(
            f"WORLD_SIZE={world}: this process is one of {int(world)}, and does not know the others: there is no "
            "process group. Call torch.distributed.init_process_group() first, or set "
            f"{ROOT} (rank 0's host and port) and {TOKEN} on all ranks. A process that is in no job of several must "
            "not have WORLD_SIZE in its environment"
        )
    if "WORLD_SIZE" in os.environ and is_in_step() and TORCHRUN not in os.environ:
        raise Invalid(
            f"WORLD_SIZE={world}, but srun has started {os.environ['SLURM_STEP_NUM_TASKS']} tasks "
            "(SLURM_STEP_NUM_TASKS): unset WORLD_SIZE if they are the ranks of one job, SLURM_PROCID if each is a job "
            "of its own"
        )


def _expect_no_mpi() -> None:
    """Refuses a process of ``mpirun`` that is one of several: it is not told where rank 0 is."""
    told = of_mpi("", None)
    if told is not None and told.world > 1:
        name = next(world for rank, world, *_ in MPI if rank in os.environ and world in os.environ)
        raise Invalid(
            f"{name}={told.world}: mpirun has started this process as one of {told.world}, and does not say where rank "
            f"0 is: set {ROOT} (rank 0's host and port) and {TOKEN} on all ranks, or call "
            f"torch.distributed.init_process_group() first. If each is a job of its own, unset {name}"
        )


def _expect_srun() -> None:
    """Refuses a process that a batch script runs without ``srun``: Slurm has several tasks for it, and one runs."""
    if (tasks := tasks_without_step()) > 1:
        raise Invalid(
            f"SLURM_NTASKS={tasks}: the job has {tasks} tasks, and its batch script has started this process alone: "
            "let it start the ranks of a training with srun. If this process is a job of its own, set WORLD_SIZE=1"
        )


def _serve(session: Session) -> None:
    """Serves and exports metrics if the environment asks for it. What prevents that is logged: no save fails for it."""
    if session in _served:
        return
    _served.add(session)
    if address := os.environ.get(METRICS):
        try:
            seen, bound, listener = session.serve(address)
        except (Error, UnicodeError) as error:
            shown = address.rsplit("@", 1)[-1].encode("utf-8", "backslashreplace").decode()
            _log.warning("%s=%s: no metrics are served: %s", METRICS, shown, error)
        else:
            _listeners.add(listener)
            where = "" if seen == bound else f", reached as {seen}"
            _log.info("rank %d serves http://%s/metrics and /live%s", session.rank, bound, where)
    if path := os.environ.get(EVENTS):
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o666))
        except OSError as error:
            _log.warning("%s=%s: no events are written: %s", EVENTS, path, error)
    try:
        session.export()
    except Error as error:
        _log.warning("nothing is exported over OTLP: %s", error)


def _warn_of(session: Session) -> None:
    """Logs calls of this session that wait long for other ranks."""
    global _watch
    if session.world == 1:
        return
    _watched.add(session)
    if _watch is None:
        _watch = threading.Thread(target=_warn, name="shardfast-watch", daemon=True)
        _watch.start()


def _warn() -> None:
    while True:
        time.sleep(GLANCE_S)
        # No lasting reference: dropping the last one waits until the other ranks have left.
        for sentence in [text for session in _watched for text in session.overdue(PATIENCE_S)[0]]:
            _log.warning("%s; still waiting", sentence)


class _Members(NamedTuple):
    """The ranks of a process group."""

    group: Any
    ranks: tuple[int, ...] | None
    """Their numbers in the default group; ``None`` for all of that."""


def _members(distributed: Any, group: Any) -> _Members:
    if distributed is None:
        raise Invalid(
            "process_group: torch.distributed is not initialised: call torch.distributed.init_process_group() first"
        )
    if not isinstance(group, distributed.ProcessGroup):
        if _is_group(group):
            raise Invalid(
                f"process_group: rank {distributed.get_rank()} is not in it: only ranks that are make this call"
            )
        hint = "; a DeviceMesh of one dimension has get_group()" if hasattr(group, "get_group") else ""
        raise Invalid(f"process_group: expected a torch.distributed.ProcessGroup, found a {type(group).__name__}{hint}")
    try:
        ranks = tuple(map(int, distributed.get_process_group_ranks(group)))
    except (KeyError, ValueError, RuntimeError) as error:
        raise Invalid(f"process_group: this process does not know its ranks: {error}") from error
    if distributed.get_rank() not in ranks:
        raise Invalid(f"process_group: rank {distributed.get_rank()} is not in it, its ranks are {ranks}")
    if len(ranks) == distributed.get_world_size():
        return _Members(distributed.group.WORLD, None)
    return _Members(group, ranks)


class _Environment:
    """Stands for the job that the environment describes."""


@functools.cache
def _environment() -> _Environment:
    return _Environment()


@functools.cache
def _solo(process: int) -> Session:
    return Session.solo(staging_bytes=_staging_bytes())


def _staging_bytes() -> int | None:
    """Reads the size of staging memory from the environment."""
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
    """Reads the tree's fan-out from the environment."""
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


class Settings(NamedTuple):
    """Settings of this process's job in its environment."""

    staging_bytes: int | None
    is_encrypted: bool
    problems: list[str]
    """What is wrong with it: each begins with the variable's name."""


def settings() -> Settings:
    """The settings of this process, and what is wrong with them. Meets no other rank."""
    staging_bytes, tls, problems = None, None, []
    try:
        staging_bytes = _staging_bytes()
    except Invalid as error:
        problems.append(str(error))
    try:
        _fan_out()
    except Invalid as error:
        problems.append(str(error))
    for read in (address, addresses.ports):
        try:
            read()
        except Invalid as error:
            problems.append(str(error))
    try:
        tls = _tls()
        if tls is not None:
            Place("127.0.0.1", 0, 1, "unused", tls=tls)  # reads the files, and listens nowhere
    except Error as error:
        problems.append(str(error))
    return Settings(staging_bytes, tls is not None, problems)


def address() -> str:
    """Returns the IP address where this process would listen for ranks that join through it, by its environment."""
    root = os.environ.get(ROOT, "").rpartition(":")[0].strip("[]")
    world = os.environ.get("WORLD_SIZE", "")
    return addresses.host(int(world) if world.isdecimal() else 0, root or os.environ.get("MASTER_ADDR", ""))


class _Meeting:
    """This rank's progress in joining the other ranks, from which the next call continues."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.token = secrets.token_hex(16)
        self.place: Place | None = None


def _met_by_store(
    distributed: Any, members: _Members, timeout_s: float, staging_bytes: int | None
) -> tuple[Session, Invalid | None]:
    rank, world = distributed.get_rank(), distributed.get_world_size()
    whole_world, local_world = world, number("LOCAL_WORLD_SIZE", 1, 1, beside=ROOT)
    on_node = local_world
    if members.ranks is not None:
        rank, world = members.ranks.index(rank), len(members.ranks)
        on_node = _on_node(members.ranks, local_world)
    if world == 1:
        return Session.solo(staging_bytes=staging_bytes), None
    try:
        fan_out, problem = _fan_out(), None
    except Invalid as error:
        fan_out, problem = None, error
    store = _store(distributed, members, timeout_s)
    meeting = _meetings.get(members.group)
    if meeting is None:
        # The number of the meeting: a store may outlive a process group, and every rank joins each meeting once.
        meeting = _meetings[members.group] = _Meeting(f"meeting/{store.add(f'meetings/{rank}', 1)}")
    name = meeting.name
    if rank == 0:
        # Rank 0's settings define the tree, so that all have the same.
        token, tree = meeting.token, (on_node, fan_out)
        store.set(name, f"{token} {on_node} {fan_out or 0}")
    else:
        token, *numbers = _published(store, name, timeout_s, f"rank {rank} of {world}: rank 0")
        tree = int(numbers[0]), int(numbers[1]) or None
        if problem is None and fan_out is not None and fan_out != tree[1]:
            other = f"has {tree[1]}" if tree[1] else "has not set it"
            problem = Invalid(f"{FANOUT}={fan_out} on rank {rank}, rank 0 {other}: all ranks must have the same")
    if meeting.place is None:
        (host, ports), wrong = _where(whole_world, os.environ.get("MASTER_ADDR", ""))
        problem = problem or wrong
        try:
            place = Place(host, rank, world, token, local_world=tree[0], fan_out=tree[1], ports=ports, tls=_tls())
        except Error as error:
            store.set(f"{name}/{rank}", f"{_FAILED}{error}")  # its children need not wait
            raise
        meeting.place = place
    place = meeting.place
    if place.address is not None:
        store.set(f"{name}/{rank}", place.address)
    parent = None
    if place.parent is not None:
        who = f"rank {rank} of {world}: rank {place.parent}, through which it joins,"
        (parent,) = _published(store, f"{name}/{place.parent}", timeout_s, who)
    meeting.place = None  # it joins once
    is_whole_job = members.ranks is None
    with _reaching(parent):
        session = place.join(
            parent, timeout_s, local_world=local_world, staging_bytes=staging_bytes, is_whole_job=is_whole_job
        )
    return session, problem


def _where(world: int, master: str) -> tuple[tuple[str, tuple[int, int] | None], Invalid | None]:
    """The address and the ports at which this rank listens; and what is wrong with the environment's, if anything."""
    try:
        return (addresses.host(world, master), addresses.ports()), None
    except Invalid as error:
        return (addresses.found(world, master), None), error


@contextlib.contextmanager
def _reaching(address: str | None) -> Iterator[None]:
    """Says what to do if another rank cannot be reached: after a while in the log, and in the error."""
    if address is None:
        yield
        return
    text = "the rank at %s has not let this one join yet; still trying; %s"
    waiting = threading.Timer(PATIENCE_S, _log.warning, (text, address, addresses.CHOOSE))
    waiting.daemon = True
    waiting.start()
    try:
        yield
    except Unavailable as error:
        raise Unavailable(f"{error}; {addresses.CHOOSE}") from None
    finally:
        waiting.cancel()


def _on_node(ranks: tuple[int, ...], local_world: int) -> int:
    """How many of these ranks share a node, if each node has equally many, in consecutive runs; else 1."""
    nodes = [rank // local_world for rank in ranks]
    counts = [nodes.count(node) for node in dict.fromkeys(nodes)]
    is_even = nodes == sorted(nodes) and len({*counts[:-1]}) <= 1 and counts[-1] <= counts[0]
    return counts[0] if is_even else 1


def _published(store: Any, key: str, timeout_s: float, who: str) -> list[str]:
    """The words that another rank has published in the store."""
    try:
        try:
            store.wait([key], datetime.timedelta(seconds=min(timeout_s, PATIENCE_S)))
        except RuntimeError:
            if timeout_s <= PATIENCE_S:
                raise
            _log.warning("%s has not made this call after %g s; still waiting", who.rstrip(","), PATIENCE_S)
            store.wait([key], datetime.timedelta(seconds=timeout_s - PATIENCE_S))
    except RuntimeError as error:  # torch's DistStoreError among them
        raise Unavailable(
            f"{who} did not report its address within {timeout_s:g} s, which it does when it makes this call: {error}"
        ) from error
    text = str(store.get(key).decode())
    if text.startswith(_FAILED):
        raise Unavailable(f"{who} cannot be joined: {text.removeprefix(_FAILED)}")
    return text.split(" ")


def _described() -> Described:
    """This process's place in its job, by its environment."""
    token = os.environ.get(TOKEN)
    if ROOT not in os.environ:
        return of_slurm(token)
    mpi = None if "RANK" in os.environ or "WORLD_SIZE" in os.environ else of_mpi(os.environ[ROOT], token)
    return mpi or Described(
        os.environ[ROOT],
        token,
        number("RANK", 0, beside=ROOT),
        number("WORLD_SIZE", 1, beside=ROOT),
        number("LOCAL_WORLD_SIZE", 1, 1, beside=ROOT),
    )


def _met_by_environment(timeout_s: float, staging_bytes: int | None) -> tuple[Session, Invalid | None]:
    root, token, rank, world, local_world, local_rank = _described()
    if world == 1:
        return Session.solo(staging_bytes=staging_bytes), None
    host, _, port = root.rpartition(":")
    is_bare = ":" in host and not (host.startswith("[") and host.endswith("]"))
    if not host or is_bare or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise Invalid(f"{ROOT}={root!r}: expected rank 0's host and port, such as 'node-7:29600' or '[fd00::7]:29600'")
    if token is None:
        raise Invalid(f"{TOKEN}: not set; expected a secret that only the ranks of this job know")
    (own, ports), problem = _where(world, host.strip("[]"))
    opened = functools.partial(
        Place, world=world, token=token, local_world=local_world, fan_out=_fan_out(), ports=ports, tls=_tls()
    )
    ours: dict[str, Any] = {"local_world": local_world, "local_rank": local_rank, "staging_bytes": staging_bytes}
    if rank == 0:
        with _listening(world):
            place = opened(host, 0, port=int(port))
        return place.join(None, timeout_s, **ours), problem
    place = opened(own, rank)
    started = time.monotonic()
    with _reaching(root):
        parent = place.find_parent(root, timeout_s)
    left = max(0.0, timeout_s - (time.monotonic() - started))
    with _reaching(parent):
        return place.join(parent, left, **ours), problem


@contextlib.contextmanager
def _listening(world: int) -> Iterator[None]:
    """Says what to do if rank 0 cannot listen where the environment or Slurm says."""
    try:
        yield
    except Unavailable as error:
        from_slurm = "" if ROOT in os.environ else ", which follows from the numbers of Slurm's job and step"
        raise Unavailable(
            f"rank 0 of {world}: {error}{from_slurm}: give all ranks another {ROOT}, with RANK, WORLD_SIZE and "
            f"{TOKEN}, and only one of them RANK=0"
        ) from None


def _store(distributed: Any, members: _Members, timeout_s: float) -> Any:
    """The store in which the job's processes found each other, with room for the keys of these members."""
    try:
        store = distributed.distributed_c10d._get_default_store()
    except (AttributeError, ValueError, RuntimeError):
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        if host is None or port is None:
            raise Unavailable(
                "this PyTorch does not expose its rendezvous store, and MASTER_ADDR and MASTER_PORT are not set"
            ) from None
        timeout = datetime.timedelta(seconds=timeout_s)
        store = distributed.TCPStore(host, int(port), is_master=False, timeout=timeout)
    room = "shardfast"
    if members.ranks is not None:
        # In some versions the name differs between ranks of a group; the ranks do not identify a group either.
        room = f"shardfast/{members.group.group_name}/{','.join(map(str, members.ranks))}"
    return distributed.PrefixStore(room, store)
