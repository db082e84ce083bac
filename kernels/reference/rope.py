"""Rotary position embedding of the last channels, in adjacent pairs, with or without YaRN.

Frequencies and angles are float32, step by step as in the released model: at a million tokens the
rounding of a frequency turns a pair by hundredths of a radian.
"""

import math
from typing import Protocol

import torch


class Yarn(Protocol):
    """YaRN (Peng et al., 2023): RoPE stretched from `original_positions` by `factor`."""

    @property
    def factor(self) -> float: ...
    @property
    def beta_fast(self) -> float: ...
    @property
    def beta_slow(self) -> float: ...
    @property
    def original_positions(self) -> int: ...


def rope_frequencies(rope_dim: int, theta: float, yarn: Yarn | None) -> torch.Tensor:
    """float32 [R / 2]: radians a position of each pair of channels.

    theta^(-2i/R). With YaRN, pairs that turn fewer than `beta_slow` times over the original
    positions are slowed by `factor`, those above `beta_fast` turns are not, with a linear ramp over
    the pairs between; its attention factor is not part of this.
    """
    frequencies = 1.0 / theta ** (torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim)
    if yarn is None:
        return frequencies
    low = max(math.floor(_pair_of_turns(yarn.beta_fast, rope_dim, theta, yarn)), 0)
    high = min(math.ceil(_pair_of_turns(yarn.beta_slow, rope_dim, theta, yarn)), rope_dim - 1)
    pairs = torch.arange(rope_dim // 2, dtype=torch.float32)
    # A ramp without width is a step.
    kept = 1 - ((pairs - low) / (high - low if high > low else 0.001)).clamp(0, 1)
    return frequencies / yarn.factor * (1 - kept) + frequencies * kept


def _pair_of_turns(turns: float, rope_dim: int, theta: float, yarn: Yarn) -> float:
    """Which pair turns so many times over the original positions."""
    positions = yarn.original_positions / (turns * 2 * math.pi)
    return rope_dim * math.log(positions) / (2 * math.log(theta))


def rope_tables(
    frequencies: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of position x frequency: float32 [..., R / 2] each, for positions int64 [...]."""
    angles = positions.to(torch.float32).unsqueeze(-1) * frequencies
    return angles.cos(), angles.sin()


def apply_rope(
    x: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor, *, inverse: bool = False
) -> torch.Tensor:
    """Turn the last R channels of x [T, ..., D] by the tables ([T, R / 2]); the others stay.

    Channels 2i and 2i + 1 of these R are a pair: (a, b) -> (a cos - b sin, a sin + b cos).
    `inverse` turns back. T may be several dimensions, in x and in the tables alike.
    """
    rotated = 2 * cos_TR.shape[-1]
    between = (1,) * (x.ndim - cos_TR.ndim)
    cos = cos_TR.view(*cos_TR.shape[:-1], *between, rotated // 2)
    sin = sin_TR.view(*sin_TR.shape[:-1], *between, rotated // 2)
    kept, turned = x.split((x.shape[-1] - rotated, rotated), -1)
    even, odd = turned.unflatten(-1, (-1, 2)).unbind(-1)
    if inverse:
        pair = (even * cos + odd * sin, odd * cos - even * sin)
    else:
        pair = (even * cos - odd * sin, even * sin + odd * cos)
    return torch.cat((kept, torch.stack(pair, -1).flatten(-2)), -1)
