"""What other systems were seen to do, row by row, shown not to happen here.

W3's every bit, and the rows about lost power (H2, H3, H4: names and contents that were never synced) are shown on a
disk that can lose and tear writes: crates/engine/tests/checkpoint/crash.rs and damage.rs, crates/store/tests/crash.rs.
"""

import ast
import os
import pickle
import pickletools
import random
import resource
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import shardfast as sf
import torch
import torch.distributed as dist
from layouts import build, held, known, local, plain_names, same_bits, train
from shardfast import adapters, session, verbs
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

sys.path.insert(0, str(Path(__file__).parents[1] / "reader"))
import shardfast_reader as reader


def command(*arguments):
    program = Path(sys.executable).with_name("shardfast")
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=60)


def below(directory, pattern="*"):
    return [path for path in Path(directory).rglob(pattern) if path.is_file()]


# W: the checkpoints of others


def test_w1_a_write_that_fails_fails_the_save(tmp_path):
    """W1: one of several files cannot be written: the save fails, nothing is published, and the next one works."""
    state = {f"part{number}": {"w": torch.zeros(100_000 if number == 3 else 10)} for number in range(5)}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    try:
        with pytest.raises(sf.Exhausted, match=r"part3/.*File too large"):
            sf.save(tmp_path / "one", state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert below(tmp_path, "COMMIT") + below(tmp_path, "manifest-*") + below(tmp_path, "*.safetensors") == []
    with pytest.raises(sf.NotFound):
        sf.load(tmp_path / "one", state)
    sf.save(tmp_path / "one", state)
    sf.load(tmp_path / "one", state)


def save_for_ever(run):
    """What a process does that will be killed: every tensor of a checkpoint holds its step."""
    with sf.Checkpointer(run, every=sf.steps(1)) as ckpt:
        for step in range(1, 1000):
            ckpt.step(step, {"w": {name: torch.full((300_000,), float(step)) for name in "abc"}})


def test_w2_a_crash_in_a_save_leaves_the_one_before(rank_server, tmp_path):
    """W2: killed at any moment, what was committed loads and what was not is passed over; nothing is mixed."""
    chance = random.Random(0)
    for attempt in range(6):
        run = tmp_path / str(attempt)
        pid, pipe = rank_server.start(save_for_ever, (run,))
        while not below(run, "COMMIT"):
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.05))
        rank_server.end(save_for_ever, pid)
        os.close(pipe)
        committed = max(int(path.parent.name.removeprefix("step-")) for path in below(run, "COMMIT"))
        state = {"w": {name: torch.zeros(300_000) for name in "abc"}}
        assert sf.Checkpointer(run).restore(state) == committed
        assert all(bool((tensor == committed).all()) for tensor in state["w"].values())


def test_w2_a_second_save_to_the_same_place_is_refused(tmp_path):
    """W2: the committed checkpoint stays as it is, byte by byte."""
    sf.save(tmp_path / "one", {"w": {"w": torch.ones(10)}})
    before = {path: path.read_bytes() for path in below(tmp_path)}
    with pytest.raises(sf.Conflict):
        sf.save(tmp_path / "one", {"w": {"w": torch.zeros(10)}, "more": {"w": torch.zeros(10)}})
    assert {path: path.read_bytes() for path in below(tmp_path)} == before


def test_w3_a_flipped_bit_is_found_and_named(tmp_path):
    """W3: tensor, file and range are named, and nothing of the damaged block is loaded."""
    names = ["a", "b", "c"]
    sf.save(tmp_path / "one", {"model": {name: known(name, (30_000,)) for name in names}})
    (path,) = below(tmp_path, "*.safetensors")
    (opened,) = reader.Checkpoint(tmp_path / "one").manifest.files
    whole = path.read_bytes()
    for name in names:
        damaged = bytearray(whole)
        part = safetensors.torch.load_file(path)[name].numpy().tobytes()
        at = whole.index(part) + 60_000
        damaged[at] ^= 0x10
        path.write_bytes(damaged)
        state = {"model": {name: torch.zeros(30_000) for name in names}}
        with pytest.raises(sf.Corrupt) as caught:
            sf.load(tmp_path / "one", state)
        block = opened.data_start + (at - opened.data_start) // 65536 * 65536
        assert f"tensor model/{name}" in str(caught.value)
        assert f"file {opened.path}, bytes {block}.." in str(caught.value)
        assert not state["model"][name][(at - whole.index(part)) // 4]
        path.write_bytes(whole)


def check_w4(rank, world, url):
    mesh = init_device_mesh("cpu", (world,))
    whole = known("w", (16, 3))
    tensor = distribute_tensor(whole, mesh, [_StridedShard(0, split_factor=2)], src_data_rank=None)
    sf.save(url, {"w": {"w": tensor}})
    (path,) = Path(url).glob(f"w/{rank:05}-*.safetensors")
    return {name: part.tolist() for name, part in safetensors.torch.load_file(path).items()}


def test_w4_two_chunks_of_one_tensor_on_a_rank_are_both_there(ranks, tmp_path):
    """W4: each part has a name of its own in its rank's file."""
    whole = known("w", (16, 3))
    for rank, parts in enumerate(ranks(2)(check_w4, f"{tmp_path}/one")):
        starts = [4 * rank, 8 + 4 * rank]
        assert parts == {f"w[{start}:{start + 4}, 0:3]": whole[start : start + 4].tolist() for start in starts}


def test_w5_every_dtype_is_exported(tmp_path):
    """W5: whole numbers and truth values too."""
    kinds = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int64, torch.uint64, torch.bfloat16]
    kinds += [torch.float8_e4m3fn, torch.complex64]
    tensors = {str(kind): (known("x", (7, 5)) > 0).to(kind) for kind in kinds}
    sf.save(tmp_path / "one", {"model": tensors})
    done = command("export", tmp_path / "one", tmp_path / "out", "--shard-size", "100B")
    assert done.returncode == 0, done.stderr
    exported = {}
    for path in below(tmp_path / "out", "*.safetensors"):
        exported |= safetensors.torch.load_file(path)
    assert exported.keys() == tensors.keys()
    assert all(same_bits(exported[name], tensor) for name, tensor in tensors.items())


def test_w6_a_change_of_dtype_or_shape_is_seen_by_the_next_save(tmp_path):
    """W6: the plan that is remembered from the save before is not taken for this one."""
    kinds = [torch.float32, torch.float32, torch.float64, torch.int32, torch.float32]
    for number, kind in enumerate(kinds):
        sf.save(tmp_path / str(number), {"w": {"w": torch.full((3 + number // 4, 2), number, dtype=kind)}})
    for number, kind in enumerate(kinds):
        loaded = {"w": torch.zeros(3 + number // 4, 2, dtype=kind)}
        sf.load(tmp_path / str(number), {"w": loaded})
        assert loaded["w"].tolist() == [[number, number]] * (3 + number // 4)


def test_w6_a_model_and_its_average_are_two(tmp_path):
    """W6: the same names under two keys have nothing to do with each other."""
    state = {"model": nn.Linear(3, 2), "ema": nn.Linear(3, 2)}
    for _ in range(2):
        url = tmp_path / str(len(list(tmp_path.iterdir())))
        sf.save(url, state)
        loaded = {"ema": nn.Linear(3, 2), "model": nn.Linear(3, 2)}
        sf.load(url, loaded)
        for key, module in state.items():
            assert same_bits(loaded[key].weight, module.weight), key
        with torch.no_grad():
            state["ema"].weight.mul_(0.5)


def test_w7_errors_are_ordinary_exceptions(tmp_path):
    """W7: ``except Exception`` catches them, and they survive the way to another process."""
    kinds = [getattr(sf, name) for name in sf.__all__ if isinstance(getattr(sf, name), type)]
    for kind in kinds:
        if issubclass(kind, BaseException):
            assert issubclass(kind, Exception)
            copy = pickle.loads(pickle.dumps(kind("what happened")))
            assert (type(copy), copy.args) == (kind, ("what happened",))
    try:
        sf.load(tmp_path / "nothing", {"a": {"b": 1}})
    except Exception as error:
        assert isinstance(error, sf.NotFound)


def bytes_read():
    """Bytes that this process asked the system to read."""
    with open("/proc/self/io") as counters:
        return int(next(line for line in counters if line.startswith("rchar")).split()[1])


def check_w8(rank, world, url):
    mesh = init_device_mesh("cpu", (world,))
    whole = known("w", (1024, 256))
    sf.save(url, {"w": {"w": whole}})
    # Runs of four rows, so that every checksummed block holds rows of both ranks.
    zeros = torch.zeros_like(whole)
    tensor = distribute_tensor(zeros, mesh, [_StridedShard(0, split_factor=128)], src_data_rank=None)
    sf.load(url, {"w": {"w": tensor}})  # what is imported and opened once is behind us
    plan = sf.plan_load(url, {"w": {"w": tensor}})
    before = bytes_read()
    sf.load(url, {"w": {"w": tensor}})
    return len(below(Path(url), "*.safetensors")), plan.bytes_read, bytes_read() - before


def test_w8_a_byte_is_read_once(ranks, tmp_path):
    """W8: a rank that needs 128 pieces of a tensor reads the tensor once, not 128 times."""
    size = 1024 * 256 * 4
    for files, planned, read in ranks(2)(check_w8, f"{tmp_path}/one"):
        assert files == 2, "each of the two ranks wrote half of what both hold"
        assert planned <= size
        assert read <= size + 100_000, "its header and the manifest aside"


def draw():
    return torch.rand(3).tolist(), random.random(), np.random.rand(2).tolist()


def check_w9(rank, world, url):
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(rank)
    state = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}
    sf.save(url, {"extra": {**state, "all": sf.PerRank(state)}})
    expected = draw()
    loaded = {"extra": {**dict.fromkeys(state), "all": sf.PerRank(None)}}
    sf.load(url, loaded)
    for found in (loaded["extra"], loaded["extra"]["all"].value):
        torch.set_rng_state(found["torch"])
        random.setstate(found["python"])
        np.random.set_state(found["numpy"])
        assert draw() == expected
    return expected


def test_w9_random_states_are_each_ranks_own(ranks, tmp_path):
    """W9: every generator of every rank goes on as it would have, declared as per rank or not."""
    drawn = ranks(3)(check_w9, f"{tmp_path}/one")
    assert len({repr(one) for one in drawn}) == 3


def check_w9_buffers(rank, world, url):
    """Statistics that drift apart under DDP, each rank seeing other samples."""
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(8), nn.BatchNorm1d(8)))
    for buffer in model.buffers():
        buffer.fill_(rank + 1)
    sf.save(url, {"model": model})


def test_w9_statistics_that_drift_apart_are_those_of_one_rank(ranks, tmp_path):
    """W9: a mean of one rank beside a variance of another one belongs to no rank."""
    ranks(4)(check_w9_buffers, f"{tmp_path}/one")
    loaded = nn.Sequential(nn.BatchNorm1d(8), nn.BatchNorm1d(8))
    sf.load(f"{tmp_path}/one", {"model": loaded})
    assert len({float(buffer.max()) for buffer in loaded.buffers()}) == 1


def pickles_in(data):
    """Where pickles begin that can be parsed to their end; the marks alone may stand in any data."""
    found = []
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        at = data.find(bytes([0x80, protocol]))
        while at >= 0:
            try:
                if len(list(pickletools.genops(data[at:]))) > 2:
                    found.append(at)
            except Exception:
                pass  # what pickletools says of bytes that are none
            at = data.find(bytes([0x80, protocol]), at + 1)
    return found


def test_w10_no_pickle_is_written_or_read(tmp_path, monkeypatch):
    """W10: neither by us nor by torch; and no byte of the checkpoint begins one."""
    assert pickles_in(b"..." + pickle.dumps({"a": [1, 2]})) == [3]
    model, optimizer = build("plain")
    train(model, optimizer, range(1))
    state = {"model": model, "optimizer": optimizer, "extra": {"args": {"betas": (0.9, 0.99)}, "path": Path("a/b")}}
    fresh = dict(zip(("model", "optimizer"), build("plain", seed=1), strict=True), extra={"args": None, "path": None})

    def refuse(*args, **kwargs):
        raise AssertionError("pickle was used")

    with monkeypatch.context() as patches:
        for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
            patches.setattr(pickle, name, refuse)
        patches.setattr(torch, "save", refuse)
        patches.setattr(torch, "load", refuse)
        sf.save(tmp_path / "one", state)
        sf.load(tmp_path / "one", fresh)
    assert fresh["extra"] == state["extra"]
    assert {
        str(path.name): pickles_in(path.read_bytes()) for path in below(tmp_path) if pickles_in(path.read_bytes())
    } == {}


def test_w11_another_dtype_is_refused_unless_asked_for(tmp_path):
    """W11: nothing is cast in silence."""
    sf.save(tmp_path / "one", {"w": {"w": torch.tensor([0.1, 300.0])}})
    half = {"w": torch.zeros(2, dtype=torch.float16)}
    with pytest.raises(sf.Invalid, match="dtype: w/w is F32 in the checkpoint and F16 here"):
        sf.load(tmp_path / "one", {"w": half})
    assert half["w"].tolist() == [0.0, 0.0]
    plan = sf.load(tmp_path / "one", {"w": half}, cast=True)
    assert same_bits(half["w"], torch.tensor([0.1, 300.0], dtype=torch.float16))
    assert plan.cast == {"w/w": ("F32", "F16")}


def private_names(path):
    """Private attributes and imports of others that a file uses without a way around: outside of ``try``."""
    tree = ast.parse(path.read_text())
    own = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    own |= {
        name.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for name in node.targets
        if isinstance(name, ast.Name)
    }
    guarded = {id(inner) for node in ast.walk(tree) if isinstance(node, ast.Try) for inner in ast.walk(node)}
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


def test_w12_no_private_name_of_torch_is_relied_on(tmp_path):
    """W12: what may drift is asked for with a default, or within ``try`` with another way behind it."""
    sample = tmp_path / "sample.py"
    sample.write_text(
        "import torch\nfrom torch._x import y\ntorch._z()\ntry:\n    torch._a\nexcept Exception:\n    pass\n"
    )
    assert private_names(sample) == ["_x", "_z"]
    package = Path(verbs.__file__).parent
    for path in (package / "session.py", *Path(adapters.__file__).parent.glob("*.py")):
        assert private_names(path) == [], path.name


def check_w12(rank, world, directory):
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


def test_w12_a_torch_that_does_not_give_its_store(ranks, tmp_path):
    """W12: one private function is used, and its absence is survived."""
    ranks(2)(check_w12, str(tmp_path))


COLLECTIVES = [
    name
    for name in dir(dist)
    if name.startswith(
        ("all_", "broadcast", "gather", "scatter", "reduce", "barrier", "send", "recv", "isend", "irecv")
    )
    or name in ("new_group", "monitored_barrier", "batch_isend_irecv")
]


def check_w13_silence(rank, world, run):
    model, optimizer = build("fsdp_tp")
    train(model, optimizer, range(1))
    group = dist.group.WORLD
    start = group._get_sequence_number_for_group()
    kept = {name: getattr(dist, name) for name in COLLECTIVES}

    def refuse(*args, **kwargs):
        raise AssertionError("a collective of the training's group was called")

    for name in COLLECTIVES:
        setattr(dist, name, refuse)
        if hasattr(dist.distributed_c10d, name):
            setattr(dist.distributed_c10d, name, refuse)
    state = {"model": model, "optimizer": optimizer, "extra": {"rank": rank}}
    with sf.Checkpointer(run, every=sf.steps(1), keep=sf.last(1)) as ckpt:
        assert ckpt.restore(state) == 0
        for step in range(1, 4):
            ckpt.step(step, state)
        ckpt.wait()
        assert ckpt.restore(state) == 3
    silent = group._get_sequence_number_for_group() == start
    for name, function in kept.items():
        setattr(dist, name, function)
        if hasattr(dist.distributed_c10d, name):
            setattr(dist.distributed_c10d, name, function)
    dist.barrier()
    counts = group._get_sequence_number_for_group() > start
    return silent, counts


def test_w13_no_collective_of_the_training_is_used(ranks, tmp_path):
    """W13: neither a function of torch.distributed is called, nor does the group count an operation."""
    assert ranks(4)(check_w13_silence, str(tmp_path)) == [(True, True)] * 4


def check_w13_beside(rank, world, directory):
    """A thread saves and loads all the time while the training's collectives run as they come."""
    model, optimizer = build("fsdp")
    ballast = {"w": torch.full((50_000,), float(rank))}
    session.current()
    failures = []

    def save_all_the_time():
        try:
            for number in range(25):
                sf.save(f"{directory}/{number}", {f"r{rank}": ballast}, timeout_s=30)
                sf.load(f"{directory}/{number}", {f"r{rank}": ballast}, timeout_s=30)
        except Exception as error:
            failures.append(error)

    saving = threading.Thread(target=save_all_the_time)
    saving.start()
    steps, going = 0, torch.ones(())
    while going:
        train(model, optimizer, range(steps, steps + 1))
        steps += 1
        going.fill_(saving.is_alive() or steps < 10)
        dist.all_reduce(going)  # ranks train the same number of steps
    saving.join()
    assert failures == []
    return steps


def test_w13_saves_beside_the_collectives_of_the_training_do_not_hang(ranks, tmp_path):
    """W13: on one gloo group, from another thread, at any moment."""
    steps = ranks(2)(check_w13_beside, str(tmp_path))
    assert steps[0] == steps[1]


# H: hazards found by reading


def check_h1(rank, world, directory):
    """An expert that every rank has under the same name, with its own numbers."""
    refusals = []
    for number, value in enumerate([torch.full((1000, 300), float(rank)), torch.full((3 + rank,), 1.0)]):
        try:
            sf.save(f"{directory}/{number}", {"model": {"expert.weight": value}}, prove=True, timeout_s=30)
            refusals.append(None)
        except sf.Invalid as error:
            refusals.append(str(error))
    sf.save(f"{directory}/own", {"model": {"expert.weight": sf.PerRank(torch.full((3,), float(rank)))}})
    loaded = {"expert.weight": sf.PerRank(None)}
    sf.load(f"{directory}/own", {"model": loaded})
    assert loaded["expert.weight"].value.tolist() == [float(rank)] * 3
    return refusals


def test_h1_replicas_that_are_of_another_shape_are_refused(ranks, tmp_path):
    """H1: ranks that say other things about one tensor fail the save; what is a rank's own has a word for it."""
    for _, shape in ranks(2)(check_h1, str(tmp_path)):
        assert "model/expert.weight: expected the same on all ranks" in shape


def test_h1_replicas_with_other_contents_are_refused_on_request(ranks, tmp_path):
    """H1: the same name and shape with other numbers on every rank is how experts were lost elsewhere."""
    for contents, _ in ranks(2)(check_h1, str(tmp_path)):
        assert "model/expert.weight: its replicas of [0:1000, 0:300] differ" in contents
        assert "on rank 0" in contents and "on rank 1" in contents


def save_full(url, number):
    sf.save(url, {"w": {"w": torch.full((200_000,), 3.0)}, "extra": {"n": number}})


def test_h3_a_commit_that_is_seen_is_whole(rank_server, tmp_path):
    """H3: whoever sees COMMIT, from another process, finds everything behind it proven."""
    for number in range(10):
        url = tmp_path / str(number)
        pid, pipe = rank_server.start(save_full, (url, number))
        while not (url / "COMMIT").exists():
            pass
        copy = shutil.copytree(url, tmp_path / f"copy{number}", ignore=shutil.ignore_patterns(".tmp-*"))
        with os.fdopen(pipe, "rb") as ended:
            assert pickle.load(ended) == (True, None)
        rank_server.end(save_full, pid)
        assert reader.Checkpoint(copy).value("extra", "n", 0) == number
        assert command("verify", copy).returncode == 0


def test_h5_what_is_restored_was_proven_and_there_is_a_way_back(tmp_path):
    """H5: damage that came after the save is found before a step is trained on it."""
    with sf.Checkpointer(tmp_path, every=sf.steps(1)) as ckpt:
        for step in (1, 2):
            ckpt.step(step, {"w": {"w": torch.full((50_000,), float(step))}})
    (newest,) = below(tmp_path / "step-00000002", "*.safetensors")
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.write_bytes(data)
    state = {"w": {"w": torch.zeros(50_000)}}
    with pytest.raises(sf.Corrupt, match=r"step-00000002.*tensor w/w"):
        sf.Checkpointer(tmp_path).restore(state)
    assert sf.Checkpointer(tmp_path).restore(state, older=True) == 1
    assert bool((state["w"]["w"] == 1).all())


def usage():
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), children


def check_h6(rank, world, directory):
    state = {"w": {f"w{number}": torch.ones(100) for number in range(50)}}
    seen = []
    for number in range(20):
        sf.save(f"{directory}/{number}", state)
        sf.load(f"{directory}/{number}", state)
        seen.append(usage())
    return seen[4], seen[-1]


def test_h6_no_second_process_and_nothing_leaks(ranks, tmp_path):
    """H6: open files and threads stay as many as they were; no process is started."""
    for early, late in ranks(2)(check_h6, str(tmp_path)):
        assert late[0] <= early[0] + 1
        assert late[1] <= early[1] + 4  # what is idle ends in its own time
        assert late[2] == []


def check_h7(rank, world, directory):
    sf.save(f"{directory}/zero", {"extra": {"n": 1}}, timeout_s=30)
    dist.barrier()
    waits = {
        "save": lambda: sf.save(f"{directory}/one", {"extra": {"n": 1}}, timeout_s=0.2),
        "load": lambda: sf.load(f"{directory}/zero", {"extra": {"n": 1}}, timeout_s=0.2),
        "restore": lambda: sf.Checkpointer(f"{directory}/run", timeout_s=0.2).restore({"extra": {"n": 1}}),
    }
    seen = {}
    if rank == 0:
        for name, wait in waits.items():
            started = time.monotonic()
            with pytest.raises(sf.Unavailable) as caught:
                wait()
            seen[name] = (str(caught.value), time.monotonic() - started)
    dist.barrier()
    return seen


def test_h7_every_wait_has_an_end(ranks, tmp_path):
    """H7: a rank that never comes is named after the time that the caller gave."""
    seen = ranks(2)(check_h7, str(tmp_path))[0]
    for name, (message, seconds) in seen.items():
        verb = "save" if name == "save" else "restore" if name == "restore" else "load"
        assert f"rank 1 has not called {verb} (" in message, name
        assert "within 200ms" in message, name
        assert seconds < 20, name


def test_h8_what_changes_after_the_call_is_not_saved(tmp_path):
    """H8: tensors in host memory are copied, not referred to, whatever their size, and Python values likewise."""
    sizes = [0, 1, 1000, 70_000, 3_000_000]
    for attempt in range(3):
        tensors = {str(size): torch.full((size,), 1.0) for size in sizes}
        values = {"list": [1, 2], "array": np.ones(3)}
        pending = sf.save_async(tmp_path / str(attempt), {"w": tensors, "extra": values})
        for tensor in tensors.values():
            tensor.fill_(-1)
        values["list"].append(3)
        values["array"].fill(-1)
        pending.committed()
        loaded = {str(size): torch.zeros(size) for size in sizes}
        extra = {"list": None, "array": np.zeros(3)}
        sf.load(tmp_path / str(attempt), {"w": loaded, "extra": extra})
        assert all(bool((tensor == 1).all()) for tensor in loaded.values())
        assert (extra["list"], extra["array"].tolist()) == ([1, 2], [1.0] * 3)


def check_h8(rank, world, run):
    """An optimizer step changes every parameter as soon as the checkpointer has returned."""
    model, optimizer = build("fsdp")
    snapshots = {}
    with sf.Checkpointer(run, every=sf.steps(1)) as ckpt:
        for step in range(1, 5):
            train(model, optimizer, range(step, step + 1))
            snapshots[step] = {name: local(tensor).clone() for name, tensor in held(model, optimizer).items()}
            ckpt.step(step, {"model": model, "optimizer": optimizer})
    for step, snapshot in snapshots.items():
        other, others = build("fsdp", seed=1)
        sf.load(f"{run}/step-{step:08}", {"model": other, "optimizer": others})
        assert [n for n, tensor in held(other, others).items() if not same_bits(local(tensor), snapshot[n])] == []
    return len(plain_names(model))


def test_h8_a_step_taken_at_once_is_not_in_the_checkpoint(ranks, tmp_path):
    """H8: with sharded parameters and a fused optimizer, which works in place."""
    ranks(2)(check_h8, str(tmp_path))
