"""Options of a Trainer that are not saved by Shardfast, and what to do instead."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import transformers
from transformers.utils import is_sagemaker_mp_enabled, is_torch_xla_available

import shardfast as sf

from .transformers_model import is_peft
from .versions import expect_version

_OLDEST, _TRIED = "5.10.0", "5.23.0"

_OTHER_GENERATORS = ("hpu", "mlu", "musa", "npu", "xla")
"""Kinds of devices whose random state the trainer saves and Shardfast does not."""

_STEP_IN_BACKWARD = ("layerwise", "lomo")


def expect_this_version() -> None:
    """Refuses a transformers that is too old; see :func:`.versions.expect_version`."""
    expect_version("transformers", transformers.__version__, oldest=_OLDEST, tried=_TRIED)


def expect_trainer(trainer: Any, replaced: Iterable[str]) -> None:
    """Refuses what is no Trainer, or one with whose own methods these would be gone.

    Args:
        trainer: What shall be one.
        replaced: The methods in whose place others come altogether.

    Raises:
        Invalid: It is no Trainer, or has begun to train, or is attached already.
        Unsupported: Its class has its own ways to write a checkpoint.
    """
    if not isinstance(trainer, transformers.Trainer):
        raise sf.Invalid(f"attach({type(trainer).__name__}): expected a transformers.Trainer")
    if trainer.is_in_train:
        raise sf.Invalid("attach(): the trainer has begun to train: attach before train()")
    if "_save_checkpoint" in vars(trainer):
        raise sf.Invalid("attach(): this trainer is attached already: call it once")
    kind = type(trainer)
    own = [name for name in replaced if getattr(kind, name, None) is not getattr(transformers.Trainer, name, None)]
    if own:
        raise sf.Unsupported(
            f"attach(): {kind.__name__} has methods of its own that write or read a checkpoint, {', '.join(own)}, and "
            "they would not be called: take them out, and write further files in _save_checkpoint() or in a "
            "callback's on_save()"
        )


def expect_supported(trainer: Any) -> None:
    """Refuses options of a trainer whose checkpoints would be less than its own, all in one error.

    Raises:
        Unsupported: It has some.
    """
    found = list(_unsupported(trainer))
    if found:
        raise sf.Unsupported("attach(): " + "\n".join(found))


def _unsupported(trainer: Any) -> Iterable[str]:
    args = trainer.args
    if trainer.is_deepspeed_enabled:
        yield (
            'deepspeed: it is saved by the block "shardfast" in DeepSpeed\'s configuration: do not attach, import '
            "shardfast.integrations.deepspeed (docs: Coming from DeepSpeed)"
        )
    if args.push_to_hub and args.hub_strategy != "end":
        yield (
            f'push_to_hub with hub_strategy="{getattr(args.hub_strategy, "value", args.hub_strategy)}": it uploads '
            'weights out of checkpoints, which have none in its format: use hub_strategy="end"'
        )
    if args.save_on_each_node:
        yield "save_on_each_node: there is one checkpoint, in a directory that all nodes reach: leave it out"
    optim = str(getattr(args.optim, "value", args.optim))
    if any(word in optim for word in _STEP_IN_BACKWARD):
        yield f'optim="{optim}": it steps in backward and its state is in no optimizer: use another one'
    if is_sagemaker_mp_enabled() or is_torch_xla_available() or trainer.is_fsdp_xla_enabled:
        yield "SageMaker's model parallelism and XLA: train without attach()"
    elif args.device.type in _OTHER_GENERATORS:
        yield f"{args.device.type}: the random state of these devices would be missing: train without attach()"
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is not None and getattr(plugin, "fsdp_version", 1) == 1 and is_peft(trainer):
        yield "peft under FSDP1, whose parameters are not those of the adapter: use FSDP2 (fsdp_version 2)"
