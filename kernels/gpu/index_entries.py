"""Index keys and queries on a CUDA device; the contract is in `kernels.reference.index_entries`.

Scales are powers of two, so times the inverse is the quotient, and the three lines of the rounding
(`fp4.place_bits`) are fused multiply-adds of the values as they are.
"""

import tilelang.language as T
import torch

from ..reference.fp4 import E2M1_MAX
from ..reference.fp8 import UE8M0_NAN
from ..reference.index_entries import AMAX_MIN, GROUP_CHANNELS
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
    unpack,
)


def quantise_index_entries(x_GJ: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.reference.index_entries`; float32 or bfloat16, on the current stream."""
    check_numbers(x_GJ, GROUP_CHANNELS)
    layout = row_layout(x_GJ.shape[-1])
    data = x_GJ.new_empty(*x_GJ.shape[:-1], layout.codes_stride, dtype=torch.uint8)
    scales = x_GJ.new_empty(*x_GJ.shape[:-1], layout.scales_stride, dtype=torch.uint8)
    quantise(FORMAT, layout, x_GJ, data, scales)
    return data, scales


def dequantise_index_entries(
    data: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """See `kernels.reference.index_entries`; to float32 or bfloat16, on the current stream."""
    check_dtype("dtype", dtype)
    expected = (*scales.shape[:-1], scales.shape[-1] * GROUP_CHANNELS // 2)
    is_bytes = data.dtype == scales.dtype == torch.uint8
    if not is_bytes or data.shape != expected or not data.shape[-1]:
        raise ValueError(
            f"data, scales: given {data.dtype} {list(data.shape)} and {scales.dtype} "
            f"{list(scales.shape)}, expected uint8 [..., J / 2] and uint8 [..., J / 32]"
        )
    check_device("data", data)
    check_device("scales", scales)
    layout = row_layout(2 * data.shape[-1])
    out = dequantise(FORMAT, layout, aligned_rows(data), aligned_rows(scales), dtype)
    return out.view(*data.shape[:-1], layout.channels)


def round_index_entries(x: torch.Tensor) -> torch.Tensor:
    """See `kernels.reference.index_entries`; float32 or bfloat16, on the current stream."""
    return dequantise_index_entries(*quantise_index_entries(x), dtype=x.dtype)


def row_layout(channels: int) -> RowLayout:
    return RowLayout(channels, channels // 2, channels // GROUP_CHANNELS, 0)


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
    is_bad = fp8.has_no_amax(top)
    code = fp8.ue8m0_code(top, AMAX_MIN, E2M1_MAX)
    scale[0] = T.cast(T.Select(is_bad, T.uint32(UE8M0_NAN), code), "uint8")
    inverse = fp8.ue8m0_inverse(code)
    unpack(magnitudes, numbers, is_short)
    fp4.encode_e2m1(words, numbers, inverse, 0.0, is_bad, codes, is_short)


FORMAT = RowFormat(GROUP_CHANNELS, 2, encode, fp4.decode_e2m1, fp8.ue8m0_value)
