"""A state that follows from the step, and the steps that a run has."""

from pathlib import Path

import torch
from torch import nn


def state_of(step, rows=300):
    model = nn.Linear(200, rows)
    with torch.no_grad():
        model.weight.fill_(step)
        model.bias.fill_(-step)
    return {"model": model, "extra": {"step": step}}


def expect_state(state, step):
    assert torch.equal(state["model"].weight, torch.full_like(state["model"].weight, step))
    assert torch.equal(state["model"].bias, torch.full_like(state["model"].bias, -step))
    assert state["extra"]["step"] == step


def steps(run):
    """The committed steps."""
    return sorted(int(path.parent.name.removeprefix("step-")) for path in Path(run).glob("step-*/COMMIT"))
