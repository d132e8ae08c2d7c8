"""Copies of one checkpoint to one place that meet, by the command, some of them killed."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import servers
import shardfast as sf
import torch

ROUNDS = int(os.environ.get("SHARDFAST_COPY_ROUNDS", "3"))
"""Rounds of a usual run; a campaign sets more."""

SEED = int(os.environ.get("SHARDFAST_COPY_SEED", "1"))

COMMAND = Path(sys.executable).with_name("shardfast")

LIMIT = "40MB"
"""So that a copy takes about as long as the others need to begin."""


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *map(str, arguments)], capture_output=True, text=True)


def meet(source: str, target: str, dice: random.Random) -> None:
    """Three copies begin within a second, two of them are killed, and the place is whole afterwards."""
    copies = []
    for _ in range(3):
        time.sleep(dice.random() * 0.3)
        copies.append(
            subprocess.Popen(
                [COMMAND, "copy", source, target, "--limit", LIMIT],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    dice.shuffle(copies)
    for copy in copies[:2]:
        time.sleep(dice.random() * 0.5)
        copy.send_signal(signal.SIGKILL)
    said = [copy.communicate()[0] for copy in copies]
    assert copies[2].returncode == 0, said
    verified = command("verify", target).stdout
    # An attempt that dies just after it has put its indexes leaves them: no reader uses them, and a copy mends them.
    findings = [line for line in verified.splitlines()[1:] if not line.startswith("  index: ")]
    assert ": sound" in verified or (": damaged" in verified and not findings), (verified, said)
    again = command("copy", source, target, "--verify")
    assert again.returncode == 0 and "already" in again.stdout, (again.stdout, again.stderr)
    assert command("diff", source, target).returncode == 0


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A checkpoint of 24 MB in several files."""
    place = tmp_path_factory.mktemp("source") / "one"
    state = {key: {"w": torch.randn(1_000_000)} for key in "abcdef"}
    sf.save(place, state)
    return str(place)


def test_copies_on_a_disk_that_meet_and_are_killed_leave_one_whole_checkpoint(source, tmp_path):
    dice = random.Random(SEED)
    for number in range(ROUNDS):
        meet(source, str(tmp_path / str(number)), dice)


@pytest.mark.campaign
@pytest.mark.parametrize("name", ["versitygw", "minio"])
def test_copies_at_a_service_that_meet_and_are_killed_leave_one_whole_checkpoint(source, name, monkeypatch):
    dice = random.Random(SEED)
    with servers.running(name) as server:
        for variable, value in server.environment.items():
            monkeypatch.setenv(variable, value)
        for number in range(ROUNDS):
            meet(source, server.s3(f"copies/{number}"), dice)
