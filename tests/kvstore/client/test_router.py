"""How a range of a chain is cut into batches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.client.router import split_into_batches
from kvstore.cluster.placement import SPAN_BLOCKS


@pytest.mark.parametrize(
    ("first", "end", "size", "expected"),
    [
        (0, 0, 10, []),
        (5, 5, 10, []),
        (0, 64, 64, [(0, 64)]),
        (0, 65, 1000, [(0, 64), (64, 65)]),
        (63, 65, 1000, [(63, 64), (64, 65)]),
        (0, 64, 30, [(0, 30), (30, 60), (60, 64)]),
        (50, 140, 40, [(50, 64), (64, 104), (104, 128), (128, 140)]),
        (0, 3, 1, [(0, 1), (1, 2), (2, 3)]),
    ],
)
def test_batches_end_at_their_size_and_at_span_borders(
    first: int, end: int, size: int, expected: list[tuple[int, int]]
) -> None:
    assert split_into_batches(first, end, batch_blocks=size) == expected


@given(st.integers(0, 400), st.integers(0, 400), st.integers(1, 300))
def test_batches_cover_each_block_once_in_order_within_one_span(
    first: int, count: int, size: int
) -> None:
    runs = split_into_batches(first, first + count, batch_blocks=size)
    covered = [block for start, end in runs for block in range(start, end)]
    assert covered == list(range(first, first + count))
    assert all(0 < end - start <= size for start, end in runs)
    assert all(start // SPAN_BLOCKS == (end - 1) // SPAN_BLOCKS for start, end in runs)
