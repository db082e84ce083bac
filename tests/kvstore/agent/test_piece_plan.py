"""How a fetch is cut for several workers, and what the pieces come to together."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvstore.agent.piece_plan import PieceResult, PlannedPiece, combine_pieces, plan_pieces
from kvstore.arena.run_layout import RUN_PIECES_MAX
from kvstore.client.results import FetchEnd


@given(
    first=st.integers(0, 5000),
    blocks=st.integers(1, 5000),
    workers=st.integers(1, 40),
    span_blocks=st.sampled_from([1, 7, 64]),
)
def test_pieces_cover_the_range_once_and_are_cut_at_span_borders(
    first: int, blocks: int, workers: int, span_blocks: int
) -> None:
    end = first + blocks
    pieces = plan_pieces(first, end, workers=workers, span_blocks=span_blocks)
    assert 1 <= len(pieces) <= min(workers, RUN_PIECES_MAX)
    assert pieces[0].first == first
    assert pieces[-1].end == end
    assert all(piece.blocks > 0 for piece in pieces)
    for before, after in pairwise(pieces):
        assert before.end == after.first
        assert before.end % span_blocks == 0
    share = blocks / min(workers, RUN_PIECES_MAX)
    assert max(piece.blocks for piece in pieces) <= share + span_blocks


def test_pieces_are_equal_where_spans_allow_it() -> None:
    pieces = plan_pieces(0, 1024, workers=4, span_blocks=64)
    assert pieces == [(0, 256), (256, 512), (512, 768), (768, 1024)]


def test_fetch_within_one_span_is_one_piece() -> None:
    assert plan_pieces(65, 127, workers=8, span_blocks=64) == [(65, 127)]


PIECES = [PlannedPiece(0, 64), PlannedPiece(64, 128), PlannedPiece(128, 150)]


def test_complete_pieces_are_a_complete_fetch() -> None:
    results = [
        PieceResult(64, FetchEnd.COMPLETE, 3, 7, 1),
        PieceResult(64, FetchEnd.COMPLETE, 0, 0, 2),
        PieceResult(22, FetchEnd.COMPLETE, 1, 5, 0),
    ]
    assert combine_pieces(PIECES, results) == (150, FetchEnd.COMPLETE, 4, 12, 3)


def test_fetch_ends_where_the_first_piece_ends_that_is_not_complete() -> None:
    results = [
        PieceResult(64, FetchEnd.COMPLETE, 3, 1, 0),
        PieceResult(10, FetchEnd.TOO_FEW_SHARDS, 2, 6, 1),
        PieceResult(0, FetchEnd.DEADLINE, 0, 0, 4),
    ]
    # Rejected shards count wherever they were seen, decoded blocks only where somebody has them.
    assert combine_pieces(PIECES, results) == (74, FetchEnd.TOO_FEW_SHARDS, 5, 7, 5)


def test_complete_piece_behind_a_gap_counts_for_nothing() -> None:
    results = [
        PieceResult(0, FetchEnd.DEADLINE),
        PieceResult(64, FetchEnd.COMPLETE, 9, 9, 0),
        PieceResult(22, FetchEnd.COMPLETE, 9, 9, 0),
    ]
    assert combine_pieces(PIECES, results) == (0, FetchEnd.DEADLINE, 0, 0, 0)
