"""Experts in batched products of one shape, planned where the choice of experts lies.

The rows of an expert are brought together in tiles of `TILE_ROWS`, filled up with zeros; which
expert a tile is of is known to the device alone. The host knows a bound of the number of tiles, and
that is how many are computed.
"""

from dataclasses import dataclass

import torch

from ..reference.experts import swiglu
from ..reference.ordered_sum import sum_in_order
from ..reference.tiles import RowTiles

TILE_ROWS = 64
BATCH_TILES = 16
"""Tiles of one product: for each of them the weights of its expert are copied together."""
PIECE_ROWS = 1 << 14
"""Rows of a long prompt that are looked at together."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertTiles:
    """Where each of R rows' K experts stands in tiles, and what the tiles hold.

    `slots_RK`: tile x TILE_ROWS + place. `rows_S`, for each slot: its row, R where it has none.
    `expert_of_tile`: any one for a tile that holds nothing. All int64; their number is a multiple
    of BATCH_TILES that follows from R, K and the number of experts alone.
    """

    slots_RK: torch.Tensor
    rows_S: torch.Tensor
    expert_of_tile: torch.Tensor


def plan_expert_tiles(experts_RK: torch.Tensor, experts: int) -> ExpertTiles:
    """Tiles of equal experts. Nothing here waits for the device."""
    rows, per_row = experts_RK.shape
    pairs, device = rows * per_row, experts_RK.device
    sorted_P, order_P = experts_RK.flatten().sort(stable=True)
    number_X = torch.arange(experts, device=device)
    first_X = torch.searchsorted(sorted_P, number_X)
    end_X = torch.searchsorted(sorted_P, number_X, right=True)
    tiles_X = (end_X - first_X + TILE_ROWS - 1) // TILE_ROWS
    tile_end_X = tiles_X.cumsum(0)
    pair_P = torch.arange(pairs, device=device)
    sorted_slots_P = (tile_end_X - tiles_X)[sorted_P] * TILE_ROWS + pair_P - first_X[sorted_P]
    slots_P = torch.empty_like(sorted_slots_P).scatter_(0, order_P, sorted_slots_P)
    # Each expert that is chosen has at most one tile that is not full.
    bound = pairs // TILE_ROWS + min(experts, pairs)
    bound = -(-bound // BATCH_TILES) * BATCH_TILES
    tile_B = torch.arange(bound, device=device)
    rows_S = torch.full((bound * TILE_ROWS,), rows, dtype=torch.int64, device=device)
    return ExpertTiles(
        slots_RK=slots_P.view(rows, per_row),
        rows_S=rows_S.scatter_(0, slots_P, pair_P // per_row),
        expert_of_tile=torch.searchsorted(tile_end_X, tile_B, right=True).clamp(max=experts - 1),
    )


def run_experts(
    x_TE: torch.Tensor,
    experts_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    gate_XFE: torch.Tensor,
    up_XFE: torch.Tensor,
    down_XEF: torch.Tensor,
    limit: float,
    tiles: RowTiles,
) -> torch.Tensor:
    """As the reference, within rounding: float32 [T, E]; `experts_TK` is ascending.

    Products are in the type of the weights.
    """
    out_TE = torch.empty_like(x_TE)
    for first in range(0, len(x_TE), PIECE_ROWS):
        some = slice(first, first + PIECE_ROWS)
        out_TE[some] = _run_piece(
            x_TE[some], experts_TK[some], weights_TK[some], gate_XFE, up_XFE, down_XEF, limit
        )
    return out_TE


def _run_piece(
    x_RE: torch.Tensor,
    experts_RK: torch.Tensor,
    weights_RK: torch.Tensor,
    gate_XFE: torch.Tensor,
    up_XFE: torch.Tensor,
    down_XEF: torch.Tensor,
    limit: float,
) -> torch.Tensor:
    plan = plan_expert_tiles(experts_RK, len(gate_XFE))
    dtype = gate_XFE.dtype
    # Behind the rows one of zeros: what an empty slot finds.
    padded_RE = torch.cat((x_RE, x_RE.new_zeros(1, x_RE.shape[1]))).to(dtype)
    weight_S1 = weights_RK.new_zeros(len(plan.rows_S), 1)
    weight_S1.scatter_(0, plan.slots_RK.view(-1, 1), weights_RK.reshape(-1, 1))
    y_SE = padded_RE.new_empty(len(plan.rows_S), x_RE.shape[1])
    for first in range(0, len(plan.expert_of_tile), BATCH_TILES):
        slots = slice(first * TILE_ROWS, (first + BATCH_TILES) * TILE_ROWS)
        expert_B = plan.expert_of_tile[first : first + BATCH_TILES]
        x_BRE = padded_RE[plan.rows_S[slots]].unflatten(0, (BATCH_TILES, TILE_ROWS))
        gate_BRF = torch.bmm(x_BRE, gate_XFE[expert_B].mT).float()
        up_BRF = torch.bmm(x_BRE, up_XFE[expert_B].mT).float()
        hidden_BRF = swiglu(gate_BRF, up_BRF, limit) * weight_S1[slots].unflatten(
            0, (BATCH_TILES, TILE_ROWS)
        )
        torch.bmm(
            hidden_BRF.to(dtype),
            down_XEF[expert_B].mT,
            out=y_SE[slots].unflatten(0, (BATCH_TILES, TILE_ROWS)),
        )
    return sum_in_order(y_SE[plan.slots_RK].float(), 1).squeeze(1)
