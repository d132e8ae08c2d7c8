"""Errors by what a caller would do about them; the same in Rust and Python.

Every one names the thing, what was expected and what was found. All derive from :class:`Error`.
"""

from .native import (
    Cancelled,
    Conflict,
    Corrupt,
    Error,
    Exhausted,
    Internal,
    Invalid,
    NotFound,
    Unavailable,
    Unsupported,
)

__all__ = [
    "Cancelled",
    "Conflict",
    "Corrupt",
    "Error",
    "Exhausted",
    "Internal",
    "Invalid",
    "NotFound",
    "Unavailable",
    "Unsupported",
]
