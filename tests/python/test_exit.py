"""Processes that end or fork with a save in flight: no hang, no torn checkpoint, a clear report."""

import json
import os
import signal
import subprocess
import sys

import pytest
import shardfast as sf
import torch

# One process imports everything; a fork of it then runs a script to its end, as an interpreter does.
INTERPRETER = """
import atexit, gc, json, os, signal, sys, time
last = []
atexit.register(lambda: [call() for call in last])  # first registered, last called
import torch, torch._dynamo, shardfast as sf, shardfast.verbs, shardfast.checkpointer
torch.set_num_threads(1)
gc.freeze()  # a fork that ends does not touch, and so copy, all that was imported
for line in sys.stdin:
    job = json.loads(line)
    pid = os.fork()
    if pid == 0:
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            os.dup2(os.open(job[name], os.O_RDWR | os.O_CREAT), number)
        torch.set_num_threads(1)
        exec(job["script"], {"__name__": "__main__", "run": job["run"], "last": last})
        break
    until, status = time.monotonic() + job["deadline_s"], (0, 0)
    while not status[0] and time.monotonic() < until:
        time.sleep(0.005)
        status = os.waitpid(pid, os.WNOHANG)
    if not status[0]:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    print(json.dumps(os.waitstatus_to_exitcode(status[1]) if status[0] else "hung"), flush=True)
"""

SCRIPT = """
import atexit, os, signal, sys, threading, time
import torch, shardfast as sf
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number, parameter in enumerate(model.parameters()):
    parameter.data.fill_(number + 1)
    parameter.grad = torch.ones_like(parameter)
state = {"model": model, "optimizer": optimizer, "extra": {"step": 1}}
sf.save(run + "/first", state)
"""

FORK = """
def in_child(function):
    pid = os.fork()
    if pid == 0:
        try:
            function()
        finally:
            os._exit(3)
    until = time.monotonic() + 20
    while time.monotonic() < until:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    print("the child hung", flush=True)
"""


@pytest.fixture(scope="module")
def interpreter():
    process = subprocess.Popen(
        [sys.executable, "-c", INTERPRETER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def run(interpreter, tmp_path):
    """``run(body)`` runs a script until it ends by itself: how it ended, and what it said."""

    def call(body, deadline_s=40):
        said = {name: str(tmp_path / name) for name in ("stdin", "stdout", "stderr")}
        job = {"script": SCRIPT + body, "run": str(tmp_path), "deadline_s": deadline_s, **said}
        print(json.dumps(job), file=interpreter.stdin, flush=True)
        code = json.loads(interpreter.stdout.readline())
        return code, (tmp_path / "stdout").read_text(), (tmp_path / "stderr").read_text()

    return call


def is_whole(url):
    """Whether the checkpoint is there and holds what was there when it was made."""
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8)))
    try:
        sf.load(url, {"model": model}, strict=False)
    except sf.NotFound:
        return False
    for number, parameter in enumerate(model.parameters()):
        assert bool((parameter == number + 1).all()), f"parameter {number} is torn"
    return True


ENDINGS = {
    "falls off its end": ("", 0),
    "calls sys.exit": ("sys.exit(4)", 4),
    "fails": ("raise RuntimeError('loss is nan')", 1),
    "ends in a thread's midst": ("threading.Thread(target=time.sleep, args=(0.2,)).start()", 0),
    "handles SIGTERM": (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(20)",
        5,
    ),
    "destroys its session": ("sf.session._solo.cache_clear()", 0),
}


@pytest.mark.parametrize("how", ENDINGS)
def test_what_is_in_flight_becomes_durable_when_the_interpreter(run, tmp_path, how):
    body, code = ENDINGS[how]
    begin = """
last.append(lambda: print("committed" if os.path.exists(run + "/second/COMMIT") else "in flight"))
sf.save_async(run + "/second", state)
optimizer.step()
"""
    ended = run(begin + body)
    assert ended[:2] == (code, "committed\n"), ended
    assert is_whole(tmp_path / "second")


@pytest.mark.parametrize("first", ["", "sf.save_async(run + '/other', state)"])
def test_a_save_that_begins_as_the_interpreter_ends_is_durable_when_the_call_returns(run, tmp_path, first):
    body = f"""
def late():
    pending = sf.save_async(run + "/second", state)
    print(os.path.exists(run + "/second/COMMIT"), pending.done())

last.append(late)
{first}
"""
    assert run(body)[:2] == (0, "True True\n")
    assert is_whole(tmp_path / "second")


FIRST_USE = """
import atexit, os, sys
import torch, shardfast as sf

def late():
    for name, save in (("one", sf.save_async), ("two", sf.save), ("three", sf.save_async)):
        save(sys.argv[1] + "/" + name, {"x": {"w": torch.zeros(3_000_000)}})
        print(os.path.exists(sys.argv[1] + f"/{name}/COMMIT"))

atexit.register(late)
"""


def test_the_first_save_may_begin_as_the_interpreter_ends(tmp_path):
    """Shardfast is imported then, and what it registers with atexit is not called any more."""
    ended = subprocess.run([sys.executable, "-c", FIRST_USE, tmp_path], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (0, "True\nTrue\nTrue\n"), ended.stderr


def test_a_save_that_fails_as_the_interpreter_ends_raises_that(run, tmp_path):
    (tmp_path / "second").write_text("in the way")
    body = """
def late():
    try:
        sf.save_async(run + "/second", state)
    except sf.Invalid:
        print("raised")

last.append(late)
"""
    code, out, err = run(body)
    assert (code, out) == (0, "raised\n"), err
    assert "failed" not in err


@pytest.mark.parametrize("is_daemon", [False, True])
def test_a_thread_trains_on_when_the_main_thread_has_returned(run, tmp_path, is_daemon):
    """Python waits for a thread that is no daemon. One that is gets a refusal."""
    body = f"""
main = threading.main_thread()

def train():
    ckpt = sf.Checkpointer(run)
    ckpt.step(1, state)
    ckpt.wait()
    begun.set()
    while main.is_alive():
        time.sleep(0.001)
    for step in (2, 3, 4):
        try:
            ckpt.save(step, state)
        except sf.Invalid as error:
            print("the interpreter ends" in str(error), flush=True)
            refused.set()
            return
        optimizer.step()
        fill()

def fill():
    for number, parameter in enumerate(model.parameters()):
        parameter.data.fill_(number + 1)

begun, refused = threading.Event(), threading.Event()
last.append(lambda: refused.wait(20 * {is_daemon}))
threading.Thread(target=train, daemon={is_daemon}).start()
begun.wait()
"""
    code, out, err = run(body)
    assert code == 0, err
    if is_daemon:
        assert out == "True\n", out
    else:
        assert out == "" and all(is_whole(tmp_path / f"step-0000000{step}") for step in (2, 3, 4)), (out, err)


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.05])
def test_a_killed_process_leaves_no_torn_checkpoint(run, tmp_path, after_s):
    """SIGTERM without a handler ends a process at once."""
    body = f"""
sf.save_async(run + "/second", state)
optimizer.step()
time.sleep({after_s})
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(20)
"""
    assert run(body)[0] == -signal.SIGTERM
    is_whole(tmp_path / "second")
    assert is_whole(tmp_path / "first")


def test_a_failure_that_nobody_heard_of_is_said_at_the_end(run, tmp_path):
    (tmp_path / "second").write_text("in the way")
    code, _, err = run('sf.save_async(run + "/second", state)')
    assert code == 0
    assert f"the save of {tmp_path}/second failed: " in err


@pytest.mark.parametrize("call", ["save", "save_async"])
def test_a_failure_that_the_call_raised_is_not_logged_as_well(run, tmp_path, call):
    body = f"""
import resource, shardfast
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
try:
    sf.{call}(run + "/second", {{"x": {{"w": torch.zeros(3_000_000)}}}})
except shardfast.Exhausted:
    print("raised")
"""
    code, out, err = run(body)
    assert (code, out) == (0, "raised\n"), err
    assert "failed" not in err


ENDS_OF_A_RUN = {
    "dies before a call raises it": ("raise RuntimeError('loss is nan')", "the save of {run}/step-00000007 failed: "),
    "forgets the checkpointer": ("del ckpt", "the save of {run}/step-00000007 failed: "),
    "closes it": ("ckpt.close()", "shardfast.Corrupt: "),
    "goes on": ("ckpt.step(8, state)", "shardfast.Corrupt: "),
}


@pytest.mark.parametrize("how", ENDS_OF_A_RUN)
def test_a_failure_in_the_background_is_reported_once_by_a_run_that(run, tmp_path, how):
    end, report = ENDS_OF_A_RUN[how]
    body = f"""
ckpt = sf.Checkpointer(run)
ckpt.save(6, state)
ckpt.wait()
os.makedirs(run + "/step-00000007/COMMIT")
ckpt.save(7, state)
while not ckpt._running[0][1].done():
    time.sleep(0.01)
{end}
"""
    _, _, err = run(body)
    assert err.count("expected a file, found something else") == 1, err
    assert report.format(run=tmp_path) in err


def test_ctrl_c_at_the_end_leaves_the_save_and_ends(run, tmp_path):
    body = """
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
pending = sf.save_async(run + "/second", state)

def wait(*timeout):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)

pending.waited = wait  # a save that does not end
"""
    code, _, err = run(body)
    assert code == 0, err
    assert "KeyboardInterrupt" in err


@pytest.mark.parametrize("attempt", range(3))
def test_a_save_that_fails_at_the_very_end_harms_nothing(run, tmp_path, attempt):
    """The thread that minds it comes back to an interpreter that is still there."""
    (tmp_path / "second").write_text("in the way")
    assert run('sf.save_async(run + "/second", state)')[0] == 0


def test_a_checkpointer_that_was_not_closed_is_waited_for(run, tmp_path):
    body = "ckpt = sf.Checkpointer(run)\nckpt.save(7, state)\nckpt.save(8, state)\noptimizer.step()"
    assert run(body)[0] == 0
    assert is_whole(tmp_path / "step-00000007")
    assert is_whole(tmp_path / "step-00000008")


def test_a_forked_process_neither_waits_nor_hangs(run, tmp_path):
    """It uses what it inherits of the save, steps the optimizer, ends as Python does, and leaves the save alone."""
    body = (
        FORK
        + """
from shardfast.session import current
ckpt = sf.Checkpointer(run + "/run")
session = current()
pending = sf.save_async(run + "/second", state)
ckpt.save(1, state)

def child():
    for use in (pending.staged, pending.committed, pending.done, lambda: pending.report, lambda: session.rank,
                ckpt.wait, ckpt.close, lambda: ckpt.step(2, state)):
        try:
            use()
        except sf.Invalid as error:
            print("Invalid", error, flush=True)
    optimizer.step()
    model.load_state_dict(model.state_dict())

in_child(child)
in_child(lambda: sys.exit(0))

def forget():
    global pending, session, ckpt
    del pending, session, ckpt
    import gc
    gc.collect()

in_child(forget)
ckpt.close()
pending.committed()
"""
    )
    code, out, err = run(body)
    assert code == 0, err
    assert "hung" not in out
    assert out.count("was forked from it") >= 7, out
    assert is_whole(tmp_path / "second")


def test_a_forked_process_may_save_alone(run, tmp_path):
    """What belongs to the parent is the parent's; a new session of its own is a new one."""
    body = (
        FORK
        + """
pending = sf.save_async(run + "/second", state)
in_child(lambda: sf.save(run + "/third", {"extra": {"x": 1}}))
pending.committed()
"""
    )
    code, out, err = run(body)
    assert (code, out) == (0, ""), err
    extra = {"x": None}
    sf.load(tmp_path / "third", {"extra": extra})
    assert extra == {"x": 1}


def test_workers_of_a_data_loader_live_beside_saves(run, tmp_path):
    body = """
loader = torch.utils.data.DataLoader(list(range(64)), num_workers=2, batch_size=8)
for number in range(3):
    pending = sf.save_async(f"{run}/{number}", state)
    assert sum(int(batch.sum()) for batch in loader) == 2016
    pending.committed()
"""
    code, _, err = run(body)
    assert code == 0, err


RESIZES = {
    "freed": "model[8].weight.untyped_storage().resize_(0)",
    "grown": "model[8].weight.data.resize_(4096, 4096)",
}


@pytest.mark.parametrize("how", RESIZES)
def test_a_storage_that_is_resized_is_a_clear_error_and_not_the_end(run, how):
    """In a process whose allocator gives memory of that size back to the system at once."""
    body = f"""
sys.path.append({os.path.dirname(__file__)!r})
from unwatched import unwatched
model.append(torch.nn.Linear(3072, 3072))
state = {{"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}}
with unwatched():
    pending = sf.save_async(run + "/second", state)
    {RESIZES[how]}
    try:
        pending.committed()
    except sf.Error as error:
        print(type(error).__name__, error)
"""
    code, out, err = run(body)
    assert code == 0, err
    assert out.startswith("Invalid ")
    # Said by whoever finds out first: the one who copies, or the one who compares.
    assert "model/8.weight" in out and "resized" in out


def test_a_checkpointer_saves_in_a_forked_child_too(run):
    """Its own thread waits there for the end of a save; the parent's does not exist."""
    body = (
        FORK
        + """
torch.set_num_threads(1)
with sf.Checkpointer(run + "/forked") as ckpt:
    ckpt.save(1, state)
    ckpt.wait()
    def saves():
        ckpt.save(2, state)
        ckpt.wait()
        ckpt.close()
        print("the child saved", ckpt.committed, flush=True)
        os._exit(0)
    in_child(saves)
    ckpt.save(3, state)
    ckpt.wait()
    print("the parent saved", ckpt.committed)
"""
    )
    code, out, err = run(body)
    assert (code, out) == (0, "the child saved 2\nthe parent saved 3\n"), err


def check_forked_rank(rank, world, directory):
    """A rank's child: the session of the job is not its own."""
    sf.save(f"{directory}/one", {"extra": {"x": 1}})
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            sf.save(f"{directory}/two", {"extra": {"x": 1}})
        except sf.Invalid as error:
            os.write(writing, str(error).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(pid, 0)
    sf.save(f"{directory}/three", {"extra": {"x": 1}})
    return said


def test_a_forked_rank_is_told_so(ranks, tmp_path):
    for said in ranks(2)(check_forked_rank, str(tmp_path)):
        assert "this job's session belongs to process" in said
