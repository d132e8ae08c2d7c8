"""PyTorch's global random generators: the host's, and those of the CUDA devices that this process sees."""

from __future__ import annotations

from typing import Any

import torch

from ...state.catalog import Refused


def read() -> dict[str, object]:
    """The generators' states now; CUDA's only once it is in use, since asking would initialise it."""
    state: dict[str, object] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def check(state: Any) -> None:
    """Refuses states that :func:`write` could not set. Raises any exception for what is no such state."""
    torch.Generator("cpu").set_state(state["cpu"])
    saved = state.get("cuda", [])
    if any(one.dtype is not torch.uint8 or one.ndim != 1 for one in saved):
        raise Refused("what is stored is no state of CUDA's generators")
    here = torch.cuda.device_count() if saved else 0
    if len(saved) != here:
        raise Refused(
            f"it holds the random states of {len(saved)} CUDA devices, and this process sees {here}: load with as many "
            "(CUDA_VISIBLE_DEVICES), or take it out of the state and load with strict=False"
        )


def write(state: Any) -> str | None:
    """Sets the generators; names those that are in use here and were not at the save."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])
        return None
    return "torch on CUDA" if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
