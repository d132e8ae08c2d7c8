"""Saves captured over several steps hold what those of one step hold, in whatever way the optimizer is stepped."""

import os
import threading
from collections.abc import Callable

import pytest
import shardfast as sf
import torch
from older import IS_OLDER
from test_ahead import EVERY, STEPS, batch, expect_same, net, replayed, step_and_copy
from torch import nn

pytestmark = pytest.mark.skipif(IS_OLDER, reason="variants are those of the newest PyTorch's kernels")


def in_backward(model: nn.Module) -> tuple[list[torch.optim.Optimizer], Callable]:
    each = {one: torch.optim.AdamW([one], lr=1e-2, fused=True) for one in model.parameters()}

    def step_of(parameter: nn.Parameter) -> None:
        each[parameter].step()
        each[parameter].zero_grad()

    for parameter in each:
        parameter.register_post_accumulate_grad_hook(step_of)
    return list(each.values()), lambda number, backward: backward()


def with_one(step: Callable) -> Callable:
    def make(model: nn.Module) -> tuple[list[torch.optim.Optimizer], Callable]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        return [optimizer], lambda number, backward: step(number, backward, optimizer)

    return make


def by_closure(number: int, backward: Callable, optimizer: torch.optim.Optimizer) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        return backward()

    optimizer.step(closure)


def in_another_thread(number: int, backward: Callable, optimizer: torch.optim.Optimizer) -> None:
    backward()
    thread = threading.Thread(target=optimizer.step)
    thread.start()
    thread.join()
    optimizer.zero_grad()


def gradients_zeroed(number: int, backward: Callable, optimizer: torch.optim.Optimizer) -> None:
    backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def unevenly(number: int, backward: Callable, optimizer: torch.optim.Optimizer) -> None:
    """Between two calls of the checkpointer the optimizer may step twice, or not at all."""
    for _ in range({12: 2, 13: 0}.get(number, 1)):
        backward()
        optimizer.step()
        optimizer.zero_grad()


def not_a_number(number: int, backward: Callable, optimizer: torch.optim.Optimizer) -> None:
    backward()
    if number == 12:
        optimizer.param_groups[0]["params"][0].grad[3, 5] = float("nan")
    optimizer.step()
    optimizer.zero_grad()


def in_a_child(number: int, backward: Callable, optimizer: torch.optim.Optimizer) -> None:
    """A fork of the process, in the window, steps its own copy."""
    backward()
    if number == 12:
        child = os.fork()
        if not child:
            optimizer.step()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    optimizer.step()
    optimizer.zero_grad()


WAYS = (by_closure, in_another_thread, gradients_zeroed, unevenly, not_a_number, in_a_child)


@pytest.mark.parametrize("make", [in_backward, *map(with_one, WAYS)], ids=["in_backward", *(w.__name__ for w in WAYS)])
def test_ways_to_step(tmp_path, make):
    for over in (1, 4):
        model = net()
        optimizers, step_of = make(model)
        state = {"model": model, "optimizers": optimizers}
        with sf.Checkpointer(tmp_path / str(over), every=sf.steps(EVERY), over=over) as ckpt:
            for step in range(1, STEPS + 1):

                def backward(step: int = step, model: nn.Module = model) -> torch.Tensor:
                    loss = model(batch(step)).square().mean()
                    loss.backward()
                    return loss

                step_of(step, backward)
                step_and_copy(ckpt, step, state)
    assert replayed(tmp_path / "4", 14) > 0 and replayed(tmp_path / "4") > 0, str(ckpt.capture)
    expect_same(tmp_path, "1", "4")
