"""Pieces cover a section once, in order, and fit into a buffer."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from engine.kv.piece_plan import Piece, StagingShape, plan_pieces

V41_LAST = 45_568


@given(st.integers(1, 300), st.integers(1, 500), st.integers(1, 4_000))
def test_pieces_cover_every_block_once_and_fit_into_a_buffer(
    blocks: int, width: int, piece_bytes: int
) -> None:
    pieces = plan_pieces(blocks, width, StagingShape(piece_bytes=piece_bytes))
    assert pieces[0].first == 0
    assert pieces[-1].end == blocks
    assert all(before.end == after.first for before, after in pairwise(pieces))
    assert all((p.end - p.first) * width <= max(piece_bytes, width) for p in pieces)


def test_kernel_has_a_block_of_threads_for_each_multiprocessor_unless_it_is_told() -> None:
    assert StagingShape().count_kernel_blocks(78) == 78
    assert StagingShape(kernel_blocks=16).count_kernel_blocks(78) == 16


def test_section_of_300_blocks_is_one_dma() -> None:
    assert plan_pieces(300, V41_LAST, StagingShape()) == [Piece(0, 300)]
