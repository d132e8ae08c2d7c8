"""NumPy's global random generator."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...state.catalog import Refused


def read() -> Any:
    """The generator's state now."""
    return np.random.get_state(legacy=False)


def check(state: Any) -> None:
    """Refuses a state that :func:`write` could not set. Raises any exception for what is no such state."""
    here = np.random.get_state(legacy=False)["bit_generator"]
    if state["bit_generator"] != here:
        raise Refused(
            f"it holds the state of numpy.random on {state['bit_generator']}, and here that is on {here}: call "
            "numpy.random.set_bit_generator() first, as the program did that saved"
        )
    scratch = getattr(np.random, here)()
    np.random.RandomState(scratch).set_state(state)


def write(state: Any) -> str | None:
    """Sets the generator; there is no other one to name."""
    np.random.set_state(state)
    return None
