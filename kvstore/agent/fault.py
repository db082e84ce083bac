"""What is a fault of our own: after one, neither an agent nor a worker can be trusted any more."""

from __future__ import annotations

from ..errors import StoreError


def is_fault(error: object) -> bool:
    """Whether an error is none of ours that are typed, and none of the system's: those are part of
    operation, and end nothing but what they happened to."""
    return isinstance(error, Exception) and not isinstance(error, (OSError, StoreError))
