"""DeepSpeed's engines, saved and loaded by Shardfast where their configuration says so.

Import this before ``deepspeed.initialize()``, and add a block to DeepSpeed's configuration::

    import shardfast.integrations.deepspeed

    config = {"zero_optimization": {"stage": 2}, "shardfast": {}, ...}

``engine.save_checkpoint()`` and ``engine.load_checkpoint()`` keep their meaning: ``<dir>/<tag>`` is a checkpoint, and
``latest`` names the newest. It loads into any world size and any stage. Engines without the block are not touched.
Directories that DeepSpeed wrote are loaded by DeepSpeed. What failed in the background is logged at once, and raised by
the next save or load or ``engine.destroy()``, which all ranks call: ``engine.step()`` goes on.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.partition_parameters import GatheredParameters

import shardfast as sf

from .deepspeed_block import Block, block_of, expect_nothing_beside, expect_savable
from .deepspeed_newest import newest
from .deepspeed_places import LATEST, Found, expect_directory, find, forget_replaced, is_there, prune, replace, tag_of
from .deepspeed_state import State
from .places import absolute, below
from .trackers import Saves, Trackers

__all__ = ["newest"]

_log = logging.getLogger("shardfast")


class _Loop:
    """The saves and loads of one engine."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.trackers = Trackers(LATEST, LATEST)
        self.saves = Saves()
        self._saved: set[str] = set()

    def save(
        self,
        engine: Any,
        save_dir: str,
        tag: Any = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Saves as ``DeepSpeedEngine.save_checkpoint()`` does."""
        if not save_dir:
            raise ValueError(f"save_dir must be a non-empty string, got {save_dir!r}")
        expect_savable(engine)
        if gathered[0]:
            raise sf.Invalid("save_checkpoint() inside of GatheredParameters, which writes at its end: save behind it")
        if engine.zero_optimization_partition_weights():
            engine.optimizer.checkpoint_event_prologue()  # what a forward has gathered, such as an evaluation's
        name = tag_of(f"global_step{engine.global_steps}" if tag is None else tag)
        place, step = absolute(str(save_dir)), int(engine.global_steps)
        tracker = self.trackers.of(place)
        if self.block.keep is not None:
            expect_directory(place)
        state = State(engine).to_save(client_state or {}, exclude_frozen=exclude_frozen_parameters)

        def named() -> None:
            if save_latest:
                tracker.write(name, step)
            forget_replaced(place, name)
            if self.block.keep is not None and dist.get_rank() == 0:
                prune(place, name, self.block.keep, tracker.read())

        url = below(place, name)
        is_again = url in self._saved or is_there(place, name)  # as all ranks see
        self._saved.add(url)

        def begin() -> sf.Pending:
            if is_again:
                replace(place, name)
            return sf.save_async(url, state, step=step, pickle=self.block.pickle)

        self.saves.begin(begin, named, most=0 if is_again else 1)
        if not self.block.is_async:
            self.saves.settle(0)
        return True

    def load(
        self,
        original: Callable[..., Any],
        engine: Any,
        load_dir: str,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Loads as ``DeepSpeedEngine.load_checkpoint()`` does."""
        self.saves.settle(0)
        found: Found | None = find(absolute(str(load_dir)), None if tag is None else tag_of(tag), self.trackers)
        if found is None:
            _log.warning("%s has no file %s: nothing is loaded", load_dir, LATEST)
            return None, None
        if found.values is None:  # what DeepSpeed wrote
            options = load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only
            return original(engine, load_dir, found.tag, *options, custom_load_fn)  # type: ignore[no-any-return]
        expect_nothing_beside(engine)
        if custom_load_fn is not None:
            raise sf.Unsupported(
                f"custom_load_fn: {found.url} is Shardfast's, which fills parameters itself: leave it out"
            )
        client = State(engine).load(
            found.url,
            found.values,
            strict=load_module_strict,
            optimizer=load_optimizer_states and not load_module_only,
            scheduler=load_lr_scheduler_states and not load_module_only,
            counts=not load_module_only,
            pickle=self.block.pickle,
        )
        return found.url, client


gathered = [0]
"""How many contexts in which parameters of stage 3 are whole this process is in."""


def _enter(original: Callable[..., Any], context: Any) -> Any:
    result = original(context)
    gathered[0] += bool(context.enabled)
    return result


def _exit(original: Callable[..., Any], context: Any, *args: Any) -> Any:
    gathered[0] -= bool(context.enabled)
    return original(context, *args)


_loops: weakref.WeakKeyDictionary[Any, _Loop] = weakref.WeakKeyDictionary()


def _loop_of(engine: Any) -> _Loop | None:
    """Returns the object that saves and loads an engine; ``None`` if its configuration has no block."""
    loop = _loops.get(engine)
    if loop is None and (block := block_of(engine)) is not None:
        loop = _loops[engine] = _Loop(block)
    return loop


def _save(original: Callable[..., Any], engine: Any, *args: Any, **named: Any) -> Any:
    loop = _loop_of(engine)
    return original(engine, *args, **named) if loop is None else loop.save(engine, *args, **named)


def _load(original: Callable[..., Any], engine: Any, *args: Any, **named: Any) -> Any:
    loop = _loop_of(engine)
    return original(engine, *args, **named) if loop is None else loop.load(original, engine, *args, **named)


def _destroy(original: Callable[..., Any], engine: Any, *args: Any, **named: Any) -> Any:
    try:
        if engine in _loops:
            _loops[engine].saves.settle(0)
    finally:
        result = original(engine, *args, **named)
    return result


def _replaced(original: Callable[..., Any], made: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(engine: Any, *args: Any, **named: Any) -> Any:
        return made(original, engine, *args, **named)

    return method


for _name, _made in (
    ("save_checkpoint", _save),
    ("load_checkpoint", _load),
    ("destroy", _destroy),
):
    setattr(DeepSpeedEngine, _name, _replaced(getattr(DeepSpeedEngine, _name), _made))
GatheredParameters.__enter__ = _replaced(GatheredParameters.__enter__, _enter)
GatheredParameters.__exit__ = _replaced(GatheredParameters.__exit__, _exit)
