"""x W^T in products of one height.

A library picks a kernel, and with it the order of the sums, by the shapes of a product. Here the
height is always `TILE_ROWS`: a long prompt makes a call for each so many rows, and a token alone
pays for all of them, which on a GPU is little, since the weights are to be read anyway. Within one
kernel the rows are alike; unlike the reference, where a row's place is fixed too, that is what
libraries do and not what they promise (tests/kernels/cuda has a test on the card).
"""

import torch
import torch.nn.functional as F

from ..reference.tiles import RowTiles

TILE_ROWS = 256


def linear(x_TK: torch.Tensor, weight_NK: torch.Tensor, tiles: RowTiles) -> torch.Tensor:
    """[T, N] = x W^T in the type of x; the product is in the type of the weight, which may be
    bfloat16: sums are float32, x and the result are rounded."""
    rows = len(x_TK)
    count = -(-rows // TILE_ROWS)
    padded = F.pad(x_TK.to(weight_NK.dtype), (0, 0, 0, count * TILE_ROWS - rows))
    out = padded.new_empty(len(padded), len(weight_NK))
    weight_KN = weight_NK.T
    for some_x, some_out in zip(padded.split(TILE_ROWS), out.split(TILE_ROWS), strict=True):
        torch.mm(some_x, weight_KN, out=some_out)
    return out[:rows].to(x_TK.dtype)
