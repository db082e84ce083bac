"""Which entries a query attends to: the best k, and the pool of candidate blocks.

Every choice is a function of one row of scores; equal scores are taken lowest position first, which
libraries leave open. Not for the scores themselves: that is `index_scores`.
"""

import torch

LARGEST_BF16 = float(torch.finfo(torch.bfloat16).max)
"""Cap of a block's score, so that the newest block (infinite) stands alone above all others."""
PIECE_VALUES = 1 << 22
"""Scores that a choice looks at together."""


def select_topk(scores_TG: torch.Tensor, k: int) -> torch.Tensor:
    """int64 [T, k]: positions of the k largest scores of each row, ascending, then -1.

    Of equal scores the lowest position is taken first. -inf is never chosen; a row with fewer than
    k other scores has the rest of its list -1. NaN, of a
    sequence that is past help, is never chosen either: rows beside it go on. O(G) for a row.
    """
    rows, width = scores_TG.shape
    chosen_TK = torch.full((rows, k), -1, dtype=torch.int64, device=scores_TG.device)
    if k == 0 or width == 0:
        return chosen_TK
    step = max(1, PIECE_VALUES // width)
    for first in range(0, rows, step):
        some = slice(first, first + step)
        is_chosen_TG = _mark_topk(scores_TG[some], min(k, width))
        row, position = is_chosen_TG.nonzero(as_tuple=True)
        counts_T = is_chosen_TG.sum(-1)
        starts_T = counts_T.cumsum(0) - counts_T
        rank = torch.arange(len(row), device=row.device) - starts_T[row]
        chosen_TK[some][row, rank] = position
    return chosen_TK


def _mark_topk(scores_TG: torch.Tensor, k: int) -> torch.Tensor:
    """bool [T, G]: which scores are chosen; 1 <= k <= G."""
    top_TK = scores_TG.topk(k, dim=-1).values
    # The library sorts NaN above everything, so a row that has one shows it first.
    if top_TK[:, 0].isnan().any():
        return _mark_topk(scores_TG.masked_fill(scores_TG.isnan(), float("-inf")), k)
    least_T1 = top_TK[:, -1:]
    is_chosen_TG = scores_TG >= least_T1
    is_chosen_TG &= scores_TG > float("-inf")
    # More than k only where several are equal to the k-th.
    crowded = (is_chosen_TG.sum(-1) > k).nonzero().squeeze(-1)
    if len(crowded):
        is_above = scores_TG[crowded] > least_T1[crowded]
        is_tied = scores_TG[crowded] == least_T1[crowded]
        room = k - is_above.sum(-1, keepdim=True)
        is_early = is_tied.cumsum(-1, dtype=torch.int32) <= room
        is_chosen_TG[crowded] = is_above | (is_tied & is_early)
    return is_chosen_TG


def select_candidate_blocks(
    scores_TG: torch.Tensor, visible_T: torch.Tensor, block_entries: int, blocks: int
) -> torch.Tensor:
    """int64 [T, blocks]: the blocks of `block_entries` entries each query may choose from.

    Ascending, then -1. A block's score is the largest of its entries below `visible_T` (int64),
    capped at the largest finite BF16; the newest block that has such an entry is always chosen.
    """
    rows, width = scores_TG.shape
    count = -(-width // block_entries)
    best_TB = scores_TG.new_full((rows, count), float("-inf"))
    step = max(1, PIECE_VALUES // max(1, width))
    for first in range(0, rows, step):
        some = slice(first, first + step)
        best_TB[some] = _best_of_blocks(scores_TG[some], visible_T[some], block_entries, count)
    newest_T1 = (visible_T[:, None] - 1).div(block_entries, rounding_mode="floor")
    block_B = torch.arange(count, device=scores_TG.device)
    best_TB = best_TB.clamp(max=LARGEST_BF16).masked_fill(block_B == newest_T1, float("inf"))
    return select_topk(best_TB, blocks)


def _best_of_blocks(
    scores_TG: torch.Tensor, visible_T: torch.Tensor, block_entries: int, count: int
) -> torch.Tensor:
    rows, width = scores_TG.shape
    padded = scores_TG.new_full((rows, count * block_entries), float("-inf"))
    position_G = torch.arange(width, device=scores_TG.device)
    padded[:, :width] = scores_TG.masked_fill(position_G >= visible_T[:, None], float("-inf"))
    return padded.view(rows, count, block_entries).amax(-1)


def candidate_entries(
    blocks_TB: torch.Tensor, visible_T: torch.Tensor, block_entries: int
) -> torch.Tensor:
    """int64 [T, B * block_entries]: the visible entries of blocks (-1 for none), then -1.

    Ascending if the blocks are, as those of `select_candidate_blocks`.
    """
    offset_E = torch.arange(block_entries, device=blocks_TB.device)
    entries_TBE = blocks_TB[..., None] * block_entries + offset_E
    is_none_TBE = (blocks_TB[..., None] < 0) | (entries_TBE >= visible_T[:, None, None])
    return entries_TBE.masked_fill(is_none_TBE, -1).flatten(1)


def topk_of_candidates(
    scores_TP: torch.Tensor, candidates_TP: torch.Tensor, k: int
) -> torch.Tensor:
    """int64 [T, k]: of ascending candidates (-1 for none) the k with the largest scores.

    The order and the rules of `select_topk`.
    """
    is_none_TP = candidates_TP < 0
    places_TK = select_topk(scores_TP.masked_fill(is_none_TP, float("-inf")), k)
    if candidates_TP.shape[1] == 0:
        return places_TK
    chosen_TK = candidates_TP.gather(1, places_TK.clamp(min=0))
    return chosen_TK.masked_fill(places_TK < 0, -1)
