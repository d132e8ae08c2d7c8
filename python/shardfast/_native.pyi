"""Types of the crossing into Rust. Private.

A save crosses with what the state holds (``Described``), then to begin (``save``); a load once for each of its phases.
`crates/native/src` describes arguments and results.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Self, final

__all__ = [
    "VALUE_BYTES_MAX",
    "VALUE_CONTAINERS_MAX",
    "VALUE_ITEMS_MAX",
    "Cancelled",
    "Checkpoint",
    "Conflict",
    "Corrupt",
    "Described",
    "Drain",
    "Error",
    "Exhausted",
    "Hold",
    "Internal",
    "Invalid",
    "Keepers",
    "Mapped",
    "NotFound",
    "Outline",
    "Part",
    "Pending",
    "Place",
    "Retention",
    "Session",
    "Stamp",
    "Stopping",
    "Tagged",
    "Unavailable",
    "Unsupported",
    "Value",
    "Window",
    "__version__",
    "absolute_url",
    "adopt_near",
    "begin_run",
    "best_interval",
    "cli_main",
    "decode",
    "dismiss_keeper",
    "export_refused",
    "flush",
    "interpreter_ends",
    "keeper_process",
    "keeper_users",
    "mean_time_between_failures",
    "meet_keepers",
    "memory_place",
    "near_place",
    "newest",
    "note_end",
    "open",
    "outlive",
    "save",
    "step_url",
    "time_of",
]

__version__: str

VALUE_BYTES_MAX: int
"""Largest encoding of one value."""

VALUE_ITEMS_MAX: int
"""Most items of one value: those of its lists, the keys and values of its dicts, all the way down."""

VALUE_CONTAINERS_MAX: int
"""Most lists, dicts and tagged values in one value."""

class Error(Exception):
    """The base class of all errors of Shardfast."""

class Corrupt(Error):
    """The bytes are not those that were saved: use another checkpoint."""

class NotFound(Error):
    """Nothing is stored under that name."""

class Conflict(Error):
    """The name is already taken."""

class Exhausted(Error):
    """A disk, a quota or a budget is full."""

class Unavailable(Error):
    """The store or another rank cannot be reached now."""

class Unsupported(Error):
    """A newer version, or a feature that is not available here."""

class Invalid(Error):
    """The call, the state or a permission is wrong: fix it and call again."""

class Cancelled(Error):
    """The operation was cancelled on request."""

class Internal(Error):
    """A defect of Shardfast."""

@final
class Place:
    """A rank's place among the ranks of its job before it has joined them. With children it listens."""

    def __new__(
        cls,
        host: str,
        rank: int,
        world: int,
        token: str,
        *,
        local_world: int = 1,
        fan_out: int | None = None,
        port: int = 0,
        ports: tuple[int, int] | None = None,
        tls: tuple[str, str, str] | None = None,
    ) -> Self:
        """The place of ``rank`` in the tree of ``world`` ranks, of which ``local_world`` share a node."""

    @property
    def parent(self) -> int | None:
        """The rank through which this one joins; ``None`` for rank 0."""

    @property
    def address(self) -> str | None:
        """The address at which this rank's children join, ``host:port``; ``None`` without children."""

    def find_parent(self, root: str, timeout_s: float) -> str:
        """The parent's address, from rank 0 at ``root``; registers this rank's own. All ranks call it, or none."""

    def join(
        self,
        parent: str | None,
        timeout_s: float,
        *,
        local_world: int = 1,
        local_rank: int | None = None,
        staging_bytes: int | None = None,
        is_whole_job: bool = True,
    ) -> Session:
        """Joins the ranks of the job, through the parent at ``parent``; ``None`` for rank 0."""

@final
class Session:
    """The ranks that save and load together, and the memory that they stage in."""

    @staticmethod
    def solo(*, staging_bytes: int | None = None) -> Session:
        """One process alone."""

    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    @property
    def staging_bytes(self) -> int:
        """Bytes of staging memory that saves and loads may use together."""

    def expect_same(self, call: str, url: str, terms: Sequence[tuple[str, str]], timeout_s: float) -> None:
        """Checks that all ranks have the same terms for a run, as a part of that call."""

    def are_all(self, call: str, is_so: bool, timeout_s: float) -> bool:
        """Whether it is so on all ranks, each of which makes that call."""

    def reserve(self, described: Described) -> None:
        """Makes and page-locks staging memory for what a save of that state copies from devices, in the background."""

    def serve(self, address: str) -> tuple[str, str, int]:
        """Serves what this process's saves and loads do over HTTP.

        ``address`` is ``host:port``; ranks of a machine serve at ports in a row. Returns where others reach it, where
        it listens, and the descriptor of the socket.
        """

    def export(self) -> bool:
        """Exports traces and metrics over OTLP if the environment says where to; returns whether it does."""
    def stands(self, coordinates: Sequence[tuple[str, int]]) -> None:
        """Notes where this rank stands in the job's meshes, for records of loads under way and of what follows."""

    def overdue(self, patience_s: float) -> tuple[list[str], bool]:
        """A sentence for each operation that has waited longer for ranks, once; whether any waits for ranks."""

    def refuse(
        self,
        kind_name: str,
        message: str,
        timeout_s: float,
        asked: tuple[bool, str, int | None, float] | None = None,
    ) -> NoReturn:
        """Takes part in the next operation with a failure: every rank raises it instead of waiting for this one.

        ``asked`` is the save or load that fails so: whether it is a save, its place, its step, and the seconds since
        the user's call.
        """

@final
class Window:
    """Some steps before a save, in which a part of the state is captured ahead of it."""

    def __new__(
        cls,
        session: Session,
        described: Described,
        owner: object,
        classes: Sequence[tuple[str, str, str, str, bool | None, str | None]],
        units: Sequence[tuple[int, int, Sequence[int]]],
        streams: Mapping[int, int],
        is_waited: bool,
        pace: tuple[float, float] | None,
    ) -> Window:
        """Opens a window over these units of what is described."""

    def go_on(self, streams: Mapping[int, int]) -> None:
        """No optimizer steps before the next call of ``stepping``: copies begin."""

    def stepping(self, streams: Mapping[int, int]) -> None:
        """An optimizer is about to step: waits for the block under way."""

    def stepped(
        self,
        applied: Sequence[tuple[int, object, int]],
        scalars: Sequence[tuple[str, Sequence[float], float | None]],
        place: Callable[[object], tuple[int, int, str, int | None]],
        streams: Mapping[int, int],
    ) -> None:
        """An optimizer has stepped."""

    def are_gradients_left(self) -> bool:
        """Whether a device's gradients stayed as they were until the next step, as a rehearsal saw."""

    def pace(self) -> tuple[float, float] | None:
        """Bytes that a device copies in a millisecond, and milliseconds between two steps."""

    def rehearse(self, streams: Mapping[int, int]) -> list[tuple[str | None, str, bool]]:
        """By class the name of the variant that has the training's bits, or why there is none; whether it is known."""

    def release(self, reason: str) -> None:
        """Gives everything back that is held."""

    def reason(self) -> str | None:
        """Why something was let go; ``None`` if nothing was."""

    def is_refuted(self) -> bool:
        """Whether a save found other bits than those that were rolled forward."""

    def figures(self) -> str:
        """Its figures, as JSON."""

@final
class Pending:
    """A save in flight."""

    def captured(self, timeout_s: float | None = None) -> None:
        """Waits until everything is copied that may change before the save is staged."""

    def staged(self, timeout_s: float | None = None) -> None:
        """Waits until all is copied."""

    def confirm_unmodified(self, kind_name: str | None = None, message: str = "") -> None:
        """Confirms that lazily captured tensors were not modified before the save was staged, or fails the save."""

    def committed(self, timeout_s: float | None = None) -> None:
        """Waits until the checkpoint is durable and visible; raises what failed."""

    def done(self) -> bool:
        """Whether the save has ended, with or without success."""

    def over(self, timeout_s: float) -> None:
        """Waits for what follows a save that has ended, for at most that long."""

    def note(self, name: str, text: str) -> None:
        """Sets a note that the checkpoint records, if rank 0 sets it before it begins to commit."""

    def committed_notes(self) -> dict[str, str]:
        """Shardfast's own notes (``shardfast.…``) of the checkpoint, after the commit; the same on every rank."""

    def stalled(self, seconds: float) -> None:
        """Notes that the program has waited for that long in the save's call."""

    def waited(self, seconds: float) -> None:
        """Notes that the program has waited for the save for that long before it could change the state."""

    def moved(self) -> tuple[int, int, int]:
        """The bytes of this rank's part of the save so far: in all, copied, and taken by the storage."""

    def report(self) -> str:
        """The save so far, as JSON."""

@final
class Checkpoint:
    """A committed checkpoint whose manifest is verified."""

    @property
    def url(self) -> str: ...
    @property
    def info(self) -> dict[str, Any]:
        """The facts of the save: attempt, step, world, created_unix_ms, writer, user."""

    @property
    def leaves(self) -> list[tuple[Any, ...]]:
        """The leaves in the manifest's order."""

    def moved(self) -> tuple[int, int]:
        """The bytes that this rank's load wants, and those of them that are verified and in place."""

    def sources(self) -> list[tuple[str, int]]:
        """The bytes that this rank has read from each level on which the checkpoint lies, by its name."""

    def failed(self, kind_name: str, message: str) -> None:
        """Notes that the load has failed on this rank; does nothing if it has ended."""

    def barrier(self, timeout_s: float) -> None:
        """Waits for all ranks after a step that each makes alone; a rank that refuses fails all."""

    def done(self, timeout_s: float) -> None:
        """Waits like :meth:`barrier` at the end of the load."""

    def agree(
        self, touched: Sequence[int], problems: Sequence[str], timeout_s: float
    ) -> tuple[list[int], list[tuple[list[int], str]]]:
        """All ranks' findings, the same on every rank. Every rank calls it."""

    def plan(self, wants: Sequence[tuple[Any, ...]], values: Sequence[tuple[int, int]]) -> dict[str, int]:
        """Forecasts this rank's :meth:`load`: bytes_wanted, bytes_read, reads, files. Touches no data."""

    def load(
        self,
        wants: Sequence[tuple[Any, ...]],
        values: Sequence[tuple[int, int]],
        timeout_s: float,
        streams: Mapping[int, int] = ...,
        peer_reads: str = "auto",
    ) -> tuple[list[bytes], dict[str, int]]:
        """Fills the wants' memory. Every rank calls it, with the same ``peer_reads``: "auto", "always" or "never"."""

@final
class Mapped:
    """A checkpoint whose data files are mapped into memory when they are first read."""

    def __new__(cls, checkpoint: Checkpoint) -> Self: ...
    def parts(self, leaf: int) -> list[Part]:
        """The saved parts of the tensor that is leaf ``leaf``, verified. One rank alone calls it."""

@final
class Part:
    """One saved part of a tensor. Its memory is there as long as this is, in forked processes too."""

    @property
    def offsets(self) -> tuple[int, ...]:
        """Offsets of the part in the tensor's global shape, in elements."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Its shape, in elements."""

    @property
    def address(self) -> int:
        """Address of its elements, row-major. Writing there changes this process's memory and no file."""

    @property
    def bytes(self) -> int:
        """Size of the part, in bytes."""

@final
class Tagged:
    """A value that is no builtin, in terms of builtins; ``tag`` is a name of the format's closed table."""

    def __new__(cls, tag: str, value: object) -> Self: ...
    @property
    def tag(self) -> str: ...
    @property
    def value(self) -> Any: ...

@final
class Value:
    """The encoding of a Python value as it was when this was made."""

    def __new__(
        cls, value: object, lower: Callable[[object, tuple[object, ...]], object] | None = None, place: str = ""
    ) -> Self: ...
    def encoded(self) -> bytes:
        """Returns the encoding."""

@final
class Described:
    """Description of a state and of where its tensors lie, for all the saves during which both stay the same."""

    def __new__(
        cls,
        leaves: Sequence[tuple[Any, ...]],
        makers: Sequence[tuple[str, str, str, str, list[str], list[str]]] = ...,
        coordinates: Sequence[tuple[str, int]] = ...,
    ) -> Self: ...
    @property
    def devices(self) -> set[int]:
        """The numbers of the CUDA devices on which tensors lie."""

@final
class Outline:
    """The objects of a state's bundles as they were when this was made; keeps nothing alive but names and layouts."""

    def __new__(cls, bundles: Sequence[tuple[Any, ...]]) -> Self: ...
    def again(self) -> tuple[list[Any], list[Any], list[list[Any]]] | None:
        """The tensors of all bundles, in order, and the entry of each, which is itself or has it inside."""

@final
class Hold:
    """Refers weakly to the memory of tensors, and detects writes and moves."""

    def __new__(
        cls,
        memory: Sequence[Any],
        address: Callable[[Any], int],
        version: str,
        retain: Callable[[Any], object] | None,
        wrapped: Sequence[int],
    ) -> Self: ...
    def stamp(self, tensors: list[Any]) -> Stamp | None:
        """Their present state; ``None`` if their memory was freed, or `changes` found that it had moved."""

    def changes(self, tensors: list[Any], stamp: Stamp) -> list[tuple[int, str]]:
        """The changes since the stamp was made, as the tensor's number and a word such as "written"."""

@final
class Stamp:
    """The state of the tensors of a :class:`Hold` at a moment. Keeps their memory allocated."""

def save(
    session: Session,
    url: str,
    described: Described,
    values: Sequence[Value],
    owner: object,
    *,
    step: int | None,
    user: Mapping[str, str],
    timeout_s: float,
    streams: Mapping[int, int] = ...,
    blocking: bool = False,
    prove: bool | None = None,
    window: Window | None = None,
    file_bytes_max: int | None = None,
    after_s: float = 0.0,
) -> Pending:
    """Begins to save what is described as the checkpoint at ``url``."""

def open(session: Session, url: str, *, timeout_s: float, after_s: float | None = None) -> Checkpoint:
    """Opens the checkpoint at ``url``. Every rank calls it; rank 0 reads.

    ``after_s`` are the seconds since the user's call of a load; ``None`` for what only looks at the checkpoint.
    """

@final
class Retention:
    """The retention of one run: the newest, every n-th and the best. One rank has it."""

    def __new__(
        cls,
        url: str,
        *,
        last: int | None,
        every: int | None,
        best: Sequence[tuple[str, int, bool]],
        timeout_s: float,
    ) -> Retention: ...
    def begin(self, session: Session, url: str) -> None:
        """Deletes from now on only while the job of that session is the newest of the run."""

    def retain(self, made: Sequence[int]) -> tuple[list[int], list[tuple[str, str]]]:
        """Takes back the committed checkpoints that no rule keeps: their files are deleted later."""

    def clear(self, steps: Sequence[int] | None) -> list[int]:
        """Deletes the files of these checkpoints, or of all that were taken back earlier."""

@final
class Stopping:
    """The agreement of the ranks on the step after which they stop, once one of them was told to."""

    def __new__(cls, session: Session, timeout_s: float) -> Stopping: ...
    def tell(self) -> None:
        """Notes that this rank is told to stop. Does not wait."""

    def passed(self) -> bool:
        """Counts a step that has passed; whether all ranks stop after it. Waits while they agree on that."""

    def failure(self) -> str | None:
        """Why the ranks could not agree after one was told."""

    def end(self) -> None:
        """Ends the agreement. Does not wait."""

@final
class Drain:
    """Sends the checkpoints of a run from the local disk to the run's own place, and keeps some on both."""

    def __new__(
        cls,
        near: str,
        url: str,
        *,
        last: int | None,
        every: int | None,
        best: Sequence[tuple[str, int, bool]],
        rate: int | None,
        timeout_s: float,
    ) -> Drain: ...
    def begin(self, session: Session) -> None:
        """Sends and deletes from now on only while the job of that session is the newest of the run."""

    def stand_in(self) -> bool:
        """Sends from now on as the job whose checkpoints the local disk has, if that is the newest; whether it is."""

    def next(self) -> tuple[int, int, list[tuple[str, str]], str | None] | None:
        """Sends the checkpoint that waits longest: its step, bytes, what stays against the rules, what failed."""

    def send_every(self, every: int | None) -> None:
        """Sends from now on only the steps that ``every`` divides, and those that are chosen."""

    def choose_newest(self) -> None:
        """Has the newest step sent that is there."""

    def reached(self) -> int | None:
        """The newest step that the run's own place has now."""

    def is_overtaken(self) -> bool:
        """Whether a newer job saves into the run, so that nothing is sent any more."""

    def stop(self) -> None:
        """Ends the sending that is under way, and each one that begins later."""

    def retain(self, made: Sequence[int]) -> tuple[list[int], list[tuple[str, str]], list[int]]:
        """Applies the rules of the local disk; returns also the steps that left unsent."""

    def clear(self, steps: Sequence[int] | None) -> list[int]:
        """Deletes the files of checkpoints of the local disk that were taken back."""

def near_place(local: str, url: str) -> str:
    """The place of a run below a directory, which is to be on a disk of this machine."""

def memory_place(url: str) -> tuple[str, str]:
    """The name of the keeper of a run on this machine, and the run's place in its memory."""

@final
class Keepers:
    """Keepers of a job's machines, which have met."""

    @property
    def machines(self) -> int:
        """Number of the machines."""

    @property
    def is_lowest(self) -> bool:
        """Whether this rank is the lowest of its machine: it starts the keeper there."""

    def revive(self) -> None:
        """Starts the keeper of this machine again, in place of one that has died."""

def meet_keepers(
    session: Session,
    call: str,
    url: str,
    *,
    linger_s: float,
    copies: int,
    rate: int | None,
    domain: str | None,
    timeout_s: float,
) -> Keepers:
    """Starts the keeper of a run on each machine, unless one runs, and has them meet. Every rank must call it."""

def keeper_process(name: str) -> int | None:
    """The process of the keeper of that name; ``None`` without one, or if it does not answer."""

def keeper_users(name: str) -> int:
    """The number of processes that use the keeper of that name."""

def dismiss_keeper(name: str, *, all: bool) -> None:
    """Has the keeper of that name, or all of the job, end, once what only they have is at the run's own place."""

def adopt_near(session: Session, url: str, near: str, step: int) -> None:
    """Makes the session's job that of the run's nearer place as well: a new one, from ``step`` on."""

def begin_run(
    session: Session,
    url: str,
    step: int,
    *,
    near: tuple[str, bool] | None = None,
    rewind: bool,
    timeout_s: float,
) -> list[tuple[str, list[int], str | None]]:
    """Makes sure that a run holds no committed step from ``step`` on, and this job the newest that saves there.

    ``near`` is its nearer place, and whether later steps move out of the way there. Returns for each place which steps
    moved, and where to.
    """

def newest(
    session: Session,
    url: str,
    *,
    near: str | None = None,
    older: bool,
    below: int | None = None,
    timeout_s: float,
    after_s: float = 0.0,
) -> tuple[tuple[int, Checkpoint] | None, list[str]]:
    """Opens the newest committed checkpoint of a run, of those below a step: its step and it; what was passed over."""

def best_interval(
    *,
    step_s: float,
    cost_s: float,
    lag_s: float,
    mtbf_s: float,
    restart_s: float,
    at_least: int,
    at_most: int | None,
) -> tuple[int, float, str]:
    """The number of steps between two saves that wastes least."""

def mean_time_between_failures(expected_s: float, restarts: int, trained_s: float) -> float:
    """The mean time between failures, in seconds, after ``restarts`` failures in ``trained_s`` seconds."""

def time_of(text: str) -> float:
    """The seconds that a text such as ``"6h"`` says."""

def absolute_url(url: str) -> str:
    """A path as seen from ``/``; a URL with a scheme without a slash at its end."""

def step_url(run_url: str, step: int) -> str:
    """The URL of the checkpoint of a step of a run."""

def decode(data: bytes) -> object:
    """The value that :class:`Value` encoded."""

def outlive(signals: Sequence[int], parent: int, exit_code: int | None = None) -> None:
    """Lets this process outlive these signals, unless ``parent`` sends ``SIGTERM``, or is no more its parent."""

def flush(timeout_s: float) -> None:
    """Waits until what this process has to say of its saves and loads is stored and sent, for at most that long."""

def export_refused() -> str | None:
    """Why the endpoint of OTLP refuses what this process exports, the first time that it is asked after a refusal."""

def note_end(url: str, timeout_s: float) -> None:
    """Notes beside the records of a run that its job has ended; waits for at most that long. Never raises for it."""

def interpreter_ends() -> None:
    """The interpreter is about to end: the engine's threads do not ask it to give back tensors any more."""

def cli_main(argv: Sequence[str], host: Callable[[], tuple[int | None, Sequence[tuple[str, str, str, str]]]]) -> int:
    """Runs the ``shardfast`` command with these arguments, the program's name first; returns its exit code."""
