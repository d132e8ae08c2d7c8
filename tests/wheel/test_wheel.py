"""The wheels that are shipped: their size, where they run, and what a user sees who installs one.

That of this machine is in target/wheels/ after ``make setup``; ``make wheel`` leaves the others in dist/.
"""

import os
import platform
import re
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UV = Path(sys.executable).with_name("uv")
AUDITWHEEL = Path(sys.executable).with_name("auditwheel")

BYTES_MAX = 12_000_000

# The processor's number in the library's header, `e_machine` of elf(5).
MACHINES = {"x86_64": 62, "aarch64": 183}

OF_EACH_MACHINE = pytest.mark.parametrize(
    "machine",
    [pytest.param(name, marks=[] if name == platform.machine() else pytest.mark.campaign) for name in MACHINES],
)

VALUES_ONLY = """
import shardfast as sf
sf.save("run", {"extra": {"step": 3, "seen": {1, 2}}})
loaded = {"extra": {"step": None, "seen": None}}
sf.load("run", loaded)
assert loaded == {"extra": {"step": 3, "seen": {1, 2}}}, loaded
"""

WITH_NUMPY = """
import numpy as np
import shardfast as sf
sf.save("run", {"model": {"w": np.arange(100_000.0)}, "extra": {"step": 3}})
loaded = {"model": {"w": np.zeros(100_000)}, "extra": {"step": None}}
sf.load("run", loaded)
assert (loaded["model"]["w"] == np.arange(100_000.0)).all() and loaded["extra"] == {"step": 3}
"""


def wheel(machine: str) -> Path:
    place, remedy = ("target/wheels", "setup") if machine == platform.machine() else ("dist", "wheel")
    wheels = list((ROOT / place).glob(f"shardfast-*-manylinux_2_28_{machine}.whl"))
    assert len(wheels) == 1, f"{place} has {[path.name for path in wheels]} for {machine}. Remedy: make {remedy}"
    return wheels[0]


@OF_EACH_MACHINE
def test_it_is_small_and_stripped_and_for_that_machine(machine):
    path = wheel(machine)
    assert path.name.split("-")[2:4] == ["cp310", "abi3"], f"{path.name}: expected one wheel for Python 3.10 and later"
    assert path.stat().st_size <= BYTES_MAX
    with zipfile.ZipFile(path) as archive:
        library = archive.read("shardfast/_native.abi3.so")
    assert struct.unpack_from("<H", library, 18) == (MACHINES[machine],)
    # The names of the library's sections stand one behind the other; that of the dynamic symbols shows where.
    sections = library[library.rindex(b"\0.dynsym\0") - 1000 :]
    found = [name for name in (b"\0.symtab\0", b"\0.debug_info\0", b"\0.debug_line\0") if name in sections]
    assert found == [], f"{path.name} is not stripped: {found}"


@OF_EACH_MACHINE
def test_it_runs_where_its_name_says(machine):
    shown = subprocess.run([AUDITWHEEL, "show", wheel(machine)], capture_output=True, text=True, timeout=120)
    said = " ".join(shown.stdout.split())
    assert f'consistent with the following platform tag: "manylinux_2_28_{machine}"' in said, said + shown.stderr


@pytest.fixture
def environment(tmp_path):
    """Makes an environment of this machine's wheel and these packages, nothing else: the folder of its programs."""

    def make(*packages: str) -> Path:
        path = tmp_path / "environment"
        subprocess.run([UV, "venv", "--quiet", "--python", sys.executable, path], check=True, timeout=120)
        install = [UV, "pip", "install", "--quiet", "--python", path / "bin" / "python"]
        constraint = ["--constraint", ROOT / "requirements" / "dev.txt"]
        subprocess.run([*install, *constraint, wheel(platform.machine()), *packages], check=True, timeout=600)
        return path / "bin"

    return make


def ran(directory: Path, *command: object) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SHARDFAST"))}
    done = subprocess.run(
        [str(word) for word in command], cwd=directory, env=clean, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{command}: exit {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def quick_start() -> str:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    assert blocks, "README.md shows no Python"
    return "\n".join(blocks)


@pytest.mark.parametrize(
    ("packages", "script"),
    [((), VALUES_ONLY), (("numpy",), WITH_NUMPY), (("torch", "numpy"), quick_start())],
    ids=["no framework", "NumPy", "PyTorch"],
)
def test_it_works_in_an_empty_environment(environment, tmp_path, packages, script):
    programs = environment(*packages)
    listed = ran(tmp_path, UV, "pip", "list", "--python", programs / "python", "--format", "freeze")
    installed = {line.split("==")[0] for line in listed.split()}
    assert installed & {"torch", "numpy"} == set(packages)
    directory = tmp_path / "work"
    directory.mkdir()
    ran(directory, programs / "python", "-c", script)
    run = next(path.parent for path in sorted(directory.rglob("COMMIT")))
    assert "sound" in ran(directory, programs / "shardfast", "verify", run)
    name, version = ran(directory, programs / "shardfast", "--version").split()
    assert (name, version) == ("shardfast", wheel(platform.machine()).name.split("-")[1])
    doctor = ran(directory, programs / "shardfast", "doctor", directory)
    for framework in ("torch", "numpy"):
        assert re.search(rf"^{'ok' if framework in packages else 'limited'} +{framework}: ", doctor, re.MULTILINE), (
            doctor
        )
