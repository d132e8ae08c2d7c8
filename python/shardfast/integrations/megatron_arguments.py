"""Calls of Megatron's functions, and arguments that ask for something that Shardfast does not do: refused by name."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import shardfast as sf

from .places import is_far

_log = logging.getLogger("shardfast")

_TRIED = "0.19"
_RETENTION = "remove old iterations by hand, with `rm -r` or the tools of the object store"
_MEGATRON = "train without attach(), or without this argument"
_ALLOWED: dict[str, tuple[tuple[Any, ...], str]] = {
    "ckpt_format": (("torch_dist",), "leave it out: an iteration is a checkpoint of Shardfast, whatever the format"),
    "dist_ckpt_strictness": (("assume_ok_unexpected",), "leave it out: a load is strict, and names what differs"),
    "non_persistent_ckpt_type": ((None,), _MEGATRON),
    "non_persistent_save_interval": ((None,), _MEGATRON),
    "save_retain_interval": ((None,), _RETENTION),
    "ckpt_convert_format": ((None,), "convert without attach()"),
    "ckpt_convert_save": ((None,), "convert without attach()"),
    "load_main_params_from_ckpt": ((None, False), "leave it out: without an optimizer, masters come from the model"),
    "override_ckpt_iteration": ((None,), _MEGATRON),
    "dataloader_save": ((None, ""), _MEGATRON),
    "logits_save_dir": ((None,), _MEGATRON),
    "moe_use_upcycling": ((None, False), "upcycle without attach(), then load the result with --load"),
    "perform_rl_step": ((None, False), _MEGATRON),
    "inprocess_restart": ((None, False), _MEGATRON),
    "use_torch_fsdp2": ((None, False), _MEGATRON),
    "use_megatron_fsdp": ((None, False), _MEGATRON),
    "gtp_weight_remat_size": ((None, 1), "leave --tensor-parallel-num-weight-shards out"),
}
"""By the name of an argument: the values that are understood, and what to do instead of another one."""

_LOCAL = (
    *("log_progress", "enable_ft_package", "wandb_project", "save_params_interval", "save_activations_interval"),
    *("save_tokens_per_expert_interval", "save_wgrads_interval", "save_dgrads_interval"),
)
"""Arguments with which Megatron itself writes into ``--save``, which must be a directory then."""


def warn_of_version(version: str) -> None:
    """Logs a warning if Megatron-Core is none with which its training loop was tried."""
    if not version.startswith(f"{_TRIED}."):
        _log.warning("attach(): megatron-core is %s; its training loop was tried with %s", version, _TRIED)


def expect_understood(args: Any) -> None:
    """Refuses arguments of the command line.

    Raises:
        Unsupported: Names all of them, with what to do instead.
    """
    problems = []
    for name, (allowed, instead) in _ALLOWED.items():
        value = getattr(args, name, allowed[0])
        if value not in allowed:
            problems.append(f"{_option(name)} is {value!r} and is not understood: {instead}")
    if args.save is not None and is_far(args.save):
        problems += [
            f"{_option(name)}: Megatron writes into --save itself, which is {args.save} here: leave one of them out"
            for name in _LOCAL
            if getattr(args, name, None)
        ]
    if problems:
        raise sf.Unsupported("\n  ".join(["Megatron's loop with shardfast:", *problems]))


def expect_call_understood(function: str, given: dict[str, Any]) -> None:
    """Refuses arguments of a call of ``save_checkpoint`` or ``load_checkpoint``.

    Raises:
        Unsupported: Names all of them.
    """
    names = ("release", "non_persistent_ckpt", "skip_load_to_model_and_opt", "rng_state_key_prefix")
    found = [f"{name}={given[name]!r}" for name in names if given.get(name)]
    if found:
        raise sf.Unsupported(f"{function}({', '.join(found)}): not understood with attach(): call it without")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


_MARK = "_shardfast"


def in_place_of(original: Any, made: Callable[..., Any]) -> Any:
    """A function with the signature of ``original``, which calls ``made(original, {parameter: argument, …})``."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return made(functools.partial(original, *args, **kwargs), bound.arguments)

    setattr(replaced, _MARK, True)
    return replaced


def is_replaced(function: Any) -> bool:
    """Whether :func:`in_place_of` made a function."""
    return hasattr(function, _MARK)
