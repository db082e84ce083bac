"""Index keys and queries: E2M1 values with a UE8M0 scale for each 32 channels.

    data of J channels: J / 2 bytes, the even channel in the low nibble
    scales: J / 32 bytes, kept apart from the data: a block holds all data, then all scales

The scale is the least power of two that brings the group's largest magnitude, taken as 6 x 2^-126
at least, to 6 or below. A group with infinity or NaN reads back as NaN (see `fp8`).
"""

import torch

from . import fp4, fp8

GROUP_CHANNELS = 32
AMAX_MIN = fp4.E2M1_MAX * 2.0**-126
"""That of the least normal float32 number as a scale."""


def quantise_index_entries(x_GJ: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Data uint8 [..., J / 2] and scales uint8 [..., J / 32] of x [..., J]; 32 divides J."""
    packed, scale_codes = _encode(x_GJ)
    return packed.flatten(-2), scale_codes


def dequantise_index_entries(
    data: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """[..., J] in `dtype` of data uint8 [..., J / 2], scales uint8 [..., J / 32]; exact in
    float32."""
    expected = (*scales.shape[:-1], scales.shape[-1] * GROUP_CHANNELS // 2)
    is_bytes = data.dtype == scales.dtype == torch.uint8
    if not is_bytes or data.shape != expected or not data.shape[-1]:
        raise ValueError(
            f"data, scales: given {data.dtype} {list(data.shape)} and {scales.dtype} "
            f"{list(scales.shape)}, expected uint8 [..., J / 2] and uint8 [..., J / 32]"
        )
    return _decode(data.unflatten(-1, (-1, GROUP_CHANNELS // 2)), scales).to(dtype)


def round_index_entries(x: torch.Tensor) -> torch.Tensor:
    """x [..., J] quantised and back, in the type of x; without a gradient."""
    return _decode(*_encode(x)).to(x.dtype)


@torch.no_grad()
def _encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    groups = fp8.split_groups(x, GROUP_CHANNELS)
    scaled, scale_codes = fp8.scale_by_powers(groups, amax_min=AMAX_MIN, largest=fp4.E2M1_MAX)
    return fp4.encode_e2m1(scaled), scale_codes


def _decode(packed: torch.Tensor, scale_codes: torch.Tensor) -> torch.Tensor:
    return fp8.multiply_by_powers(fp4.decode_e2m1(packed), scale_codes)
