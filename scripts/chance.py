"""Runs tests that start ranks or other processes, drawn by a seed, beside two busy loops: what fails fails by chance.

    python3 scripts/chance.py [--seconds 1800] [--seed N]

Two batches of three run with the PyTorch of .venv, one with the oldest (target/oldest). It prints the seed, how many
tests ran, and what failed; if a test did, so does it. A batch of the same seed and number runs the same tests in the
same order.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = (ROOT / ".venv/bin/python", ROOT / "target/oldest/bin/python")
NUMBER_OF_BATCH = 40
BUSY_LOOPS = 2

STARTS = ("rank_server", "alone", "ranks")
"""Fixtures that start processes."""

FILES = ("test_exit", "test_session", "test_process_groups", "test_missed_calls", "test_sharing")
"""Files of tests that start processes by themselves."""

# Prints the tests that start processes; as a plugin, since only pytest knows the fixtures of a test.
COLLECT = f"""
import json, sys, pytest

class Plugin:
    def pytest_collection_finish(self, session):
        starts = [
            item.nodeid for item in session.items
            if set(item.fixturenames) & set({STARTS!r}) or item.path.stem in {FILES!r}
        ]
        print("found " + json.dumps(starts))

sys.exit(pytest.main(["--collect-only", "-qq", "tests/python", *sys.argv[1:]], plugins=[Plugin()]))
"""


def left_out() -> list[str]:
    """What `scripts/oldest.sh` does not run: it says nothing about PyTorch's version."""
    names = re.search(r"^others=\((.*?)\)", (ROOT / "scripts/oldest.sh").read_text(), re.DOTALL | re.MULTILINE)[1]
    return [f"--ignore=tests/python/test_{name}.py" for name in names.split()]


def tests_of(python: Path, arguments: list[str]) -> list[str]:
    """The ids of the tests that start processes with this Python's packages."""
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    command = [python, "-c", COLLECT, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    found = [line for line in done.stdout.splitlines() if line.startswith("found ")]
    assert done.returncode == 0 and found, f"{python} collects no tests:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return json.loads(found[0].removeprefix("found "))


def run(python: Path, tests: list[str], seconds_left: float) -> tuple[int, list[str], str]:
    """How many of these tests ran, which failed, and what pytest printed. The time may end a batch early."""
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        command = [python, "-m", "pytest", "--quiet", "-p", "no:cacheprovider", f"--junit-xml={report.name}", *tests]
        with tempfile.TemporaryFile("w+") as log:
            process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
            is_whole = True
            try:
                process.wait(timeout=seconds_left + 900)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                is_whole = False
            log.seek(0)
            printed = log.read()
        if not is_whole or not Path(report.name).read_bytes():
            return 0, [f"the batch of {tests[0]} ... did not end"], printed
        cases = list(xml.etree.ElementTree.parse(report.name).iter("testcase"))
    failed = [f"{one.get('classname')}::{one.get('name')}" for one in cases if one.find("failure") is not None]
    failed += [f"{one.get('classname')}::{one.get('name')}" for one in cases if one.find("error") is not None]
    return len(cases), failed, printed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    found = [tests_of(python, arguments) for python, arguments in zip(PYTHONS, ([], left_out()), strict=True)]
    until = time.monotonic() + given.seconds
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(BUSY_LOOPS)]
    ran, failed, number = 0, [], 0
    try:
        while (left := until - time.monotonic()) > 0:
            which = number % 3 == 2
            tests = random.Random(f"{given.seed}.{number}").sample(found[which], NUMBER_OF_BATCH)
            count, names, printed = run(PYTHONS[which], tests, left)
            ran, number = ran + count, number + 1
            failed += names
            print(f"batch {number}, {PYTHONS[which].parts[-3]}: {count} tests, {len(names)} failed", flush=True)
            if names:
                print(printed, flush=True)
    finally:
        for one in busy:
            one.kill()
            one.wait()
    for name in failed:
        print(f"FAILED {name}")
    print(f"seed {given.seed}: {ran} tests in {number} batches beside {BUSY_LOOPS} busy loops, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
