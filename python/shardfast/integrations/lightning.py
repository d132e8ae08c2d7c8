"""Lightning's trainings, saved and loaded by Shardfast.

One name in the user's script::

    import shardfast.integrations.lightning as shardfast_lightning

    trainer = lightning.Trainer(strategy=shardfast_lightning.through(DDPStrategy()), ...)
    trainer.fit(model, ckpt_path="last")

``ModelCheckpoint``, ``trainer.save_checkpoint()`` and ``ckpt_path=`` keep their meaning. A checkpoint such as
``epoch=0-step=10.ckpt`` is a directory that holds one of Shardfast's, ``shardfast``. Nothing is gathered, and Lightning
writes no file. What Lightning wrote is loaded by Lightning.

Private names of Lightning 2.6.6 that are used: ``strategy._start_method``, and those of
``lightning_strategy``.
"""

from __future__ import annotations

from typing import Any, TypeVar

import lightning
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    SingleDeviceXLAStrategy,
    Strategy,
    StrategyRegistry,
    XLAStrategy,
)

import shardfast as sf

from .lightning_strategy import METHODS, Through
from .versions import expect_version

OLDEST, TESTED = "2.6.0", "2.6.6"
_UNDERSTOOD = (DDPStrategy, FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy)
_OTHERS = (DeepSpeedStrategy, SingleDeviceXLAStrategy, XLAStrategy)
S = TypeVar("S", bound=Strategy)


def through(strategy: S | str, *, is_async: bool = True, pickle: bool = False) -> S:
    """Has a strategy save and load by Shardfast.

    Args:
        strategy: A ``DDPStrategy``, ``FSDPStrategy``, ``ModelParallelStrategy`` or ``SingleDeviceStrategy`` of
            ``lightning.pytorch``, or the name of one, such as ``"ddp"``.
        is_async: Return from a save when everything is copied that may change; otherwise when it is durable.
        pickle: Pickle what in callbacks' states, hyperparameters and hooks' data has no form as data. Such a checkpoint
            runs code when it is loaded.

    Returns:
        The strategy.

    Raises:
        Invalid: It is in use already.
        Unsupported: It is another strategy.
    """
    one: Any = StrategyRegistry.get(strategy) if isinstance(strategy, str) else strategy
    if not isinstance(one, _UNDERSTOOD) or isinstance(one, _OTHERS):
        instead = ": use the block in DeepSpeed's configuration" if isinstance(one, DeepSpeedStrategy) else ""
        known = ", ".join(kind.__name__ for kind in _UNDERSTOOD)
        raise sf.Unsupported(f"through({type(one).__name__}): expected one of lightning.pytorch's {known}{instead}")
    if getattr(one, "_start_method", "popen") not in ("popen", None):
        raise sf.Unsupported(
            f"through({type(one).__name__}(start_method={one._start_method!r})): such processes hand the weights over "
            'by files of Lightning\'s: use "ddp", or torchrun'
        )
    if isinstance(getattr(vars(one).get("save_checkpoint"), "__self__", None), Through):
        raise sf.Invalid(f"through({type(one).__name__}): shardfast saves for this strategy already: call it once")
    if one.lightning_module is not None:
        raise sf.Invalid(f"through({type(one).__name__}): a trainer has begun with it: call it before Trainer()")
    expect_version("lightning", lightning.__version__, oldest=OLDEST, tried=TESTED)
    ours = Through(one, is_async=is_async, pickle=pickle)
    for method in METHODS:
        setattr(one, method, getattr(ours, method))
    return one  # type: ignore[no-any-return]
