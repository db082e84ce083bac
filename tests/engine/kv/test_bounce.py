"""Parts of any size go through a buffer, piece after piece, in both directions."""

from __future__ import annotations

import numpy as np
import pytest

from engine.kv.bounce import move_by_bounce
from engine.kv.mover import ENDED, Transfer


@pytest.mark.parametrize(
    ("rows", "row_bytes", "pieces"),
    [
        (0, 4, []),
        (1, 4, [(0, 1)]),
        (7, 3, [(0, 3), (3, 6), (6, 7)]),
        (2, 10, [(0, 1), (1, 2)]),
        (25, 1, [(0, 10), (10, 20), (20, 25)]),
    ],
)
@pytest.mark.parametrize("is_in", [True, False], ids=["in", "out"])
def test_rows_go_through_whole_and_in_order(
    rows: int, row_bytes: int, pieces: list[tuple[int, int]], is_in: bool
) -> None:
    here = np.random.default_rng(rows).integers(0, 256, rows * row_bytes, np.uint8)
    there = here[::-1].copy()
    expected = (here if is_in else there).copy()
    begun: list[tuple[int, int]] = []

    def start(piece: memoryview, first: int, end: int) -> Transfer:
        begun.append((first, end))
        place = slice(first * row_bytes, end * row_bytes)
        device, host = there[place], np.frombuffer(piece, np.uint8)
        np.copyto(*((device, host) if is_in else (host, device)))
        return ENDED

    move_by_bounce(memoryview(bytearray(10)), here.data, row_bytes, start, is_in=is_in)
    assert begun == pieces
    assert np.array_equal(here, expected)
    assert np.array_equal(there, expected)
