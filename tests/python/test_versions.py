"""A PyTorch outside of the tested range is named in a warning, once."""

import subprocess
import sys

import pytest
import torch
from shardfast.adapters import torch as torch_adapter


@pytest.mark.parametrize(
    ("version", "is_tested"),
    [
        (torch.__version__, True),
        ("2.6.0", False),
        ("2.7.0", False),
        ("2.7.1", True),
        ("2.7.1+cu126", True),
        ("2.10.0", True),
        ("2.15.3", True),
        ("2.16.0a0+git1f2e3d4", False),
        ("3.0.0", False),
        ("unknown", False),
    ],
)
def test_versions_outside_of_the_tested_range_are_warned_of(monkeypatch, caplog, version, is_tested):
    monkeypatch.setattr(torch, "__version__", version)
    torch_adapter.adapter()
    told = [(record.name, record.levelname, record.getMessage()) for record in caplog.records]
    if is_tested:
        assert told == []
    else:
        ((name, level, message),) = told
        assert (name, level) == ("shardfast", "WARNING")
        assert message.startswith(f"this is PyTorch {version}, and Shardfast is tested with PyTorch 2.7.1 to 2.15: ")


NEWER = """
import sys
import torch
torch.__version__ = "2.99.0"
import shardfast as sf
for number in range(2):
    sf.save(f"{sys.argv[1]}/{number}", {"model": {"w": torch.arange(3.0)}})
state = {"model": {"w": torch.zeros(3)}}
sf.load(f"{sys.argv[1]}/1", state)
assert state["model"]["w"].tolist() == [0, 1, 2]
"""


def test_a_version_that_was_not_tested_is_told_once_and_it_goes_on(tmp_path):
    done = subprocess.run([sys.executable, "-c", NEWER, tmp_path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("this is PyTorch 2.99.0") == 1, done.stderr
