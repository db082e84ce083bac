"""Weights as checkpoints store them: E4M3 in blocks, E2M1 in rows, each with UE8M0 scales.

    FP8 blocks: E4M3 [N, K], a scale for each 32 x 32 block: [ceil(N / 32), ceil(K / 32)]
    FP4 rows:   int8 [N, K / 2], two E2M1 codes to a byte, the even column in the low nibble; a
                scale for each 32 columns of a row: [N, K / 32]
    FP8 rows:   E4M3 [N, K], a scale for each 32 columns of a row: [N, K / 32] (n-gram tables)

Data and scales have the types with which safetensors reads them. A scale is the least power of two
that brings the largest magnitude to 448 or 6 or below, so quantising what was dequantised gives
the same values. Unlike cache rows, weights with infinity or NaN are refused: a file would carry the
fault on.
"""

import torch

from . import fp4, fp8

BLOCK = 32
AMAX_MIN_FP8 = fp8.E4M3_MAX * 2.0**-126
AMAX_MIN_FP4 = fp4.E2M1_MAX * 2.0**-126
"""Those of the least normal float32 number as a scale."""


def quantise_fp8_blocks(w_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float8_e4m3fn [N, K] and float8_e8m0fnu [ceil(N / 32), ceil(K / 32)] of w [N, K], N, K > 0.

    Raises ValueError if w has infinity or NaN.
    """
    _require_matrix(w_NK, column_multiple=1)
    groups = _split_blocks(w_NK.detach().float())
    codes, scales = _encode_fp8(groups)
    return _join_blocks(codes, w_NK.shape), scales


def dequantise_fp8_blocks(
    data_NK: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """[N, K] in `dtype` of what `quantise_fp8_blocks` gives; float32 is exact."""
    _require_types(data_NK, torch.float8_e4m3fn, scales)
    rows, columns = data_NK.shape
    _require_scales(data_NK, scales, (-(-rows // BLOCK), -(-columns // BLOCK)))
    groups = _split_blocks(data_NK.view(torch.uint8))
    values = fp8.multiply_by_powers(fp8.decode_e4m3(groups), _bytes(scales))
    return _join_blocks(values.unflatten(-1, (-1, BLOCK * BLOCK)), data_NK.shape).to(dtype)


def quantise_fp8_rows(w_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float8_e4m3fn [N, K] and float8_e8m0fnu [N, K / 32] of w [N, K], K a multiple of 32.

    Raises ValueError if w has infinity or NaN.
    """
    _require_matrix(w_NK, column_multiple=BLOCK)
    codes, scales = _encode_fp8(w_NK.detach().float().unflatten(-1, (-1, BLOCK)))
    return codes.flatten(-2), scales


def dequantise_fp8_rows(
    data: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """[..., K] in `dtype` of rows of what `quantise_fp8_rows` gives; float32 is exact."""
    _require_types(data, torch.float8_e4m3fn, scales)
    _require_scales(data, scales, (*data.shape[:-1], data.shape[-1] // BLOCK))
    groups = _bytes(data).unflatten(-1, (-1, BLOCK))
    return fp8.multiply_by_powers(fp8.decode_e4m3(groups), _bytes(scales)).to(dtype)


def quantise_fp4_rows(w_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [N, K / 2] and float8_e8m0fnu [N, K / 32] of w [N, K], K a multiple of 32.

    Raises ValueError if w has infinity or NaN.
    """
    _require_matrix(w_NK, column_multiple=BLOCK)
    groups = w_NK.detach().float().unflatten(-1, (-1, BLOCK))
    scaled, scale_codes = fp8.scale_by_powers(groups, amax_min=AMAX_MIN_FP4, largest=fp4.E2M1_MAX)
    packed = fp4.encode_e2m1(scaled)
    return packed.flatten(-2).view(torch.int8), scale_codes.view(torch.float8_e8m0fnu)


def dequantise_fp4_rows(
    data: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """[..., K] in `dtype` of rows of what `quantise_fp4_rows` gives; float32 is exact."""
    _require_types(data, torch.int8, scales)
    _require_scales(data, scales, (*data.shape[:-1], data.shape[-1] * 2 // BLOCK))
    packed = _bytes(data).unflatten(-1, (-1, BLOCK // 2))
    return fp8.multiply_by_powers(fp4.decode_e2m1(packed), _bytes(scales)).to(dtype)


def _encode_fp8(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scaled, scale_codes = fp8.scale_by_powers(groups, amax_min=AMAX_MIN_FP8, largest=fp8.E4M3_MAX)
    codes = fp8.encode_e4m3(scaled).view(torch.float8_e4m3fn)
    return codes, scale_codes.view(torch.float8_e8m0fnu)


def _split_blocks(x_NK: torch.Tensor) -> torch.Tensor:
    """[ceil(N / 32), ceil(K / 32), 32 x 32]; what lies beyond the edges is 0."""
    rows, columns = x_NK.shape
    padded = torch.nn.functional.pad(x_NK, (0, -columns % BLOCK, 0, -rows % BLOCK))
    return padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).transpose(1, 2).flatten(2)


def _join_blocks(blocks: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """[N, K] of [ceil(N / 32), ceil(K / 32), 32 x 32]."""
    padded = blocks.unflatten(2, (BLOCK, BLOCK)).transpose(1, 2).flatten(2).flatten(0, 1)
    return padded[: shape[0], : shape[1]].contiguous()


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


def _require_matrix(w_NK: torch.Tensor, *, column_multiple: int) -> None:
    if w_NK.dim() != 2 or w_NK.numel() == 0 or w_NK.shape[1] % column_multiple:
        raise ValueError(
            f"weights: given shape {list(w_NK.shape)}, expected a matrix that is not empty, with "
            f"a multiple of {column_multiple} columns"
        )
    if not w_NK.is_floating_point() or w_NK.element_size() == 8:
        raise TypeError(f"weights: given {w_NK.dtype}, expected float32 or a shorter float type")
    if not w_NK.float().isfinite().all():
        raise ValueError("weights: given infinity or NaN, expected finite numbers")


def _require_types(data: torch.Tensor, dtype: torch.dtype, scales: torch.Tensor) -> None:
    if data.dtype != dtype or scales.dtype != torch.float8_e8m0fnu:
        raise TypeError(
            f"data, scales: given {data.dtype} and {scales.dtype}, "
            f"expected {dtype} and {torch.float8_e8m0fnu}"
        )


def _require_scales(data: torch.Tensor, scales: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(scales.shape) != shape:
        raise ValueError(
            f"scales: given shape {list(scales.shape)}, expected {list(shape)} for data of shape "
            f"{list(data.shape)}"
        )
