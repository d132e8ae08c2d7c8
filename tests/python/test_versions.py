"""A PyTorch outside of the tested range is named in a warning, once; its private names may be absent."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from shardfast import adapters, verbs
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
    done = subprocess.run([sys.executable, "-c", NEWER, tmp_path], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("this is PyTorch 2.99.0") == 1, done.stderr


def is_guard(node):
    calls = [ast.unparse(item.context_expr) for item in node.items] if isinstance(node, ast.With) else []
    return isinstance(node, ast.Try) or "contextlib.suppress(Exception)" in calls


def private_names(path):
    """Private attributes and imports of others that a file uses without a way around.

    There is one in ``try``, and in ``with contextlib.suppress(Exception)``.
    """
    tree = ast.parse(path.read_text())
    own = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    own |= {
        name.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for name in node.targets
        if isinstance(name, ast.Name)
    }
    guarded = {id(inner) for node in ast.walk(tree) if is_guard(node) for inner in ast.walk(node)}
    found = []
    for node in ast.walk(tree):
        if id(node) in guarded:
            continue
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            is_ours = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            found += [] if is_ours or node.attr in own else [node.attr]
        if isinstance(node, ast.ImportFrom) and not node.level:
            found += [
                name
                for name in [*node.module.split("."), *(alias.name for alias in node.names)]
                if name.startswith("_") and name != "__future__"
            ]
    return found


def test_no_private_name_of_torch_is_relied_on(tmp_path):
    """A name that may drift is asked for with a default, or within ``try`` with another way behind it."""
    sample = tmp_path / "sample.py"
    sample.write_text(
        "import torch\nfrom torch._x import y\ntorch._z()\ntry:\n    torch._a\nexcept Exception:\n    pass\n"
        "with contextlib.suppress(Exception):\n    torch._b()\n"
    )
    assert private_names(sample) == ["_x", "_z"]
    package = Path(verbs.__file__).parent
    for path in (package / "session.py", *Path(adapters.__file__).parent.rglob("*.py")):
        assert private_names(path) == [], path.name
