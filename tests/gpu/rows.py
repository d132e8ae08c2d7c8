"""The implementations that variants repeat: how to run each, and the variants of which one must have its bits."""

from __future__ import annotations

from typing import Any, NamedTuple

from test_replay import FUSED, Case, case_of

Flags = dict[str, Any]
FUSED_ADAM = [run for run in FUSED if run[0].startswith("Adam")]
FUSED_SGD = [run for run in FUSED if run[0] == "SGD"]
FUSED_ADAGRAD = [run for run in FUSED if run[0] == "Adagrad"]


class Row(NamedTuple):
    """An implementation of an optimizer in one dtype.

    Attributes:
        name: Of the implementation, which is the name of its first variant.
        dtype: A key of ``DTYPES``.
        runs: The class of the optimizer and its settings, of each run.
        variants: One of them must have the bits of all runs.
    """

    name: str
    dtype: str
    runs: list[tuple[str, Flags]]
    variants: list[str]

    def case(self, run: tuple[str, Flags], device: str, **options: Any) -> Case:
        kind, flags = run
        return case_of(kind, self.dtype, flags, device=device, **options)


def row(implementations: str, dtype: str, runs: list[tuple[str, Flags]], **flags: Any) -> Row:
    """A row whose variants have these names before their dtype; ``flags`` are set in each run."""
    variants = [f"{implementation}.{dtype}" for implementation in implementations.split()]
    return Row(variants[0], dtype, [(kind, {**own, **flags}) for kind, own in runs], variants)


FUSED_CUDA = [
    ("adam.fused.cuda adam.fused-separate.cuda", FUSED_ADAM),
    ("sgd.fused.cuda sgd.fused-second.cuda sgd.fused-separate.cuda", FUSED_SGD),
    ("adagrad.fused.cuda adagrad.fused-separate.cuda", FUSED_ADAGRAD),
]
"""Where a compiler may round ``a * b + c`` once or twice there are several variants."""

FOREACH: Flags = {"fused": False, "foreach": True}
FOR_LOOP: Flags = {"fused": False, "foreach": False}
BOTH_SGD = [(kind, {**flags, **way}) for way in (FOREACH, FOR_LOOP) for kind, flags in FUSED_SGD]
"""Foreach and for-loop of SGD are the same operations."""

CUDA_ROWS = [
    *(row(names, dtype, runs) for names, runs in FUSED_CUDA for dtype in ("f32", "bf16")),
    row("adam.fused.cuda adam.fused-separate.cuda", "mixed", FUSED_ADAM),
    *(row("adam.foreach.cuda", dtype, FUSED_ADAM, **FOREACH) for dtype in ("f32", "bf16")),
    *(row("adam.for-loop.cuda", dtype, FUSED_ADAM, **FOR_LOOP) for dtype in ("f32", "bf16")),
    row("adam.capturable-foreach.cuda", "f32", FUSED_ADAM, **FOREACH, capturable=True),
    row("adam.capturable-for-loop.cuda", "f32", FUSED_ADAM, **FOR_LOOP, capturable=True),
    *(row("sgd.foreach.cuda", dtype, BOTH_SGD) for dtype in ("f32", "bf16")),
    *(row("adagrad.foreach.cuda", dtype, FUSED_ADAGRAD, **FOREACH) for dtype in ("f32", "bf16")),
    *(row("adagrad.for-loop.cuda", dtype, FUSED_ADAGRAD, **FOR_LOOP) for dtype in ("f32", "bf16")),
    *(row("lion.added.cuda", dtype, [("Lion", {"added": True})]) for dtype in ("f32", "bf16")),
    *(row("lion.multiplied.cuda", dtype, [("Lion", {"added": False})]) for dtype in ("f32", "bf16")),
]

CPU_ROWS = [
    *(row("adam.fused.cpu", dtype, FUSED_ADAM) for dtype in ("f32", "bf16")),
    *(row("sgd.fused.cpu", dtype, FUSED_SGD) for dtype in ("f32", "bf16")),
    row("sgd.for-loop.cpu", "f32", BOTH_SGD),
    *(row("adagrad.fused.cpu", dtype, FUSED_ADAGRAD) for dtype in ("f32", "bf16")),
    row("lion.added.cpu", "f32", [("Lion", {"added": True})]),
    row("lion.multiplied.cpu", "f32", [("Lion", {"added": False})]),
]
"""Of a processor with AVX2, which stands in for a device: the same code runs and compares them."""
