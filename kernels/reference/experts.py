"""Feed-forward experts: SwiGLU with limits, and the sum of those that a token goes to."""

import torch

from .activations import silu
from .tiles import RowTiles


def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """silu(min(gate, limit)) x clamp(up, -limit, limit), any shape, float32."""
    return silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


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
    """[T, E]: the weighted sum of each row's experts, in the order of their numbers; float32.

    experts_TK (int64): K different ones a row; the weight (float32) is applied before the down
    projection. Only experts that some row goes to are read.
    """
    weights_TX = x_TE.new_zeros(len(x_TE), len(gate_XFE)).scatter_(1, experts_TK, weights_TK)
    chosen = [
        (expert, gate_XFE[expert].T, up_XFE[expert].T, down_XEF[expert].T)
        for expert in experts_TK.unique().tolist()
    ]
    if tiles.count == 1:
        return _run_in_one_tile(x_TE, weights_TX, chosen, limit, tiles)
    out_TE = torch.zeros_like(x_TE)
    for expert, *matrices in chosen:
        rows = (experts_TK == expert).any(-1).nonzero().flatten()
        own = tiles.select(rows)
        x, weights = own.spread(x_TE[rows]), own.spread(weights_TX[rows, expert, None])
        parts = [_run_expert(limit, *tile, *matrices) for tile in zip(x, weights, strict=True)]
        # A row is there once, so nothing is left to chance in the order of the additions.
        out_TE.index_add_(0, rows, own.gather(torch.stack(parts)))
    return out_TE


def _run_in_one_tile(
    x_TE: torch.Tensor,
    weights_TX: torch.Tensor,
    chosen: list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]],
    limit: float,
    tiles: RowTiles,
) -> torch.Tensor:
    """The same where all rows share a tile: packing rows anew for each expert would save nothing.

    A row that an expert is not for has the weight 0 there, and 0 is added to it. Not a product with
    0, which infinity makes NaN: a row would see which experts the others go to.
    """
    (x_SE,), (weights_SX,) = tiles.spread(x_TE), tiles.spread(weights_TX)
    out_SE = torch.zeros_like(x_SE)
    for expert, *matrices in chosen:
        weights_S1 = weights_SX[:, expert, None]
        y_SE = _run_expert(limit, x_SE, weights_S1, *matrices)
        out_SE += y_SE.masked_fill_(weights_S1 == 0, 0)
    return tiles.gather(out_SE.unsqueeze(0))


def _run_expert(
    limit: float,
    x_SE: torch.Tensor,
    weights_S1: torch.Tensor,
    gate_EF: torch.Tensor,
    up_EF: torch.Tensor,
    down_FE: torch.Tensor,
) -> torch.Tensor:
    """One tile through one expert."""
    return (swiglu(x_SE @ gate_EF, x_SE @ up_EF, limit) * weights_S1) @ down_FE
