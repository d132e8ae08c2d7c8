"""Frameworks, one file each. An adapter is used once its framework has been imported; importing none is ours."""

from __future__ import annotations

import functools
import importlib
import sys

from ..catalog import Adapter

FRAMEWORKS = ("torch", "numpy")


def active() -> list[Adapter]:
    """The adapters of the frameworks that this process has imported, in a fixed order."""
    return [_adapter(framework) for framework in FRAMEWORKS if framework in sys.modules]


@functools.cache
def _adapter(framework: str) -> Adapter:
    adapter: Adapter = importlib.import_module(f"{__name__}.{framework}").adapter()
    return adapter
