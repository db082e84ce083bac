"""Scratch memory for parity and tails, used again and again.

Fresh memory costs a page fault for every 4 KiB, more than receiving into it; so a few areas are
kept, and only the largest are worth keeping.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

KEPT_AREAS_MAX = 4


class ScratchPool:
    """Lends byte areas. For one event loop; nothing is zeroed."""

    def __init__(self) -> None:
        self._free: list[NDArray[np.uint8]] = []

    @contextmanager
    def lend(self, size_bytes: int) -> Iterator[tuple[memoryview, int]]:
        """A writable area of at least `size_bytes` and its address, for the time of the block."""
        fitting = [area for area in self._free if area.nbytes >= size_bytes]
        if fitting:
            area = min(fitting, key=lambda one: one.nbytes)
            self._free = [one for one in self._free if one is not area]
        else:
            area = np.empty(max(size_bytes, 1), np.uint8)
        try:
            yield area.data, area.ctypes.data
        finally:
            self._free.append(area)
            self._free.sort(key=lambda one: -one.nbytes)
            del self._free[KEPT_AREAS_MAX:]
