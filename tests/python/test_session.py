"""Ranks find each other through the job's rendezvous store or its environment, never through its process groups."""

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import shardfast as sf
import torch.distributed as dist
from rank_server import RENDEZVOUS, make_group
from shardfast import addresses, session


def test_one_process_needs_no_process_group():
    assert (session.current().rank, session.current().world) == (0, 1)
    assert session.current() is session.current()


@pytest.mark.parametrize(("text", "expected"), [("8388608", 8 << 20), ("12MiB", 12 << 20), ("5000 KiB", 4 << 20)])
def test_the_environment_bounds_the_staging_memory(monkeypatch, text, expected):
    monkeypatch.setenv(session.STAGING_BYTES, text)
    session._solo.cache_clear()
    assert session.current().staging_bytes == expected
    monkeypatch.setenv(session.STAGING_BYTES, "1GiB")  # read once
    assert session.current().staging_bytes == expected
    session._solo.cache_clear()
    assert session.current().staging_bytes == 1 << 30
    session._solo.cache_clear()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("much", "expected a number of bytes, or one of KiB, MiB or GiB such as '512MiB'"),
        ("", "expected a number of bytes"),
        ("1.5GiB", "expected a number of bytes"),
        ("-1", "expected a number of bytes"),
        ("1GB", "expected a number of bytes"),
        ("9999999999999999999", "expected a number of bytes"),
        ("9" * 5000, "expected a number of bytes"),
        ("1MiB", "staging_bytes=1048576: expected at least 4194304"),
    ],
)
def test_a_budget_that_is_none_is_refused(monkeypatch, tmp_path, text, told):
    monkeypatch.setenv(session.STAGING_BYTES, text)
    session._solo.cache_clear()
    for _ in range(2):
        with pytest.raises(sf.Invalid) as raised:
            sf.save(tmp_path / "one", {"extra": {"x": 1}})
        assert str(raised.value).startswith(f"SHARDFAST_STAGING_BYTES={text!r}: ")
        assert told in str(raised.value)


def check_budgets(rank, world, directory):
    """Each rank has its own; one that is none fails every operation on every rank, at once."""
    os.environ[session.STAGING_BYTES] = f"{8 << rank}MiB"
    assert session.current(30).staging_bytes == 8 << rank << 20
    dist.barrier()
    dist.destroy_process_group()
    os.environ[session.STAGING_BYTES] = "8MiB" if rank == 0 else "lots"
    make_group("-again", rank, world)
    for _ in range(2):
        with pytest.raises(sf.Invalid, match="SHARDFAST_STAGING_BYTES='lots': expected a number of bytes"):
            sf.save(f"{directory}/one", {"extra": {"x": 1}}, timeout_s=20)


def test_each_rank_has_a_budget_and_a_wrong_one_is_told_to_all(ranks, tmp_path):
    ranks(2)(check_budgets, str(tmp_path))


def check_meeting(rank, world):
    first = session.current(30)
    assert (first.rank, first.world) == (rank, world)
    assert session.current(30) is first
    dist.barrier()
    dist.destroy_process_group()
    # It is still one process of three, and knows the others no more.
    with pytest.raises(sf.Invalid, match=f"WORLD_SIZE={world}"):
        session.current()
    # The same processes, found through the same store, in another order: nothing of the first meeting is left.
    again = (rank + 1) % world
    make_group("-again", again, world)
    second = session.current(30)
    assert (second.rank, second.world) == (again, world)
    assert second is not first
    return True


def test_a_new_process_group_is_a_new_session(ranks):
    assert ranks(3)(check_meeting) == [True, True, True]


def check_kept_store(rank, world):
    place = os.environ[RENDEZVOUS].removeprefix("file://")
    store = dist.FileStore(f"{place}-kept", world)
    session._store = lambda *_: store
    dist.destroy_process_group()
    for number in range(3):
        make_group(f"-{number}", rank, world)
        # Rank 0 comes late: who takes an earlier meeting's message for this one's looks for a session that is gone.
        time.sleep(0.2 if rank == 0 else 0)
        sf.save(f"{place}-saved-{number}", {"extra": {"rank": rank}}, timeout_s=10)
        dist.barrier()
        dist.destroy_process_group()


def test_a_store_that_outlives_the_group_does_not_mislead(ranks):
    ranks(2)(check_kept_store)


def check_absence(rank, world):
    if rank == 1:
        with pytest.raises(sf.Unavailable, match=r"rank 1 of 2: rank 0 did not report its address within 0\.5 s"):
            session.current(0.5)
    dist.barrier()


def test_a_rank_that_does_not_come_is_an_error_in_time(ranks):
    ranks(2)(check_absence)


def test_threads_share_one_session(ranks):
    ranks(2)(check_threads)


def check_threads(rank, world):
    found = []
    threads = [threading.Thread(target=lambda: found.append(session.current(30))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(one) for one in found}) == 1


@pytest.mark.parametrize(
    ("environment", "host"),
    [
        ({"LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node-7"}, "127.0.0.1"),  # all ranks on one machine
        ({"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, "127.0.0.1"),
        ({"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, "127.0.0.1"),
        ({"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node-7"}, "10.0.0.7"),
        ({"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "this-node"}, "10.9.9.9"),  # its name is a loopback address here
        ({}, "10.9.9.9"),
        ({"MASTER_ADDR": "nowhere"}, "10.9.9.9"),
    ],
)
def test_a_rank_listens_where_the_others_can_reach_it(monkeypatch, environment, host):
    routes = {"node-7": "10.0.0.7", "this-node": "127.0.1.1", "192.0.2.1": "10.9.9.9"}
    for name in ("LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(addresses, "_route_to", routes.get)
    assert addresses.host(4, os.environ.get("MASTER_ADDR", "")) == host


def test_routes_are_found_without_a_packet():
    assert addresses._route_to("127.0.0.1") == "127.0.0.1"
    assert addresses._route_to("::1") in ("::1", None)
    assert addresses._route_to("") is None
    assert addresses._route_to("no such host.invalid") is None


def check_tree(rank, world, directory):
    os.environ.update({session.FANOUT: "2", "LOCAL_WORLD_SIZE": "2"})
    assert session.current(30).rank == rank
    sf.save(f"{directory}/one", {"extra": {"rank": 1}}, timeout_s=30)


def test_ranks_join_through_each_other(ranks, tmp_path):
    ranks(6)(check_tree, str(tmp_path))
    found = {"extra": {"rank": 0}}
    sf.load(tmp_path / "one", found)
    assert found == {"extra": {"rank": 1}}


def check_fan_out(rank, world, directory, wrong):
    text = wrong.get(rank)
    if text is not None:
        os.environ[session.FANOUT] = text
    with pytest.raises(sf.Invalid) as raised:
        sf.save(f"{directory}/one", {"extra": {"x": 1}}, timeout_s=20)
    return str(raised.value)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({1: "8"}, "SHARDFAST_FANOUT=8 on rank 1, rank 0 has not set it: all ranks must have the same"),
        ({0: "4", 1: "8"}, "SHARDFAST_FANOUT=8 on rank 1, rank 0 has 4: all ranks must have the same"),
        ({0: "1"}, "SHARDFAST_FANOUT='1': expected a number, at least 2"),
        ({1: "wide"}, "SHARDFAST_FANOUT='wide': expected a number, at least 2"),
    ],
)
def test_ranks_that_want_other_trees_are_told_so_all_of_them(ranks, tmp_path, wrong, told):
    messages = ranks(2)(check_fan_out, str(tmp_path), wrong)
    assert messages[0] == messages[1]
    assert told in messages[0]


def check_unreachable(rank, world):
    os.environ.update({session.TLS_CERT: "/no/such/file", session.TLS_KEY: "/no/key", session.TLS_CA: "/no/ca"})
    expected = sf.Invalid if rank == 0 else sf.Unavailable
    if rank == 1:
        for name in (session.TLS_CERT, session.TLS_KEY, session.TLS_CA):
            del os.environ[name]
    with pytest.raises(expected, match="/no/such/file: a certificate cannot be read"):
        session.current(20)


def test_a_rank_that_cannot_listen_does_not_keep_the_others_waiting(ranks):
    started = time.monotonic()
    ranks(2)(check_unreachable)
    assert time.monotonic() - started < 15


def free_port():
    """A port that no connection gets until it is used: those of clients are above these."""
    while True:
        port = random.randrange(10_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@pytest.fixture
def job(tmp_path):
    """Starts the ranks of a job that knows nothing but its environment."""
    processes = []

    def start(world, script, root=None, **environment):
        if root is None:
            root = f"127.0.0.1:{free_port()}"
        for rank in range(world):
            variables = {
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(world),
                session.ROOT: root,
                session.TOKEN: "s3cret",
                **environment,
            }
            kept = {name: value for name, value in {**os.environ, **variables}.items() if value is not None}
            process = subprocess.Popen(
                [sys.executable, "-c", script, str(tmp_path)],
                env=kept,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            processes.append(process)
        return processes

    yield start
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.communicate()


SAVES = """
import os, sys
import numpy as np
import shardfast as sf

weights = np.arange(1000.0)
sf.save(sys.argv[1] + "/one", {"model": {"weights": weights}, "extra": {"world": 5}}, timeout_s=40)
assert "torch" not in sys.modules
loaded = {"model": {"weights": np.zeros(1000)}, "extra": {"world": 0}}
sf.load(sys.argv[1] + "/one", loaded, timeout_s=40)
assert (loaded["model"]["weights"] == weights).all()
"""


def test_a_job_without_torch_meets_through_its_environment(job, tmp_path):
    for process in job(5, SAVES, **{session.FANOUT: "2"}):
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output
    found = {"model": {"weights": np.zeros(1000)}, "extra": {"world": 0}}
    sf.load(tmp_path / "one", found)
    assert (found["model"]["weights"] == np.arange(1000.0)).all()


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"RANK": None}, "RANK: not set; this job needs it beside SHARDFAST_ROOT"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE='many': expected a number, at least 1"),
        ({"SHARDFAST_TOKEN": None}, "SHARDFAST_TOKEN: not set; expected a secret"),
        ({"SHARDFAST_ROOT": "here"}, "SHARDFAST_ROOT='here': expected rank 0's host and port"),
        ({"SHARDFAST_ROOT": "::1:29600"}, "SHARDFAST_ROOT='::1:29600': expected rank 0's host and port"),
        ({"SHARDFAST_TLS_KEY": "key.pem"}, "SHARDFAST_TLS_CERT and SHARDFAST_TLS_CA: not set; TLS needs all of"),
        ({"RANK": "2"}, "rank 2 is not below the world's size, 2"),
    ],
)
def test_an_environment_that_does_not_say_enough_is_refused(monkeypatch, tmp_path, environment, told):
    whole = {"RANK": "1", "WORLD_SIZE": "2", session.ROOT: "127.0.0.1:9", session.TOKEN: "s3cret"}
    for name, value in {**whole, **environment}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(sf.Invalid) as raised:
        sf.save(tmp_path / "one", {"extra": {"x": 1}}, timeout_s=2)
    assert told in str(raised.value)


MEETS_ITS_END = """
import os, signal, sys
import numpy as np
import shardfast as sf

victim, is_idle = os.environ["VICTIM"] == os.environ["RANK"], os.environ["WHEN"] == "idle"
state = {"model": {"weights": np.arange(100_000.0)}, "extra": {"n": 1}}
sf.save(sys.argv[1] + "/first", state, timeout_s=40)
if victim and not is_idle:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 0.1)  # whose default is to end the process, in the middle of what it does
if victim and is_idle:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    for number in range(10_000):
        sf.save(f"{sys.argv[1]}/{number}", state, timeout_s=40)
        sf.load(f"{sys.argv[1]}/{number}", state, timeout_s=40)
except sf.Error as error:
    print(f"raised {type(error).__name__}: {error}")
"""


@pytest.mark.parametrize("when", ["idle", "busy"])
@pytest.mark.parametrize("victim", [0, 1, 3])
def test_survivors_of_a_killed_rank_say_the_same(job, victim, when):
    processes = job(4, MEETS_ITS_END, VICTIM=str(victim), WHEN=when, **{session.FANOUT: "2"})
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    told = [
        [line for line in output.splitlines() if line.startswith("raised")]
        for rank, output in enumerate(outputs)
        if rank != victim
    ]
    expected = rf"raised Unavailable: \w+ \S+: rank {victim} is lost: its process ended or cannot be reached"
    assert all(len(lines) == 1 and re.fullmatch(expected, lines[0]) for lines in told), outputs
    # A rank that passes words on may have told some only how an operation ended: these are in the next one.
    operations_max = 2 if when == "busy" and victim in (0, 1) else 1
    assert len({line for lines in told for line in lines}) <= operations_max, outputs


def check_no_store(rank, world, directory):
    """Without the one private function that says how the job's processes met, the environment does."""
    port = [None]
    if rank == 0:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = [server.port]
    dist.broadcast_object_list(port)
    del dist.distributed_c10d._get_default_store
    with pytest.raises(sf.Unavailable, match="MASTER_ADDR and MASTER_PORT are not set"):
        session.current(5.0)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port[0]))
    sf.save(f"{directory}/one", {"extra": {"rank": rank}}, timeout_s=30)
    dist.barrier()


def test_a_torch_that_does_not_give_its_store(ranks, tmp_path):
    """One private function is used, and its absence is survived."""
    ranks(2)(check_no_store, str(tmp_path))
