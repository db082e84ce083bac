"""Scores of the lightning indexer in large products, with the bits of the reference.

As there, the channels that share a scale are multiplied together, which is exact in float32 in any
order, and everything else is elementwise in an order written out: so a score is the same on a CPU
and on a GPU, and does not depend on the shapes of the products.

`unpack` makes numbers of the keys' bytes: the reference, or a kernel that gives the same bits.
"""

from collections.abc import Callable

import torch

from ..paged_rows import PagedRows
from ..reference.index_entries import dequantise_index_entries
from ..reference.index_scores import EXACT_CHANNELS, IndexKeys
from ..reference.tiles import RowTiles

PIECE_VALUES = 1 << 27
"""Values [queries, heads, keys], or of unpacked keys, that exist at a time: 512 MiB."""


def score_entries(
    q_TIJ: torch.Tensor,
    head_weights_TI: torch.Tensor,
    keys: IndexKeys,
    visible_T: torch.Tensor,
    tiles: RowTiles,
    *,
    width: int | None = None,
    unpack: Callable[..., torch.Tensor] = dequantise_index_entries,
) -> torch.Tensor:
    """As the reference; without `width` the device is asked for it."""
    queries, heads, _ = q_TIJ.shape
    if width is None:
        width = int(visible_T.max()) if queries else 0
    scores_TG = q_TIJ.new_empty(queries, width)
    if width == 0:
        return scores_TG
    keys_GJ = unpack(_first_rows(keys.data, width), _first_rows(keys.scales, width), q_TIJ.dtype)
    position_G = torch.arange(width, device=q_TIJ.device)
    step = max(1, PIECE_VALUES // (heads * width))
    for first in range(0, queries, step):
        some = slice(first, first + step)
        q_RJ, weight_R1 = q_TIJ[some].flatten(0, 1), head_weights_TI[some].reshape(-1, 1)
        dots_RG = _dots(q_RJ, keys_GJ).relu_().mul_(weight_R1)
        piece_TG = _sum_heads(dots_RG.unflatten(0, (-1, heads)))
        is_hidden_TG = position_G >= visible_T[some, None]
        scores_TG[some] = piece_TG.masked_fill(is_hidden_TG, float("-inf"))
    return scores_TG


def score_candidates(
    q_TIJ: torch.Tensor,
    head_weights_TI: torch.Tensor,
    keys: IndexKeys,
    candidates_TP: torch.Tensor,
    tiles: RowTiles,
    *,
    unpack: Callable[..., torch.Tensor] = dequantise_index_entries,
) -> torch.Tensor:
    """As the reference; the keys of each query are unpacked for it alone."""
    queries, heads, channels = q_TIJ.shape
    listed = candidates_TP.shape[1]
    scores_TP = q_TIJ.new_empty(queries, listed)
    step = max(1, PIECE_VALUES // max(1, listed * max(heads, channels)))
    for first in range(0, queries, step):
        some = slice(first, first + step)
        rows_TP = candidates_TP[some]
        keys_TPJ = keys.read(rows_TP.clamp(min=0), q_TIJ.dtype, unpack=unpack)
        dots_TIP = _dots(q_TIJ[some], keys_TPJ).relu_().mul_(head_weights_TI[some, :, None])
        scores_TP[some] = _sum_heads(dots_TIP).masked_fill(rows_TP < 0, float("-inf"))
    return scores_TP


def _first_rows(rows: PagedRows, count: int) -> torch.Tensor:
    """Rows 0 .. count - 1, [count, row bytes]: block by block, which is less to look up."""
    blocks = -(-count // rows.rows_per_block)
    return rows.pages[rows.block_ids[:blocks]].flatten(0, 1)[:count]


def _dots(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[..., R, G] = q [..., R, J] . keys [..., G, J]; the sums of channels that share a scale are
    added one after the other."""
    assert q.shape[-1] % EXACT_CHANNELS == 0, q.shape
    q_groups, key_groups = q.split(EXACT_CHANNELS, -1), keys.split(EXACT_CHANNELS, -1)
    dots = q_groups[0] @ key_groups[0].mT
    if len(q_groups) > 1:
        part = torch.empty_like(dots)
        for q_group, key_group in zip(q_groups[1:], key_groups[1:], strict=True):
            # Not added within the product: where in the sum the library would begin is its own.
            dots += torch.matmul(q_group, key_group.mT, out=part)
    return dots


def _sum_heads(x_TIP: torch.Tensor) -> torch.Tensor:
    """[T, P]: the sum over I in halves, as in the reference; overwrites x."""
    heads = x_TIP.shape[1]
    while heads > 1:
        half = (heads + 1) // 2
        x_TIP[:, : heads - half] += x_TIP[:, half:heads]
        heads = half
    return x_TIP[:, 0]
