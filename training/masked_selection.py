"""Which compressed entries each query attends to, as masks over all entries.

The choices of `kernels.reference.selection`, ties lowest position first, but with fixed shapes and
no look at any number: a device can capture them into a graph. Nothing here has a gradient.
"""

import torch

LARGEST_BF16 = float(torch.finfo(torch.bfloat16).max)


def mark_topk(scores: torch.Tensor, k: int) -> torch.Tensor:
    """bool [..., G]: the k largest of each row; -inf is never chosen."""
    is_finite = scores > float("-inf")
    if k >= scores.shape[-1]:
        return is_finite
    least = scores.topk(k, dim=-1).values[..., -1:]
    is_above = scores > least
    is_tied = scores == least
    room = k - is_above.sum(-1, keepdim=True)
    is_early = is_tied.cumsum(-1, dtype=torch.int32) <= room
    return (is_above | (is_tied & is_early)) & is_finite


def mark_visible(tokens: int, entries: int, ratio: int, device: torch.device) -> torch.Tensor:
    """bool [T, G]: the query at p sees entries below floor((p + 1) / ratio)."""
    visible = (torch.arange(tokens, device=device) + 1) // ratio
    return torch.arange(entries, device=device) < visible.unsqueeze(-1)


def mark_pool(
    scores: torch.Tensor, is_visible: torch.Tensor, block_entries: int, blocks: int
) -> torch.Tensor:
    """bool [..., T, G]: entries of the best blocks of each query, the newest one among them.

    `scores` [..., T, G] are -inf where `is_visible` [T, G] is not.
    """
    entries = scores.shape[-1]
    padded = torch.nn.functional.pad(scores, (0, -entries % block_entries), value=float("-inf"))
    best = padded.unflatten(-1, (-1, block_entries)).amax(-1).clamp(max=LARGEST_BF16)
    newest = (is_visible.sum(-1, keepdim=True) - 1).div(block_entries, rounding_mode="floor")
    is_newest = torch.arange(best.shape[-1], device=scores.device) == newest
    is_chosen = mark_topk(best.masked_fill(is_newest, float("inf")), blocks)
    is_of_chosen = is_chosen.unsqueeze(-1).expand(*is_chosen.shape, block_entries).flatten(-2)
    return is_of_chosen[..., :entries] & is_visible
