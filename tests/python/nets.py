"""A small plain model, its steps, and copies of what optimizers hold."""

import torch
from torch import nn


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def step(model, *optimizers, seed=0):
    torch.manual_seed(seed)
    for optimizer in optimizers:
        optimizer.zero_grad()
    model(torch.randn(4, 6)).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()


def copies_of(*optimizers):
    """All state by parameter and name, as copies."""
    return [
        {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in entries.items()}
        for optimizer in optimizers
        for entries in (optimizer.state.get(p, {}) for group in optimizer.param_groups for p in group["params"])
    ]


def same(one, other):
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, (list, dict)):
        items = one.items() if isinstance(one, dict) else enumerate(one)
        return len(one) == len(other) and all(same(value, other[key]) for key, value in items)
    return one == other
