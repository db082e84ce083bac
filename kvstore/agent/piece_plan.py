"""How a fetch is cut into pieces for several workers, and what their results come to together.

Pure. Pieces are cut at span borders, because a span is what one group of nodes is asked for; a
worker with half a span would ask the same nodes for half as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..arena.run_layout import RUN_PIECES_MAX
from ..client.results import FetchEnd


class PlannedPiece(NamedTuple):
    """Blocks [first, end) of a chain."""

    first: int
    end: int

    @property
    def blocks(self) -> int:
        return self.end - self.first


class PieceResult(NamedTuple):
    """What became of a piece: so many leading blocks of it are verified."""

    blocks: int
    ended: FetchEnd
    decoded_blocks: int = 0
    left_blocks: int = 0
    rejected_shards: int = 0


def plan_pieces(
    first_block: int, end_block: int, *, workers: int, span_blocks: int
) -> list[PlannedPiece]:
    """Cut blocks [first, end) at span borders into at most `workers` pieces of nearly equal size:
    none is empty, and none has a span more than its equal share.
    """
    assert 0 <= first_block < end_block, (first_block, end_block)
    assert workers > 0, workers
    blocks = end_block - first_block
    cuts = [first_block]
    for number in range(1, min(workers, RUN_PIECES_MAX)):
        ideal = first_block + blocks * number / min(workers, RUN_PIECES_MAX)
        border = round(ideal / span_blocks) * span_blocks
        if cuts[-1] < border < end_block:
            cuts.append(border)
    return [PlannedPiece(*one) for one in zip(cuts, [*cuts[1:], end_block], strict=True)]


def combine_pieces(pieces: Sequence[PlannedPiece], results: Sequence[PieceResult]) -> PieceResult:
    """The result of a whole fetch: its blocks end where the first piece ends that is not complete,
    for the reason that this piece gives."""
    assert len(pieces) == len(results) > 0, (pieces, results)
    blocks, decoded, left = 0, 0, 0
    ended = FetchEnd.COMPLETE
    for piece, result in zip(pieces, results, strict=True):
        assert 0 <= result.blocks <= piece.blocks, (piece, result)
        blocks += result.blocks
        decoded += result.decoded_blocks
        left += result.left_blocks
        if result.blocks < piece.blocks or result.ended is not FetchEnd.COMPLETE:
            ended = result.ended
            break
    rejected = sum(result.rejected_shards for result in results)
    return PieceResult(blocks, ended, decoded, left, rejected)
