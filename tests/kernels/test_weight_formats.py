"""Weights as checkpoints store them: codes, scales, edges, and what is refused."""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from kernels.reference.index_entries import quantise_index_entries
from kernels.reference.weight_formats import (
    dequantise_fp4_rows,
    dequantise_fp8_blocks,
    dequantise_fp8_rows,
    quantise_fp4_rows,
    quantise_fp8_blocks,
    quantise_fp8_rows,
)
from tests.golden_folder import golden_folder
from tests.kernels.exact_formats import (
    E2M1,
    E2M1_SIGN,
    E4M3,
    E4M3_SIGN,
    encode_ue8m0_group,
    pack_pairs,
    rows_of,
)
from tests.kernels.golden_quant import equal_bits

Stored = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Format:
    quantise: Callable[[torch.Tensor], Stored]
    dequantise: Callable[..., torch.Tensor]
    data_type: torch.dtype


FORMATS = {
    "fp8 blocks": Format(quantise_fp8_blocks, dequantise_fp8_blocks, torch.float8_e4m3fn),
    "fp8 rows": Format(quantise_fp8_rows, dequantise_fp8_rows, torch.float8_e4m3fn),
    "fp4 rows": Format(quantise_fp4_rows, dequantise_fp4_rows, torch.int8),
}


@pytest.fixture(params=list(FORMATS))
def stored_as(request: pytest.FixtureRequest) -> Format:
    return FORMATS[request.param]


def random_weights(rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * 1_000 + columns)
    return torch.randn(rows, columns, generator=generator) * 0.05


def as_bytes(x: torch.Tensor) -> list[list[int]]:
    found: list[list[int]] = x.view(torch.uint8).tolist()
    return found


@given(rows_of(64, E4M3))
def test_fp8_rows_are_those_of_exact_arithmetic(x: np.ndarray) -> None:
    data, scales = quantise_fp8_rows(torch.from_numpy(x)[None])
    floor = 448 * Fraction(2) ** -126
    parts = [
        encode_ue8m0_group(group.tolist(), E4M3, E4M3_SIGN, floor) for group in x.reshape(2, 32)
    ]
    assert as_bytes(data) == [parts[0][0] + parts[1][0]]
    assert as_bytes(scales) == [[scale for _, scale in parts]]


@given(rows_of(64, E2M1))
def test_fp4_rows_are_those_of_exact_arithmetic(x: np.ndarray) -> None:
    data, scales = quantise_fp4_rows(torch.from_numpy(x)[None])
    floor = 6 * Fraction(2) ** -126
    parts = [
        encode_ue8m0_group(group.tolist(), E2M1, E2M1_SIGN, floor) for group in x.reshape(2, 32)
    ]
    assert as_bytes(data) == [pack_pairs(parts[0][0] + parts[1][0])]
    assert as_bytes(scales) == [[scale for _, scale in parts]]


def test_fp4_rows_have_the_codes_of_index_entries() -> None:
    w = random_weights(7, 96)
    data, scales = quantise_fp4_rows(w)
    for found, expected in zip((data, scales), quantise_index_entries(w), strict=True):
        assert as_bytes(found) == as_bytes(expected)


@pytest.mark.parametrize(("rows", "columns"), [(32, 32), (64, 96), (1, 1), (33, 65), (50, 7)])
def test_fp8_blocks_have_a_scale_for_each_block_also_at_the_edges(rows: int, columns: int) -> None:
    w = random_weights(rows, columns)
    data, scales = quantise_fp8_blocks(w)
    assert (data.shape, data.dtype) == ((rows, columns), torch.float8_e4m3fn)
    assert scales.shape == (-(-rows // 32), -(-columns // 32))
    assert scales.dtype == torch.float8_e8m0fnu
    expected = torch.zeros(rows, columns)
    for row in range(0, rows, 32):
        for column in range(0, columns, 32):
            block = w[row : row + 32, column : column + 32].double()
            mantissa, exponent = np.frexp(block.abs().max().item() / 448)
            scale = 2.0 ** (exponent - (mantissa == 0.5))
            assert scales[row // 32, column // 32].float() == scale
            rounded = (block / scale).to(torch.float8_e4m3fn).double() * scale
            expected[row : row + 32, column : column + 32] = rounded.float()
    assert equal_bits(dequantise_fp8_blocks(data, scales), expected)


@st.composite
def weight_matrices(draw: st.DrawFn) -> torch.Tensor:
    rows, groups = draw(st.integers(1, 40)), draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    w = torch.randn(rows, 32 * groups, generator=generator)
    spread = draw(st.sampled_from([0.0, 1.0, 20.0]))
    w *= torch.exp2(spread * torch.randn(w.shape, generator=generator)).clamp(max=2.0**60)
    return w * 2.0 ** draw(st.integers(-150, 50))


@pytest.mark.parametrize("name", list(FORMATS))
@given(w=weight_matrices())
def test_quantising_what_was_dequantised_gives_the_same_values(name: str, w: torch.Tensor) -> None:
    stored_as = FORMATS[name]
    once = stored_as.dequantise(*stored_as.quantise(w))
    twice = stored_as.dequantise(*stored_as.quantise(once))
    assert equal_bits(twice, once)


def test_data_and_scales_have_the_types_that_safetensors_reads(
    stored_as: Format, tmp_path: Path
) -> None:
    data, scales = stored_as.quantise(random_weights(32, 64))
    save_file({"weight": data, "scale": scales}, tmp_path / "x.safetensors")
    loaded = load_file(tmp_path / "x.safetensors")
    assert loaded["weight"].dtype == stored_as.data_type
    assert loaded["scale"].dtype == torch.float8_e8m0fnu
    found = stored_as.dequantise(loaded["weight"], loaded["scale"])
    assert equal_bits(found, stored_as.dequantise(data, scales))


def test_bf16_weights_are_quantised_as_their_float32_values(stored_as: Format) -> None:
    w = random_weights(40, 64).bfloat16()
    for short, long in zip(stored_as.quantise(w), stored_as.quantise(w.float()), strict=True):
        assert equal_bits(short, long)
    data, scales = stored_as.quantise(w)
    short = stored_as.dequantise(data, scales, torch.bfloat16)
    assert short.dtype == torch.bfloat16
    # A code has at most 4 significant bits, BF16 has 8.
    assert equal_bits(short.float(), stored_as.dequantise(data, scales))


def test_errors_are_at_most_half_a_step(stored_as: Format) -> None:
    w = random_weights(64, 64)
    found = stored_as.dequantise(*stored_as.quantise(w))
    # The last step is an eighth of the group's largest magnitude in E4M3, a third in E2M1; the
    # scale may be near to twice what would fit.
    largest_step = w.abs().max() * (1 / 8 if stored_as.data_type != torch.int8 else 2 / 3)
    assert (found - w).abs().max() <= largest_step / 2
    assert not torch.equal(found, w)


def test_zeros_stay_zeros_of_their_sign(stored_as: Format) -> None:
    w = torch.zeros(32, 32)
    w[3, 5] = -0.0
    assert equal_bits(stored_as.dequantise(*stored_as.quantise(w)), w)


def test_rows_are_read_by_their_numbers() -> None:
    w = random_weights(50, 64)
    wanted = torch.tensor([[7, 49], [0, 7]])
    for stored_as in (FORMATS["fp8 rows"], FORMATS["fp4 rows"]):
        data, scales = stored_as.quantise(w)
        found = stored_as.dequantise(data[wanted], scales[wanted])
        assert equal_bits(found, stored_as.dequantise(data, scales)[wanted])


def test_trainable_weights_are_quantised_without_a_gradient(stored_as: Format) -> None:
    w = random_weights(32, 32).requires_grad_()
    assert not stored_as.dequantise(*stored_as.quantise(w)).requires_grad


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_no_numbers_are_refused(stored_as: Format, bad: float) -> None:
    w = random_weights(40, 64)
    w[39, 63] = bad
    with pytest.raises(ValueError, match="given infinity or NaN, expected finite numbers"):
        stored_as.quantise(w)


@pytest.mark.parametrize("shape", [(0, 32), (4, 0), (32,), (2, 4, 32)])
def test_weights_that_are_no_matrix_are_refused(stored_as: Format, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected a matrix that is not empty"):
        stored_as.quantise(torch.zeros(shape))


@pytest.mark.parametrize("name", ["fp8 rows", "fp4 rows"])
def test_columns_that_fill_no_group_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"given shape \[4, 40\], .* a multiple of 32 columns"):
        FORMATS[name].quantise(torch.zeros(4, 40))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64])
def test_weights_of_other_types_are_refused(stored_as: Format, dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"given {dtype}, expected float32"):
        stored_as.quantise(torch.zeros(32, 32, dtype=dtype))


def test_scales_of_another_shape_or_type_are_refused(stored_as: Format) -> None:
    data, scales = stored_as.quantise(random_weights(64, 64))
    with pytest.raises(ValueError, match=r"scales: given shape \[\d+, 1\], expected \[\d+, 2\]"):
        stored_as.dequantise(data, scales[:, :1].contiguous())
    with pytest.raises(TypeError, match=r"given torch\.\w+ and torch\.uint8, expected"):
        stored_as.dequantise(data, scales.view(torch.uint8))
    with pytest.raises(TypeError, match=r"given torch\.bfloat16 and torch\.float8_e8m0fnu"):
        stored_as.dequantise(data.float().bfloat16(), scales)


def test_the_golden_checkpoint_is_stored_as_these_formats_store_it() -> None:
    folder = golden_folder() / "v41"
    plain = load_file(folder / "model.safetensors")
    quantised = load_file(folder / "model_quant.safetensors")
    seen = dict.fromkeys(FORMATS, 0)
    for name, data in quantised.items():
        if name.endswith(".scale"):
            continue
        scales, is_table = quantised[name.replace(".weight", ".scale")], "engram.embed" in name
        kind = "fp8 rows" if is_table else "fp4 rows" if data.dtype == torch.int8 else "fp8 blocks"
        seen[kind] += 1
        weights = FORMATS[kind].dequantise(data, scales)
        if is_table:
            # The plain table holds the values of the stored one.
            assert torch.equal(weights, plain[name].float()), name
        else:
            expected_data, expected_scales = FORMATS[kind].quantise(plain[name])
            assert equal_bits(data, expected_data), name
            assert equal_bits(scales, expected_scales), name
        assert torch.equal(FORMATS[kind].dequantise(*FORMATS[kind].quantise(weights)), weights)
    assert seen == {"fp8 blocks": 95, "fp8 rows": 2, "fp4 rows": 228}
