"""The way of parts of the host's memory that a device or a NIC cannot use as they are: through a
buffer that it can, a piece at a time. The calling thread copies, and waits for each."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

import numpy as np
import torch

from .device_errors import transfer_error
from .mover import Transfer, wait_to_end
from .pinned import PinnedMemory, PinnedRange

BOUNCE_BYTES = 8 << 20


def move_by_bounce(
    bounce: memoryview,
    part: memoryview,
    row_bytes: int,
    start: Callable[[memoryview, int, int], Transfer],
    *,
    is_in: bool,
) -> None:
    """Move `part`, which is rows of so many bytes, through `bounce`, which has room for one at
    least. `start` moves rows first .. end - 1, whose piece of the buffer it is given: from there
    if `is_in`, else to there. Raises as `start`, and TransferFailed."""
    rows = np.frombuffer(part, np.uint8).reshape(-1, row_bytes)
    step = bounce.nbytes // row_bytes
    assert step > 0, (bounce.nbytes, row_bytes)
    for first in range(0, len(rows), step):
        some = rows[first : first + step]
        piece = bounce[: some.nbytes]
        copied = np.frombuffer(piece, np.uint8).reshape(some.shape)
        if is_in:
            np.copyto(copied, some)
        wait_to_end(start(piece, first, first + len(some)))
        if not is_in:
            np.copyto(some, copied)


class PinnedBounce:
    """A page-locked buffer, taken when it is needed for the first time. For one part at a time, of
    whichever thread."""

    def __init__(self, pinned: PinnedMemory) -> None:
        self._pinned = pinned
        self._lock = Lock()
        self._buffer: PinnedRange | None = None

    def move(
        self,
        part: memoryview,
        row_bytes: int,
        start: Callable[[memoryview, PinnedRange, int, int], Transfer],
        *,
        is_in: bool,
    ) -> None:
        """As `move_by_bounce`; `start` is given the whole buffer, too. Raises TransferFailed also
        where no memory can be page-locked."""
        with self._lock:
            buffer = self._need(row_bytes)
            move_by_bounce(
                buffer.view,
                part,
                row_bytes,
                lambda piece, first, end: start(piece, buffer, first, end),
                is_in=is_in,
            )

    def close(self) -> None:
        """Let go of the buffer, which nothing uses any more."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._pinned.disown(buffer)

    def _need(self, row_bytes: int) -> PinnedRange:
        """The buffer, with room for a row. Raises TransferFailed."""
        if self._buffer is None or self._buffer.view.nbytes < row_bytes:
            size_bytes = max(row_bytes, BOUNCE_BYTES)
            try:
                memory = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                raise transfer_error(f"{size_bytes} bytes to page-lock", error) from error
            smaller, self._buffer = self._buffer, self._pinned.adopt(memory)
            if smaller is not None:  # whoever used it has waited
                self._pinned.disown(smaller)
        return self._buffer
