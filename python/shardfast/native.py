"""The engine and what else is in Rust: the one module that imports the extension, for all others."""

from ._native import *  # noqa: F403
