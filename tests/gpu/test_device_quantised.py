"""Optimizers that quantise their state on a device: torchao, whose step is compiled to code for it, and flashoptim."""

import pytest
import shardfast as sf
import torch
from torch import nn


def net(device: torch.device, seed: int, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).to(device, dtype)


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    found = []
    for step in steps:
        torch.manual_seed(step)
        parameter = next(model.parameters())
        x = torch.randn(4, 64, device=parameter.device, dtype=parameter.dtype)
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def check(folder, device: torch.device, make, dtype: torch.dtype, **how) -> None:
    """The losses after a load are those of the training that was saved and went on."""
    model = net(device, 0, dtype)
    optimizer = make(model.parameters())
    losses(model, optimizer, range(3))
    pending = sf.save_async(folder / "a", {"model": model, "optimizer": optimizer}, **how)
    expected = losses(model, optimizer, range(3, 8))
    pending.committed()
    other = net(device, 1, dtype)
    other_optimizer = make(other.parameters())
    losses(other, other_optimizer, range(1))
    sf.load(folder / "a", {"model": other, "optimizer": other_optimizer}, **how)
    assert losses(other, other_optimizer, range(3, 8)) == expected


@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_torchao(tmp_path, device, kind):
    optim = pytest.importorskip("torchao.optim", reason="torchao is not installed (requirements/frameworks.in pins it)")
    check(tmp_path, device, lambda parameters: getattr(optim, kind)(parameters, lr=1e-2), torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["FlashAdamW", "FlashSGD", "FlashLion"])
def test_flashoptim(tmp_path, device, kind, dtype):
    """Quantised moments, and for parameters of low precision master weights of 24 bits."""
    reason = "flashoptim is not installed (requirements/frameworks.in pins it)"
    flashoptim = pytest.importorskip("flashoptim", reason=reason)
    how = {"master_weight_bits": None if dtype == torch.float32 else 24}
    how |= {"momentum": 0.9} if kind == "FlashSGD" else {}
    check(tmp_path, device, lambda ps: getattr(flashoptim, kind)(ps, lr=1e-3, **how), dtype, pickle=True)
