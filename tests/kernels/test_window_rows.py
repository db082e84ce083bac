"""Window rows: E4M3 with a power of two for each 32 channels, bit for bit."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given

from kernels.reference.window_rows import (
    dequantise_window_rows,
    quantise_window_rows,
    round_window_rows,
)
from tests.kernels.exact_formats import (
    E4M3,
    E4M3_SIGN,
    decode_values,
    encode_row,
    encode_ue8m0_group,
    midpoints,
    neighbours,
    rows_of,
)
from tests.kernels.golden_quant import (
    equal_bits,
    folder_array,
    kept_codes,
    kept_float32,
    kept_inputs,
)

FLOOR = Fraction(1, 10_000)


def exact_row(x: np.ndarray) -> tuple[list[int], list[int]]:
    return encode_row(x, 32, lambda group: encode_ue8m0_group(group, E4M3, E4M3_SIGN, FLOOR))


def group_of(*values: float) -> torch.Tensor:
    """One row of one group, filled up with zeros."""
    return torch.tensor([[*values, *[0.0] * (32 - len(values))]])


def test_rows_have_codes_first_and_scales_last() -> None:
    x = torch.zeros(1, 64)
    x[0, 1], x[0, 33] = 448.0, -1.0
    row = quantise_window_rows(x)[0].tolist()
    assert len(row) == 64 + 2
    assert row[:3] == [0, 0x7E, 0]  # 448 is the last number of E4M3
    assert row[33] == 0x80 | 0x78  # -256 x 2^-8
    assert row[64:] == [127, 127 - 8]
    assert dequantise_window_rows(quantise_window_rows(x)).equal(x)


def test_rows_have_the_bytes_of_the_kept_golden_vectors() -> None:
    rows = quantise_window_rows(kept_inputs("window"))
    assert equal_bits(rows[:, :32], kept_codes("window", "codes"))
    assert equal_bits(rows[:, 32:], kept_codes("window", "scale_codes"))
    assert equal_bits(round_window_rows(kept_float32("x")), kept_float32("window"))


def test_rows_have_the_bytes_of_every_golden_vector() -> None:
    rows = quantise_window_rows(folder_array("swa_fp8_ue8m0_x"))
    assert equal_bits(rows[:, :512], folder_array("swa_fp8_ue8m0_q_byte"))
    assert equal_bits(rows[:, 512:], folder_array("swa_fp8_ue8m0_scale_byte"))
    assert equal_bits(dequantise_window_rows(rows), folder_array("swa_fp8_ue8m0_dequant_f32"))
    short = dequantise_window_rows(rows, torch.bfloat16)
    assert equal_bits(short.float(), folder_array("swa_fp8_ue8m0_dequant_bf16"))


def test_float32_rows_read_back_as_in_every_golden_vector() -> None:
    assert equal_bits(round_window_rows(folder_array("f32in_x")), folder_array("f32in_swa"))


def test_rows_are_the_records_that_another_engine_stores() -> None:
    rows = quantise_window_rows(folder_array("record_swa_x"))
    assert equal_bits(rows.flatten(), folder_array("record_swa_bytes"))
    short = dequantise_window_rows(rows, torch.bfloat16)
    assert equal_bits(short.float(), folder_array("record_swa_dequant_bf16"))


@given(rows_of(64, E4M3))
def test_rows_are_those_of_exact_arithmetic(x: np.ndarray) -> None:
    rows = quantise_window_rows(torch.from_numpy(x)[None])
    codes, scale_codes = exact_row(x)
    assert rows[0].tolist() == codes + scale_codes
    scales = [Fraction(2) ** (code - 127) for code in scale_codes]
    expected = torch.tensor([decode_values(codes, scales, E4M3, E4M3_SIGN)])
    assert equal_bits(dequantise_window_rows(rows), expected)


@pytest.mark.parametrize("exponent", [-20, 0, 7])
def test_codes_round_to_nearest_even_at_every_tie(exponent: int) -> None:
    scale = Fraction(2) ** exponent
    near = [value for tie in midpoints(E4M3) for value in neighbours(tie * scale)]
    near += [-value for value in near]
    rest = -len(near) % 31
    body = np.array([*near, *[0.0] * rest], np.float32).reshape(-1, 31)
    # The first channel holds the scale in its place.
    x = np.concatenate([np.full((len(body), 1), float(448 * scale), np.float32), body], axis=1)
    expected = [[code for part in exact_row(row) for code in part] for row in x]
    assert all(row[-1] == 127 + exponent for row in expected)
    assert quantise_window_rows(torch.from_numpy(x)).tolist() == expected


def test_scales_step_just_above_448_times_a_power_of_two() -> None:
    exponents = np.arange(-21, 120)
    edges = np.float32(448) * np.exp2(exponents).astype(np.float32)
    for amax, step in ((edges, 0), (np.nextafter(edges, np.float32(np.inf)), 1)):
        x = torch.zeros(len(amax), 32)
        x[:, 5] = torch.from_numpy(amax)
        assert quantise_window_rows(x)[:, 32].tolist() == (exponents + step + 127).tolist()


def test_scales_of_all_bf16_maxima_are_the_least_powers_of_two() -> None:
    amax = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16).float()
    x = torch.zeros(len(amax), 32)
    x[:, 31] = -amax
    mantissa, exponent = np.frexp(np.maximum(amax.double().numpy(), 1e-4) / 448)
    expected = np.where(mantissa == 0.5, exponent - 1, exponent) + 127
    assert quantise_window_rows(x)[:, 32].tolist() == expected.tolist()


def test_zeros_keep_their_sign_and_take_the_scale_of_the_floor() -> None:
    row = quantise_window_rows(group_of(0.0, -0.0))[0].tolist()
    assert row[:2] == [0, 0x80]
    assert row[32] == 127 - 22  # 2^-22 is the least power of two above 1e-4 / 448
    assert equal_bits(round_window_rows(group_of(0.0, -0.0)), group_of(0.0, -0.0))


def test_values_below_the_floor_round_to_steps_of_the_floors_scale() -> None:
    step = 2.0**-22 * 2.0**-9
    subnormal = 2.0**-140
    given_x = group_of(step, 0.75 * step, 0.5 * step, 1.5 * step, -0.25 * step, subnormal, -1e-45)
    expected = group_of(step, step, 0.0, 2 * step, -0.0, 0.0, -0.0)
    assert equal_bits(round_window_rows(given_x), expected)


def test_huge_values_round_up_to_infinity_only_beyond_the_last_finite_number() -> None:
    # At the top the scale is 2^120: 248 x 2^120 lies between the codes of 240 and of 256, which
    # is 2^128 and no float32 number.
    tie = float(np.float32(248 * 2.0**120))
    below = float(np.nextafter(np.float32(tie), np.float32(0)))
    rounded = round_window_rows(group_of(tie, below, 1e30))
    assert rounded[0, 0] == torch.inf
    assert rounded[0, 1] == 240 * 2.0**120
    assert rounded[0, 2].isfinite()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_group_reads_back_as_nan_when_it_holds_no_number(bad: float) -> None:
    x = torch.ones(2, 96)
    x[0, 40] = bad
    rows = quantise_window_rows(x)
    assert rows[0, 32:64].tolist() == [0] * 32
    assert rows[0, 96:].tolist() == [127 - 8, 0xFF, 127 - 8]
    expected = torch.ones(2, 96)
    expected[0, 32:64] = torch.nan
    for found in (dequantise_window_rows(rows), round_window_rows(x)):
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7))


def test_every_byte_reads_back_as_the_number_it_stands_for() -> None:
    rows = torch.full((8, 33), 127, dtype=torch.uint8)
    rows[:, :32] = torch.arange(256).view(8, 32)
    numbers = dequantise_window_rows(rows).flatten().tolist()
    magnitudes = [float(magnitude) for magnitude in E4M3]
    assert numbers[:127] == magnitudes
    assert numbers[128:255] == [-magnitude for magnitude in magnitudes]
    assert np.isnan([numbers[127], numbers[255]]).all()


def test_rounding_twice_is_rounding_once() -> None:
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(5)).exp() * 1e-3
    once = round_window_rows(x)
    assert equal_bits(round_window_rows(once), once)


def test_wrong_shapes_and_types_are_refused() -> None:
    with pytest.raises(ValueError, match=r"given shape \[2, 48\], expected a multiple of 32"):
        quantise_window_rows(torch.zeros(2, 48))
    with pytest.raises(TypeError, match=r"given torch\.float64"):
        quantise_window_rows(torch.zeros(2, 32, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"given torch\.uint8 \[2, 34\], expected uint8"):
        dequantise_window_rows(torch.zeros(2, 34, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"given torch\.float32 \[2, 33\], expected uint8"):
        dequantise_window_rows(torch.zeros(2, 33))
