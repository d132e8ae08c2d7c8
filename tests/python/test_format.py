"""The bytes are open: other people's readers read every file that saves of all kinds write."""

import json
import pickle
import pickletools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import shardfast as sf
import torch
from layouts import LAYOUTS, Net, build, known, same_bits, train
from safetensors import safe_open
from shardfast.adapters.torch import memory as torch_memory
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "reader"))
from shardfast_reader import Checkpoint
from write_later import LATER

DTYPES = [
    "bool",
    "uint8",
    "int8",
    "float8_e5m2",
    "float8_e4m3fn",
    "float8_e8m0fnu",
    "float8_e5m2fnuz",
    "float8_e4m3fnuz",
    "float4_e2m1fn_x2",
    "uint16",
    "int16",
    "float16",
    "bfloat16",
    "uint32",
    "int32",
    "float32",
    "uint64",
    "int64",
    "float64",
    "complex64",
]


def raw(tensor: torch.Tensor) -> bytes:
    """The tensor's bytes, row-major; of a zero-dimensional one too."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def pattern(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Every bit pattern that fits, so that NaNs and signed zeros count."""
    count = torch.empty(shape, dtype=dtype).nbytes
    data = torch.arange(count, dtype=torch.int64).mul_(37).to(torch.uint8)
    if dtype is torch.bool:
        data = data % 2
    return data.view(dtype).reshape(shape)


@pytest.mark.parametrize("kind", DTYPES)
def test_every_shared_dtype_comes_back_bit_for_bit(tmp_path, kind):
    if not hasattr(torch, kind):
        pytest.skip(f"torch {torch.__version__} has no {kind}")
    dtype = getattr(torch, kind)
    tensors = {"matrix": pattern(dtype, 6, 10), "empty": pattern(dtype, 0, 4)}
    if kind != "float4_e2m1fn_x2":  # torch itself cannot make one of no dimensions
        tensors["scalar"] = pattern(dtype, 1).reshape(())
    sf.save(tmp_path / "one", {"model": tensors})
    into = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    sf.load(tmp_path / "one", {"model": into})
    opened = Checkpoint(tmp_path / "one")
    for name, tensor in tensors.items():
        assert raw(into[name]) == raw(tensor), name
        assert opened.tensor("model", name) == raw(tensor), name
    (file,) = (tmp_path / "one" / "model").glob("*.safetensors")
    for name, tensor in safetensors.torch.load_file(file).items():
        assert tensor.dtype == dtype
        assert raw(tensor) == raw(tensors[name])


def test_a_type_that_this_torch_does_not_have_is_refused_by_name(tmp_path, monkeypatch):
    """As float4_e2m1fn_x2 in PyTorch 2.7."""
    model = nn.Linear(4, 4).to(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(4, dtype=torch.float64)).sum().backward()
    optimizer.step()
    sf.save(tmp_path / "one", {"model": model, "optimizer": optimizer, "extra": {"t": torch.arange(3.0).double()}})
    monkeypatch.delitem(torch_memory.OF_NAME, "F64")
    refused = f"PyTorch {re.escape(torch.__version__)} has no type for F64"
    other = nn.Linear(4, 4)
    before = other.weight.detach().clone()
    with pytest.raises(sf.Invalid, match=f"model/(weight|bias): {refused}"):
        sf.load(tmp_path / "one", {"model": other}, cast=True, strict=False)
    assert torch.equal(other.weight, before)
    with pytest.raises(sf.Invalid, match=f"extra/t: {refused}"):
        sf.load(tmp_path / "one", {"extra": {"t": None}}, strict=False)
    stepped = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(sf.Invalid, match=f"optimizer/state.(weight|bias).momentum_buffer: {refused}"):
        sf.load(tmp_path / "one", {"model": other, "optimizer": stepped}, only=["optimizer"])
    with sf.mapped(tmp_path / "one") as found, pytest.raises(sf.Invalid, match=f"model/weight: {refused}"):
        found["model/weight"]


def test_unsharded_weights_open_through_the_hugging_face_index(tmp_path):
    torch.manual_seed(1)
    model = Net()
    sf.save(tmp_path / "one", {"model": model, "optimizer": torch.optim.AdamW(model.parameters())})
    directory = tmp_path / "one" / "model"
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    loaded: dict[str, torch.Tensor] = {}
    for file in sorted(set(index["weight_map"].values())):
        with safe_open(directory / file, framework="pt") as opened:
            names = [name for name, home in index["weight_map"].items() if home == file]
            assert sorted(opened.keys()) == sorted(names)
            loaded |= {name: opened.get_tensor(name) for name in names}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in loaded.values())
    fresh = Net()
    fresh.load_state_dict(loaded, strict=True)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), fresh.state_dict().values(), strict=True))
    assert not (tmp_path / "one" / "optimizer" / "model.safetensors.index.json").exists()


def test_a_model_of_one_file_opens_with_load_model(tmp_path):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.tokens.weight

    model, fresh = Tied(), Tied()
    sf.save(tmp_path / "one", {"model": model})
    (file,) = (tmp_path / "one" / "model").glob("*.safetensors")
    missing, unexpected = safetensors.torch.load_model(fresh, file)
    assert not missing
    assert not unexpected
    assert torch.equal(fresh.tokens.weight, model.tokens.weight)
    assert fresh.head.weight is fresh.tokens.weight
    assert Checkpoint(tmp_path / "one").tensor("model", "head.weight") == raw(model.head.weight)


def save_in_layout(rank, world, layout, url):
    torch.manual_seed(3)
    model = LAYOUTS[layout](Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    state = {
        "model": model,
        "optimizer": optimizer,
        "extra": {"rank": sf.PerRank(rank), "args": {"betas": (0.9, 0.95), 3: {1, 2}}, "rng": torch.get_rng_state()},
    }
    sf.save(url, state, step=7, user={"layout": layout})
    full = {}
    for name, tensor in model.state_dict().items():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        full[name.removeprefix("module.")] = raw(whole)
    return full


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_every_file_of_every_layout_is_read_by_others(ranks, tmp_path, layout):
    world = 1 if layout == "plain" else 4
    expected = ranks(world)(save_in_layout, layout, str(tmp_path / "one"))[0]
    opened = Checkpoint(tmp_path / "one")
    assert opened.verify() > 0
    for name, data in expected.items():
        assert opened.tensor("model", name) == data, name
    for rank in range(world):
        assert opened.value("extra", "rank", rank=rank) == rank
    files = list((tmp_path / "one").rglob("*.safetensors"))
    assert files
    for file in files:
        assert safetensors.torch.load_file(file), file


@pytest.mark.parametrize("layout", ["fsdp", "hsdp", "fsdp_tp"])
def test_parts_are_put_together_from_their_names_alone(ranks, tmp_path, layout):
    """With the safetensors package only: what a part is, its name says."""
    expected = ranks(4)(save_in_layout, layout, str(tmp_path / "one"))[0]
    wholes: dict[str, torch.Tensor] = {}
    filled: dict[str, int] = {}
    for file in (tmp_path / "one" / "model").glob("*.safetensors"):
        for entry, part in safetensors.torch.load_file(file).items():
            name, _, bounds = entry.removesuffix("]").partition("[")
            shape = dict(Net().state_dict())[name].shape
            place = tuple(slice(*map(int, bound.split(":"))) for bound in bounds.split(", ") if bound)
            wholes.setdefault(name, torch.empty(shape, dtype=part.dtype))[place] = part
            filled[name] = filled.get(name, 0) + part.numel()
    assert {name: raw(whole) for name, whole in wholes.items()} == expected
    assert filled == {name: whole.numel() for name, whole in wholes.items()}, "each element once"


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


def test_no_pickle_is_written_or_read(tmp_path, monkeypatch):
    """Neither by us nor by torch; and no byte of the checkpoint begins one."""
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
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.name for path in files if pickles_in(path.read_bytes())] == []


def test_every_dtype_is_exported(tmp_path):
    """Whole numbers and truth values too."""
    kinds = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int64, torch.uint64, torch.bfloat16]
    kinds += [torch.float8_e4m3fn, torch.complex64]
    tensors = {str(kind): (known("x", (7, 5)) > 0).to(kind) for kind in kinds}
    sf.save(tmp_path / "one", {"model": tensors})
    program = Path(sys.executable).with_name("shardfast")
    done = subprocess.run(
        [program, "export", tmp_path / "one", tmp_path / "out", "--shard-size", "100B"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    exported = {}
    for path in (tmp_path / "out").rglob("*.safetensors"):
        exported |= safetensors.torch.load_file(path)
    assert exported.keys() == tensors.keys()
    assert all(same_bits(exported[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("unknown-feature", r'"delta" of format 1\.3'),
        ("codec-column", r'column "regions\.codec"'),
        ("compressed", r'"codec" of format 1\.4'),
        ("file-elsewhere", r'"files-elsewhere" of format 1\.5'),
        ("file-elsewhere-unannounced", r'lies in "\.\./step-00000900"'),
    ],
)
def test_what_a_later_version_writes_is_refused_by_name(name, message):
    into = torch.zeros(16)
    with pytest.raises(sf.Unsupported, match=message):
        sf.load(LATER / name, {"model": {"w": into}})
    assert not into.any()


def test_what_a_later_version_writes_is_loaded_where_nothing_new_is_needed():
    into = torch.zeros(16)
    sf.load(LATER / "readable", {"model": {"w": into}}, only="model")
    assert into.tolist() == [1.0] * 16
