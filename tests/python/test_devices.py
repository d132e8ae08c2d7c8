"""The way into a CUDA device and back, through the wheel as it is, with a driver that needs no device.

Tensors are addresses here: nothing stands between the state's description and the driver's functions but the wheel.
``tests/gpu`` does the same with PyTorch on a real device.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SCRIPT = """
import ctypes, json, sys, time, weakref
from shardfast import _native

driver, url = ctypes.CDLL("libcuda.so.1"), sys.argv[1]
def call(name, *arguments):
    code = getattr(driver, name)(*arguments)
    assert code == 0, (name, code)
def u64(value=0): return ctypes.c_uint64(value)
context, stream = u64(), u64()
call("cuInit", 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
call("cuCtxPushCurrent_v2", context)
call("cuStreamCreate", ctypes.byref(stream), 1)
call("fakeSeed", u64(3), u64(500))

def allocate(contents):
    address = u64()
    call("fakeAlloc", ctypes.byref(address), ctypes.c_size_t(len(contents)))
    call("fakeWrite", address, contents, ctypes.c_size_t(len(contents)))
    return address.value
def read(address, size):
    out = ctypes.create_string_buffer(size)
    call("fakeRead", u64(address), out, ctypes.c_size_t(size))
    return out.raw

big, small, host = bytes(range(256)) * 12288, b"12345678", b"abcdefgh" * 8
big_at, small_at = allocate(big), allocate(small)
kept = ctypes.create_string_buffer(host, len(host))
def leaf(name, size, parts, when):
    return ("tensor", "model", name, "", "U8", (size,), parts, when, None, "first save")
described = _native.Described([
    leaf("big", len(big), [((0,), (len(big),), big_at, (1,), 0)], "lazy"),
    leaf("small", len(small), [("flat", 0, len(small), small_at, 0)], "inline"),
    leaf("host", len(host), [((0,), (len(host),), ctypes.addressof(kept), (1,))], "inline"),
])
assert described.devices == {0}
session = _native.Session.solo(staging_bytes=4 << 20)

# What a save will copy from a device is page-locked in advance, in the background.
def calls(name):
    count = u64()
    call("fakeCalls", name, ctypes.byref(count))
    return count.value
assert calls(b"cuMemHostRegister_v2") == 0
session.reserve(described)
until = time.monotonic() + 20
while calls(b"cuMemHostRegister_v2") < 1:
    assert time.monotonic() < until, "nothing was page-locked"
    time.sleep(0.001)
def save(to, **more):
    return _native.save(session, to, described, [], None, step=None, user={}, timeout_s=20.0, **more)

try:
    save(url + "/none")
except _native.Invalid as error:
    assert "cuda:0: no stream was given" in str(error), error
else:
    raise AssertionError("saved without a stream")

# What the training has asked for belongs to the save; what it asks for after the save is staged does not.
call("fakeKernel", stream, u64(big_at), ctypes.c_size_t(len(big)), ctypes.c_uint8(7), u64(20000))
pending = save(url + "/a", streams={0: stream.value})
pending.captured()
call("fakeKernel", stream, u64(small_at), ctypes.c_size_t(len(small)), ctypes.c_uint8(9), u64(0))
pending.staged()
call("fakeKernel", stream, u64(big_at), ctypes.c_size_t(len(big)), ctypes.c_uint8(9), u64(0))
pending.confirm_unmodified()
pending.committed()

checkpoint = _native.open(session, url + "/a", timeout_s=20.0)
index = {leaf[2]: number for number, leaf in enumerate(checkpoint.leaves)}
big_to, small_to = allocate(bytes(len(big))), allocate(bytes(len(small)))
checkpoint.load(
    [
        (index["big"], (0,), (len(big),), big_to, (1,), 0),
        (index["small"], "flat", 0, len(small), small_to, 0),
    ],
    [], 20.0, {0: stream.value},
)
assert read(big_to, len(big)) == b"\\x07" * len(big), "not what the device held at the call"
assert read(small_to, len(small)) == small

# Gradients of a window are given back as soon as they were copied, without another call.
class Gradient:
    pass
arrays = [allocate(bytes(4 << 20)) for _ in range(3)]
floats = _native.Described([
    ("tensor", "model", str(i), "", "F32", (1 << 20,), [((0,), (1 << 20,), at, (4,), 0)], "lazy", None, "never")
    for i, at in enumerate(arrays)
])
roomy = _native.Session.solo(staging_bytes=256 << 20)
before = _native.save(roomy, url + "/c", floats, [], None, step=None, user={}, timeout_s=20.0,
                      streams={0: stream.value})
before.staged()
before.confirm_unmodified()
before.committed()
on = {0: stream.value}
adam = [("adam", "F32", "F32", "cuda", True, "adam.fused.cuda.f32")]
window = _native.Window(roomy, floats, None, adam, [(0, 1 << 20, arrays)], on, False, None)
window.go_on(on)
window.stepping(on)
figures = json.loads(window.figures())
assert figures["held_bytes"] == 12 << 20, figures
gradient_at = allocate(bytes(4 << 20))
gradient = Gradient()
known = weakref.ref(gradient)
numbers = [1e-3, 0.9, 0.99, 1e-8, 0.01, 1, 0, 0, 0.1, 0.1, 0.1, 0.1]
window.stepped([(0, gradient, 0)], [("adam", numbers, None)], lambda one: (gradient_at, 1 << 20, "F32", 0), on)
del gradient
until = time.monotonic() + 20
while known() is not None:
    assert time.monotonic() < until, "the gradient is still held"
    time.sleep(0.001)
window.release("seen")
del window

# A device that is lost fails the save, and nothing is published.
call("fakeFail", b"cuMemcpyAsync", u64(1), 700, True)
lost = save(url + "/b", streams={0: stream.value})
try:
    lost.committed()
except _native.Unavailable as error:
    assert "cuda:0" in str(error) and "700" in str(error), error
else:
    raise AssertionError("saved from a lost device")
print("saved and loaded")
"""


WITHOUT = """
part = ((0,), (1,), 64, (1,), 0)
described = _native.Described([("tensor", "model", "w", "", "U8", (1,), [part], "eager", None, "first save")])
session = _native.Session.solo()
try:
    _native.save(session, sys.argv[1], described, [], None, step=None, user={}, timeout_s=9.0, streams={0: 0})
except _native.Unsupported as error:
    print(error)
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a ``libcuda.so.1`` that needs no device."""
    command = ["cargo", "build", "--quiet", "--locked", "--package", "shardfast-fake-cuda", "--message-format=short"]
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    subprocess.run(command, cwd=ROOT, check=True)
    place = tmp_path_factory.mktemp("driver")
    shutil.copy(target / "debug" / "libshardfast_fake_cuda.so", place / "libcuda.so.1")
    return place


def test_a_device_is_saved_as_it_was_at_the_call_and_loaded_again(driver: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(driver)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.stdout == "saved and loaded\n", done.stderr


def test_without_a_driver_a_devices_tensor_is_refused(tmp_path: Path) -> None:
    script = SCRIPT.partition("driver, url")[0] + WITHOUT
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=240)
    if not done.stderr and not done.stdout:
        pytest.skip("this machine has a CUDA driver")
    assert "libcuda.so.1" in done.stdout, done.stderr
