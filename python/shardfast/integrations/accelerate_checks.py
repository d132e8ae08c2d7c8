"""Checks of an accelerator, and of the options of a load: what Shardfast does not save is refused by name."""

from __future__ import annotations

from typing import Any

import accelerate
from accelerate.utils import DistributedType

import shardfast as sf

from .versions import expect_version

_OLDEST, _TRIED = "1.13.0", "1.15.0"

_DEVICES = ("cpu", "cuda")


def expect_supported(accelerator: accelerate.Accelerator) -> None:
    """Refuses an accelerator with state that is not saved here.

    Raises:
        Unsupported: Naming everything that is.
    """
    kind, device = accelerator.distributed_type, accelerator.device.type
    found = []
    if kind == DistributedType.DEEPSPEED:
        found.append('DeepSpeed: put the block "shardfast": {} into its configuration (docs/guide/deepspeed.md)')
    if kind == DistributedType.MEGATRON_LM:
        found.append("the Megatron-LM plugin: save with accelerate")
    if device not in _DEVICES:
        found.append(f"the device {device}, whose random state is not saved: use one of {', '.join(_DEVICES)}")
    if accelerator.project_configuration.save_on_each_node:
        found.append("save_on_each_node=True: there is one checkpoint, in storage of all nodes: leave it out")
    if str(accelerator.fp8_backend).endswith("MSAMP"):
        found.append("MS-AMP: save with accelerate")
    if found:
        raise sf.Unsupported(f"Shardfast does not save this Accelerator: {'; '.join(found)}")


def expect_options(load_kwargs: Any, options: dict[str, Any]) -> bool:
    """Refuses options of a load that mean nothing here; whether models' names must match.

    Raises:
        Invalid: Naming all of them.
    """
    unknown = sorted({*(load_kwargs or {})} - {"weights_only"})  # nothing that is loaded runs code
    unknown += sorted(options.keys() - {"strict", "map_location"})
    if options.get("map_location") not in (None, "cpu", "on_device"):  # tensors are filled where they are
        unknown.append("map_location")
    if unknown:
        raise sf.Invalid(f"load_state({', '.join(unknown)}=…): Shardfast wrote the directory: leave this out")
    return bool(options.get("strict", True))


def expect_untrained(accelerator: Any) -> None:
    """Refuses what is no accelerator, and one that has begun to train.

    Raises:
        Invalid: It is one of these.
    """
    if not isinstance(accelerator, accelerate.Accelerator):
        raise sf.Invalid(f"attach({type(accelerator).__name__}): expected an accelerate.Accelerator")
    in_use = accelerator.gradient_state.dataloader_references
    loaders = accelerator._dataloaders
    if accelerator.step or any(getattr(one, "iteration", 0) or one in in_use for one in loaders):
        raise sf.Invalid("attach(): this Accelerator has begun to train: attach it before the first step")


def expect_this_version() -> None:
    """Refuses an accelerate that is too old; see :func:`.versions.expect_version`."""
    expect_version("accelerate", accelerate.__version__, oldest=_OLDEST, tried=_TRIED)
