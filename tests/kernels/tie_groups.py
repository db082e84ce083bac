"""Groups of numbers at the ties and steps of each format of cache rows, and right beside them.

That is where a last bit decides which byte is stored. Each function gives groups [n, group].
"""

from collections.abc import Iterable
from fractions import Fraction

import numpy as np
import torch

from tests.kernels.exact_formats import E2M1, E4M3, midpoints, neighbours

INDEX_EXPONENTS = (-126, -9, 0, 100)
WINDOW_EXPONENTS = (-22, 0, 119)
"""Of scales whose codes are tried: the least, some between, and the largest."""


def main_scale_ties(dtype: torch.dtype) -> torch.Tensor:
    """[n, 16]: amax at each tie of E4M3 times 6, and the float32 numbers beside it."""
    ties = torch.tensor([float(6 * tie) for tie in midpoints(E4M3)])
    near = [np.nextafter(ties.numpy(), np.float32(to)) for to in (-np.inf, np.inf)]
    return _with_amax(torch.cat([ties, *map(torch.from_numpy, near)]), 16, dtype)


def main_code_ties() -> torch.Tensor:
    """[n, 16], float32: under every scale, the numbers at each tie of E2M1 and beside it."""
    groups = []
    for scale in E4M3[1:]:
        signed = _near(tie * scale for tie in midpoints(E2M1))
        largest = 6 * float(scale)
        groups += [[largest, *signed[at : at + 14], -largest] for at in (0, 14, 28)]
    return torch.tensor(groups)


def index_scale_steps(dtype: torch.dtype) -> torch.Tensor:
    """[n, 32]: 6 x 2^e for every exponent, and the number of the type above it."""
    return _with_amax(_edges(6, range(-130, 126), dtype), 32, dtype)


def index_code_ties(exponent: int, dtype: torch.dtype) -> torch.Tensor:
    """[n, 32]: under 2^exponent, the numbers at each tie of E2M1 and beside it."""
    values = torch.tensor(_near(midpoints(E2M1)))
    return _with_values(values, 6, 32, exponent, dtype)


def window_scale_steps(dtype: torch.dtype) -> torch.Tensor:
    """[n, 32]: 448 x 2^e for every exponent from below the floor, and the number of the type above
    it; the floor and the float32 numbers beside it."""
    floor = torch.tensor(1e-4).view(torch.int32) + torch.arange(-2, 3)
    edges = _edges(448, range(-25, 120), dtype)
    return _with_amax(torch.cat([edges, floor.int().view(torch.float32)]), 32, dtype)


def window_code_ties(exponent: int, dtype: torch.dtype) -> torch.Tensor:
    """[n, 32]: under 2^exponent, the numbers at each tie of E4M3 and beside it."""
    return _with_values(torch.tensor(_near(midpoints(E4M3))), 448, 32, exponent, dtype)


def _near(values: Iterable[Fraction]) -> list[np.float32]:
    near = [number for value in values for number in neighbours(value)]
    return [*near, *(-number for number in near)]


def _edges(largest: int, exponents: range, dtype: torch.dtype) -> torch.Tensor:
    edges = (largest * torch.exp2(torch.tensor(exponents).double())).float()
    above = edges.view(torch.int32) + (1 if dtype == torch.float32 else 1 << 16)
    return torch.cat([edges, above.view(torch.float32)])


def _with_amax(amax: torch.Tensor, group_channels: int, dtype: torch.dtype) -> torch.Tensor:
    groups = torch.zeros(len(amax), group_channels, dtype=dtype)
    groups[:, group_channels // 2 - 1] = -amax.to(dtype)
    return groups


def _with_values(
    values: torch.Tensor, largest: int, group_channels: int, exponent: int, dtype: torch.dtype
) -> torch.Tensor:
    """The values, behind the largest magnitude that the scale 1 has, times 2^exponent."""
    missing = -len(values) % (group_channels - 1)
    rows = torch.cat([values, values.new_zeros(missing)]).view(-1, group_channels - 1)
    groups = torch.cat([torch.full((len(rows), 1), float(largest)), rows], dim=1)
    return torch.ldexp(groups, torch.tensor(float(exponent))).to(dtype)
