"""Rows of a sliding window's cache: E4M3 values with a UE8M0 scale for each 32 channels.

    row of D channels: [ E4M3 code of each channel: D | UE8M0 code of each group: D / 32 ]

The scale is the least power of two that brings the group's largest magnitude, taken as 1e-4 at
least, to 448 or below; codes are rounded to nearest even. A group with infinity or NaN reads back
as NaN (see `fp8`).
"""

import torch

from . import fp8

GROUP_CHANNELS = 32
AMAX_MIN = 1e-4


def quantise_window_rows(x_TD: torch.Tensor) -> torch.Tensor:
    """uint8 [..., D + D / 32] of x [..., D], D a multiple of 32."""
    codes, scale_codes = _encode(x_TD)
    return torch.cat([codes.flatten(-2), scale_codes], dim=-1)


def dequantise_window_rows(rows: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[..., D] in `dtype` of uint8 [..., D + D / 32]; float32 is exact."""
    groups, rest = divmod(rows.shape[-1], GROUP_CHANNELS + 1)
    if rows.dtype != torch.uint8 or rest or not groups:
        raise ValueError(
            f"rows: given {rows.dtype} {list(rows.shape)}, expected uint8 [..., D + D / 32]"
        )
    codes = rows[..., :-groups].unflatten(-1, (groups, GROUP_CHANNELS))
    return _decode(codes, rows[..., -groups:]).to(dtype)


def round_window_rows(x: torch.Tensor) -> torch.Tensor:
    """x [..., D] quantised and back, in the type of x; without a gradient."""
    return _decode(*_encode(x)).to(x.dtype)


@torch.no_grad()
def _encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    groups = fp8.split_groups(x, GROUP_CHANNELS)
    scaled, scale_codes = fp8.scale_by_powers(groups, amax_min=AMAX_MIN, largest=fp8.E4M3_MAX)
    return fp8.encode_e4m3(scaled), scale_codes


def _decode(codes: torch.Tensor, scale_codes: torch.Tensor) -> torch.Tensor:
    return fp8.multiply_by_powers(fp8.decode_e4m3(codes), scale_codes)
