"""Values saved of the dict that Lightning's ``Trainer`` makes: values, and stand-ins for tensors."""

from __future__ import annotations

from typing import Any

import shardfast as sf

VALUES = "lightning"
"""The key of what Lightning's dict holds beside tensors of model and optimizers."""

WEIGHTS, OPTIMIZERS, LOOPS = "state_dict", "optimizer_states", "loops"


class Elsewhere(dict[str, Any]):
    """Stands in Lightning's dict for tensors that no rank gathers; it refuses to be read.

    Attributes:
        url: The checkpoint from which they are loaded.
    """

    def __init__(self, name: str, url: str | None = None) -> None:
        super().__init__()
        self.name, self.url = name, url

    def __repr__(self) -> str:
        return f"<{self.name} of a checkpoint of shardfast>"

    def _refuse(self, *args: Any, **named: Any) -> Any:
        raise sf.Unsupported(
            f"checkpoint[{self.name!r}]: a hook or a callback reads or changes it, but shardfast gathers no tensors "
            "here: put what you need under a key of your own, and read the module instead"
        )

    __getitem__ = __setitem__ = __delitem__ = __contains__ = __iter__ = __len__ = __or__ = __ior__ = _refuse
    __reversed__ = keys = values = items = get = pop = popitem = setdefault = update = copy = clear = _refuse
    __bool__ = _refuse


def values_of(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Returns what is saved as values.

    Raises:
        Unsupported: A hook or callback put other tensors where the model's or optimizers' stand.
    """
    values = dict(checkpoint)
    places = {WEIGHTS: [values.pop(WEIGHTS, None)], OPTIMIZERS: values.get(OPTIMIZERS, [])}
    for key, found in places.items():
        if not all(isinstance(one, Elsewhere) and one.name == key for one in found):
            raise sf.Unsupported(
                f"checkpoint[{key!r}]: a hook or a callback (such as WeightAveraging) replaced it, and shardfast saves "
                "the module and the optimizers as they are: put other tensors under a key of your own"
            )
    if OPTIMIZERS in values:
        values[OPTIMIZERS] = len(values[OPTIMIZERS])
    for key, value in values.items():
        if isinstance(value, Elsewhere):
            raise sf.Unsupported(f"checkpoint[{key!r}]: a hook put {value!r} there, which has no tensors: leave it out")
    if LOOPS in values:
        fit = values[LOOPS]["fit_loop"]
        own = {key: value for key, value in fit["state_dict"].items() if key != "combined_loader"}
        values[LOOPS] = {**values[LOOPS], "fit_loop": {**fit, "state_dict": own}}
    return values


def dict_of(values: dict[str, Any], url: str) -> dict[str, Any]:
    """Lightning's dict, of values that were loaded."""
    checkpoint = {**values, WEIGHTS: Elsewhere(WEIGHTS, url)}
    if OPTIMIZERS in checkpoint:
        checkpoint[OPTIMIZERS] = [Elsewhere(OPTIMIZERS, url)] * values[OPTIMIZERS]
    return checkpoint
