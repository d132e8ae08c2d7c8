"""Saves that are captured over several steps of a training on a real device hold what the device had at the save."""

import pytest
import shardfast as sf
import torch
from torch import nn

EVERY, STEPS = 8, 25
"""The first save is the rehearsal."""

OPTIMIZERS = {
    "adamw, fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
    "adamw, foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=True),
    "adamw, for-loop": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=False),
    "adam, l2, amsgrad, fused": lambda parameters: torch.optim.Adam(
        parameters, lr=1e-3, weight_decay=0.1, amsgrad=True, fused=True
    ),
    "sgd, momentum, foreach": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, foreach=True),
    "sgd, momentum, fused": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, fused=True),
    "adagrad, fused": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2, fused=True),
}


def net(device: torch.device, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    layers = (nn.Linear(512, 2047), nn.GELU(), nn.Linear(2047, 2048), nn.GELU(), nn.Linear(2048, 515))
    return nn.Sequential(*layers).to(device, dtype)


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Parameters and moments."""
    of = [optimizer.state[parameter] for parameter in model.parameters()]
    moments = [one[name] for one in of for name in sorted(one) if isinstance(one[name], torch.Tensor)]
    return [one.detach().to("cpu", copy=True) for one in (*model.parameters(), *moments)]


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def train(place, device, dtype, name, *, over, set_to_none=True, scaled=False):
    """Trains and saves; the checkpointer, and what the device had at each save."""
    model = net(device, dtype)
    optimizer = OPTIMIZERS[name](model.parameters())
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**4, growth_interval=3, enabled=scaled)
    state, had = {"model": model, "optimizer": optimizer}, {}
    with sf.Checkpointer(place, every=sf.steps(EVERY), over=over) as ckpt:
        for step in range(1, STEPS):
            x = torch.randn(64, 512, generator=torch.Generator().manual_seed(step)).to(device, dtype)
            loss = model(x).square().mean() * (float("inf") if scaled and step % 7 == 0 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=set_to_none)
            if step % EVERY == 0:
                had[step] = held(model, optimizer)
            ckpt.step(step, state)
        ckpt.wait()
    return ckpt, had


def expect_held(place, device, dtype, name, had):
    for step, expected in had.items():
        model = net(device, dtype)
        optimizer = OPTIMIZERS[name](model.parameters())
        state = {"model": model, "optimizer": optimizer}
        sf.load(f"{place}/step-{step:08}", state)
        found = held(model, optimizer)
        assert len(found) == len(expected) and all(map(is_same, found, expected)), f"step {step} holds other bytes"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer(tmp_path, device, name, dtype):
    ckpt, had = train(tmp_path / "run", device, dtype, name, over=4)
    assert str(ckpt.capture).startswith("over 4 steps"), str(ckpt.capture)
    assert ckpt.capture.figures()["held_bytes"] > 0, ckpt.capture.figures()
    expect_held(tmp_path / "run", device, dtype, name, had)


def test_gradients_that_are_zeroed_in_place_are_waited_for(tmp_path, device):
    name, dtype = "adamw, fused", torch.float32
    ckpt, had = train(tmp_path / "run", device, dtype, name, over=4, set_to_none=False)
    assert str(ckpt.capture).startswith("over 4 steps"), str(ckpt.capture)
    assert ckpt.capture._is_waited == (device.type == "cuda")
    expect_held(tmp_path / "run", device, dtype, name, had)


def test_scaled_gradients_and_steps_that_are_skipped(tmp_path, device):
    name, dtype = "adamw, fused", torch.float32
    ckpt, had = train(tmp_path / "run", device, dtype, name, over=4, scaled=True)
    assert ckpt.capture.figures().get("held_bytes", 0) > 0, str(ckpt.capture)
    expect_held(tmp_path / "run", device, dtype, name, had)


def test_what_is_changed_behind_the_step_commits_nothing(tmp_path, device):
    model = net(device, torch.float32)
    optimizer = OPTIMIZERS["adamw, fused"](model.parameters())
    state = {"model": model, "optimizer": optimizer}
    with sf.Checkpointer(tmp_path / "run", every=sf.steps(EVERY), over=3) as ckpt, pytest.raises(sf.Invalid) as refused:
        for step in range(1, 2 * EVERY + 2):
            model(torch.randn(64, 512, device=device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 2 * EVERY - 1:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.view(-1)[0] += 1
            ckpt.step(step, state)
        ckpt.wait()
    assert "rolled forward has other bits" in str(refused.value)
    assert ckpt.committed == EVERY
