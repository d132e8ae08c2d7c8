"""Runs the steps of a script beside each other, as far as the processors carry them, and says how each ended.

All steps run even when one fails, so that one run tells everything; a step whose failure shows is named at once. The
table at the end has the longest step first, and ``target/steps.json`` has it, too, also of a run that was interrupted.
Each step has a deadline. What a step leaves running is named and killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT / "target"
"""Directory of ``steps.json``, the table, and of ``steps``, what each step printed. A run of some steps, chosen by
words, has a directory ``chosen`` in it, so that it leaves what the run of all has said."""

SLACK_CORES = 0.5
"""By how much the running steps may ask for more processors than there are: each of them waits at times."""

FAILURES = re.compile(r"^(---- .* stdout|FAILED|ERROR| +(FAIL|TIMEOUT|SIGABRT|SIGSEGV|LEAK-FAIL) )")
"""Lines that say which test failed, of cargo test, pytest and cargo-nextest."""

FAILURES_SHOWN, LAST_LINES_SHOWN = 60, 20
FAILURES_AT_END = 8
"""Tests whose failures stand below the table, too: of a long output the end is read first, or alone."""
WIDTH_MAX = 500
LOOK_S = 0.05
GRACE_S = 3.0
"""For processes that a step has left: servers of tests look once a second whether their test still lives."""

PR_SET_PDEATHSIG = 1

# With it each process compiles what it imports again: PyTorch alone for seconds.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


class Step(NamedTuple):
    """A command, run from the root of the checkout."""

    name: str
    command: list[str]
    after: tuple[str, ...] = ()  # steps that must have passed before
    cores: float = 1.0  # processors that it keeps busy
    seconds_max: float = 3600.0  # what takes longer hangs


class Ended(NamedTuple):
    """How a step ended."""

    name: str
    outcome: str  # "passed", "FAILED", "not run" or "interrupted"
    seconds: float
    processor_seconds: float
    began: float  # in seconds since the first step


def _end_with_parent() -> None:
    """In a step's first process: a runner that is killed takes it along."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Running:
    """A step that runs, in a session of its own."""

    def __init__(self, step: Step, log: Path, first: float) -> None:
        self.step, self.log, self.began = step, log, time.monotonic()
        self.since_first = self.began - first
        with log.open("wb") as printed:
            self.process = subprocess.Popen(
                step.command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )

    def is_late(self) -> bool:
        return time.monotonic() - self.began > self.step.seconds_max

    def ended(self, outcome: str, processor_seconds: float = 0.0) -> Ended:
        return Ended(self.step.name, outcome, time.monotonic() - self.began, processor_seconds, self.since_first)

    def left(self) -> list[tuple[int, str]]:
        """Processes of its session, which process groups do not leave: their numbers and commands."""
        found = []
        for entry in Path("/proc").iterdir() if Path("/proc").is_dir() else ():
            with contextlib.suppress(OSError, ValueError):
                state, *numbers = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(numbers[2]) == self.process.pid and state not in "ZX":
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    found.append((int(entry.name), command[:WIDTH_MAX]))
        return found

    def clear(self, grace_s: float) -> list[str]:
        """Kills what it has left and what does not end by itself; the commands."""
        until = time.monotonic() + grace_s
        while (left := self.left()) and time.monotonic() < until:
            time.sleep(LOOK_S)
        for number, _ in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        return [command for _, command in left]

    def end(self) -> None:
        """Kills it and what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.clear(0.0)


def say(*lines: str) -> None:
    print(*lines, sep="\n", flush=True)


def show(log: Path, ended: Ended) -> None:
    """Prints what a step printed, and how it ended."""
    say(f"\n=== {ended.name}")
    with log.open(errors="replace") as printed:
        shutil.copyfileobj(printed, sys.stdout)
    say(f"--- {ended.name}: {ended.outcome}, {ended.seconds:.0f} s")


def note(log: Path, line: str) -> None:
    """Adds a line of the runner's own to what a step printed."""
    with log.open("a") as printed:
        printed.write(f"\n[steps] {line}\n")


def show_failure(name: str, log: Path) -> list[str]:
    """Prints again, of what a step printed, the tests that failed, which it returns, and the end."""
    named: list[str] = []
    last: deque[str] = deque(maxlen=LAST_LINES_SHOWN)
    with log.open(errors="replace") as printed:
        for line in printed:
            last.append(line.rstrip("\n")[:WIDTH_MAX])
            if FAILURES.match(line) and len(named) < FAILURES_SHOWN:
                named.append(last[-1])
    say(f'\n=== once more, of what "{name}" printed: tests that failed, and the end', *named, *last)
    return named


def summary(ended: list[Ended], total: float, table: Path) -> bool:
    """Prints the table and writes it; whether all steps passed."""
    longest_first = sorted(ended, key=lambda one: -one.seconds)
    rows = [
        {key: round(value, 1) if isinstance(value, float) else value for key, value in one._asdict().items()}
        for one in longest_first
    ]
    table.write_text(json.dumps({"seconds": round(total, 1), "steps": rows}, indent=1) + "\n")
    say("\n=== summary: seconds, of processors, since the start")
    for one in longest_first:
        say(f"{one.seconds:6.0f} s {one.processor_seconds:6.0f} s {one.began:6.0f} s  {one.outcome:8} {one.name}")
    failed = [one.name for one in ended if one.outcome != "passed"]
    say(f"{total:6.0f} s  " + (f"FAILED: {', '.join(failed)}" if failed else f"all {len(ended)} steps passed"))
    return not failed


def checked(steps: list[Step]) -> list[Step]:
    """The steps, each of which needs others before it only.

    Raises:
        ValueError: Naming the step that does not.
    """
    names: set[str] = set()
    for step in steps:
        if step.name in names:
            raise ValueError(f"two steps are called {step.name!r}")
        unknown = set(step.after) - names
        if unknown:
            raise ValueError(f"{step.name!r} comes after {sorted(unknown)}, which stand not before it")
        names.add(step.name)
    return steps


@contextlib.contextmanager
def alone(place: Path) -> Iterator[None]:
    """Keeps another run out of the checkout: both would build and install into the same places."""
    place.mkdir(parents=True, exist_ok=True)
    with (place / "steps.lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            sys.exit(f"steps: process {lock.read().strip() or '?'} runs steps in this checkout: wait for its end")
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


def run(steps: list[Step], place: Path = PLACE) -> bool:
    """Runs them, in this order where processors are short; whether all passed."""
    waiting, first = list(enumerate(checked(steps))), time.monotonic()
    running: dict[int, Running] = {}
    ended: dict[str, Ended] = {}
    failed: list[tuple[str, Path]] = []
    logs, table = place / "steps", place / "steps.json"
    table.unlink(missing_ok=True)
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    cores = (os.cpu_count() or 1) + SLACK_CORES

    def has_ended(one: Running, outcome: str, processor_seconds: float) -> None:
        ended[one.step.name] = one.ended(outcome, processor_seconds)
        show(one.log, ended[one.step.name])
        if outcome == "FAILED":
            failed.append((one.step.name, one.log))

    def begin(number: int, step: Step) -> None:
        log = logs / f"{number:02}.log"
        try:
            one = Running(step, log, first)
        except OSError as error:
            note(log, f"{step.command[0]} cannot be run: {error.strerror}: make setup installs what the steps need")
            ended[step.name] = Ended(step.name, "FAILED", 0.0, 0.0, time.monotonic() - first)
            failed.append((step.name, log))
            show(log, ended[step.name])
            return
        running[one.process.pid] = one
        say(f"... {step.name} begins")

    try:
        while waiting or running:
            for number, step in list(waiting):
                outcomes = [ended[name].outcome if name in ended else "" for name in step.after]
                if any(outcome in ("FAILED", "not run") for outcome in outcomes):
                    waiting.remove((number, step))
                    ended[step.name] = Ended(step.name, "not run", 0.0, 0.0, time.monotonic() - first)
                    say(f"\n--- {step.name}: not run")
                    continue
                busy = sum(one.step.cores for one in running.values())
                if all(outcome == "passed" for outcome in outcomes) and (not running or busy + step.cores <= cores):
                    waiting.remove((number, step))
                    begin(number, step)
            if not running:
                continue
            for one in running.values():
                if one.is_late():
                    note(one.log, f"still running after {one.step.seconds_max:.0f} s, and killed: it hangs")
                    one.end()
            pid, status, usage = os.wait4(-1, os.WNOHANG)
            if not pid:
                time.sleep(LOOK_S)
            elif pid in running:
                one = running.pop(pid)
                code = one.process.returncode = os.waitstatus_to_exitcode(status)
                if code < 0:
                    note(one.log, f"killed by {signal.Signals(-code).name}")
                for command in one.clear(GRACE_S):
                    note(one.log, f"left running, and killed: {command}")
                has_ended(one, "FAILED" if status else "passed", usage.ru_utime + usage.ru_stime)
    finally:
        for one in running.values():
            one.end()
            ended[one.step.name] = one.ended("interrupted")
        for _, step in waiting:
            ended[step.name] = Ended(step.name, "not run", 0.0, 0.0, time.monotonic() - first)
        named = [line for name, log in failed for line in show_failure(name, log)]
        passed = summary([ended[step.name] for step in steps], time.monotonic() - first, table)
        if named:
            say("=== tests that failed", *named[:FAILURES_AT_END])
    return passed


def chosen(steps: list[Step], words: list[str]) -> list[Step]:
    """The steps whose names contain one of these words, without what they come after: that is there already.

    Raises:
        ValueError: Naming a word that is in no name.
    """
    for word in words:
        if not word or not any(word in step.name for step in steps):
            names = "\n  ".join(step.name for step in steps)
            raise ValueError(f"no step's name contains {word!r}; they are:\n  {names}")
    taken = [step for step in steps if not words or any(word in step.name for word in words)]
    names = {step.name for step in taken}
    return [step._replace(after=tuple(name for name in step.after if name in names)) for step in taken]


def main(steps: list[Step], place: Path = PLACE) -> None:
    """Runs the steps that the command line's words choose, or all, and ends the process; a signal ends them, too."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    words = sys.argv[1:]
    try:
        steps = chosen(steps, words)
    except ValueError as error:
        sys.exit(f"steps: {error}")
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        with alone(place):
            sys.exit(0 if run(steps, place / "chosen" if words else place) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
