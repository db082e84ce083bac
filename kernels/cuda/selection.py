"""Choices by scores, equal to the reference's, without asking the device how many there are."""

import torch

from ..reference.selection import LARGEST_BF16

NEVER = float("-inf")


def select_topk(scores_TG: torch.Tensor, k: int) -> torch.Tensor:
    """As the reference: int64 [T, k], positions of the k largest, ascending, then -1; equal scores
    by position; NaN and -inf never."""
    rows, width = scores_TG.shape
    if k == 0 or width == 0:
        return torch.full((rows, k), -1, dtype=torch.int64, device=scores_TG.device)
    known_TG = scores_TG.masked_fill(scores_TG.isnan(), NEVER)
    top_TK = known_TG.topk(min(k, width), dim=-1, sorted=False).values
    least_T1 = top_TK.amin(-1, keepdim=True)
    is_above_TG = known_TG > least_T1
    is_tied_TG = (known_TG == least_T1).logical_and_(known_TG > NEVER)
    room_T1 = k - is_above_TG.sum(-1, keepdim=True, dtype=torch.int32)
    is_early_TG = is_tied_TG.cumsum(-1, dtype=torch.int32) <= room_T1
    return _positions(is_above_TG | (is_tied_TG & is_early_TG), k)


def _positions(is_chosen_TG: torch.Tensor, k: int) -> torch.Tensor:
    """int64 [T, k]: where each row is true, at most k times; then -1."""
    rows, width = is_chosen_TG.shape
    rank_TG = is_chosen_TG.cumsum(-1, dtype=torch.int32) - 1
    # What was not chosen goes to a column of its own, which is cut off.
    rank_TG = rank_TG.masked_fill(~is_chosen_TG, k).long()
    position_TG = torch.arange(width, device=rank_TG.device).expand(rows, width)
    chosen = torch.full((rows, k + 1), -1, dtype=torch.int64, device=rank_TG.device)
    return chosen.scatter_(1, rank_TG, position_TG)[:, :k]


def select_candidate_blocks(
    scores_TG: torch.Tensor, visible_T: torch.Tensor, block_entries: int, blocks: int
) -> torch.Tensor:
    """As the reference: int64 [T, blocks]."""
    rows, width = scores_TG.shape
    count = -(-width // block_entries)
    position_G = torch.arange(width, device=scores_TG.device)
    padded = scores_TG.new_full((rows, count * block_entries), NEVER)
    padded[:, :width] = scores_TG.masked_fill(position_G >= visible_T[:, None], NEVER)
    best_TB = padded.view(rows, count, block_entries).amax(-1)
    newest_T1 = (visible_T[:, None] - 1).div(block_entries, rounding_mode="floor")
    block_B = torch.arange(count, device=scores_TG.device)
    best_TB = best_TB.clamp(max=LARGEST_BF16).masked_fill(block_B == newest_T1, float("inf"))
    return select_topk(best_TB, blocks)


def topk_of_candidates(
    scores_TP: torch.Tensor, candidates_TP: torch.Tensor, k: int
) -> torch.Tensor:
    """As the reference: int64 [T, k]."""
    is_none_TP = candidates_TP < 0
    places_TK = select_topk(scores_TP.masked_fill(is_none_TP, NEVER), k)
    if candidates_TP.shape[1] == 0:
        return places_TK
    chosen_TK = candidates_TP.gather(1, places_TK.clamp(min=0))
    return chosen_TK.masked_fill(places_TK < 0, -1)
