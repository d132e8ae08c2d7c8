"""How PyTorch's optimizers step: parameters with their moments, and the gradients and scalars of each step."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from ...capture.stepping import Stepped, Taken
from ...state.catalog import Refused
from .memory import ORDINARY
from .placement import local_of

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}


class _Kind(NamedTuple):
    """An optimizer that steps element by element.

    Attributes:
        name: As in :class:`Stepped`.
        moments: The names of its moments, in the order in which a step reads them, with the settings of a group.
        flags: Settings of a group that decide which operations a step makes.
        numbers: The numbers of a step with these settings, the ``steps``-th of its parameter.
    """

    name: str
    moments: Callable[[dict[str, Any]], tuple[str, ...]]
    flags: tuple[str, ...]
    numbers: Callable[[dict[str, Any], float], tuple[float, ...]]


def _adam(group: dict[str, Any], steps: float) -> tuple[float, ...]:
    beta1, beta2 = group["betas"]
    # As torch.optim.adam and the fused kernels compute them.
    corrections = (1 - beta1**steps, math.sqrt(1 - beta2**steps))
    flags = (_is_decoupled(group), bool(group["maximize"]), bool(group["amsgrad"]))
    return (group["lr"], beta1, beta2, group["eps"], group["weight_decay"], *flags, *corrections)


def _is_decoupled(group: dict[str, Any]) -> bool:
    return bool(group.get("decoupled_weight_decay", False))


def _sgd(group: dict[str, Any], steps: float) -> tuple[float, ...]:
    # A buffer that is there was made by an earlier step.
    flags = (bool(group["nesterov"]), bool(group["maximize"]), False)
    return (group["lr"], group["momentum"], group["dampening"], group["weight_decay"], *flags)


def _adagrad(group: dict[str, Any], steps: float) -> tuple[float, ...]:
    corrected = group["lr"] / (1 + (steps - 1) * group["lr_decay"])
    return (corrected, group["eps"], group["weight_decay"], bool(group["maximize"]))


def _lion(group: dict[str, Any], steps: float) -> tuple[float, ...]:
    return (group["lr"], *group["betas"], group["weight_decay"])


_ADAM = _Kind(
    "adam",
    lambda group: ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ())),
    ("amsgrad", "maximize", "decoupled_weight_decay", "foreach", "fused", "capturable", "differentiable"),
    _adam,
)
_SGD = _Kind(
    "sgd",
    lambda group: ("momentum_buffer",) if group["momentum"] else (),
    ("nesterov", "maximize", "foreach", "fused", "differentiable"),
    _sgd,
)
_ADAGRAD = _Kind("adagrad", lambda group: ("sum",), ("maximize", "foreach", "fused", "differentiable"), _adagrad)
_LION = _Kind("lion", lambda group: ("exp_avg",), (), _lion)

_COUNTED = ("adam", "adagrad")
"""Optimizers whose scalars depend on the number of the step."""


def _kind_of(optimizer: Any) -> _Kind | None:
    if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        return _ADAM
    if isinstance(optimizer, torch.optim.SGD):
        return _SGD
    if isinstance(optimizer, torch.optim.Adagrad):
        return _ADAGRAD
    # PyTorch has none; the published ones share name and settings. A rehearsal finds out whether this is one.
    return _LION if type(optimizer).__name__ == "Lion" else None


class _One(NamedTuple):
    """A parameter of a unit. The optimizer is held weakly, and with it what it steps."""

    parameter: weakref.ref[torch.Tensor]
    group: int
    unit: int
    device: int | None


class TorchSteps:
    """Optimizers whose parameters can be replayed as they step.

    Args:
        optimizers: Those that step, and whether each runs hooks when it does.
    """

    def __init__(self, optimizers: Sequence[tuple[Any, bool]]) -> None:
        self.units: list[Stepped] = []
        self.reason = ""
        self._of: dict[int, tuple[weakref.ref[Any], _Kind, list[_One]]] = {}
        self._settings: dict[int, Hashable] = {}
        self._noted: dict[int, torch.Tensor | None] = {}
        self._counts: list[float] = []
        self._numbers: Sequence[int] = ()
        self._devices: set[int] = set()
        self._corrections: dict[tuple[int, tuple[float, float], float], tuple[float, ...]] = {}
        for optimizer, is_hooked in optimizers:
            kind = _kind_of(optimizer)
            name = type(optimizer).__name__
            if kind is None:
                self._refuse(f"{name} is not replayed: it is none of AdamW, Adam, SGD, Adagrad and Lion")
            elif not is_hooked:
                self._refuse(f"{name} announces no steps: its class is not registered with PyTorch")
            else:
                self._of[id(optimizer)] = (weakref.ref(optimizer), kind, self._units_of(optimizer, kind))
                self._settings[id(optimizer)] = _settings_of(optimizer, kind)

    def _refuse(self, reason: str) -> None:
        self.reason = self.reason or reason

    def _units_of(self, optimizer: Any, kind: _Kind) -> list[_One]:
        found = []
        for number, group in enumerate(optimizer.param_groups):
            settings = _flags_of(group, kind)
            if _has_tensors(group):
                self._refuse(f"{type(optimizer).__name__} has settings that are tensors on a device, or betas that are")
                continue
            for parameter in group["params"]:
                moments, state = kind.moments(group), optimizer.state.get(parameter, {})
                if not parameter.requires_grad or (moments and not state):
                    continue  # it never is stepped, or was not yet
                arrays = [parameter, *map(state.get, moments)]
                is_fused = bool(group.get("fused")) if "fused" in kind.flags else None
                unit = _unit(optimizer, kind, settings, is_fused, arrays)
                if isinstance(unit, Stepped):
                    place = local_of(parameter).device
                    device = place.index if place.type == "cuda" else None
                    if device is not None:
                        self._devices.add(device)
                    found.append(_One(weakref.ref(parameter), number, len(self.units), device))
                    self.units.append(unit)
                else:
                    self._refuse(unit)
        return found

    def is_current(self) -> bool:
        for number, (weak, kind, _) in self._of.items():
            optimizer = weak()
            if optimizer is None or _settings_of(optimizer, kind) != self._settings[number]:
                return False
        return True

    def streams(self) -> dict[int, int]:
        return {device: int(torch.cuda.current_stream(device).cuda_stream) for device in self._devices}

    def begin(self, steps: int, numbers: Sequence[int]) -> None:
        self._numbers = numbers
        self._noted.clear()
        self._corrections.clear()
        self._counts = [0.0] * len(self.units)
        for weak, kind, units in self._of.values():
            optimizer = weak()
            if optimizer is None or kind.name not in _COUNTED:
                continue
            there = [(one.unit, parameter) for one in units if (parameter := one.parameter()) is not None]
            counts = _numbers([optimizer.state[parameter]["step"] for _, parameter in there])
            for (unit, _), count in zip(there, counts, strict=True):
                self._counts[unit] = count
            if kind is not _ADAM:
                continue
            for betas, device, count in {
                (tuple(optimizer.param_groups[one.group]["betas"]), one.device, self._counts[one.unit]) for one in units
            }:
                if device is not None:
                    self._correct(device, betas, count + 1, steps)

    def _correct(self, device: int, betas: tuple[float, float], first: float, steps: int) -> None:
        """Has the device compute Adam's bias corrections of so many steps from ``first`` on, as its kernels do."""
        if all((device, betas, first + step) in self._corrections for step in range(steps)):
            return
        place = torch.device("cuda", device)
        count = torch.arange(first, first + steps, dtype=torch.float32, device=place)
        powers = [torch.pow(torch.tensor(beta, dtype=torch.float32, device=place), count) for beta in betas]
        found = torch.stack((1 - powers[0], (1 - powers[1]).sqrt())).tolist()
        for step, both in enumerate(zip(*found, strict=True)):
            self._corrections[device, betas, first + step] = both

    def stepping(self, optimizer: object) -> None:
        _, _, units = self._of.get(id(optimizer), (None, None, ()))
        for one in units if _may_drop_gradients(optimizer) else ():
            parameter = one.parameter()
            self._noted[one.unit] = None if parameter is None else parameter.grad

    def taken(self, optimizer: Any) -> Taken:
        found = self._of.get(id(optimizer))
        is_known = found is not None and found[0]() is optimizer
        if found is None or not is_known or _was_skipped(optimizer):
            return Taken((), ())
        kind, units = found[1], found[2]
        applied: list[tuple[int, object, int]] = []
        scalars: list[tuple[str, Sequence[float], float | None]] = []
        known: dict[tuple[int, float], int] = {}
        counts, noted, numbers, plain = self._counts, self._noted, self._numbers, torch.Tensor
        last_group, last_steps = -1, -1.0
        number = 0
        # The training waits for this loop, a thousand parameters long.
        for reference, group, unit, device in units:
            parameter = reference()
            gradient = None if parameter is None else parameter.grad
            if gradient is None:
                gradient = noted.get(unit)
                if gradient is None:
                    continue  # it did not step
            steps = counts[unit] = counts[unit] + 1
            if group != last_group or steps != last_steps:
                last_group, last_steps = group, steps
                number = known.setdefault((group, steps), len(scalars))
                if number == len(scalars):
                    scalars.append((kind.name, self._scalars_of(optimizer, kind, group, steps, device), None))
            window_number = numbers[unit]
            if window_number >= 0:
                applied.append((window_number, gradient if type(gradient) is plain else local_of(gradient), number))
        noted.clear()
        return Taken(applied, scalars)

    def _scalars_of(self, optimizer: Any, kind: _Kind, group: int, steps: float, device: int | None) -> list[float]:
        """The scalars of the group's parameters in their ``steps``-th step."""
        settings = optimizer.param_groups[group]
        found = kind.numbers(settings, steps)
        if device is not None and kind is _ADAM:
            betas = tuple(settings["betas"])
            self._correct(device, betas, steps, 1)
            found += self._corrections[device, betas, steps]
        return [float(value) for value in found]

    def place(self, gradient: Any) -> tuple[int, int, str, int | None]:
        dtype = DTYPES.get(gradient.dtype)
        if dtype is None or gradient.layout is not torch.strided or not gradient.is_contiguous():
            raise Refused(f"a gradient is a {gradient.layout} tensor of {gradient.dtype}, or not contiguous")
        device = gradient.device.index if gradient.is_cuda else None
        return gradient.data_ptr(), gradient.numel(), dtype, device


def _numbers(of: Sequence[Any]) -> list[float]:
    """Returns the numbers of tensors with one element, or of numbers; what devices have is read at once."""
    devices = {one.device.type if isinstance(one, torch.Tensor) else "" for one in of}
    return [float(one) for one in (torch.stack(tuple(of)).tolist() if devices == {"cuda"} else of)]


def _flags_of(group: dict[str, Any], kind: _Kind) -> Hashable:
    """The settings that decide which operations a step makes: flags, and numbers that are nothing at zero."""
    numbers = ((name, group.get(name)) for name in ("momentum", "dampening", "weight_decay", "lr_decay"))
    used = ((name, isinstance(number, torch.Tensor) or bool(number)) for name, number in numbers)
    return (*((flag, group.get(flag)) for flag in kind.flags), *used)


def _has_tensors(group: dict[str, Any]) -> bool:
    """Whether settings are tensors that cannot be read as numbers behind each step.

    The host would wait for those of a device. With betas that are tensors PyTorch computes the corrections in fp32. A
    learning rate on the host is a number.
    """
    settings = [value for value in group.values() if isinstance(value, torch.Tensor)]
    betas = [beta for beta in group.get("betas", ()) if isinstance(beta, torch.Tensor)]
    return bool(betas) or any(value.device.type != "cpu" for value in settings)


def _settings_of(optimizer: Any, kind: _Kind) -> Hashable:
    """Returns the settings that decide which parameters are units, and how they are stepped."""
    groups = optimizer.param_groups
    return tuple((_flags_of(one, kind), kind.moments(one), _has_tensors(one), len(one["params"])) for one in groups)


def _may_drop_gradients(optimizer: Any) -> bool:
    """Whether hooks of others run behind the optimizer's step and before ours."""
    own = getattr(optimizer, "_optimizer_step_post_hooks", True)
    of_all = getattr(sys.modules[torch.optim.Optimizer.__module__], "_global_optimizer_post_hooks", None)
    return bool(own) or of_all is None or len(of_all) > 1


def _was_skipped(optimizer: Any) -> bool:
    """Whether a fused step found gradients that are not finite, and left everything as it was."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


def _unit(
    optimizer: Any, kind: _Kind, settings: Hashable, is_fused: bool | None, arrays: Sequence[Any]
) -> Stepped | str:
    """A parameter with its moments; or why it cannot be replayed."""
    name = type(optimizer).__name__
    if not all(isinstance(array, torch.Tensor) for array in arrays):
        return f"{name} keeps other state than the one that is known of its kind"
    local = [local_of(array) for array in arrays]
    first = local[0]
    if not all(type(one) in ORDINARY and one.layout is torch.strided for one in local):
        return f"{name} steps tensors of other classes than PyTorch's own"
    if any(one.device != first.device for one in local) or first.device.type not in ("cpu", "cuda"):
        return f"{name} steps tensors of a device and of another one, or of one that is neither CPU nor CUDA"
    if not all(one.is_contiguous() and one.shape == first.shape for one in local):
        return f"{name} steps tensors that are not contiguous, or have other shapes than their moments"
    dtypes = [DTYPES.get(one.dtype) for one in local]
    moments = dtypes[1] if len(dtypes) > 1 else dtypes[0]
    if dtypes[0] is None or moments is None or any(dtype != moments for dtype in dtypes[1:]):
        return f"{name} steps tensors of {first.dtype}, and only fp32 and bf16 are replayed"
    addresses = tuple(one.data_ptr() for one in local)
    arithmetic = (type(optimizer).__module__, type(optimizer).__qualname__, settings)
    device = first.device.type
    return Stepped(kind.name, dtypes[0], moments, device, is_fused, arithmetic, first.numel(), addresses)
