"""accelerate's ``save_state()`` and ``load_state()``, by Shardfast.

Attach an accelerator after it is made, and go on as before::

    import shardfast.integrations.accelerate

    accelerator = Accelerator(project_config=ProjectConfiguration("runs/one", automatic_checkpoint_naming=True))
    shardfast.integrations.accelerate.attach(accelerator)
    ...
    accelerator.save_state()                   # returns once what may change was copied
    accelerator.load_state()                   # the newest committed checkpoint, in any number of processes
    accelerator.end_training()                 # waits until the last save is durable

A directory holds one checkpoint, ``shardfast``, with models, optimizers, schedules, the scaler, registered objects,
positions in the data, counters and random states; accelerate writes no file there. Directories that accelerate wrote
are loaded by accelerate. What fails in the background is logged at once, and raised by the next ``save_state()``,
``load_state()`` or ``end_training()``.

Private names of accelerate 1.15.0, the version tried: ``Accelerator._models``, ``_optimizers``, ``_schedulers``,
``_dataloaders``, ``_custom_objects``, ``_save_model_state_pre_hook`` and ``_load_model_state_pre_hook``. Those of
loaders are named in ``accelerate_positions.py``.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
from accelerate.utils import DistributedType

import shardfast as sf

from .accelerate_checks import expect_options, expect_supported, expect_this_version, expect_untrained
from .accelerate_loaders import Loader
from .accelerate_places import Found, Numbered, begin, expect_new, find, forget_replaced, named_by, replace
from .accelerate_state import State
from .directories import state_of
from .places import of_rank_0
from .trackers import Saves

_log = logging.getLogger("shardfast")


class _Loop:
    """The saves and loads of one accelerator."""

    def __init__(self, accelerator: accelerate.Accelerator, pickle: bool) -> None:
        self.accelerator = accelerator
        self.state = State(accelerator)
        self.saves = Saves()
        self.pickle = pickle
        self._saved: set[Path] = set()
        self._running: set[Path] = set()

    def save(
        self, original: Callable[..., Any], output_dir: Any = None, safe_serialization: bool = True, **options: Any
    ) -> Path:
        """``Accelerator.save_state()``. No weights are written, in whatever form."""
        accelerator, numbered = self.accelerator, self._numbered()
        expect_supported(accelerator)
        if options:
            raise sf.Unsupported(
                f"save_state({', '.join(sorted(options))}=…): only DeepSpeed has options: leave it out"
            )
        self.state.warn_of_gradients()
        directory = named_by(output_dir, "save_state") if numbered is None else numbered.next
        if numbered is not None:
            expect_new(directory, is_running=directory in self._running)
            accelerator.wait_for_everyone()  # as accelerate does: all have looked before one makes it
        is_again = numbered is None and (directory in self._saved or find(directory).is_committed)
        if accelerator.is_main_process:
            begin(directory)
        self._call_save_hooks(directory)
        accelerator.project_configuration.iteration += 1
        state = self.state.to_save()
        self._saved.add(directory)
        self._running.add(directory)

        def start() -> sf.Pending:
            if accelerator.is_main_process:
                replace(directory)
            return sf.save_async(str(state_of(directory)), state, pickle=self.pickle)

        def named() -> None:
            self._running.discard(directory)
            if accelerator.is_main_process:
                forget_replaced(directory)
                if numbered is not None:
                    numbered.prune(directory, frozenset(self._running))

        self.saves.begin(start, named, most=0 if is_again else 1)
        return directory

    def load(
        self, original: Callable[..., Any], input_dir: Any = None, load_kwargs: Any = None, **options: Any
    ) -> None:
        """Loads as ``Accelerator.load_state()`` does."""
        self.saves.settle(0)
        numbered = self._numbered()
        if input_dir is None and numbered is None:
            raise ValueError("No input_dir provided and automatic checkpoint naming is disabled.")
        directory = numbered.newest() if numbered and input_dir is None else named_by(input_dir, "load_state")
        found: Found | None = of_rank_0(lambda: find(directory) if directory.is_dir() else None)
        if found is None:
            raise ValueError(f"Tried to find {directory} but folder does not exist")
        if not found.is_ours:
            original(str(directory), load_kwargs, **options)
            return
        found.expect_committed()
        is_strict = expect_options(load_kwargs, options)
        expect_supported(self.accelerator)
        models = list(self.accelerator._models)
        # accelerate has loaded FSDP's models before it calls the hooks, and hides them.
        is_sharded = self.accelerator.distributed_type == DistributedType.FSDP
        if not is_sharded:
            self._call_load_hooks(models, directory)
        self.state.load(str(found.place), models, is_strict=is_strict, pickle=self.pickle)
        if is_sharded:
            self._call_load_hooks([], directory)

    def prepare(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Prepares as ``Accelerator.prepare_data_loader()`` does."""
        loader = original(*args, **options)
        Loader(self.accelerator, loader).prepared()
        return loader

    def end(self, original: Callable[..., Any]) -> None:
        """Ends as ``Accelerator.end_training()`` does."""
        try:
            self.saves.settle(0)
        finally:
            original()

    def _numbered(self) -> Numbered | None:
        """The directory of directories that are named automatically; ``None`` if they are not."""
        project = self.accelerator.project_configuration
        if not project.automatic_checkpoint_naming:
            return None
        if self.accelerator.project_dir is None:
            raise sf.Invalid("automatic_checkpoint_naming=True without a project_dir: pass one to ProjectConfiguration")
        root = named_by(self.accelerator.project_dir, "project_dir") / "checkpoints"
        return Numbered(root, project.iteration, project.total_limit)

    def _call_save_hooks(self, directory: Path) -> None:
        accelerator = self.accelerator
        weights: list[Any] = []
        if accelerator.distributed_type != DistributedType.FSDP:
            weights = [accelerator.get_state_dict(model, unwrap=False) for model in accelerator._models]
        handed = list(weights)
        for hook in list(accelerator._save_model_state_pre_hook.values()):
            hook(accelerator._models, weights, str(directory))
        if list(map(id, weights)) != list(map(id, handed)):
            _log.info("%s: a hook took weights out of the save: models are saved whole nevertheless", directory)

    def _call_load_hooks(self, models: list[Any], directory: Path) -> None:
        for hook in list(self.accelerator._load_model_state_pre_hook.values()):
            hook(models, str(directory))


_attached: weakref.WeakSet[accelerate.Accelerator] = weakref.WeakSet()


def attach(accelerator: accelerate.Accelerator, *, pickle: bool = False) -> None:
    """Lets Shardfast save and load what an accelerator's ``save_state()`` and ``load_state()`` do.

    Replaces ``save_state``, ``load_state``, ``end_training`` and ``prepare_data_loader`` of this object. Models,
    optimizers and loaders may be prepared before or after. All processes call it.

    Args:
        accelerator: The accelerator, before it has trained.
        pickle: Pickles what has no form as data in the state of registered objects, as accelerate does with all of it.
            Such a checkpoint runs code when it is loaded.

    Raises:
        Invalid: It is attached already, or the training has begun.
        Unsupported: It uses DeepSpeed, Megatron-LM or something else that Shardfast does not save.
    """
    if accelerator in _attached:
        raise sf.Invalid("attach(): this Accelerator is attached already: attach it once")
    expect_untrained(accelerator)
    expect_supported(accelerator)
    expect_this_version()
    for loader in accelerator._dataloaders:
        Loader(accelerator, loader).prepared()
    loop = _Loop(accelerator, pickle)
    replaced: dict[str, Callable[..., Any]] = {
        "save_state": loop.save,
        "load_state": loop.load,
        "end_training": loop.end,
        "prepare_data_loader": loop.prepare,
    }
    for name, made in replaced.items():
        original = getattr(accelerator, name)
        setattr(accelerator, name, functools.wraps(original)(functools.partial(made, original)))
    _attached.add(accelerator)
