"""What the hooks of captures ahead cost the host in a step, within a window and outside of it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import shardfast as sf
import torch
from figures import Figures, median, ratio, spread, summary, table
from ranks import Settings
from shardfast.capture import in_flight

TENSORS = 1_000
ELEMENTS = 512
"""Of a tensor: few, so that the copies of gradients, which a device makes beside the training, take little."""

EVERY, OVER = 12, 6


def measure(settings: Settings) -> Figures:
    """Times both hooks of each step, for parameters of fused AdamW in fp32."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(ELEMENTS)) for _ in range(TENSORS)])
    optimizer = torch.optim.AdamW(model, lr=1e-3, fused=True)
    state = {"model": model, "optimizer": optimizer}
    place = settings.where / "hooks"
    steps = EVERY * (3 if settings.quick else 12)
    hooks: dict[str, list[float]] = {"in a window": [], "outside of windows": []}
    beside: dict[str, list[float]] = {name: [] for name in hooks}
    with sf.Checkpointer(str(place), every=sf.steps(EVERY), keep=sf.last(1), over=OVER) as ckpt:
        for step in range(1, steps + 1):
            for parameter in model:
                parameter.grad = torch.randn_like(parameter)
            ahead, spent, took = ckpt.capture, [0.0], [0.0]
            if ahead._window is None:
                timed(in_flight._stepping, spent, optimizer)
                timed(in_flight._stepped, spent, optimizer)
                timed(optimizer.step, took)
                where = "outside of windows"
            else:
                with (
                    patch.object(ahead, "stepping", partial(timed, ahead.stepping, spent)),
                    patch.object(ahead, "stepped", partial(timed, ahead.stepped, spent)),
                ):
                    timed(optimizer.step, took)
                took[0] -= spent[0]
                where = "in a window"
            # Before the second save the hooks are not there, or see their first window.
            if step > 2 * EVERY:
                hooks[where].append(spent[0] * 1e3)
                beside[where].append(took[0] * 1e3)
            ckpt.step(step, state)
        captured = str(ckpt.capture)
        copies_ms = ckpt.capture.figures()["gradient_ms"] / (OVER - 1)
    shutil.rmtree(place, ignore_errors=True)
    torch.set_num_threads(threads)
    rows = [
        [name, f"{median(found):.3f} {spread(found, 3)}", f"{median(of):.2f} {spread(of)}", len(found)]
        for (name, found), of in zip(hooks.items(), (ratio(hooks[name], beside[name]) for name in hooks), strict=True)
    ]
    table(f"both hooks of a step, {TENSORS} tensors", ("", "ms", "of the step itself", "steps"), rows)
    print(f"  of a step in a window, the copies of gradients take {copies_ms:.3f} ms: not in the hooks on a device")
    print(f"  {captured}")
    figures = {f"{name}, ms": summary(found) for name, found in hooks.items()}
    return figures | {"copies of gradients, ms": copies_ms, "captured": captured}


def timed(call: Callable[..., object], spent: list[float], *arguments: object) -> None:
    """Calls it, and adds the seconds to ``spent``."""
    begun = time.perf_counter()
    call(*arguments)
    spent[0] += time.perf_counter() - begun
