"""Rows of a sliding window's cache on a CUDA device; the contract is in
`kernels.reference.window_rows`.

Codes are made by the device's own conversion to E4M3 (cvt.rn.satfinite.e4m3x2.f32): to nearest
even, subnormal numbers and the sign of zero included. Above 448 and of NaN, where conversions
differ, nothing reaches it: scaled values end at 448, and groups without an amax are zeros.
"""

import tilelang.language as T
import torch

from ..reference.fp8 import E4M3_MAX, UE8M0_NAN
from ..reference.window_rows import AMAX_MIN, GROUP_CHANNELS
from . import fp8
from .quantised_rows import (
    RowFormat,
    RowLayout,
    aligned_rows,
    check_device,
    check_dtype,
    check_numbers,
    dequantise,
    quantise,
    unpack,
)


def quantise_window_rows(x_TD: torch.Tensor) -> torch.Tensor:
    """See `kernels.reference.window_rows`; float32 or bfloat16, on the current stream."""
    check_numbers(x_TD, GROUP_CHANNELS)
    layout = row_layout(x_TD.shape[-1])
    rows = x_TD.new_empty(*x_TD.shape[:-1], layout.codes_stride, dtype=torch.uint8)
    quantise(FORMAT, layout, x_TD, rows, rows)
    return rows


def dequantise_window_rows(rows: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """See `kernels.reference.window_rows`; to float32 or bfloat16, on the current stream."""
    check_dtype("dtype", dtype)
    groups, rest = divmod(rows.shape[-1], GROUP_CHANNELS + 1)
    if rows.dtype != torch.uint8 or rest or not groups:
        raise ValueError(
            f"rows: given {rows.dtype} {list(rows.shape)}, expected uint8 [..., D + D / 32]"
        )
    check_device("rows", rows)
    layout, flat = row_layout(groups * GROUP_CHANNELS), aligned_rows(rows)
    out = dequantise(FORMAT, layout, flat, flat, dtype)
    return out.view(*rows.shape[:-1], layout.channels)


def row_layout(channels: int) -> RowLayout:
    row_bytes = channels + channels // GROUP_CHANNELS
    return RowLayout(channels, row_bytes, row_bytes, channels)


@T.macro
def encode(
    words: fp8.Registers,
    magnitudes: fp8.Registers,
    top: fp8.Expression,
    numbers: fp8.Registers,
    codes: fp8.Registers,
    scale: fp8.Registers,
    is_short: bool,
) -> None:
    """See `RowFormat`."""
    converted = T.alloc_local((codes.shape[0],), "float8_e4m3fn")
    is_bad = fp8.has_no_amax(top)
    code = fp8.ue8m0_code(top, AMAX_MIN, E4M3_MAX)
    scale[0] = T.cast(T.Select(is_bad, T.uint32(UE8M0_NAN), code), "uint8")
    inverse = fp8.ue8m0_inverse(code)
    for at in T.unroll(words.shape[0]):
        words[at] = T.Select(is_bad, T.uint32(0), words[at])
    unpack(words, numbers, is_short)
    for channel in T.unroll(codes.shape[0]):
        numbers[channel] = T.ieee_mul(numbers[channel], inverse)
    for v in T.vectorized(codes.shape[0]):
        converted[v] = T.cast(numbers[v], "float8_e4m3fn")
    for channel in T.unroll(codes.shape[0]):
        codes[channel] = T.reinterpret(converted[channel], "uint8")


@T.macro
def decode(codes: fp8.Registers, numbers: fp8.Registers) -> None:
    """See `RowFormat`."""
    for at in T.unroll(codes.shape[0]):
        numbers[at] = fp8.e4m3_value(T.cast(codes[at], "uint32"))


FORMAT = RowFormat(GROUP_CHANNELS, 1, encode, decode, fp8.ue8m0_value)
