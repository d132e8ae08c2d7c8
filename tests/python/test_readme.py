"""Runs what README.md shows: its Python in order, then its commands on what that wrote."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def blocks(language: str) -> list[str]:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)


def shell_lines() -> list[list[str]]:
    return [shlex.split(line) for block in blocks("sh") for line in block.splitlines() if line.strip()]


def test_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "readme"}
    python = blocks("python")
    assert python, "README.md shows no Python"
    for number, block in enumerate(python, 1):
        exec(compile(block, f"README.md, Python block {number}", "exec"), namespace)

    commands = [line for line in shell_lines() if line[0] == "shardfast"]
    assert commands, "README.md shows no command"
    for command in commands:
        program = Path(sys.executable).with_name("shardfast")
        ran = subprocess.run([program, *command[1:]], capture_output=True, text=True, timeout=60)
        # `diff` says by its exit code whether the two are the same, as diff(1) does.
        allowed = (0, 1) if command[1] == "diff" else (0,)
        assert ran.returncode in allowed, f"{shlex.join(command)}: exit {ran.returncode}\n{ran.stdout}{ran.stderr}"
        assert ran.stdout.strip(), f"{shlex.join(command)} printed nothing"


def test_other_commands_are_words_of_the_makefile():
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    others = [line for line in shell_lines() if line[0] != "shardfast"]
    assert [line[:1] for line in others] == [["make"]] * len(others), others
    assert {word for line in others for word in line[1:]} <= set(targets)
