"""Index keys: E2M1 with a power of two for each 32 channels, bit for bit."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given

from kernels.reference.index_entries import (
    dequantise_index_entries,
    quantise_index_entries,
    round_index_entries,
)
from tests.kernels.exact_formats import (
    E2M1,
    E2M1_SIGN,
    decode_values,
    encode_row,
    encode_ue8m0_group,
    midpoints,
    neighbours,
    pack_pairs,
    rows_of,
)
from tests.kernels.golden_quant import (
    equal_bits,
    folder_array,
    kept_codes,
    kept_float32,
    kept_inputs,
)

FLOOR = 6 * Fraction(2) ** -126


def exact_entry(x: np.ndarray) -> tuple[list[int], list[int]]:
    return encode_row(x, 32, lambda group: encode_ue8m0_group(group, E2M1, E2M1_SIGN, FLOOR))


def group_of(*values: float) -> torch.Tensor:
    """One entry of one group, filled up with zeros."""
    return torch.tensor([[*values, *[0.0] * (32 - len(values))]])


def test_entries_have_the_even_channel_low_and_scales_apart() -> None:
    x = torch.zeros(1, 64)
    x[0, 0], x[0, 1], x[0, 63] = 6.0, -0.5, -12.5
    data, scales = quantise_index_entries(x)
    assert data.tolist() == [[0x97, *[0] * 30, 0xD0]]  # 12.5 / 4 rounds to 3
    assert scales.tolist() == [[127, 129]]


def test_an_entry_of_128_channels_has_64_and_4_bytes() -> None:
    data, scales = quantise_index_entries(torch.ones(3, 128))
    assert (data.shape, scales.shape) == ((3, 64), (3, 4))


def test_entries_have_the_bytes_of_the_kept_golden_vectors() -> None:
    data, scales = quantise_index_entries(kept_inputs("index"))
    assert equal_bits(data, kept_codes("index", "codes"))
    assert equal_bits(scales, kept_codes("index", "scale_codes"))
    assert equal_bits(round_index_entries(kept_float32("x")), kept_float32("index"))


def test_entries_have_the_bytes_of_every_golden_vector() -> None:
    data, scales = quantise_index_entries(folder_array("index_k_fp4_ue8m0_x"))
    assert equal_bits(data, folder_array("index_k_fp4_ue8m0_packed"))
    assert equal_bits(scales, folder_array("index_k_fp4_ue8m0_scale_byte"))
    expected = folder_array("index_k_fp4_ue8m0_dequant_f32")
    assert equal_bits(dequantise_index_entries(data, scales), expected)
    short = dequantise_index_entries(data, scales, torch.bfloat16)
    assert equal_bits(short.float(), folder_array("index_k_fp4_ue8m0_dequant_bf16"))


def test_float32_entries_read_back_as_in_every_golden_vector() -> None:
    assert equal_bits(round_index_entries(folder_array("f32in_x")), folder_array("f32in_index"))


def test_entries_are_the_records_that_another_engine_stores() -> None:
    data, scales = quantise_index_entries(folder_array("record_index_x"))
    records = torch.cat([data.flatten(), scales.flatten()])
    assert equal_bits(records, folder_array("record_index_bytes"))
    short = dequantise_index_entries(data, scales, torch.bfloat16)
    assert equal_bits(short.float(), folder_array("record_index_dequant_bf16"))


@given(rows_of(64, E2M1))
def test_entries_are_those_of_exact_arithmetic(x: np.ndarray) -> None:
    data, scales = quantise_index_entries(torch.from_numpy(x)[None])
    codes, scale_codes = exact_entry(x)
    assert data[0].tolist() == pack_pairs(codes)
    assert scales[0].tolist() == scale_codes
    powers = [Fraction(2) ** (code - 127) for code in scale_codes]
    expected = torch.tensor([decode_values(codes, powers, E2M1, E2M1_SIGN)])
    assert equal_bits(dequantise_index_entries(data, scales), expected)


@pytest.mark.parametrize("exponent", [-126, -125, -30, 0, 20, 125])
def test_codes_round_to_nearest_even_at_every_tie(exponent: int) -> None:
    scale = Fraction(2) ** exponent
    near = [value for tie in midpoints(E2M1) for value in neighbours(tie * scale)]
    largest = np.float32(6 * scale)
    x = np.array([[largest, *near, *[0.0] * 10], [largest, *(-v for v in near), *[0.0] * 10]])
    data, scales = quantise_index_entries(torch.from_numpy(x.astype(np.float32)))
    expected = [exact_entry(row) for row in x]
    assert data.tolist() == [pack_pairs(codes) for codes, _ in expected]
    assert scales.tolist() == [scale_codes for _, scale_codes in expected] == [[127 + exponent]] * 2


def test_scales_step_just_above_6_times_a_power_of_two() -> None:
    exponents = np.arange(-126, 126)
    edges = np.float32(6) * np.exp2(exponents).astype(np.float32)
    for amax, step in ((edges, 0), (np.nextafter(edges, np.float32(np.inf)), 1)):
        x = torch.zeros(len(amax), 32)
        x[:, 5] = torch.from_numpy(amax)
        _, scales = quantise_index_entries(x)
        assert scales[:, 0].tolist() == (exponents + step + 127).tolist()


def test_scales_of_all_bf16_maxima_are_the_least_powers_of_two() -> None:
    amax = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16).float()
    x = torch.zeros(len(amax), 32)
    x[:, 31] = -amax
    mantissa, exponent = np.frexp(np.maximum(amax.double().numpy(), 6 * 2.0**-126) / 6)
    expected = np.where(mantissa == 0.5, exponent - 1, exponent) + 127
    _, scales = quantise_index_entries(x)
    assert scales[:, 0].tolist() == expected.tolist()


def test_zeros_keep_their_sign_and_take_the_least_scale() -> None:
    data, scales = quantise_index_entries(group_of(0.0, -0.0, -0.0))
    assert data[0, :2].tolist() == [0x80, 0x08]
    assert scales.tolist() == [[1]]
    assert equal_bits(round_index_entries(group_of(-0.0)), group_of(-0.0))


def test_subnormal_values_round_to_steps_of_the_least_scale() -> None:
    step = 2.0**-127
    x = group_of(step, 0.5 * step, 0.75 * step, -0.5 * step, 2.0**-149)
    assert equal_bits(round_index_entries(x), group_of(step, 0.0, step, -0.0, 0.0))


def test_huge_values_round_up_to_infinity_only_beyond_the_last_finite_number() -> None:
    # At the top the scale is 2^126: 3.5 x 2^126 lies between the codes of 3 and of 4, which is
    # 2^128 and no float32 number.
    tie = float(np.float32(3.5 * 2.0**126))
    below = float(np.nextafter(np.float32(tie), np.float32(0)))
    rounded = round_index_entries(group_of(tie, below, 2.0**126))[0]
    assert rounded[:3].tolist() == [torch.inf, 3 * 2.0**126, 2.0**126]


def test_every_scale_reads_back_as_the_power_it_stands_for() -> None:
    data = torch.full((256, 16), 0x22, dtype=torch.uint8)
    scales = torch.arange(256, dtype=torch.uint8)[:, None]
    numbers = dequantise_index_entries(data, scales)[:, 9]
    assert numbers[:255].tolist() == [2.0 ** (code - 127) for code in range(255)]
    assert numbers[255].isnan()


def test_rounding_twice_is_rounding_once() -> None:
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(5)).exp() * 1e-3
    once = round_index_entries(x)
    assert equal_bits(round_index_entries(once), once)


def test_scales_of_other_entries_are_refused() -> None:
    data, scales = quantise_index_entries(torch.zeros(3, 128))
    with pytest.raises(ValueError, match=r"\[3, 64\] and torch\.uint8 \[2, 4\], expected uint8"):
        dequantise_index_entries(data, scales[:2])
