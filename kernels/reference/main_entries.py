"""Compressed KV entries of the cache: E2M1 values with an E4M3 scale for each 16 channels.

    entry of D channels: [ E2M1 codes, two to a byte: D / 2 | E4M3 scale of each group: D / 16 ]

The even channel is in the low nibble. The scale is amax / 6 rounded to E4M3, where amax is the
group's largest magnitude, taken as 6 x 2^-9 at least, and amax / 6 as 448 at most: values above
2688 read back as 2688. Values are divided by the rounded scale, not multiplied by its inverse,
which would move a few codes at ties. A group with infinity or NaN reads back as NaN (see `fp8`).
"""

import torch

from . import fp4, fp8

GROUP_CHANNELS = 16
GROUP_BYTES = GROUP_CHANNELS // 2 + 1
AMAX_MIN = fp4.E2M1_MAX * 2.0**-9
"""That of the least E4M3 number as a scale."""


def quantise_main_entries(x_GD: torch.Tensor) -> torch.Tensor:
    """uint8 [..., D / 2 + D / 16] of x [..., D], D a multiple of 16."""
    packed, scale_codes = _encode(x_GD)
    return torch.cat([packed.flatten(-2), scale_codes], dim=-1)


def dequantise_main_entries(rows: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[..., D] in `dtype` of uint8 [..., D / 2 + D / 16]; float32 is exact."""
    groups, rest = divmod(rows.shape[-1], GROUP_BYTES)
    if rows.dtype != torch.uint8 or rest or not groups:
        raise ValueError(
            f"rows: given {rows.dtype} {list(rows.shape)}, expected uint8 [..., D / 2 + D / 16]"
        )
    packed = rows[..., :-groups].unflatten(-1, (groups, GROUP_CHANNELS // 2))
    return _decode(packed, rows[..., -groups:]).to(dtype)


def round_main_entries(x: torch.Tensor) -> torch.Tensor:
    """x [..., D] quantised and back, in the type of x; without a gradient."""
    return _decode(*_encode(x)).to(x.dtype)


@torch.no_grad()
def _encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    groups = fp8.split_groups(x, GROUP_CHANNELS)
    amax = fp8.find_amax(groups, AMAX_MIN)
    # Conversions to E4M3 differ in what they make of numbers above 448: 448 or NaN.
    scales = (amax / amax.new_full((), fp4.E2M1_MAX)).clamp(max=fp8.E4M3_MAX)
    scale_codes = fp8.encode_e4m3(scales)
    scaled = fp8.divide_by_scales(groups, fp8.decode_e4m3(scale_codes))
    return fp4.encode_e2m1(scaled), scale_codes


def _decode(packed: torch.Tensor, scale_codes: torch.Tensor) -> torch.Tensor:
    return fp8.multiply_by_scales(fp4.decode_e2m1(packed), fp8.decode_e4m3(scale_codes))
