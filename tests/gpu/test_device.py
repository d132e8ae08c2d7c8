"""Tensors on a real device, through the public face: not a byte too early, not a byte too late, every byte the same."""

import subprocess
import sys
import textwrap

import pytest
import shardfast as sf
import torch
import torch.distributed as dist
from torch import nn

FLOATS = ("bfloat16", "float16", "float32", "float64", "complex64", "float8_e4m3fn", "float8_e5m2")
INTEGERS = ("uint8", "int8", "int16", "int32", "int64")
DTYPES = [getattr(torch, name) for name in (*FLOATS, *INTEGERS)]

LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(-1, -2),
    "cut out": lambda t: t[1:-1, 2:-3],
    "every second": lambda t: t[::2],
    "permuted": lambda t: t.view(4, -1, t.shape[1]).permute(1, 0, 2),
}


def random_bytes(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    """Any bits, NaNs of all kinds among them."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = (*shape[:-1], shape[-1] * dtype.itemsize) if shape else (dtype.itemsize,)
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=generator).view(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8).cpu()


def keep_busy(device: torch.device, milliseconds: float = 200.0) -> None:
    """Gives the current stream work that takes so long on the fastest device, longer on others; returns at once."""
    matrix = torch.zeros(8192, 8192, dtype=torch.bfloat16, device=device)
    for _ in range(int(milliseconds / 1.4)):  # 1.1 TFLOP each
        matrix = matrix @ matrix


def test_random_numbers_go_on_where_the_save_was_made(tmp_path, device):
    state = {"extra": {"random": sf.random_state()}}
    torch.rand(3, device=device)
    sf.save(tmp_path / "a", state)
    expected = [torch.rand(3, device=device) for _ in range(2)]
    sf.load(tmp_path / "a", state)
    assert all(torch.equal(torch.rand(3, device=device), one) for one in expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_dtype_and_layout_comes_back_bit_for_bit(tmp_path, device, dtype, layout):
    saved = LAYOUTS[layout](random_bytes((64, 96), dtype, device, seed=1))
    sf.save(tmp_path / "a", {"model": {"w": saved}})
    for target in LAYOUTS:
        base = random_bytes((64, 96), dtype, device, seed=2)
        loaded = LAYOUTS[target](base)
        if loaded.shape != saved.shape:
            continue
        around = base.clone()
        LAYOUTS[target](around).copy_(saved)
        pointer = loaded.data_ptr()
        sf.load(tmp_path / "a", {"model": {"w": loaded}})
        assert loaded.data_ptr() == pointer
        assert torch.equal(bits(loaded), bits(saved))
        assert torch.equal(bits(base), bits(around)), "bytes beside the elements were written"


def test_tiny_empty_and_thousands_of_tensors(tmp_path, device):
    def state(fill: int) -> dict[str, dict[str, torch.Tensor]]:
        tensors = {f"small.{i}": torch.full((1 + i % 7,), fill * (i + 1), device=device) for i in range(3000)}
        tensors |= {"scalar": torch.tensor(fill * 2.5, device=device), "empty": torch.zeros(0, 3, device=device)}
        tensors |= {"on the host": torch.full((5,), fill), "flags": torch.full((9,), fill == 1, device=device)}
        return {"model": tensors}

    saved, loaded = state(1), state(0)
    sf.save(tmp_path / "a", saved)
    sf.load(tmp_path / "a", loaded)
    for name, tensor in saved["model"].items():
        assert torch.equal(bits(loaded["model"][name]), bits(tensor)), name


def test_a_tensor_larger_than_any_slot(tmp_path, device):
    saved = random_bytes((3, 70_000_001), torch.uint8, device, seed=3)
    sf.save(tmp_path / "a", {"model": {"w": saved}})
    loaded = torch.zeros_like(saved)
    sf.load(tmp_path / "a", {"model": {"w": loaded}})
    assert torch.equal(loaded, saved)


@pytest.mark.parametrize("seed", range(5))
def test_no_stale_byte_is_staged(tmp_path, device, seed):
    """What was asked for before the call is in it, though the device is far behind; what is asked for after, is not."""
    tensors = {f"w{i}": torch.zeros(1 << (10 + 2 * i), device=device) for i in range(8)}
    keep_busy(device)
    for number, tensor in enumerate(tensors.values()):
        tensor.fill_(number + 1 + seed)
    pending = sf.save_async(tmp_path / "a", {"model": tensors})
    pending.staged()
    for tensor in tensors.values():
        tensor.fill_(-1)
    pending.committed()
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    sf.load(tmp_path / "a", {"model": loaded})
    for number, tensor in enumerate(loaded.values()):
        assert torch.equal(tensor, torch.full_like(tensor, number + 1 + seed)), f"tensor {number}"


def test_the_stream_that_is_current_counts(tmp_path, device):
    stream, tensor = torch.cuda.Stream(device), torch.zeros(1 << 22, device=device)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        keep_busy(device)
        tensor.fill_(1)
        pending = sf.save_async(tmp_path / "a", {"model": {"w": tensor}})
    pending.staged()
    with torch.cuda.stream(stream):
        tensor.fill_(2)
    pending.committed()
    loaded = torch.zeros_like(tensor)
    sf.load(tmp_path / "a", {"model": {"w": loaded}})
    assert torch.equal(loaded, torch.ones_like(tensor))


def test_a_load_waits_for_what_is_still_writing(tmp_path, device):
    saved = random_bytes((1 << 22,), torch.int32, device, seed=4)
    sf.save(tmp_path / "a", {"model": {"w": saved}})
    loaded = torch.zeros_like(saved)
    keep_busy(device)
    loaded.fill_(-1)
    sf.load(tmp_path / "a", {"model": {"w": loaded}})
    doubled = loaded * 2  # the very next kernel sees what was loaded
    assert torch.equal(loaded, saved)
    assert torch.equal(doubled, saved * 2)


def training(device: torch.device, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    layers = [nn.Linear(1024, 1024, dtype=torch.bfloat16) for _ in range(8)]
    model = nn.Sequential(*layers, nn.BatchNorm1d(1024, dtype=torch.bfloat16)).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    model(torch.randn(64, 1024, dtype=torch.bfloat16, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def flat(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    moments = {
        f"{index}.{name}": tensor
        for index, entries in optimizer.state_dict()["state"].items()
        for name, tensor in entries.items()
    }
    return {**model.state_dict(), **moments}


def test_saves_while_the_training_is_busy(tmp_path, device):
    """Steps go on as early as the API allows; each save holds the state as it was at its call."""
    model, optimizer = training(device, seed=1)
    step(model, optimizer, device)
    state = {"model": model, "optimizer": optimizer}
    expected, running = [], []
    for number in range(4):
        keep_busy(device, 20)
        step(model, optimizer, device)
        expected.append({name: tensor.clone() for name, tensor in flat(model, optimizer).items()})
        running.append(sf.save_async(tmp_path / str(number), state))
        for _ in range(3):
            step(model, optimizer, device)
    for pending in running:
        pending.committed()
    other, other_optimizer = training(device, seed=2)
    for number, tensors in enumerate(expected):
        sf.load(tmp_path / str(number), {"model": other, "optimizer": other_optimizer})
        for name, tensor in flat(other, other_optimizer).items():
            assert torch.equal(bits(tensor), bits(tensors[name])), f"save {number}: {name}"


def test_a_call_waits_for_no_work_of_the_device(tmp_path, device):
    """Though some of the tensors are a few bytes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for number in range(2):  # the second save finds memory that is page-locked already
        model(torch.randn(8, 64, device=device)).square().mean().backward()
        optimizer.step()
        expected = {name: tensor.clone() for name, tensor in flat(model, optimizer).items()}
        torch.cuda.synchronize()
        keep_busy(device, 2000)
        pending = sf.save_async(tmp_path / str(number), {"model": model, "optimizer": optimizer})
        is_busy = not torch.cuda.current_stream(device).query()
        pending.committed()
    assert is_busy
    sf.load(tmp_path / "1", {"model": model, "optimizer": optimizer})
    assert all(torch.equal(tensor, expected[name]) for name, tensor in flat(model, optimizer).items())


def test_checkpoints_move_between_host_and_device(tmp_path, device):
    on_device = random_bytes((300, 200), torch.bfloat16, device, seed=5)
    on_host = on_device.cpu()
    sf.save(tmp_path / "device", {"model": {"w": on_device}})
    sf.save(tmp_path / "host", {"model": {"w": on_host}})
    for name in ("device", "host"):
        for target in (torch.zeros_like(on_device), torch.zeros_like(on_host)):
            sf.load(tmp_path / name, {"model": {"w": target}})
            assert torch.equal(bits(target), bits(on_host))


def test_a_dtensor_on_one_device(tmp_path, device):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        mesh = init_device_mesh(device.type, (1,))
        local = random_bytes((48, 64), torch.float32, device, seed=6)
        saved = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        sf.save(tmp_path / "a", {"model": {"w": saved}})
        loaded = DTensor.from_local(torch.zeros_like(local), mesh, [Replicate()], run_check=False)
        sf.load(tmp_path / "a", {"model": {"w": loaded}})
        assert torch.equal(bits(loaded.to_local()), bits(local))
    finally:
        dist.destroy_process_group()


LOST = """
    import sys, torch, shardfast as sf
    tensor = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")]  # an assertion on the device: its context is lost
    try:
        sf.save(sys.argv[1], {"model": {"w": tensor}}, timeout_s=60)
    except sf.Unavailable as error:
        print("Unavailable:", error, flush=True)
    try:
        sf.load(sys.argv[1], {"model": {"w": torch.zeros(1 << 20)}})
    except sf.NotFound:
        print("nothing was published", flush=True)
"""


@pytest.mark.usefixtures("device")
def test_a_lost_device_fails_the_save_and_hangs_nobody(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(LOST), str(tmp_path / "a")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert "Unavailable:" in ended.stdout and "cuda:0" in ended.stdout, ended.stdout + ended.stderr
    assert "CUDA_ERROR_" in ended.stdout, ended.stdout
    assert "nothing was published" in ended.stdout, ended.stdout + ended.stderr
