"""From patches of the vision encoder to tokens of the text model."""

import torch
import torch.nn.functional as F

from .image_size import Grid
from .weights import AlignerWeights


def unfold_patches(x_PE: torch.Tensor, patches: Grid, downsample: int) -> torch.Tensor:
    """Squares of patches side by side: [tokens, E x downsample^2], in reading order.

    Inside a token: channel, then row and column in the square. Squares that stand over the edge are
    filled with zeros.
    """
    image_EHW = x_PE.view(patches.rows, patches.columns, -1).permute(2, 0, 1)
    right, below = -patches.columns % downsample, -patches.rows % downsample
    padded = F.pad(image_EHW, (0, right, 0, below))
    return F.unfold(padded[None], downsample, stride=downsample)[0].T


def align_patches(
    x_PE: torch.Tensor, patches: Grid, weights: AlignerWeights, downsample: int
) -> torch.Tensor:
    """Image tokens [tokens, hidden of the text model]: unfold, linear, GELU (erf), linear."""
    squares = unfold_patches(x_PE, patches, downsample)
    inner = F.gelu(F.linear(squares, weights.first, weights.first_bias))
    return F.linear(inner, weights.second, weights.second_bias)
