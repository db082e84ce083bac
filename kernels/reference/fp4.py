"""E2M1 codes: 4-bit numbers 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, two to a byte.

Bit 3 of a code is the sign, bits 0 to 2 the place in that list. The even channel is in the low
nibble of a byte. Not for scales: E2M1 has no NaN and no infinity, which are the scale's to carry.
"""

import functools

import torch

E2M1_MAX = 6.0
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """uint8 [..., C / 2] of float32 x [..., C]: the nearest code, ties to even, 6 for all above 6.

    Codes are steps of 0.5 up to 2, of 1 up to 4 and of 2 up to 6. Over the code's place each of the
    three is a line, the lowest line holds, and lines cross at whole numbers: so the rounded
    place is the least of the rounded lines. Each is rounded before the addition, which is exact
    then. -0.0 and negative numbers that round to 0 keep their sign.
    """
    magnitude = x.abs()
    place = torch.minimum((magnitude * 2).round_(), magnitude.round().add_(2))
    place = torch.minimum(place, (magnitude / 2).round_().add_(4)).clamp_(max=7)
    codes = place.to(torch.uint8) | (torch.signbit(x).to(torch.uint8) << 3)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def decode_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """float32 [..., C] of uint8 [..., C / 2]."""
    pairs = _value_pairs(packed.device).index_select(0, packed.flatten().int())
    return pairs.view(torch.float32).view(*packed.shape[:-1], packed.shape[-1] * 2)


@functools.cache
def _value_pairs(device: torch.device) -> torch.Tensor:
    """For each byte its two float32 values, as one int64 of the same bits: one gather for two."""
    magnitudes = torch.tensor(E2M1_MAGNITUDES)
    values = torch.cat([magnitudes, -magnitudes])
    byte = torch.arange(256)
    pairs = torch.stack([values[byte & 15], values[byte >> 4]], dim=-1)
    return pairs.view(torch.int64).flatten().to(device)
