"""Lets Megatron-Core train on the CPU over gloo, for tests: `install()` before it is imported, `repair()` afterwards.

`torch.cuda` gets functions that do nothing, `device="cuda"` becomes the CPU, `Tensor.type()` says a CUDA type (the
distributed optimizer compares these strings), and dropout's random trackers do not fork.
"""

import contextlib
import warnings
from collections.abc import Iterator

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def _is_cuda(device: object) -> bool:
    return str(device).startswith("cuda") if isinstance(device, (str, torch.device)) else False


class _Inert:
    """A stream or an event that does nothing."""

    def __init__(self, *arguments: object, **named: object) -> None:
        pass

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments, **named: _Inert()


class _CudaIsCpu(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if func is torch.device and args and _is_cuda(args[0]):
            return CPU
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            name = func(*args)
            return name if ".cuda." in name else name.replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


_modes: list[TorchFunctionMode] = []


def install() -> None:
    if _modes:
        return

    for name in ("synchronize", "set_device", "empty_cache", "reset_peak_memory_stats", "nvtx_range_push"):
        # torch.compile wants another function for each.
        setattr(torch.cuda, name, lambda *arguments, **named: None)
    torch.cuda.current_device = lambda: CPU
    torch.cuda.device_count = lambda: 1
    torch.cuda.get_device_capability = lambda *arguments: (8, 0)
    torch.cuda.get_rng_state = lambda *arguments, **named: torch.get_rng_state()
    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.Stream = torch.cuda.Event = _Inert
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *arguments, **named: _Inert()
    torch.cuda.stream = lambda stream=None: contextlib.nullcontext()
    _modes.append(_CudaIsCpu())
    _modes[0].__enter__()


@contextlib.contextmanager
def without_mode() -> Iterator[None]:
    """Runs without the function mode, which costs each use of a tensor about a microsecond: for measurements."""
    _modes[0].__exit__(None, None, None)
    try:
        yield
    finally:
        _modes[0].__enter__()


def repair() -> None:
    from megatron.core import model_parallel_config
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    random.CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()
    # Gloo gathers tensors of one size only; Megatron keeps this as what the other one is compared with.
    with contextlib.suppress(ImportError):  # before 0.16 there is none
        from megatron.core.optimizer import layer_wise_optimizer

        layer_wise = layer_wise_optimizer.LayerWiseDistributedOptimizer
        layer_wise.allgather_params = layer_wise.broadcast_params
    if not hasattr(model_parallel_config, "warnings"):
        model_parallel_config.warnings = warnings  # 0.15.3 raises NameError where it would warn
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # without TransformerEngine 0.16.1 raises NameError in a router
