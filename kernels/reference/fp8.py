"""E4M3 values and scales of groups: what the formats of cache rows and weights have in common.

A group is a run of channels that share one scale. Two kinds of scale are in use: UE8M0, a byte b
that stands for 2^(b - 127), and E4M3 (see `main_entries`). All arithmetic is float32. Only
divisions are not exact, and a quotient that is rounded to float32 never falls on a tie of the
format that it was not on: the bytes are those of exact arithmetic, on every device. They are
divisions by tensors, therefore: by a number of Python's a GPU multiplies with its rounded inverse.
Not for FP4 values (`fp4`) and not for the order of bytes in a row (a module for each kind of row).

Infinity and NaN: a group that holds one has no amax, so its scale is NaN (byte 0xFF in UE8M0, 0x7F
in E4M3), all its codes are 0, and the whole group reads back as NaN. A bad number is never stored
as a good one. A finite one above the largest finite float32 that the format has reads back as
infinity, as in every rounding.
"""

import functools

import torch

E4M3_MAX = 448.0
UE8M0_NAN = 0xFF
UE8M0_BIAS = 127
FLOAT32_MANTISSA_BITS = 23


def split_groups(x: torch.Tensor, group_channels: int) -> torch.Tensor:
    """float32 [..., C / group, group] of x [..., C], which is a float type of at most 32 bits."""
    if not x.is_floating_point() or x.element_size() > 4:
        raise TypeError(f"x: given {x.dtype}, expected float32 or a shorter float type")
    if x.dim() == 0 or x.shape[-1] == 0 or x.shape[-1] % group_channels:
        raise ValueError(
            f"x: given shape {list(x.shape)}, expected a multiple of {group_channels} channels last"
        )
    return x.float().unflatten(-1, (-1, group_channels))


def find_amax(groups: torch.Tensor, floor: float) -> torch.Tensor:
    """Largest magnitude over the last dimension, at least `floor`; NaN if it is not finite."""
    amax = groups.abs().amax(-1)
    return torch.where(amax < torch.inf, amax.clamp(min=floor), torch.nan)


def encode_ue8m0(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """uint8 codes of the least powers of two 2^e with amax <= largest x 2^e; 0xFF for NaN.

    `amax`: float32, at least largest x 2^-126. Between normal numbers of one mantissa the bits of
    a float32, taken as an integer, differ by 2^23 for each power of two, and they are ordered as
    the numbers are: a division of integers, rounded up, gives e without a logarithm.
    """
    largest_bits = torch.tensor(largest, dtype=torch.float32).view(torch.int32).item()
    above = amax.view(torch.int32) - largest_bits
    exponent = -(-above >> FLOAT32_MANTISSA_BITS)
    return torch.where(amax.isnan(), UE8M0_NAN, exponent + UE8M0_BIAS).to(torch.uint8)


def decode_ue8m0(codes: torch.Tensor) -> torch.Tensor:
    """float32 values of uint8 codes: 2^-127 to 2^127, and NaN for 0xFF. By table, which needs no
    conversion that a device may not have."""
    return _ue8m0_values(codes.device).index_select(0, codes.flatten().int()).view(codes.shape)


def divide_by_scales(groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """groups [..., n, group] / scales [..., n]; 0 in the groups whose scale is NaN."""
    scales = scales.unsqueeze(-1)
    return (groups / scales).masked_fill(scales.isnan(), 0.0)


def scale_by_powers(
    groups: torch.Tensor, *, amax_min: float, largest: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """groups [..., n, group], each divided by a power of two, and the powers' UE8M0 codes [..., n].

    The least power that brings a group's amax, taken as `amax_min` at least, to `largest` or below.
    """
    scale_codes = encode_ue8m0(find_amax(groups, amax_min), largest)
    return divide_by_scales(groups, decode_ue8m0(scale_codes)), scale_codes


def multiply_by_powers(groups: torch.Tensor, scale_codes: torch.Tensor) -> torch.Tensor:
    """[..., n x group] = groups [..., n, group] x the powers of uint8 UE8M0 codes [..., n]."""
    return multiply_by_scales(groups, decode_ue8m0(scale_codes))


def multiply_by_scales(groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[..., n x group] = groups [..., n, group] x scales [..., n], float32; NaN scales spread."""
    return (groups * scales.unsqueeze(-1)).flatten(-2)


def encode_e4m3(x: torch.Tensor) -> torch.Tensor:
    """uint8 codes of float32 values of magnitude <= 448, to nearest even; NaN becomes 0x7F."""
    return x.to(torch.float8_e4m3fn).view(torch.uint8)


def decode_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """float32 values of uint8 codes. By table: the library's own conversion is 5 times slower."""
    return _e4m3_values(codes.device).index_select(0, codes.flatten().int()).view(codes.shape)


@functools.cache
def _ue8m0_values(device: torch.device) -> torch.Tensor:
    every_code = torch.arange(256, dtype=torch.uint8)
    return every_code.view(torch.float8_e8m0fnu).to(torch.float32).to(device)


@functools.cache
def _e4m3_values(device: torch.device) -> torch.Tensor:
    every_code = torch.arange(256, dtype=torch.uint8, device=device)
    return every_code.view(torch.float8_e4m3fn).to(torch.float32)
