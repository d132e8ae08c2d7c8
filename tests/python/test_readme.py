"""Runs what README.md shows: its Python and its commands, in order."""

import re
from pathlib import Path

import pytest
from pages import ROOT, blocks, run_page, shell_lines

WHEELS = "target/wheels"  # where `make setup` leaves the wheel of this machine


def test_readme_runs(ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "page").mkdir()
    monkeypatch.chdir(tmp_path / "page")
    assert any(block.language == "python" for block in blocks("README.md")), "README.md shows no Python"
    assert any(line[0] == "shardfast" for line in shell_lines("README.md")), "README.md shows no command"
    run_page("README.md", ranks)


def test_other_commands_are_words_of_the_makefile():
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    others = [line for line in shell_lines("README.md") if line[0] != "shardfast"]
    assert [line for line in others if line[0] != "make"] == [["pip", "install", f"{WHEELS}/*.whl"]]
    others = [line for line in others if line[0] == "make"]
    assert {word for line in others for word in line[1:]} <= set(targets)
    setup = (ROOT / "scripts" / "setup.sh").read_text(encoding="utf-8")
    assert f'scripts/wheel.sh build "$(uname -m)" {WHEELS}\n' in setup
