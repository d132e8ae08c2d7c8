"""Where the kernel offers no ``io_uring`` (a container's seccomp profile), saves and loads work all the same."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import ctypes, errno, json, subprocess, sys
import torch

# seccomp(2): every io_uring call (425, 426, 427 on all architectures) answers with an error, every other one works.
errno_answered, url = int(sys.argv[1]), sys.argv[2]
class Filter(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint)]
class Program(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.POINTER(Filter))]
filters = (Filter * 5)(
    Filter(0x20, 0, 0, 0),  # load the call's number
    Filter(0x35, 0, 2, 425),  # below 425: allow
    Filter(0x25, 1, 0, 427),  # above 427: allow
    Filter(0x06, 0, 0, 0x00050000 | errno_answered),  # SECCOMP_RET_ERRNO
    Filter(0x06, 0, 0, 0x7FFF0000),  # SECCOMP_RET_ALLOW
)
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
program = Program(5, filters)
assert libc.prctl(22, 2, ctypes.byref(program)) == 0, ctypes.get_errno()  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
assert libc.syscall(425, 1, None) == -1 and ctypes.get_errno() == errno_answered, "the filter does not hold"

import shardfast as sf

state = {"model": {"w": torch.arange(3_000_000.0)}}
sf.save(url, state)
other = {"model": {"w": torch.zeros(3_000_000)}}
sf.load(url, other)
assert torch.equal(other["model"]["w"], state["model"]["w"])
from pathlib import Path
program = Path(sys.executable).with_name("shardfast")
told = json.loads(subprocess.run([program, "doctor", url, "--json"], check=True, capture_output=True).stdout)
(ring,) = (finding for finding in told["findings"] if finding["name"] == "io_uring")
assert ring["status"] == "limited" and "several threads" in ring["follows"], ring
print("saved and loaded")
"""


@pytest.mark.skipif(platform.system() != "Linux", reason="seccomp is Linux's")
@pytest.mark.parametrize(
    "answer", [pytest.param(1, id="EPERM"), pytest.param(38, id="ENOSYS", marks=pytest.mark.campaign)]
)
def test_without_io_uring(tmp_path: Path, answer: int) -> None:
    command = [sys.executable, "-c", SCRIPT, str(answer), str(tmp_path / "checkpoint")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if "Invalid argument" in done.stderr and "prctl" in done.stderr:
        pytest.skip("this kernel has no seccomp filters")
    assert done.stdout == "saved and loaded\n", done.stderr
