"""Checkpoints mapped into memory: what a load gives, without a copy, and nothing that was not looked at."""

import gc
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import shardfast as sf
import torch
import torch.distributed as dist
from layouts import same_bits
from shardfast.adapters.numpy import DTYPES as NUMPY_DTYPES
from shardfast.adapters.numpy import adapter as numpy_adapter
from shardfast.adapters.torch import DTYPES
from shardfast.adapters.torch import adapter as torch_adapter
from shardfast.testing import check_view
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

MIB = 1 << 20


def every_type():
    """A tensor of each element type, holding any bits."""
    random = torch.randint(0, 256, (6, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    tensors = {name: (random % 2 if name == "BOOL" else random).view(dtype) for dtype, name in DTYPES.items()}
    return tensors | {"empty": torch.empty(0, 3), "scalar": torch.tensor(2.5), "matrix": torch.arange(12.0).view(3, 4)}


def test_every_type_is_what_a_load_gives(tmp_path):
    tensors = every_type()
    sf.save(tmp_path / "one", {"model": tensors})
    with sf.mapped(tmp_path / "one") as checkpoint:
        assert len(checkpoint) == len(tensors)
        assert set(checkpoint) == {f"model/{name}" for name in tensors}
        loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        sf.load(tmp_path / "one", {"model": loaded})
        for name, tensor in tensors.items():
            found = checkpoint[f"model/{name}"]
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            assert same_bits(found, loaded[name]), name
            assert same_bits(found, tensor), name


def test_adapters_show_foreign_memory():
    for tensor in every_type().values():
        if tensor.numel():
            check_view(torch_adapter(), tensor)
    for name in NUMPY_DTYPES:
        check_view(numpy_adapter(), np.ones((3, 4), name))


def test_nothing_is_copied_and_nothing_is_written_to_the_file(tmp_path):
    sf.save(tmp_path / "one", {"model": {"w": torch.arange(64.0), "v": torch.arange(8.0)}})
    with sf.mapped(tmp_path / "one") as checkpoint, sf.mapped(tmp_path / "one") as other:
        first, again = checkpoint["model/w"], checkpoint["model/w"]
        assert first.data_ptr() == again.data_ptr() == checkpoint.parts("model/w")[0][1].data_ptr()
        assert address_is_of(first.data_ptr(), ".safetensors")
        first.fill_(-1)
        assert bool((again == -1).all())
        assert torch.equal(checkpoint["model/v"], torch.arange(8.0))
        assert torch.equal(other["model/w"], torch.arange(64.0))
    loaded = {"w": torch.zeros(64)}
    sf.load(tmp_path / "one", {"model": loaded}, strict=False)
    assert torch.equal(loaded["w"], torch.arange(64.0))


def test_the_word_is_found_whatever_was_asked_for_before():
    ask = "import shardfast as sf, shardfast.inspection; sf.Mapped; assert callable(sf.mapped)"
    subprocess.run([sys.executable, "-c", ask], check=True)


def address_is_of(address, suffix):
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(text, 16) for text in line.split()[0].split("-"))
        if start <= address < stop:
            return line.endswith(suffix)
    return False


def is_mapped(directory):
    return str(directory) in Path("/proc/self/maps").read_text()


def test_tensors_outlive_the_mapping_and_the_file_is_let_go_after_the_last(tmp_path):
    sf.save(tmp_path / "one", {"model": {"w": torch.arange(64.0)}})
    with sf.mapped(tmp_path / "one") as checkpoint:
        tensor = checkpoint["model/w"][8:]
    with pytest.raises(sf.Invalid, match=r"was closed: call sf\.mapped again"):
        checkpoint["model/w"]
    del checkpoint
    for file in (tmp_path / "one").rglob("*.safetensors"):
        file.unlink()
    gc.collect()
    assert torch.equal(tensor, torch.arange(8.0, 64.0))
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:  # the workers of a data loader
        os.write(writing, tensor.numpy().tobytes())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        assert pipe.read() == tensor.numpy().tobytes()
    os.waitpid(pid, 0)
    assert is_mapped(tmp_path)
    del tensor
    gc.collect()
    assert not is_mapped(tmp_path)


def test_damage_is_found_where_one_looks_and_nowhere_else(tmp_path):
    """Each block of 64 KiB is proven by itself, when a tensor in it is first looked at."""
    sf.save(tmp_path / "one", {"model": {name: torch.full((MIB,), 1.0) for name in "abc"}})
    [file] = (tmp_path / "one" / "model").glob("*.safetensors")
    with sf.mapped(tmp_path / "one") as checkpoint:
        _, middle, _ = sorted(checkpoint, key=lambda name: checkpoint[name].data_ptr())
    with open(file, "r+b") as data:
        data.seek(file.stat().st_size - 6 * MIB)
        data.write(b"\1")
    with sf.mapped(tmp_path / "one") as checkpoint:
        for name in checkpoint:
            if name != middle:
                assert bool((checkpoint[name] == 1).all())
        with pytest.raises(sf.Corrupt, match=rf"tensor {middle}.*expected CRC-64"):
            checkpoint[middle]


def test_names_and_values_are_those_of_the_state(tmp_path):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one = torch.nn.Linear(4, 4, bias=False)
            self.two = torch.nn.Linear(4, 4, bias=False)
            self.two.weight = self.one.weight

    model, big = Tied(), torch.arange(1 << 19)
    extra = {"args": {"lr": 1e-3, "sizes": (1, 2)}, "big": [big, "text"], "code": complex}
    sf.save(tmp_path / "one", {"model": model, "extra": extra}, pickle=True)
    with sf.mapped(tmp_path / "one") as checkpoint:
        assert {"model/one.weight", "model/two.weight"} < set(checkpoint)
        assert checkpoint["model/one.weight"].data_ptr() == checkpoint["model/two.weight"].data_ptr()
        assert torch.equal(checkpoint["model/two.weight"], model.one.weight)
        assert sorted(checkpoint.value_names()) == ["extra/args", "extra/big", "extra/code"]
        assert checkpoint.value("extra/args") == {"lr": 1e-3, "sizes": (1, 2)}
        found = checkpoint.value("extra/big")
        assert torch.equal(found[0], big)
        assert address_is_of(found[0].data_ptr(), ".safetensors")
        assert found[1] == "text"
        with pytest.raises(sf.Invalid, match="extra/code: stored as a pickle"):
            checkpoint.value("extra/code")
        assert checkpoint.value("extra/code", pickle=True) is complex
        assert "model/one.weight" in checkpoint
        assert checkpoint.get("model/three") is None
        for look, said in {
            lambda: checkpoint["model/three"]: "has no tensor 'model/three'",
            lambda: checkpoint["extra/args"]: "has no tensor 'extra/args', which is a value: value() has it",
            lambda: checkpoint.value("model/one.weight"): "has no value 'model/one.weight', which is a tensor",
        }.items():
            with pytest.raises(KeyError, match=re.escape(said)):
                look()
        with pytest.raises(sf.Invalid, match=r"rank=3: expected one that saved extra/args: 0$"):
            checkpoint.value("extra/args", rank=3)


def check_sharded(rank, world, directory):
    whole = torch.arange(35.0).view(5, 7)
    mesh = init_device_mesh("cpu", (world,))
    state = {name: distribute_tensor(whole, mesh, [Shard(dim)]) for name, dim in {"rows": 0, "columns": 1}.items()}
    sf.save(f"{directory}/one", {"model": state, "extra": {"rank": sf.PerRank(rank)}})
    dist.barrier()
    if rank == 1:  # alone: the others do not take part
        with sf.mapped(f"{directory}/one") as checkpoint:
            for name, along in {"rows": 0, "columns": 1}.items():
                assert torch.equal(checkpoint[f"model/{name}"], whole)
                parts = checkpoint.parts(f"model/{name}")
                assert len(parts) == world
                for offsets, part in parts:
                    assert torch.equal(part, whole.narrow(along, offsets[along], part.shape[along]))
                    assert address_is_of(part.data_ptr(), ".safetensors")
            assert [checkpoint.value("extra/rank", rank=number) for number in range(world)] == list(range(world))
    dist.barrier()


def test_parts_are_assembled_or_shown_by_any_process_alone(ranks, tmp_path):
    ranks(2)(check_sharded, str(tmp_path))


OF_NUMPY = """
import sys, numpy, shardfast as sf
checkpoint = sf.mapped(sys.argv[1])
for name in checkpoint:
    try:
        array = checkpoint[name]
        print(name, type(array).__module__, array.dtype, array.tobytes().hex())
    except sf.Invalid as error:
        print(name, "Invalid", error)
"""


def test_arrays_are_those_of_the_framework_that_was_imported(tmp_path):
    tensors = every_type()
    sf.save(tmp_path / "one", {"model": tensors})
    done = subprocess.run([sys.executable, "-c", OF_NUMPY, str(tmp_path / "one")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    for name, tensor in tensors.items():
        if name == "BF16" or re.match("F[48]", name):
            expected = f"Invalid .*model/{name}: NumPy has no type for {name}: import a framework that has"
            assert re.match(expected, said[f"model/{name}"]), said[f"model/{name}"]
        else:
            held = tensor.view(-1).numpy()
            assert said[f"model/{name}"].strip() == f"numpy {held.dtype} {held.tobytes().hex()}".strip()
    no_framework = "import sys, shardfast as sf; sf.mapped(sys.argv[1])"
    failed = subprocess.run([sys.executable, "-c", no_framework, str(tmp_path / "one")], capture_output=True, text=True)
    assert "Invalid" in failed.stderr
    assert "import the framework to show the tensors with" in failed.stderr


RESIDENT = """
import sys, numpy, shardfast as sf
def resident():
    status = open("/proc/self/status").read()
    return int(status.split("VmRSS:")[1].split()[0]) >> 10
sf.mapped(sys.argv[2])["model/small"].sum()
before = resident()
checkpoint = sf.mapped(sys.argv[1])
array = checkpoint["model/small"]
looked = resident() - before
checkpoint["model/large"]
print(looked, resident() - before)
"""


def test_memory_grows_by_what_is_looked_at(tmp_path):
    for name, size in {"one": 32 * MIB, "two": 16}.items():
        sf.save(tmp_path / name, {"model": {"large": np.zeros(size, "f4"), "small": np.ones(MIB, "f4")}})
    arguments = [sys.executable, "-c", RESIDENT, str(tmp_path / "one"), str(tmp_path / "two")]
    looked, both = map(int, subprocess.run(arguments, capture_output=True, text=True, check=True).stdout.split())
    assert looked < 24, f"looking at 4 MiB of 132 took {looked} MiB"
    assert both >= 100, f"the measure does not see mapped pages: {both} MiB"


def test_what_cannot_be_mapped_is_said(tmp_path):
    sf.save("memory://mapped/one", {"model": {"w": torch.ones(4)}})
    with pytest.raises(sf.Unsupported):
        sf.mapped("memory://mapped/one")["model/w"]
    with pytest.raises(sf.NotFound):
        sf.mapped(tmp_path / "nothing")
    with sf.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, {"model": {"w": torch.ones(4)}})
    with pytest.raises(sf.Error) as mapped:
        sf.mapped(tmp_path / "run")
    with pytest.raises(sf.Error) as loaded:
        sf.load(tmp_path / "run", {"model": {"w": torch.ones(4)}})
    assert (type(mapped.value), str(mapped.value)) == (type(loaded.value), str(loaded.value))
    assert "it is a run: name one of its steps" in str(mapped.value)
