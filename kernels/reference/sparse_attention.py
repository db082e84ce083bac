"""Attention of each query to a window and to the compressed entries that were chosen for it.

One latent per key is both key and value, for all heads. Not for choosing (`selection`), nor for
the rotations before and behind it.
"""

import torch

from ..paged_rows import PagedRows
from .distinct_rows import distinct_rows
from .main_entries import dequantise_main_entries
from .tiles import RowTiles

PIECE_VALUES = 1 << 21
"""Values [queries, keys, D] of unpacked keys that exist at a time."""


def sparse_attention(
    q_THD: torch.Tensor,
    window_rows_ND: torch.Tensor,
    window_index_TW: torch.Tensor,
    entries: PagedRows | None,
    selected_TS: torch.Tensor | None,
    sink_H: torch.Tensor,
    scale: float,
    tiles: RowTiles,
) -> torch.Tensor:
    """[T, H, D] f32: one softmax over window rows, chosen entries and the sink of a head.

    `window_rows_ND`: f32, already unpacked. `window_index_TW`: int64, rows of it, -1 for none.
    `entries`: packed main entries, and `selected_TS`: int64, entries chosen, -1 for none; both
    None in a layer without. A key that is listed twice counts twice. `sink_H`: finite f32.

    p_j = exp(s_j) / (exp(sink) + sum_j exp(s_j)), s_j = scale q . k_j; o = sum_j p_j k_j, so a
    query without keys gives 0. The work is that of the W + S places of the lists, whatever the
    length of the context. A query has products of its own, whose shapes are [H, D], W + S and D:
    bits do not depend on other queries, nor on its position, so `tiles` is for back ends that
    compute several queries together; not needed here.
    """
    assert (entries is None) == (selected_TS is None), "entries and those chosen come together"
    # Behind the rows one of zeros: what -1 finds.
    padded_ND = torch.cat([window_rows_ND, window_rows_ND.new_zeros(1, window_rows_ND.shape[1])])
    listed = window_index_TW.shape[1] + (0 if selected_TS is None else selected_TS.shape[1])
    step = max(1, PIECE_VALUES // max(1, listed * q_THD.shape[2]))
    o_THD = q_THD.new_zeros(q_THD.shape)
    for first in range(0, len(q_THD) if listed else 0, step):
        some = slice(first, first + step)
        index_TK = window_index_TW[some]
        keys_TKD = padded_ND[index_TK]
        if entries is not None and selected_TS is not None:
            keys_TKD = torch.cat([keys_TKD, _unpack(entries, selected_TS[some], q_THD.dtype)], 1)
            index_TK = torch.cat([index_TK, selected_TS[some]], 1)
        o_THD[some] = _attend(q_THD[some].contiguous(), keys_TKD, index_TK < 0, sink_H, scale)
    return o_THD


def _unpack(entries: PagedRows, selected_TS: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[T, S, D]: the chosen entries, zeros where none is chosen."""
    rows_U, places_TS = distinct_rows(selected_TS)
    table_UD = dequantise_main_entries(entries.read(rows_U), dtype)
    return torch.cat([table_UD, table_UD.new_zeros(1, table_UD.shape[1])])[places_TS]


def _attend(
    q_THD: torch.Tensor,
    keys_TKD: torch.Tensor,
    is_none_TK: torch.Tensor,
    sink_H: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    queries, heads, _ = q_THD.shape
    scores_THK = q_THD.new_empty(queries, heads, keys_TKD.shape[1])
    for t in range(queries):
        torch.mm(q_THD[t], keys_TKD[t].T, out=scores_THK[t])
    scores_THK.mul_(scale).masked_fill_(is_none_TK[:, None], float("-inf"))
    top_TH = torch.maximum(scores_THK.amax(-1), sink_H)
    weights_THK = scores_THK.sub_(top_TH[..., None]).exp_()
    total_TH = weights_THK.sum(-1) + (sink_H - top_TH).exp()
    o_THD = q_THD.new_empty(q_THD.shape)
    for t in range(queries):
        torch.mm(weights_THK[t], keys_TKD[t], out=o_THD[t])
    return o_THD.div_(total_TH[..., None])
