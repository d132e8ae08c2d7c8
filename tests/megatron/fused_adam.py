"""A stand-in for `FusedAdam` of TransformerEngine and Apex, which step on a GPU only: it counts steps in its groups."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core import optimizer as made
from megatron.core.optimizer import distrib_optimizer as distributed


class FusedAdam(torch.optim.Optimizer):
    """Keeps `step` in each group that has parameters, from the first step on, and moments in fp32.

    As TransformerEngine's does, it says its state in dicts of its own and makes tensors anew when it loads them.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        *,
        capturable: bool = False,
        adam_w_mode: bool,
    ) -> None:
        defaults = {"lr": lr, "bias_correction": True, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        assert adam_w_mode
        assert not capturable

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, group)

    def _step_one(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update((name, torch.zeros_like(parameter)) for name in ("exp_avg", "exp_avg_sq"))
        first, second = group["betas"]
        gradient, steps = parameter.grad, group["step"]
        mean = state["exp_avg"].lerp_(gradient, 1 - first)
        square = state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        deviation = (square / (1 - second**steps)).sqrt_().add_(group["eps"])
        parameter.addcdiv_(mean, deviation, value=-group["lr"] / (1 - first**steps))

    def state_dict(self) -> dict[str, Any]:
        said = super().state_dict()
        said["state"] = {number: dict(state) for number, state in said["state"].items()}
        return said

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, state in state_dict["state"].items():
            self.state[parameters[number]] = {name: value.detach().clone() for name, value in state.items()}


@contextlib.contextmanager
def in_place() -> Iterator[None]:
    """Has Megatron make it, and save its counts, as it does TransformerEngine's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(made, "Adam", FusedAdam)
        patch.setattr(made, "USING_PYTORCH_OPTIMIZER", False)
        patch.setattr(distributed, "HAVE_APEX_OR_TE", True)
        patch.setattr(distributed, "Adam", FusedAdam, raising=False)  # up to 0.18 it looks whether it is one
        yield
