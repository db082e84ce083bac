"""x W^T for rows of activations."""

import torch

from .tiles import TILE_ROWS, RowTiles


def linear(x_TK: torch.Tensor, weight_NK: torch.Tensor, tiles: RowTiles) -> torch.Tensor:
    """[T, N] = x W^T, in the type of both; a row's bits do not depend on the other rows."""
    spread = tiles.spread(x_TK)
    weight_KN = weight_NK.T
    out = x_TK.new_empty(tiles.count, TILE_ROWS, len(weight_NK))
    for tile in range(tiles.count):
        torch.mm(spread[tile], weight_KN, out=out[tile])
    return tiles.gather(out)
