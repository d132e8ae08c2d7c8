"""The plain verbs: save one checkpoint, load one checkpoint."""

from __future__ import annotations

import contextlib
import functools
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from . import adapters as frameworks
from . import native
from .capture.background import runs_atexit
from .capture.in_flight import Pending, in_flight
from .collection import paused
from .errors import Error, Exhausted, Internal, Invalid
from .nesting import call
from .progress import shown
from .session import TELLING_S, TIMEOUT_S, current
from .session import alone as one_process
from .state.catalog import SavedAlias, SavedLeaf, SavedObject, SavedTensor
from .state.coordinates import coordinates_of, shown_by
from .state.description import Describer
from .state.entries import Walked, in_use, walk
from .state.load_plan import LoadPlan, Options, Rename
from .state.match import Match
from .state.sharded import load as load_pieces

Url = str | os.PathLike[str]
T = TypeVar("T")

Asked = tuple[bool, str, int | None, float]
"""A save or load: whether it is a save, its place, its step, and the seconds since the user's call."""


@call("save()")
def save(
    url: Url,
    state: dict[str, Any],
    *,
    step: int | None = None,
    user: Mapping[str, str] | None = None,
    pickle: bool = False,
    prove: bool | None = None,
    prove_except: str | Sequence[str] = (),
    process_group: Any = None,
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Saves ``state`` as one checkpoint and returns when it is durable. Every rank of the job calls it.

    Args:
        url: Where the checkpoint goes: a path, or a URL such as ``file:///ckpt/1`` or ``s3://bucket/run/1``. A relative
            path starts at the current directory of this call, ``~`` at the home directory. The directory must be new,
            empty, or left by a save that was cut off; one that holds other files is refused. A committed checkpoint is
            never overwritten.
        state: A dict from names to what is saved under them: modules, optimizers (with their modules in the same
            state), anything with ``state_dict`` and ``load_state_dict``, tensors and arrays, and dicts of these and of
            plain Python values. Each key becomes a directory of the checkpoint. A tensor without a sharding is taken to
            be the same on every rank; wrap what belongs to one rank in :class:`PerRank`. A value is saved as it stands
            in the dict; to have it read at each save, use :class:`Stateful` or :func:`random_state`. One value takes at
            most 1 GiB and 2**24 items; put larger ones into tensors or arrays.
        step: The training step, which the checkpoint records.
        user: Other texts to record, which ``shardfast inspect`` shows.
        pickle: Pickle Python values that have no form as data. Such a checkpoint runs code when it is loaded, and loads
            only with ``pickle=True``.
        prove: When ranks compare their replicas. Ranks that hold the same part of a tensor are replicas, and share its
            writing. By default the first save of each layout in a process compares checksums of all copies except
            those of modules' buffers. If copies differ, the save fails and names them and their ranks. For this a rank
            sums what it holds and does not write, before the save is staged; ranks compare these sums when they have
            written. ``True`` compares everything in every
            save; ``False`` compares nothing. The lowest rank that holds a part writes it if it is not compared.
            :attr:`Pending.report` tells under ``"replicas"`` what was done. Optimizer state of another shape than its
            sharded parameter is compared in every save.
        prove_except: Leaves whose copies may differ: patterns of keys (``"ema"``) or of leaves
            (``"model/*.running_*"``). The lowest rank that holds a part writes it.
        process_group: The ranks that make this call, if not all ranks of the job do: a ``torch.distributed`` process
            group. Its ranks are a job of their own, with their numbers in the group.
        timeout_s: How long ranks wait for each other, in seconds.

    Raises:
        Invalid: The state cannot be stored (the message names every offender), the ranks' states contradict each
            other, or the directory holds files of something else.
        Conflict: A committed checkpoint is there already.
        Corrupt: Something removed or changed the files of this save before its commit.
        Exhausted: The disk is full.
        Unavailable: The storage or a rank cannot be reached.
    """
    session, describer = _describer(timeout_s, process_group)
    pending = begin(
        session,
        describer,
        url,
        state,
        step=step,
        user=user,
        pickle=pickle,
        prove=prove,
        prove_except=prove_except,
        timeout_s=timeout_s,
        blocking=True,
    )
    _wait(pending)


@call("save_async()")
def save_async(
    url: Url,
    state: dict[str, Any],
    *,
    step: int | None = None,
    user: Mapping[str, str] | None = None,
    pickle: bool = False,
    prove: bool | None = None,
    prove_except: str | Sequence[str] = (),
    process_group: Any = None,
    timeout_s: float = TIMEOUT_S,
) -> Pending:
    """Begins to save ``state`` and returns. Every rank of the job calls it.

    When this returns, everything is copied that no optimizer of the state owns: Python values, buffers, small tensors.
    Parameters and optimizer state are copied while the training goes on. A step of any optimizer and a
    ``load_state_dict`` wait until that is done, and so do :func:`load` and the next save. Call :meth:`Pending.staged`
    before modifying them any other way; otherwise the save fails on every rank and leaves no checkpoint. Writes that
    PyTorch's version counters do not count (through ``.data``, by foreign code) are noticed only in part. Writing,
    flushing and the commit go on in the background; a process that ends waits for them, and a call while it ends until
    the save is durable.

    The arguments are those of :func:`save`. So are the errors: this call raises what fails before it returns, the
    :class:`Pending` everything else.
    """
    session, describer = _describer(timeout_s, process_group)
    # The callback of atexit that waits for saves may have run, or come too late to be run.
    is_last = runs_atexit()
    pending = begin(
        session,
        describer,
        url,
        state,
        step=step,
        user=user,
        pickle=pickle,
        prove=prove,
        prove_except=prove_except,
        timeout_s=timeout_s,
        blocking=is_last,
    )
    if is_last:
        _wait(pending)
    return pending


def _wait(pending: Pending) -> None:
    try:
        pending.waited()
    finally:
        if runs_atexit():
            in_flight.conclude()  # a thread that came back to an interpreter which is gone would end the process


# Each session's last state, as described for the plain verbs.
_describers: weakref.WeakKeyDictionary[native.Session, Describer] = weakref.WeakKeyDictionary()


def _describer(timeout_s: float, process_group: Any = None) -> tuple[native.Session, Describer]:
    session = current(timeout_s, process_group)
    describer = _describers.get(session)
    if describer is None:
        describer = _describers[session] = Describer(in_flight.changing)
    return session, describer


def begin(
    session: native.Session,
    describer: Describer,
    url: Url,
    state: dict[str, Any],
    *,
    step: int | None,
    user: Mapping[str, str] | Callable[[], Mapping[str, str]] | None = None,
    pickle: bool,
    prove: bool | None,
    prove_except: str | Sequence[str] = (),
    timeout_s: float,
    blocking: bool = False,
    window: Callable[[native.Described], native.Window | None] = lambda described: None,
    file_bytes_max: int | None = None,
) -> Pending:
    """Begins to save ``state`` as :func:`save_async` does; ``describer`` may have described it before.

    ``window`` gives what was captured ahead of this save of what is described. ``file_bytes_max`` bounds the tensors'
    bytes in a data file.
    """

    began = time.perf_counter()
    described_s = 0.0

    def prepare() -> Callable[[], tuple[Pending, native.Pending]]:
        place, notes = _expect_own_directory(expect_url(url)), dict((user() if callable(user) else user) or {})
        if step is not None:
            expect_step(step)
        for name, note in notes.items():
            if not is_text(name) or not is_text(note):
                raise Invalid(f"user={{{name!r}: {note!r}}}: expected texts by name")
        if not (prove is None or isinstance(prove, bool)):
            raise Invalid(f"prove={prove!r}: expected None, True or False; leaves are excepted by prove_except=")
        if pickle:
            notes["shardfast.pickle"] = "allowed"
        in_flight.staged()
        said = describer.describe(state, pickle=pickle, excepted=patterns(prove_except))
        ahead, streams = window(said.described), _streams(said.described.devices)

        def begin() -> tuple[Pending, native.Pending]:
            nonlocal described_s
            described_s = time.perf_counter() - began
            begun = native.save(
                session,
                place,
                said.described,
                said.values,
                said.owner,
                step=step,
                user=notes,
                timeout_s=timeout_s,
                streams=streams,
                blocking=blocking,
                prove=prove,
                window=ahead,
                file_bytes_max=file_bytes_max,
                after_s=described_s,
            )
            return Pending(place, begun, said.watched, ahead), begun

        return begin

    asked = functools.partial(_asked, True, url, step, began)
    # An interrupt in the second part comes when the ranks have met: it is no failure of the next call.
    first = prepared(session, prepare, timeout_s, asked=asked)
    pending, begun = prepared(session, first, timeout_s, failures=Exception, asked=asked)
    try:
        in_flight.add(pending)
    finally:
        try:
            _until_captured(begun)
        except Error:  # of this save: the caller gets it here
            pending.raised()
            raise
    if not blocking:
        pending.stalled(time.perf_counter() - began - described_s)  # the save has counted what was before it
    return pending


def _until_captured(begun: native.Pending) -> None:
    """Waits until everything is copied that the program may change after the call, also after an exception.

    A program that goes on after Ctrl-C changes what the save still copies, and the save would commit that.
    """
    try:
        begun.captured()
    except Error:
        raise
    except BaseException:
        while True:
            try:
                begun.captured()
            except Error:  # it failed: nothing is committed
                pass
            except BaseException:  # once more Ctrl-C: the first one is raised
                continue
            break
        raise


def _streams(devices: Iterable[int]) -> dict[int, int]:
    """The streams that the program uses now."""
    found = ((device, adapter.stream(device)) for device in devices for adapter in frameworks.active())
    return {device: stream for device, stream in found if stream is not None}


@call("load()")
def load(
    url: Url,
    state: dict[str, Any],
    *,
    strict: bool = True,
    rename: Rename | None = None,
    cast: bool = False,
    only: str | Sequence[str] = (),
    per_rank: str = "error",
    pickle: bool = False,
    progress: bool = False,
    process_group: Any = None,
    timeout_s: float = TIMEOUT_S,
) -> LoadPlan:
    """Loads one checkpoint into ``state``, in this job's layout. Every rank of the job calls it.

    Fills tensors in place, whatever layout they were saved in, and creates optimizer state that does not exist yet.
    Other values replace the entries of the state's dicts, or go to ``load_state_dict``. These change only after all
    bytes on all ranks were read and verified, and every rank has made its values.

    If several ranks want the same bytes, one of them reads these and passes them on: to ranks of its machine through
    shared memory, to others over connections of their own. Ranks of one machine that load from a file system read for
    themselves, since the page cache reads each byte once. No collective of the job's process groups runs.

    Args:
        url: The checkpoint.
        state: As in :func:`save`. A value that only marks a place may be anything, such as ``None``.
        strict: Refuse leaves that only the checkpoint has (no rank's state has them) or only the state has. With
            ``False`` the result lists them.
        rename: A dict from names in the checkpoint to names in the state, both ``"key/name"``, or a function from the
            one to the other. A renamed parameter is renamed in optimizers, too.
        cast: Convert tensors whose dtype differs.
        only: Load a part: patterns of keys (``"model"``) or of leaves (``"model/layers.*"``), of names in the state.
        per_rank: What to do if values differ by rank and the number of ranks or their mesh has changed. ``"error"``
            raises.
            ``"rank0"`` gives every rank what rank 0 saved. ``"index"`` gives rank *i* what rank *i* modulo the number
            of saving ranks saved.
        pickle: Load pickles, which can run any code.
        progress: Draw a line with the bytes of rank 0's part on its standard error, if that is a terminal.
        process_group: As in :func:`save`.
        timeout_s: How long ranks wait for each other, in seconds.

    Returns:
        What was loaded.

    Raises:
        NotFound: No checkpoint is committed there.
        Invalid: The checkpoint does not fit the state. One error, the same on every rank, lists all leaves of all
            ranks that are missing, unexpected, or of another shape or dtype.
        Corrupt: Bytes are not those that were saved, or no value can be made of them. Tensors that were filled before
            that keep the loaded data.
        Unsupported: The format is newer, or a value's class is not imported, or a value is larger than the limit.
    """
    began = time.perf_counter()
    session = current(timeout_s, process_group)
    options, place = prepared(
        session,
        lambda: (Options(strict, rename, cast, patterns(only), per_rank, pickle), expect_url(url)),
        timeout_s,
        asked=functools.partial(_asked, False, url, None, began),
    )
    checkpoint = native.open(session, place, timeout_s=timeout_s, after_s=time.perf_counter() - began)
    return fill(session, checkpoint, state, options, timeout_s, progress=progress)


@paused
@call("plan_load()")
def plan_load(
    url: Url,
    state: dict[str, Any],
    *,
    strict: bool = True,
    rename: Rename | None = None,
    cast: bool = False,
    only: str | Sequence[str] = (),
    per_rank: str = "error",
    process_group: Any = None,
    timeout_s: float = TIMEOUT_S,
) -> LoadPlan:
    """Tells what :func:`load` with these arguments would do. Every rank of the job calls it.

    Reads the manifest, and small tensors that stand beside values, and changes nothing. ``print(sf.plan_load(...))``
    shows what would be loaded, renamed, cast, missing and unexpected, every problem that would make the load fail, and
    how many bytes this rank would read.
    """
    session = current(timeout_s, process_group)
    options, place = prepared(
        session, lambda: (Options(strict, rename, cast, patterns(only), per_rank), expect_url(url)), timeout_s
    )
    checkpoint = native.open(session, place, timeout_s=timeout_s)
    match = _matched(session, checkpoint, state, options, timeout_s, dry=True)
    forecast = match.installation.forecast()
    for name, number in checkpoint.plan(forecast.wants, forecast.values).items():
        setattr(match.plan, name, number)
    return match.plan


@paused
def fill(
    session: native.Session,
    checkpoint: native.Checkpoint,
    state: dict[str, Any],
    options: Options,
    timeout_s: float,
    *,
    peer_reads: str = "auto",
    progress: bool = False,
) -> LoadPlan:
    """Loads an open checkpoint into ``state``; every rank of the session calls it. See :func:`load`.

    ``peer_reads`` is ``"always"`` if one rank reads the bytes that several ranks want, ``"never"`` if each reads for
    itself, else the engine decides by where the storage is. ``progress`` is as in :func:`load`.
    """
    with concluding(checkpoint):
        return _filled(session, checkpoint, state, options, timeout_s, peer_reads, progress)


@contextlib.contextmanager
def concluding(checkpoint: native.Checkpoint) -> Iterator[None]:
    """An error of the block is one of the load that the checkpoint was opened for, so that reports tell it."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(Error):  # of another process
            checkpoint.failed(*_told(error))
        raise


def _filled(
    session: native.Session,
    checkpoint: native.Checkpoint,
    state: dict[str, Any],
    options: Options,
    timeout_s: float,
    peer_reads: str,
    progress: bool,
) -> LoadPlan:
    match = _matched(session, checkpoint, state, options, timeout_s)
    match.plan.expect_no_problems()
    in_flight.staged()
    in_flight.release("a checkpoint was loaded since")
    installation = match.installation
    bound = prepared(session, installation.bind, timeout_s)
    with shown(f"load {checkpoint.url}", checkpoint.moved, progress and session.rank == 0):
        encoded, traffic = checkpoint.load(bound.wants, bound.values, timeout_s, _streams(bound.devices), peer_reads)
    match.plan.add(traffic)
    match.plan.sources = dict(checkpoint.sources())
    # Each rank makes its values alone: an error of one fails all, before any rank has changed.
    prepared(session, functools.partial(installation.make, encoded), timeout_s)
    checkpoint.barrier(timeout_s)
    prepared(session, installation.install, timeout_s)
    checkpoint.done(timeout_s)
    return match.plan


def _matched(
    session: native.Session,
    checkpoint: native.Checkpoint,
    state: dict[str, Any],
    options: Options,
    timeout_s: float,
    dry: bool = False,
) -> Match:
    saved = [_saved_leaf(index, leaf) for index, leaf in enumerate(checkpoint.leaves)]
    alone = functools.partial(prepared, session, timeout_s=timeout_s)
    walked: Walked = alone(lambda: walk(state))
    session.stands(coordinates_of(shown_by(walked.entries), walked.adapters))
    problems = in_use(walked.entries, options.selects)
    pieces = load_pieces(checkpoint, walked, saved, options, timeout_s, dry, alone)
    pieces.problems += problems
    info = checkpoint.info
    ranks = {"rank": session.rank, "world": session.world, "saved_world": info["world"]}
    match: Match = alone(lambda: Match(pieces, saved, url=checkpoint.url, step=info["step"], **ranks, dry=dry))
    if dry:
        alone(lambda: match.foresee(functools.partial(_read, checkpoint.url, timeout_s)))
    match.conclude(*checkpoint.agree(*match.findings(), timeout_s))
    return match


def _read(url: str, timeout_s: float, copies: list[tuple[int, int]]) -> Sequence[bytes]:
    """Reads copies of values on this rank alone."""
    return native.open(one_process(), url, timeout_s=timeout_s).load([], copies, timeout_s)[0]


def prepared(
    session: native.Session,
    prepare: Callable[[], T],
    timeout_s: float,
    *,
    failures: type[BaseException] = BaseException,
    asked: Callable[[], Asked] | None = None,
) -> T:
    """The result of ``prepare`` on this rank; its error fails all ranks, so that none waits for this one.

    ``asked`` gives the save or load that fails so, if that is not open yet. After what ends the program, such as
    ``KeyboardInterrupt``, it waits for the others no longer than :data:`TELLING_S`.
    """
    try:
        return prepare()
    except failures as error:
        agreed = _refused(session, error, timeout_s, asked)
        try:
            if agreed is error:
                raise
            raise agreed from error
        finally:  # an exception that its own traceback refers to would keep all frames, and with them the state
            del agreed


def _refused(
    session: native.Session, error: BaseException, timeout_s: float, asked: Callable[[], Asked] | None
) -> BaseException:
    """Fails all ranks with this one's error, so that none waits for it; returns what to raise here."""
    if not isinstance(error, Exception):
        timeout_s = min(timeout_s, TELLING_S)
    try:
        session.refuse(*_told(error), timeout_s, None if asked is None else asked())
    except Error as agreed:
        return agreed if isinstance(error, Error) else error
    return error


def _asked(is_save: bool, url: object, step: object, began: float) -> Asked:
    """A save or load that this rank refuses: its place and step as far as they are some."""
    place, number = "", None
    with contextlib.suppress(Error):
        place = expect_url(url)
        if step is not None:
            number = expect_step(step)
    return is_save, place, number, time.perf_counter() - began


def _told(error: BaseException) -> tuple[str, str]:
    """The kind and the message with which other ranks, and reports, tell an error."""
    if isinstance(error, MemoryError):
        kind = Exhausted.__name__
    else:  # other exceptions come from the state's own code
        kind = type(error).__name__ if isinstance(error, Error) else Invalid.__name__
    message = str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}"
    if not isinstance(error, Exception):
        message = f"it was interrupted by {type(error).__name__}"
    message += "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return kind, message.encode("utf-8", "backslashreplace").decode()  # the state's own code may say anything


def patterns(only: str | Sequence[str]) -> tuple[str, ...]:
    """The patterns of ``only``, or of another choice of leaves."""
    chosen = (only,) if isinstance(only, str) else tuple(only) if isinstance(only, Iterable) else (only,)
    if not all(isinstance(pattern, str) for pattern in chosen):
        raise Invalid(f"{only!r}: expected a key, a name or a pattern of leaves, or several of them")
    return chosen


def _saved_leaf(index: int, leaf: tuple[Any, ...]) -> SavedLeaf:
    kind, key, name, layout = leaf[:4]
    if kind == "tensor":
        return SavedTensor(index, key, name, layout, leaf[4], tuple(leaf[5]), leaf[6])
    if kind == "object":
        copies = tuple((tuple((start, stop) for start, stop in ranks), size) for ranks, size in leaf[4])
        return SavedObject(index, key, name, layout, copies)
    if kind == "alias":
        return SavedAlias(index, key, name, layout, leaf[4], leaf[5])
    raise Internal(f"{key}/{name}: a leaf of unknown kind {kind!r}")


def is_text(value: object) -> bool:
    """Whether it is a text that UTF-8 can encode, as a lone surrogate is not."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def expect_url(url: object) -> str:
    """A URL or path as text that names the same place from now on, whatever ``os.chdir`` does.

    A path is made absolute and its ``~`` or ``~user`` expanded.
    """
    if not isinstance(url, (str, os.PathLike)):
        raise Invalid(f"url: expected a path or a URL, found a {type(url).__name__}")
    text = os.fspath(url)
    if not isinstance(text, str):
        raise Invalid(f"url: expected a path in text, found {text!r}: pass os.fsdecode(path)")
    if not is_text(text):
        raise Invalid(f"url: expected text that UTF-8 can encode, found {text!r}")
    if text.startswith("~"):
        home = os.path.expanduser(text)
        if home.startswith("~"):
            raise Invalid(f"{text}: there is no home directory of that name; write ./{text} for a file of that name")
        text = home
    return native.absolute_url(text)


def _expect_own_directory(place: str) -> str:
    """Refuses to save into the root or the current directory, also when nothing else is there yet."""
    path = os.path.normpath(place.removeprefix("file://"))  # asks no file system, which may be far away
    with contextlib.suppress(OSError):  # a current directory that was removed
        which = "root" if path in ("/", "//") else "current" if path == os.getcwd() else None
        if which is not None:
            raise Invalid(f"save {place}: this is the {which} directory: save to a directory of its own, a new one")
    return place


def expect_step(step: object) -> int:
    """The number of training steps; refuses what is none."""
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 1 << 64:
        raise Invalid(f"step={step!r}: expected the number of training steps done")
    return step
