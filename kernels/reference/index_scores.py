"""Scores of the lightning indexer: how much each query would like to see each compressed entry.

    score(t, g) = sum over heads h of w[t, h] * relu(q[t, h] . k[g])

Both sides of the product are FP4 with a power of two for each 32 channels. So the products of 32
channels are multiples of one power of two, and at most 13 bits long when they are summed: exact in
float32 in whatever order a library sums them. The sums over the groups of 32 and over the heads
are elementwise, in an order written out here. That makes a score the same bits for the same query
and key however many of either are handed over, with no tiles of fixed shape; on another device
too. Queries that are not on the FP4 grid get scores as good as float32 gives, without that promise
(nor has it any meaning for numbers so small or large that a product leaves the range of float32).

Not for choosing by the scores: that is `selection`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..paged_rows import PagedRows
from .distinct_rows import distinct_rows
from .index_entries import dequantise_index_entries
from .tiles import RowTiles

EXACT_CHANNELS = 32
"""Channels that share a scale in both the queries and the keys."""
PIECE_KEYS = 2048
"""Keys of a long context that are unpacked at a time."""
PIECE_VALUES = 1 << 20
"""Values [queries, heads, keys] that exist at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class IndexKeys:
    """The packed index keys of one sequence and owner: entry g is row g of both."""

    data: PagedRows
    scales: PagedRows

    def read(
        self,
        rows: torch.Tensor,
        dtype: torch.dtype,
        *,
        unpack: Callable[..., torch.Tensor] = dequantise_index_entries,
    ) -> torch.Tensor:
        """Keys [*rows.shape, J] of entries `rows` (int64, each 0 or more); `unpack` makes numbers
        of bytes."""
        return unpack(self.data.read(rows), self.scales.read(rows), dtype)


def score_entries(
    q_TIJ: torch.Tensor,
    head_weights_TI: torch.Tensor,
    keys: IndexKeys,
    visible_T: torch.Tensor,
    tiles: RowTiles,
    *,
    width: int | None = None,
) -> torch.Tensor:
    """[T, width] f32: scores of the first entries of a sequence.

    `q_TIJ`: f32, on the FP4 grid (`round_index_entries`). `head_weights_TI`: f32. `visible_T`:
    int64, how many entries each query may see; the score of one it may not is -inf. `width`: the
    largest of them, which a back end on a device need not be asked for if the caller knows it.
    `tiles`: for back ends whose products round; not needed here.
    """
    queries, heads, _ = q_TIJ.shape
    visible = visible_T.tolist()
    most = max(visible, default=0)
    assert width in (None, most), (width, most)
    width = most
    scores_TG = q_TIJ.new_full((queries, width), float("-inf"))
    rows = max(1, PIECE_VALUES // (heads * PIECE_KEYS))
    for first in range(0, width, PIECE_KEYS):
        piece_P = torch.arange(first, min(first + PIECE_KEYS, width), device=q_TIJ.device)
        keys_PJ = keys.read(piece_P, q_TIJ.dtype)
        for row in range(0, queries, rows):
            some = slice(row, row + rows)
            if max(visible[some]) <= first:
                continue
            piece_TP = _score(q_TIJ[some], head_weights_TI[some], keys_PJ)
            is_hidden_TP = piece_P >= visible_T[some, None]
            scores_TG[some, first : first + len(piece_P)] = piece_TP.masked_fill(
                is_hidden_TP, float("-inf")
            )
    return scores_TG


def score_candidates(
    q_TIJ: torch.Tensor,
    head_weights_TI: torch.Tensor,
    keys: IndexKeys,
    candidates_TP: torch.Tensor,
    tiles: RowTiles,
) -> torch.Tensor:
    """[T, P] f32: scores of the entries that each query lists (int64, -1 for none: -inf).

    The rest as in `score_entries`, and the same bits for the same query and entry.
    """
    queries, heads, channels = q_TIJ.shape
    listed = candidates_TP.shape[1]
    scores_TP = q_TIJ.new_empty(queries, listed)
    rows = max(1, PIECE_VALUES // max(1, listed * max(heads, channels)))
    for row in range(0, queries, rows):
        some = slice(row, row + rows)
        rows_U, places_TP = distinct_rows(candidates_TP[some])
        table_UJ = torch.cat([keys.read(rows_U, q_TIJ.dtype), q_TIJ.new_zeros(1, channels)])
        piece_TP = _score(q_TIJ[some], head_weights_TI[some], table_UJ[places_TP])
        scores_TP[some] = piece_TP.masked_fill(places_TP < 0, float("-inf"))
    return scores_TP


def _score(q_TIJ: torch.Tensor, head_weights_TI: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[T, P] of keys [P, J] for all queries, or [T, P, J], each query's own."""
    channels = q_TIJ.shape[-1]
    assert channels % EXACT_CHANNELS == 0, channels
    q_groups = q_TIJ.split(EXACT_CHANNELS, dim=-1)
    key_groups = keys.split(EXACT_CHANNELS, dim=-1)
    dots_TIP = q_groups[0] @ key_groups[0].mT
    for q_group, key_group in zip(q_groups[1:], key_groups[1:], strict=True):
        dots_TIP += q_group @ key_group.mT
    weighed_TIP = dots_TIP.relu_().mul_(head_weights_TI[..., None])
    return _sum_heads(weighed_TIP)


def _sum_heads(x_TIP: torch.Tensor) -> torch.Tensor:
    """[T, P]: the sum over I in halves, an order that no shape can change; overwrites x."""
    heads = x_TIP.shape[1]
    while heads > 1:
        half = (heads + 1) // 2
        x_TIP[:, : heads - half] += x_TIP[:, half:heads]
        heads = half
    return x_TIP[:, 0]
