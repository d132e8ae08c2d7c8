"""Frameworks, one package each. An adapter is used once its framework was imported: saves and loads import none."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ..state.catalog import Adapter, Objects
from ..state.generators import RandomGenerators

if TYPE_CHECKING:
    from ..state.stateful import Stateful

FRAMEWORKS = ("torch", "numpy")
"""Those with tensors of their own. A new whole tensor is one of the first that is imported."""

BUILT_ON_OTHERS = {
    "megatron.core.transformer.module": "megatron",
    "deepspeed.runtime.engine": "deepspeed",
    "torch.distributed.fsdp": "torch.fsdp1",
}
"""Adapters of frameworks whose tensors are another's, by the module that tells that they are in use. The most special
one stands first, and is asked first."""

LOADERS = {
    "torchdata.stateful_dataloader": "torchdata",
    "grain._src.python.dataset.dataset": "grain",
    "megatron.energon.savable_loader": "energon",
}
"""The files below ``data/`` that know data loaders, by the module that tells that such are in use."""


def active() -> list[Adapter]:
    """The adapters of the frameworks that this process has imported, in a fixed order."""
    return [_adapter(framework) for framework in FRAMEWORKS if framework in sys.modules]


def built_on_others() -> list[Objects]:
    """Returns the adapters of modules and optimizers of frameworks built on others that this process has imported."""
    return [_objects(name) for module, name in BUILT_ON_OTHERS.items() if module in sys.modules]


def installed() -> dict[str, tuple[str, bool]]:
    """Imports each framework: its version and ``True``, or why it cannot be imported and ``False``."""
    found = {}
    for name in FRAMEWORKS:
        try:
            found[name] = str(importlib.import_module(name).__version__), True
        except Exception as error:  # a broken installation fails in any way
            found[name] = f"{type(error).__name__}: {error}", False
    return found


def stands_for(value: object) -> Stateful | None:
    """Returns a stand-in for a data loader in pieces, its workers; ``None`` for other objects."""
    known = [_data(file) for module, file in LOADERS.items() if module in sys.modules]
    return next((found for found in (one.stateful_of(value) for one in known) if found is not None), None)


def call_in_worker(then: Callable[[], None]) -> None:
    """Calls ``then`` if this process, which was just forked, becomes a worker of a data loader of PyTorch.

    It comes after PyTorch has set handlers of signals in the worker.
    """
    handling, name = sys.modules.get("torch.utils.data._utils.signal_handling"), "_set_worker_signal_handlers"
    set_handlers = getattr(handling, name, None)
    if set_handlers is not None:

        def both() -> None:
            set_handlers()
            then()

        setattr(handling, name, both)


def expect_unused(value: object) -> None:
    """Refuses a load into a data loader, or a sampler of ours, whose iterator the program would go on with.

    Raises:
        Refused: It is one.
    """
    loaders = _loaders()
    if loaders is not None:
        loaders.expect_unused(value)
    own = getattr(value, "expect_unused", None)
    if callable(own):
        own()


def expect_positions(values: Iterable[tuple[str, object]]) -> None:
    """Refuses samplers of ours whose position is not known; see :func:`shardfast.data.sampler.expect_positions`."""
    if "shardfast.data.sampler" in sys.modules:
        _data("sampler").expect_positions(values)


def expect_save(values: Iterable[object], steps: int) -> None:
    """Lets data loaders among the values prepare for a save that is due so many steps from now."""
    loaders = _loaders()
    for value in values if loaders is not None else ():
        loaders.expect_save(value, steps)


def expect_as_saved(value: object, state: object) -> None:
    """Refuses a state that was saved by a data loader with other workers, where nothing stands for it.

    Raises:
        Refused: It was.
    """
    loaders = _loaders()
    if loaders is not None:
        loaders.expect_as_saved(value, state)


def random_generators() -> dict[str, RandomGenerators]:
    """The modules for the global random generators of the frameworks that this process has imported, by framework."""
    names = [framework for framework in FRAMEWORKS if framework in sys.modules]
    return {name: importlib.import_module(f"{__name__}.{name}.random") for name in names}


@functools.cache
def _adapter(framework: str) -> Adapter:
    adapter: Adapter = importlib.import_module(f"{__name__}.{framework}").adapter()
    return adapter


def _loaders() -> Any:
    """The module for torchdata's loaders, once that is imported."""
    return _data("torchdata") if "torchdata.stateful_dataloader" in sys.modules else None


@functools.cache
def _data(file: str) -> Any:
    return importlib.import_module(f"shardfast.data.{file}")


@functools.cache
def _objects(name: str) -> Objects:
    objects: Objects = importlib.import_module(f"{__name__}.{name}").objects()
    return objects
