"""A failure at any stage, on any rank: every rank raises, in time, an ordinary exception; nothing is half there.

The stages are those of PyTorch's own tests of error handling: describing the state, agreeing on a plan, making files,
writing them, committing; opening, planning, reading, installing. After each of them training and the next save go on.
"""

import ctypes
import itertools
import os
import re
import resource
import signal
import time
from pathlib import Path

import pytest
import shardfast as sf
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

TIMEOUT_S = 30.0
PROMPT_S = 15.0  # far below the timeout: nobody waits for a rank that failed


def failure(call):
    """What a call raises, as its type's name and message, and that it does so promptly."""
    started = time.monotonic()
    try:
        call()
    except Exception as error:
        assert time.monotonic() - started < PROMPT_S, f"too late: {error}"
        return type(error).__name__, str(error)
    raise AssertionError("nothing was raised")


def files_below(directory):
    return sorted(str(path.relative_to(directory)) for path in Path(directory).rglob("*") if path.is_file())


def expect_all_is_well(rank, world, directory):
    """Training goes on, and so do saves: the next one is committed and holds what it should."""
    total = torch.tensor(rank + 1.0)
    dist.all_reduce(total)
    assert total == world * (world + 1) / 2
    url = f"{directory}/afterwards"
    sf.save(url, {"r": {f"of{rank}": torch.full((5,), float(rank))}}, timeout_s=TIMEOUT_S)
    loaded = {f"of{other}": torch.empty(5) for other in range(world)}
    sf.load(url, {"r": loaded}, timeout_s=TIMEOUT_S)
    assert [float(tensor.sum()) for tensor in loaded.values()] == [5.0 * other for other in range(world)]


# Saves


class Failing:
    """State that its own code cannot give, or cannot take back."""

    def __init__(self, gives: bool) -> None:
        self.gives = gives

    def state_dict(self):
        if not self.gives:
            raise RuntimeError("the sensor is offline")
        return {"reading": 3}

    def load_state_dict(self, state):
        raise RuntimeError("the sensor is offline")


def partial():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return DTensor.from_local(torch.ones(3), mesh, [Partial()])


BAD_STATES = {
    "unencodable": (
        lambda: {"x": {"a": {"deep": [1, object()]}}},
        "Invalid",
        r"rank 1: x\.a\.deep\[1\]: a builtins\.object",
    ),
    "partial": (lambda: {"x": {"a": partial()}}, "Invalid", r"rank 1: x\.a: a DTensor with placement Partial\(sum\)"),
    "no state": (lambda: [1, 2], "Invalid", r"rank 1: the state is a list"),
    "key": (lambda: {"../x": {"a": 1}}, "Invalid", r"rank 1: .*\.\./x"),
    "nameless parameter": (
        lambda: {"x": torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)},
        "Invalid",
        r"rank 1: x: a parameter of shape \(2,\) in param_groups\[0\] belongs to no module",
    ),
    "shape": (
        lambda: {"x": {"a": torch.ones(4)}},
        "Invalid",
        r"x/a: .* F32 \[3\] on rank 0, a tensor F32 \[4\] on rank 1",
    ),
    "dtype": (
        lambda: {"x": {"a": torch.ones(3).double()}},
        "Invalid",
        r"x/a: .* F32 \[3\] on rank 0, a tensor F64 \[3\] on rank 1",
    ),
    "kind": (lambda: {"x": {"a": "text"}}, "Invalid", r"x/a: .* a tensor F32 \[3\] on rank 0, .* on rank 1"),
}


def check_bad_states(rank, world, directory):
    seen = {}
    for name, (make, _, _) in BAD_STATES.items():
        bad = make() if name == "partial" or rank == 1 else None  # making a DTensor takes every rank
        state = bad if rank == 1 else {"x": {"a": torch.ones(3)}}
        seen[name] = failure(lambda name=name, state=state: sf.save(f"{directory}/{name}", state, timeout_s=TIMEOUT_S))
    assert files_below(directory) == []
    expect_all_is_well(rank, world, directory)
    return seen


def test_a_state_that_cannot_be_saved_on_one_rank(ranks, tmp_path):
    per_rank = ranks(2)(check_bad_states, str(tmp_path / "run"))
    assert per_rank[0] == per_rank[1]
    for name, (_, kind, message) in BAD_STATES.items():
        found_kind, found = per_rank[0][name]
        assert found_kind == kind, (name, found)
        assert re.search(message, found), f"{name}: {found}"


def check_user_code(rank, world, directory):
    seen = [failure(lambda: sf.save(f"{directory}/one", {"x": Failing(gives=rank != 1)}, timeout_s=TIMEOUT_S))]
    sf.save(f"{directory}/two", {"x": Failing(gives=True)}, timeout_s=TIMEOUT_S)
    seen.append(failure(lambda: sf.load(f"{directory}/two", {"x": Failing(gives=True)}, timeout_s=TIMEOUT_S)))
    expect_all_is_well(rank, world, directory)
    return seen


def test_code_of_the_user_that_fails_on_one_rank_or_on_all(ranks, tmp_path):
    """Who fails keeps the own exception with its traceback; the others are told whose it was."""
    saved, loaded = zip(*ranks(2)(check_user_code, str(tmp_path)), strict=True)
    assert saved[1] == ("RuntimeError", "the sensor is offline")
    assert saved[0] == ("Invalid", "rank 1: RuntimeError: the sensor is offline")
    assert loaded == (("RuntimeError", "the sensor is offline"),) * 2


def own_key(rank, numel=100_000):
    """A state of which this rank writes its own files."""
    return {f"r{rank}": {"a": torch.full((numel,), float(rank))}}


def check_blocked(rank, world, directory):
    """The place of a rank's files is taken by something that is no directory."""
    if rank == 1:
        os.makedirs(f"{directory}/one")
        Path(f"{directory}/one/r1").touch()
    dist.barrier()
    seen = failure(lambda: sf.save(f"{directory}/one", own_key(rank), timeout_s=TIMEOUT_S))
    expect_all_is_well(rank, world, directory)
    return seen


def limited(number, soft, call):
    """What a call raises under a limit of this process."""
    before = resource.getrlimit(number)
    resource.setrlimit(number, (soft, before[1]))
    try:
        return failure(call)
    finally:
        resource.setrlimit(number, before)


def check_file_limit(rank, world, directory, limited_rank, limit_bytes):
    """A rank that may not make large files: it fails where a full disk would, in the middle of the data path."""
    state = own_key(rank) if rank == 1 else {}
    # Rank 0 has no data to write, but the manifest.
    soft = limit_bytes if rank == limited_rank else resource.RLIM_INFINITY
    sf.save(f"{directory}/zero", {}, timeout_s=TIMEOUT_S)  # the ranks' first meeting is through a file of its own
    seen = limited(resource.RLIMIT_FSIZE, soft, lambda: sf.save(f"{directory}/one", state, timeout_s=TIMEOUT_S))
    dist.barrier()
    left = [name for name in files_below(f"{directory}/one") if not name.endswith(".index.json")]
    assert left == [], "what a failed save wrote is given back"
    missing = failure(lambda: sf.load(f"{directory}/one", state, timeout_s=TIMEOUT_S))
    assert missing[0] == "NotFound", missing
    expect_all_is_well(rank, world, directory)
    return seen


def check_commit(rank, world, directory):
    """Something that is no file is called COMMIT."""
    os.makedirs(f"{directory}/one/COMMIT", exist_ok=True)
    dist.barrier()
    seen = failure(lambda: sf.save(f"{directory}/one", own_key(rank), timeout_s=TIMEOUT_S))
    dist.barrier()
    left = [name for name in files_below(f"{directory}/one") if not name.endswith(".index.json")]
    assert left == [], "what a failed save wrote is given back"
    expect_all_is_well(rank, world, directory)
    return seen


def check_urls(rank, world, directory):
    """Ranks that name different places, or one that no store knows."""
    seen = [
        failure(lambda: sf.save(f"{directory}/one-{rank}", own_key(rank), timeout_s=TIMEOUT_S)),
        failure(lambda: sf.save("nosuch://x" if rank else f"{directory}/two", own_key(rank), timeout_s=TIMEOUT_S)),
        failure(
            lambda: sf.save(f"{directory}/three", own_key(rank), timeout_s=TIMEOUT_S) if rank else resting(directory)
        ),
    ]
    expect_all_is_well(rank, world, directory)
    return seen


def resting(directory):
    sf.load(f"{directory}/three", {"r0": {"a": torch.ones(1)}}, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize(
    ("check", "args", "kind", "message"),
    [
        (check_blocked, (), "Invalid", "save .*/one: expected a new or empty directory.*found r1"),
        (
            check_file_limit,
            (1, 300_000),
            "Exhausted",
            r"rank 1: fallocate .*/one/r1/00001-000-\w+\.safetensors: File too large",
        ),
        (check_file_limit, (0, 1000), "Exhausted", "write .*/one/.*: File too large"),
        (check_commit, (), "Corrupt", "/one/COMMIT: expected a file, found something else"),
    ],
    ids=["place taken", "data too large", "manifest too large", "commit"],
)
def test_a_store_that_fails_on_one_rank(ranks, tmp_path, check, args, kind, message):
    one, other = ranks(2)(check, str(tmp_path), *args)
    assert one == other
    assert one[0] == kind
    assert re.search(message, one[1]), one[1]


def test_ranks_that_do_not_call_the_same(ranks, tmp_path):
    one, other = ranks(2)(check_urls, str(tmp_path))
    assert one == other
    different, unknown, mixed = one
    assert different[0] == mixed[0] == "Invalid"
    assert "ranks must call the same operations in the same order: rank 0 calls" in different[1]
    assert "ranks must call the same operations in the same order" in mixed[1]
    assert unknown[0] == "Unsupported"
    assert "rank 1: open nosuch://x: expected a path or one of file://, memory://, az://, gs://" in unknown[1]


# Real file systems, mounted for one rank only

LIBC = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNS, MS_RDONLY, MS_REC, MS_PRIVATE = 0x20000, 0x1, 0x4000, 0x40000


def mount(source, target, kind, flags, options):
    arguments = [None if text is None else text.encode() for text in (source, target, kind)]
    if LIBC.mount(*arguments, ctypes.c_ulong(flags), None if options is None else options.encode()) != 0:
        raise OSError(ctypes.get_errno(), f"mount {target}")


def own_file_system(directory, flags, options):
    """Mounts a memory file system that this process and its threads to come see alone."""
    if LIBC.unshare(CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    mount("none", "/", None, MS_REC | MS_PRIVATE, None)
    mount("none", directory, "tmpfs", flags, options)


def may_mount():
    """Whether a process of ours can do that; asked in one that ends at once."""
    pid = os.fork()
    if pid == 0:
        try:
            own_file_system("/tmp", 0, "size=64k")
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


def check_mounted(rank, world, directory, flags, options):
    os.makedirs(f"{directory}/one/r1", exist_ok=True)
    if rank == 1:
        own_file_system(f"{directory}/one/r1", flags, options)
    seen = failure(lambda: sf.save(f"{directory}/one", own_key(rank), timeout_s=TIMEOUT_S))
    dist.barrier()
    assert [name for name in files_below(f"{directory}/one") if not name.endswith(".index.json")] == []
    expect_all_is_well(rank, world, directory)
    return seen


@pytest.mark.parametrize(
    ("flags", "options", "kind", "message"),
    [
        (0, "size=128k", "Exhausted", "No space left on device"),
        (MS_RDONLY, "size=4m", "Invalid", "Read-only file system"),
    ],
    ids=["full", "read-only"],
)
def test_a_disk_that_is_full_or_read_only_on_one_rank(ranks, tmp_path, flags, options, kind, message):
    if not may_mount():
        pytest.skip("mounting a file system for one process takes root, or CAP_SYS_ADMIN")
    one, other = ranks(2)(check_mounted, str(tmp_path), flags, options)
    assert one == other
    assert one[0] == kind
    assert one[1].startswith("rank 1: ")
    assert message in one[1]


def check_unopened(rank, world, directory):
    """Rank 1 finds a file where the newest step of the run is, which only rank 0 has looked at."""
    run = f"{directory}/run"
    with sf.Checkpointer(run, timeout_s=TIMEOUT_S) as ckpt:
        ckpt.save(1, own_key(rank))
    dist.barrier()
    if rank == 1:
        own_file_system(run, 0, "size=64k")
        Path(run, "step-00000001").write_text("not a directory")
    started = time.monotonic()
    seen = failure(lambda: sf.Checkpointer(run, timeout_s=TIMEOUT_S).restore(own_key(rank)))
    assert time.monotonic() - started < TIMEOUT_S / 2
    expect_all_is_well(rank, world, directory)
    return seen


def test_a_restore_that_one_rank_cannot_open_fails_on_all(ranks, tmp_path):
    if not may_mount():
        pytest.skip("mounting a file system for one process takes root, or CAP_SYS_ADMIN")
    one, other = ranks(2)(check_unopened, str(tmp_path))
    assert one == other
    assert one[0] == "Invalid"
    assert "rank 1: open " in one[1] and "expected a directory, found something else" in one[1], one[1]


# Loads


def damage(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def check_damage(rank, world, directory, what):
    """Rank 1 alone reads what is damaged."""
    url = f"{directory}/one"
    sf.save(url, own_key(rank), timeout_s=TIMEOUT_S)
    if rank == 0:
        (data,) = Path(url).glob("r1/*.safetensors")
        (manifest,) = Path(url).glob("manifest-*")
        {
            "flipped": lambda: damage(data),
            "cut": lambda: os.truncate(data, data.stat().st_size - 1),
            "missing": data.unlink,
            "swapped": lambda: data.write_bytes(next(Path(url).glob("r0/*.safetensors")).read_bytes()),
            "manifest": lambda: damage(manifest),
            "no manifest": manifest.unlink,
            "commit": lambda: damage(Path(url, "COMMIT")),
            "no commit": Path(url, "COMMIT").unlink,
        }[what]()
    dist.barrier()
    state = {f"r{rank}": {"a": torch.zeros(100_000)}}
    seen = failure(lambda: sf.load(url, state, timeout_s=TIMEOUT_S))
    expect_all_is_well(rank, world, directory)
    return seen


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("flipped", "Corrupt", ["rank 1", "tensor r1/a", "r1/00001-000-", "bytes"]),
        ("cut", "Corrupt", ["rank 1", "r1/00001-000-", "bytes"]),
        ("missing", "Corrupt", ["rank 1", "r1/00001-000-"]),
        ("swapped", "Corrupt", ["rank 1", "r1/00001-000-"]),
        ("manifest", "Corrupt", ["manifest-", "SHA-256"]),
        ("no manifest", "Corrupt", ["manifest-"]),
        ("commit", "Corrupt", ["COMMIT"]),
        ("no commit", "NotFound", ["no checkpoint is committed there"]),
    ],
)
def test_damage_that_one_rank_meets(ranks, tmp_path, what, kind, words):
    one, other = ranks(2)(check_damage, str(tmp_path), what)
    assert one == other
    assert one[0] == kind, one
    assert [word for word in words if word not in one[1]] == [], one[1]


class Stubborn:
    def __init__(self, value, takes):
        self.value, self.takes = value, takes

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        if not self.takes:
            raise KeyError("no such sensor")
        self.value = state["value"]


def check_load_stages(rank, world, directory):
    url = f"{directory}/one"
    sf.save(url, {"w": {"w": torch.arange(6.0)}, "s": Stubborn(3, True)}, timeout_s=TIMEOUT_S)

    def attempt(state, **options):
        return failure(lambda: sf.load(url, state, timeout_s=TIMEOUT_S, **options))

    seen = [
        attempt({"w": {"w": torch.zeros(6 + rank)}, "s": Stubborn(0, True)}),
        attempt(
            {"w": {"w": torch.zeros(1, 6).expand(5 if rank else 1, 6)[0]} if rank else {"w": None}, "s": 5, "z": 3}
        ),
        attempt({"w": {"w": torch.zeros(6)}, "s": Stubborn(0, takes=rank != 1)}),
        limited(
            resource.RLIMIT_NOFILE,
            lowest_free_file() if rank == 1 else resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            lambda: sf.load(url, {"w": {"w": torch.zeros(6)}, "s": Stubborn(0, True)}, timeout_s=TIMEOUT_S),
        ),
    ]
    expect_all_is_well(rank, world, directory)
    return seen


def lowest_free_file():
    """As a limit: no more files can be opened."""
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    return next(number for number in itertools.count() if number not in used)


def test_a_load_that_fails_on_one_rank(ranks, tmp_path):
    one, other = ranks(2)(check_load_stages, str(tmp_path))
    shape, places, code, files = zip(one, other, strict=True)
    assert shape[0] == shape[1]
    assert shape[0][0] == "Invalid"
    assert "shape: w/w is [6] in the checkpoint and [7] here (rank 1)" in shape[0][1]
    assert places[0] == places[1]
    assert code[1] == ("KeyError", "'no such sensor'")
    where = "in the load_state_dict() of a test_failures.Stubborn, which stands at s"
    assert code[0] == ("Invalid", f"rank 1: KeyError: 'no such sensor' ({where})")
    assert files[0] == files[1]
    assert files[0][0] == "Exhausted", files
    assert "rank 1: " in files[0][1]


# Ranks that are late, or gone


def check_late(rank, world, directory):
    sf.save(f"{directory}/zero", own_key(rank, 10), timeout_s=TIMEOUT_S)
    if rank == 1:
        dist.barrier()  # rank 0 has given up
    seen = failure(lambda: sf.save(f"{directory}/one", own_key(rank), timeout_s=0.3))
    if rank == 0:
        dist.barrier()
    expect_all_is_well(rank, world, directory)
    return seen


def test_a_rank_that_is_late_is_named_and_the_next_save_works(ranks, tmp_path):
    one, other = ranks(2)(check_late, str(tmp_path))
    assert one[0] == other[0] == "Unavailable"
    assert "rank 1" in one[1]


def check_gone(rank, world, directory):
    """Rank 1 dies in the middle of the run; what the others get is told by a file, as they are not waited for."""
    sf.save(f"{directory}/zero", own_key(rank, 10), timeout_s=TIMEOUT_S)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    seen = failure(lambda: sf.save(f"{directory}/one", own_key(rank, 10), timeout_s=TIMEOUT_S))
    Path(f"{directory}/told-{rank}.tmp").write_text(f"{seen[0]}: {seen[1]}")
    os.rename(f"{directory}/told-{rank}.tmp", f"{directory}/told-{rank}")
    while len(list(Path(directory).glob("told-?"))) < world - 1:
        time.sleep(0.01)
    os._exit(0)


def test_a_rank_that_dies_is_named_to_all_others_at_once(ranks, tmp_path):
    with pytest.raises(AssertionError, match="died without a word"):
        ranks(3)(check_gone, str(tmp_path))
    for rank in (0, 2):
        told = (tmp_path / f"told-{rank}").read_text()
        assert told.startswith("Unavailable: "), told
        assert "rank 1" in told
    assert not (tmp_path / "one" / "COMMIT").exists()


def check_fallback(rank, world, run):
    """What one rank finds damaged is damaged for all: they go back together."""
    with sf.Checkpointer(run, every=sf.steps(1), timeout_s=TIMEOUT_S) as ckpt:
        for step in (1, 2, 3):
            ckpt.step(step, {**own_key(rank), "extra": {"step": step}})
    dist.barrier()
    if rank == 0:
        (data,) = Path(run, "step-00000002", "r1").glob("*.safetensors")
        damage(data)
        Path(run, "step-00000003", "COMMIT").unlink()
    dist.barrier()
    state = {f"r{rank}": {"a": torch.zeros(100_000)}, "extra": {"step": None}}
    ckpt = sf.Checkpointer(run, timeout_s=TIMEOUT_S)
    seen = failure(lambda: ckpt.restore(state))
    assert state["extra"]["step"] is None
    assert ckpt.restore(state, older=True) == 1
    assert state["extra"]["step"] == 1
    assert bool((state[f"r{rank}"]["a"] == rank).all())
    return seen


def test_ranks_fall_back_together(ranks, tmp_path):
    one, other = ranks(2)(check_fallback, str(tmp_path))
    assert one == other
    assert one[0] == "Corrupt"
    assert "step-00000002" in one[1]
    assert "tensor r1/a" in one[1]


def test_single_process_errors_are_the_same_without_any_process_group(tmp_path):
    for name, (make, kind, message) in BAD_STATES.items():
        if name in ("partial", "shape", "dtype", "kind"):
            continue  # these take ranks
        found = failure(lambda name=name, make=make: sf.save(tmp_path / name, make()))
        assert found[0] == kind
        assert re.search(message.removeprefix("rank 1: "), found[1]), f"{name}: {found[1]}"
        assert not found[1].startswith("rank"), "one process has no number"
    assert files_below(tmp_path) == []
    seen = limited(resource.RLIMIT_FSIZE, 0, lambda: sf.save(tmp_path / "one", own_key(0)))
    assert seen[0] == "Exhausted"
    assert failure(lambda: sf.load(tmp_path / "one", own_key(0)))[0] == "NotFound"
    sf.save(tmp_path / "one", own_key(0))
    sf.load(tmp_path / "one", own_key(0))


def check_arguments(rank, world, directory):
    sf.save(f"{directory}/zero", own_key(rank, 10), timeout_s=TIMEOUT_S)
    wrong = rank == 1
    choice, step, url = ("nonsense", -3, 7) if wrong else ("error", 3, f"{directory}/one")
    return [
        failure(lambda: sf.load(f"{directory}/zero", own_key(rank, 10), per_rank=choice, timeout_s=TIMEOUT_S)),
        failure(lambda: sf.plan_load(f"{directory}/zero", own_key(rank, 10), per_rank=choice, timeout_s=TIMEOUT_S)),
        failure(lambda: sf.save(f"{directory}/one", own_key(rank, 10), step=step, timeout_s=TIMEOUT_S)),
        failure(lambda: sf.save(url, own_key(rank, 10), timeout_s=TIMEOUT_S)),
        failure(
            lambda: sf.Checkpointer(f"{directory}/run", timeout_s=TIMEOUT_S).restore(own_key(rank, 10), per_rank=choice)
        ),
        expect_all_is_well(rank, world, directory),
    ]


def test_arguments_that_are_wrong_on_one_rank_are_told_to_all(ranks, tmp_path):
    one, other = ranks(2)(check_arguments, str(tmp_path))
    assert one == other
    for kind, message in one[:-1]:
        assert kind == "Invalid"
        assert message.startswith("rank 1: "), message


def check_options(rank, world, directory):
    """One rank asks for something else than the other."""
    sf.save(f"{directory}/zero", {"x": {"v": 1}, "y": {"v": 2}}, timeout_s=TIMEOUT_S)
    seen = []
    for number in range(2):  # whichever rank it is
        other = rank == number
        for options in (
            {"strict": not other},
            {"cast": other},
            {"per_rank": "rank0" if other else "error"},
            {"only": "x" if other else ("x", "y")},
        ):
            state = {"x": {"v": 0}}
            seen.append(failure(lambda s=state, o=options: sf.load(f"{directory}/zero", s, **o, timeout_s=TIMEOUT_S)))
        plan = sf.plan_load(f"{directory}/zero", {"x": {"v": 0}}, strict=not other, timeout_s=TIMEOUT_S)
        seen.append(("plan", plan.problems))
    sf.load(f"{directory}/zero", {"x": {"v": 0}}, strict=False, only=["x", "y"], timeout_s=TIMEOUT_S)
    return seen


def test_ranks_that_ask_for_other_things_get_one_error(ranks, tmp_path):
    one, other = ranks(2)(check_options, str(tmp_path))
    assert one == other
    for (kind, message), text in zip(
        one[:4], ("strict=False", "cast=True", "per_rank='rank0'", "only=['x']"), strict=True
    ):
        assert kind == "Invalid"
        assert f"arguments: {text} (rank 0)" in message
    assert one[4] == ("plan", ["arguments: strict=False (rank 0)"])
    assert one[9] == ("plan", ["arguments: strict=False (rank 1)"])


def check_calls(rank, world, directory):
    """Arguments that are wrong before this rank takes part in anything."""
    sf.save(f"{directory}/zero", own_key(rank, 10), timeout_s=TIMEOUT_S)
    wrong = rank == 1
    checkpointer = sf.Checkpointer(f"{directory}/run", timeout_s=TIMEOUT_S)
    seen = [
        failure(lambda: sf.load(f"{directory}/zero", own_key(rank, 10), timeout_s=-1 if wrong else TIMEOUT_S)),
        failure(lambda: sf.save(f"{directory}/one", own_key(rank, 10), timeout_s="1" if wrong else TIMEOUT_S)),
        failure(
            lambda: sf.save(
                f"{directory}/one", own_key(rank, 10), process_group="all" if wrong else None, timeout_s=TIMEOUT_S
            )
        ),
        failure(lambda: checkpointer.save(-1 if wrong else 1, own_key(rank, 10))),
    ]
    expect_all_is_well(rank, world, directory)
    return seen


def test_arguments_that_no_call_begins_with_are_told_to_all(ranks, tmp_path):
    one, other = ranks(2)(check_calls, str(tmp_path))
    for (kind, message), (own_kind, own) in zip(one, other, strict=True):
        assert (kind, own_kind) == ("Invalid", "Invalid")
        assert message == f"rank 1: {own.removeprefix('rank 1: ')}"


class Interrupted:
    """Is interrupted in its own code."""

    def __init__(self, saves=None, loads=None):
        self.saves, self.loads = saves, loads

    def state_dict(self):
        if self.saves is not None:
            raise self.saves
        return {"a": 1}

    def load_state_dict(self, state):
        if self.loads is not None:
            raise self.loads


def ended(call):
    """What a call ends with, whatever it is, and whether that was soon."""
    began = time.monotonic()
    with pytest.raises(BaseException) as caught:
        call()
    return type(caught.value).__name__, str(caught.value), time.monotonic() - began < PROMPT_S


def check_interrupted(rank, world, directory):
    kind = KeyboardInterrupt, SystemExit, GeneratorExit
    one = rank == 1
    seen = [
        ended(lambda k=k: sf.save(f"{directory}/one", {"b": Interrupted(k if one else None)}, timeout_s=TIMEOUT_S))
        for k in kind
    ]
    sf.save(f"{directory}/one", {"b": Interrupted()}, timeout_s=TIMEOUT_S)
    seen += [
        ended(
            lambda k=k: sf.load(f"{directory}/one", {"b": Interrupted(loads=k if one else None)}, timeout_s=TIMEOUT_S)
        )
        for k in kind
    ]
    # The other rank comes later than this one waits.
    if one:
        seen.append(ended(lambda: sf.save(f"{directory}/two", {"b": Interrupted(KeyboardInterrupt)}, timeout_s=600)))
    dist.barrier()
    if not one:
        seen.append(ended(lambda: sf.save(f"{directory}/two", {"b": Interrupted()}, timeout_s=TIMEOUT_S)))
    sf.save(f"{directory}/two", {"b": Interrupted()}, timeout_s=TIMEOUT_S)
    return seen


def test_an_interrupt_of_one_rank_fails_the_others_soon(ranks, tmp_path):
    one, other = ranks(2)(check_interrupted, str(tmp_path))
    kinds = ["KeyboardInterrupt", "SystemExit", "GeneratorExit"] * 2
    assert one[:-1] == [("Invalid", f"rank 1: it was interrupted by {kind}", True) for kind in kinds]
    assert one[-1][2] and "rank 1: it was interrupted by KeyboardInterrupt" in one[-1][1]
    assert other == [(kind, "", True) for kind in [*kinds, "KeyboardInterrupt"]]
