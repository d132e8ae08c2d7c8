"""The block ``"shardfast"`` of DeepSpeed's configuration."""

from __future__ import annotations

import os
import re
from typing import Any, NamedTuple

import shardfast as sf

_KEYS = ("staging_bytes", "over", "keep", "pickle", "async")
_STAGING = "SHARDFAST_STAGING_BYTES"


class Block(NamedTuple):
    """Settings of the block.

    Attributes:
        pickle: Whether values that have no form as data are pickled.
        is_async: Whether a save returns before it is durable.
        keep: How many checkpoints of a directory stay; ``None`` for all.
    """

    pickle: bool
    is_async: bool
    keep: int | None


def block_of(engine: Any) -> Block | None:
    """The block of an engine's configuration; ``None`` if it has none.

    Raises:
        Invalid: It has other keys, or a value of another kind.
    """
    configuration = _configuration(engine)
    if "shardfast" not in configuration:
        return None
    said = configuration["shardfast"]
    if not isinstance(said, dict):
        raise sf.Invalid(f'"shardfast": {said!r} in DeepSpeed\'s configuration: expected a block {{…}}')
    if said.get("over", 1) != 1 or said.get("over") is True:
        raise sf.Unsupported(
            f'"shardfast": {{"over": {said["over"]!r}}}: a copy over several steps begins before a save, which '
            "save_checkpoint() does not announce, and does not follow optimizers that step flat buffers, as ZeRO's do: "
            "expected 1, which is what a save has without it: it is captured in one step"
        )
    unknown = sorted(map(str, said.keys() - set(_KEYS)))
    if unknown:
        raise sf.Invalid(
            f'"shardfast" in DeepSpeed\'s configuration has {", ".join(unknown)}: expected none but {", ".join(_KEYS)}'
        )
    for name in ("pickle", "async"):
        if not isinstance(said.get(name, False), bool):
            raise sf.Invalid(f'"shardfast": {{"{name}": {said[name]!r}}}: expected true or false')
    if "staging_bytes" in said:
        _stage(said["staging_bytes"])
    return Block(said.get("pickle", False), said.get("async", True), _kept(said.get("keep")))


def _kept(rule: Any) -> int | None:
    """The number in ``"last(N)"``."""
    if rule is None:
        return None
    found = re.fullmatch(r"last\(([1-9]\d{0,8})\)", rule) if isinstance(rule, str) else None
    if found is None:
        raise sf.Invalid(f'"shardfast": {{"keep": {rule!r}}}: expected "last(N)", such as "last(3)"')
    return int(found[1])


def _stage(size: Any) -> None:
    """Bounds this process's staging memory, unless its environment says something else."""
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise sf.Invalid(f'"shardfast": {{"staging_bytes": {size!r}}}: expected bytes, or a text such as "4GiB"')
    other = os.environ.setdefault(_STAGING, str(size))
    if other != str(size):
        raise sf.Invalid(
            f'"shardfast": {{"staging_bytes": {size!r}}}: the environment says {_STAGING}={other}: say it in one place'
        )


def _configuration(engine: Any) -> dict[str, Any]:
    """DeepSpeed's configuration, as it was given."""
    found = getattr(getattr(engine, "_config", None), "_param_dict", None)
    if not isinstance(found, dict):
        raise sf.Unsupported(
            "DeepSpeed of this version keeps its configuration elsewhere than is known (engine._config._param_dict): "
            "use DeepSpeed 0.19"
        )
    return found


def expect_savable(engine: Any) -> None:
    """Refuses a save between the micro-batches of a step, whose gradients are no part of it; and the next function."""
    expect_nothing_beside(engine)
    of_step = int(engine.gradient_accumulation_steps())
    done = int(engine.micro_steps) % of_step
    if done:
        raise sf.Invalid(
            f"save_checkpoint() after {done} of the {of_step} micro-batches of a step, whose gradients no checkpoint "
            "holds: save where engine.micro_steps is a multiple of gradient_accumulation_steps"
        )


def expect_nothing_beside(engine: Any) -> None:
    """Refuses parts of the configuration that ask for another way to save."""
    said = _configuration(engine)
    of_saves = said.get("checkpoint") or {}
    for name, value, instead in (
        ("checkpoint.writer", of_saves.get("writer"), "Shardfast writes itself"),
        ("datastates_ckpt", said.get("datastates_ckpt"), "Shardfast writes itself"),
        (
            "checkpoint.use_node_local_storage",
            of_saves.get("use_node_local_storage"),
            "all ranks of a checkpoint write to one place",
        ),
        (
            "checkpoint.load_universal",
            of_saves.get("load_universal"),
            "a checkpoint of Shardfast's loads into any world and stage as it is",
        ),
    ):
        if value:
            raise sf.Invalid(
                f'DeepSpeed\'s configuration has {name} beside the block "shardfast": {instead}: take out one'
            )
