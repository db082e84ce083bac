"""Attention to a window and to chosen entries, `PIECE_QUERIES` queries at a time.

Every product is a batch of so many, filled up with queries that see nothing: one shape, so that the
library takes one kernel, whatever the number of queries.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from ..paged_rows import PagedRows
from ..reference.main_entries import dequantise_main_entries
from ..reference.tiles import RowTiles

PIECE_QUERIES = 64
"""Their keys are 84 MB for V4.1-Flash."""


def sparse_attention(
    q_THD: torch.Tensor,
    window_rows_ND: torch.Tensor,
    window_index_TW: torch.Tensor,
    entries: PagedRows | None,
    selected_TS: torch.Tensor | None,
    sink_H: torch.Tensor,
    scale: float,
    tiles: RowTiles,
    *,
    unpack: Callable[..., torch.Tensor] = dequantise_main_entries,
) -> torch.Tensor:
    """As the reference, within rounding: float32 [T, H, D].

    `unpack` makes numbers of the entries' bytes: the reference, or a kernel that gives the same
    bits.
    """
    assert (entries is None) == (selected_TS is None), "entries and those chosen come together"
    queries = len(q_THD)
    filling = -queries % PIECE_QUERIES
    q_THD = F.pad(q_THD, (0, 0, 0, 0, 0, filling))
    window_index_TW = F.pad(window_index_TW, (0, 0, 0, filling), value=-1)
    window_ND = _with_zeros(window_rows_ND)
    chosen = None
    if entries is not None and selected_TS is not None:
        selected_TS = F.pad(selected_TS, (0, 0, 0, filling), value=-1)
        chosen = _ChosenEntries(entries, selected_TS, q_THD.dtype, unpack)
    o_THD = torch.empty_like(q_THD)
    for first in range(0, len(q_THD), PIECE_QUERIES):
        some = slice(first, first + PIECE_QUERIES)
        index_TK = window_index_TW[some]
        keys_TKD = window_ND[index_TK]
        if chosen is not None:
            keys_TKD = torch.cat((keys_TKD, chosen.read(some)), 1)
            index_TK = torch.cat((index_TK, chosen.selected_TS[some]), 1)
        o_THD[some] = _attend(q_THD[some], keys_TKD, index_TK < 0, sink_H, scale)
    return o_THD[:queries]


class _ChosenEntries:
    """The entries that queries chose, unpacked: all of the sequence at once if the queries chose
    more than there are, else those of each query as it comes."""

    def __init__(
        self,
        entries: PagedRows,
        selected_TS: torch.Tensor,
        dtype: torch.dtype,
        unpack: Callable[..., torch.Tensor],
    ) -> None:
        self.selected_TS = selected_TS
        self._entries = entries
        self._dtype = dtype
        self._unpack = unpack
        self._table_GD: torch.Tensor | None = None
        if selected_TS.numel() > len(entries.block_ids) * entries.rows_per_block:
            packed_GB = entries.pages[entries.block_ids].flatten(0, 1)
            self._table_GD = _with_zeros(unpack(packed_GB, dtype))

    def read(self, some: slice) -> torch.Tensor:
        """[some, S, D]: zeros where none is chosen."""
        selected_TS = self.selected_TS[some]
        if self._table_GD is not None:
            return self._table_GD[selected_TS]
        packed_TSB = self._entries.read(selected_TS.clamp(min=0))
        keys_TSD = self._unpack(packed_TSB, self._dtype)
        return keys_TSD.masked_fill_(selected_TS[..., None] < 0, 0)


def _with_zeros(rows_ND: torch.Tensor) -> torch.Tensor:
    """Behind the rows one of zeros, which -1 finds."""
    return F.pad(rows_ND, (0, 0, 0, 1))


def _attend(
    q_THD: torch.Tensor,
    keys_TKD: torch.Tensor,
    is_none_TK: torch.Tensor,
    sink_H: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    scores_THK = torch.bmm(q_THD, keys_TKD.mT).mul_(scale)
    scores_THK.masked_fill_(is_none_TK[:, None], float("-inf"))
    if scores_THK.shape[-1] == 0:
        return torch.zeros_like(q_THD)
    top_TH = torch.maximum(scores_THK.amax(-1), sink_H)
    weights_THK = scores_THK.sub_(top_TH[..., None]).exp_()
    total_TH = weights_THK.sum(-1) + (sink_H - top_TH).exp()
    return torch.bmm(weights_THK, keys_TKD).div_(total_TH[..., None])
