"""Compressed KV entries on a CUDA device; the contract is in `kernels.reference.main_entries`.

Values are divided by the scale exactly where it matters, without a division each:

* float32: with r = 1 / scale rounded, y = x r rounded and e = x - y scale, which is exact, the sum
  y + e r is the quotient but for some 2^-45 of it before it is rounded. A tie of E2M1 times a scale
  has 7 bits at most. Of a float32 number x beside that product the quotient is by 2^-31 of it too
  far from the tie to be rounded to it, so the code is that of the exact quotient. Likewise the
  scale itself: 6 times a tie of E4M3 has 7 bits.
* bfloat16: a quotient that is no tie is at least 2^-11 away from each. So y is rounded to steps of
  2^-12, all in one fused multiply-add: what is a tie becomes one again, and nothing else does.

Magnitudes above 6 scales are taken as these, which have the last code: this is where values
saturate, and what keeps groups without an amax to finite numbers.
"""

import tilelang.language as T
import torch

from ..reference.fp4 import E2M1_MAX
from ..reference.fp8 import E4M3_MAX
from ..reference.main_entries import AMAX_MIN, GROUP_BYTES, GROUP_CHANNELS
from . import fp4, fp8
from .quantised_rows import (
    RowFormat,
    RowLayout,
    aligned_rows,
    check_device,
    check_dtype,
    check_numbers,
    dequantise,
    quantise,
    smaller,
    unpack,
)

SNAP = 2.0**11
"""float32 numbers from here to 2^12 have steps of 2^-12."""


def quantise_main_entries(x_GD: torch.Tensor) -> torch.Tensor:
    """See `kernels.reference.main_entries`; float32 or bfloat16, on the current stream."""
    check_numbers(x_GD, GROUP_CHANNELS)
    layout = row_layout(x_GD.shape[-1])
    rows = x_GD.new_empty(*x_GD.shape[:-1], layout.codes_stride, dtype=torch.uint8)
    quantise(FORMAT, layout, x_GD, rows, rows)
    return rows


def dequantise_main_entries(rows: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """See `kernels.reference.main_entries`; to float32 or bfloat16, on the current stream."""
    check_dtype("dtype", dtype)
    groups, rest = divmod(rows.shape[-1], GROUP_BYTES)
    if rows.dtype != torch.uint8 or rest or not groups:
        raise ValueError(
            f"rows: given {rows.dtype} {list(rows.shape)}, expected uint8 [..., D / 2 + D / 16]"
        )
    check_device("rows", rows)
    layout, flat = row_layout(groups * GROUP_CHANNELS), aligned_rows(rows)
    out = dequantise(FORMAT, layout, flat, flat, dtype)
    return out.view(*rows.shape[:-1], layout.channels)


def row_layout(channels: int) -> RowLayout:
    row_bytes = channels // GROUP_CHANNELS * GROUP_BYTES
    return RowLayout(channels, row_bytes, row_bytes, channels // 2)


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
    quotient, step_bits = T.alloc_var("float32"), T.alloc_var("uint32")
    rounded, divisor = T.alloc_var("float32"), T.alloc_var("float32")
    inverse, largest = T.alloc_var("float32"), T.alloc_var("uint32")
    is_bad = fp8.has_no_amax(top)
    sixth = fp8.as_float(T.uint32(fp8.bits_of(1 / E2M1_MAX)))
    quotient = fp8.divide(fp8.as_float(amax_bits(top)), T.float32(E2M1_MAX), sixth)
    step_bits = fp8.e4m3_step_bits(quotient)
    rounded = T.ieee_add(quotient, fp8.as_float(step_bits))
    divisor = T.ieee_sub(rounded, fp8.as_float(step_bits))
    code = fp8.e4m3_code(fp8.as_bits(rounded), step_bits)
    scale[0] = T.cast(T.Select(is_bad, T.uint32(fp8.E4M3_NAN), code), "uint8")
    inverse = T.ieee_frcp(divisor)
    largest = fp8.as_bits(T.ieee_mul(divisor, T.float32(E2M1_MAX)))
    if is_short:
        largest = largest | (largest >> T.uint32(16))
    for at in T.unroll(magnitudes.shape[0]):
        magnitudes[at] = smaller(magnitudes[at], largest, is_short)
    unpack(magnitudes, numbers, is_short)
    for channel in T.unroll(numbers.shape[0]):
        if is_short:
            numbers[channel] = T.ieee_fmaf(numbers[channel], inverse, T.float32(SNAP))
        else:
            numbers[channel] = fp8.divide(numbers[channel], divisor, inverse)
    offset = SNAP if is_short else 0.0
    fp4.encode_e2m1(words, numbers, T.float32(1), offset, is_bad, codes, is_short)


def amax_bits(top: fp8.Expression) -> fp8.Expression:
    """Bits of the amax, from the floor to where scales saturate; of some number without an amax."""
    most = E2M1_MAX * E4M3_MAX
    return T.min(T.max(top, T.uint32(fp8.bits_of(AMAX_MIN))), T.uint32(fp8.bits_of(most)))


FORMAT = RowFormat(GROUP_CHANNELS, 2, encode, fp4.decode_e2m1, fp8.e4m3_value)
