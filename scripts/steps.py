"""Runs the steps of a script beside each other, as far as the processors carry them, and says how each ended.

All steps run even when one fails, so that one run tells everything; a step whose failure shows is named at once. The
table at the end has the longest step first, and ``target/steps.json`` has it, too.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT / "target"
"""Directory of ``steps.json``, the table, and of ``steps``, what each step printed."""

SLACK_CORES = 0.5
"""By how much the running steps may ask for more processors than there are: each of them waits at times."""

FAILURES = re.compile(r"^(---- .* stdout|FAILED|ERROR| +FAIL )")
"""Lines that say which test failed, of cargo test, pytest and cargo-nextest."""

FAILURES_SHOWN, LAST_LINES_SHOWN = 60, 20
WIDTH_MAX = 500


class Step(NamedTuple):
    """A command, run from the root of the checkout."""

    name: str
    command: list[str]
    after: tuple[str, ...] = ()  # steps that must have passed before
    cores: float = 1.0  # processors that it keeps busy


class Ended(NamedTuple):
    """How a step ended."""

    name: str
    outcome: str  # "passed", "FAILED" or "not run"
    seconds: float
    processor_seconds: float
    began: float  # in seconds since the first step


class Running:
    """A step that runs, in a process group of its own."""

    def __init__(self, step: Step, log: Path, first: float) -> None:
        self.step, self.log, self.began = step, log, time.monotonic()
        self.since_first = self.began - first
        with log.open("wb") as printed:
            self.process = subprocess.Popen(
                step.command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=printed, stderr=printed, start_new_session=True
            )

    def ended(self, status: int, processor_seconds: float) -> Ended:
        outcome = "passed" if status == 0 else "FAILED"
        return Ended(self.step.name, outcome, time.monotonic() - self.began, processor_seconds, self.since_first)

    def end(self) -> None:
        """Kills it and what it has started."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def say(*lines: str) -> None:
    print(*lines, sep="\n", flush=True)


def show(running: Running, ended: Ended) -> None:
    """Prints what a step printed, and how it ended."""
    say(f"\n=== {ended.name}")
    sys.stdout.flush()
    with running.log.open("rb") as log:
        shutil.copyfileobj(log, sys.stdout.buffer)
    say(f"--- {ended.name}: {ended.outcome}, {ended.seconds:.0f} s")


def show_failure(running: Running) -> None:
    """Prints again, of what a step printed, the tests that failed and the end."""
    lines = [line[:WIDTH_MAX] for line in running.log.read_text(errors="replace").splitlines()]
    say(f'\n=== once more, of what "{running.step.name}" printed: tests that failed, and the end')
    say(*[line for line in lines if FAILURES.match(line)][:FAILURES_SHOWN], *lines[-LAST_LINES_SHOWN:])


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
    """The steps, each of which needs others before it only."""
    names: set[str] = set()
    for step in steps:
        assert step.name not in names, f"two steps are called {step.name!r}"
        unknown = set(step.after) - names
        assert not unknown, f"{step.name!r} comes after {sorted(unknown)}, which stand not before it"
        names.add(step.name)
    return steps


def run(steps: list[Step], place: Path = PLACE) -> bool:
    """Runs them, in this order where processors are short; whether all passed."""
    waiting, first = list(enumerate(checked(steps))), time.monotonic()
    running: dict[int, Running] = {}
    ended: dict[str, Ended] = {}
    failed: list[Running] = []
    logs = place / "steps"
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    cores = (os.cpu_count() or 1) + SLACK_CORES
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
                    started = Running(step, logs / f"{number:02}.log", first)
                    running[started.process.pid] = started
                    say(f"... {step.name} begins")
            if not running:
                continue
            pid, status, usage = os.wait4(-1, 0)
            if pid in running:
                one = running.pop(pid)
                one.process.returncode = os.waitstatus_to_exitcode(status)
                ended[one.step.name] = one.ended(status, usage.ru_utime + usage.ru_stime)
                show(one, ended[one.step.name])
                if status:
                    failed.append(one)
    finally:
        for one in running.values():
            one.end()
    for one in failed:
        show_failure(one)
    return summary([ended[step.name] for step in steps], time.monotonic() - first, place / "steps.json")


def chosen(steps: list[Step], words: list[str]) -> list[Step]:
    """The steps whose names contain one of these words, without what they come after: that is there already."""
    taken = [step for step in steps if not words or any(word in step.name for word in words)]
    names = {step.name for step in taken}
    return [step._replace(after=tuple(name for name in step.after if name in names)) for step in taken]


def main(steps: list[Step], place: Path = PLACE) -> None:
    """Runs the steps that the command line's words choose, or all, and ends the process; a signal ends them, too."""
    steps = chosen(steps, sys.argv[1:])
    if not steps:
        sys.exit(f"no step's name contains one of {sys.argv[1:]}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(0 if run(steps, place) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
