"""The back end without ISA-L: look-ups in a 256-byte table for each coefficient.

Right on any machine, ten to twenty times slower than ISA-L, and it holds the GIL. For tests and for
machines without the library; not for serving traffic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .buffers import bytes_at
from .matrix import multiplication_table
from .multiplier import Multiplier, ShardProduct

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Pieces of this size stay in the first-level cache while all rows use them.
PIECE_BYTES = 16 * 1024


class TableMultiplier(Multiplier):
    """Products by table look-up, in plain Python and numpy."""

    @property
    def name(self) -> str:
        return "numpy"

    def prepare(self, coefficients: NDArray[np.uint8]) -> ShardProduct:
        return _TableProduct(coefficients)


class _TableProduct(ShardProduct):
    def __init__(self, coefficients: NDArray[np.uint8]) -> None:
        table = multiplication_table()
        # bytes.translate is the fastest look-up at hand: 2.5 GB/s, numpy.take 1.5 GB/s.
        self._tables = [[table[value].tobytes() for value in row] for row in coefficients]

    def apply_at(
        self,
        source_addresses: NDArray[np.uintp],
        target_addresses: NDArray[np.uintp],
        *,
        shard_bytes: int,
    ) -> None:
        for offset in range(0, shard_bytes, PIECE_BYTES):
            piece_bytes = min(PIECE_BYTES, shard_bytes - offset)
            for sources, targets in zip(source_addresses, target_addresses, strict=True):
                pieces = [
                    bytes_at(int(address) + offset, piece_bytes).tobytes() for address in sources
                ]
                for address, tables in zip(targets, self._tables, strict=True):
                    target = bytes_at(int(address) + offset, piece_bytes)
                    target[:] = _dot_product(tables, pieces, piece_bytes)


def _dot_product(tables: list[bytes], pieces: list[bytes], piece_bytes: int) -> NDArray[np.uint8]:
    total = np.zeros(piece_bytes, np.uint8)
    for table, piece in zip(tables, pieces, strict=True):
        total ^= np.frombuffer(piece.translate(table), np.uint8)
    return total
