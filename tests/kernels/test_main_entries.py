"""Main entries: E2M1 with an E4M3 scale for each 16 channels, bit for bit."""

import numpy as np
import pytest
import torch
from hypothesis import given

from kernels.reference.main_entries import (
    dequantise_main_entries,
    quantise_main_entries,
    round_main_entries,
)
from tests.kernels.exact_formats import (
    E2M1,
    E2M1_SIGN,
    E4M3,
    decode_values,
    encode_main_group,
    encode_row,
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
    kept_vectors,
)

BF16_FROM_FLOOR_TO_2688 = slice(0x3C40, 0x4528 + 1)


def exact_entry(x: np.ndarray) -> list[int]:
    codes, scale_codes = encode_row(x, 16, encode_main_group)
    return pack_pairs(codes) + scale_codes


def group_of(*values: float) -> torch.Tensor:
    """One entry of one group, filled up with zeros."""
    return torch.tensor([[*values, *[0.0] * (16 - len(values))]])


def test_entries_have_the_even_channel_low_and_scales_last() -> None:
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 1], x[0, 2], x[0, 31] = 6.0, -0.5, 3.0, -12.0
    entry = quantise_main_entries(x)[0].tolist()
    assert entry == [0x97, 0x05, *[0] * 13, 0xF0, 0x38, 0x40]  # scales 1 and 2
    assert dequantise_main_entries(quantise_main_entries(x)).equal(x)


def test_an_entry_of_512_channels_has_288_bytes() -> None:
    assert quantise_main_entries(torch.ones(3, 512)).shape == (3, 288)
    assert dequantise_main_entries(torch.zeros(3, 288, dtype=torch.uint8)).shape == (3, 512)


def test_entries_have_the_bytes_of_the_kept_golden_vectors() -> None:
    entries = quantise_main_entries(kept_inputs("main"))
    assert equal_bits(entries[:, :16], kept_codes("main", "codes"))
    assert equal_bits(entries[:, 16:], kept_codes("main", "scale_codes"))
    assert equal_bits(round_main_entries(kept_float32("x")), kept_float32("main"))


def test_entries_have_the_bytes_of_every_golden_vector() -> None:
    entries = quantise_main_entries(folder_array("main_kv_fp4_e4m3_x"))
    assert equal_bits(entries[:, :256], folder_array("main_kv_fp4_e4m3_packed"))
    assert equal_bits(entries[:, 256:], folder_array("main_kv_fp4_e4m3_scale_byte"))
    expected = folder_array("main_kv_fp4_e4m3_dequant_f32")
    assert equal_bits(dequantise_main_entries(entries), expected)
    short = dequantise_main_entries(entries, torch.bfloat16)
    assert equal_bits(short.float(), folder_array("main_kv_fp4_e4m3_dequant_bf16"))


def test_float32_entries_read_back_as_in_every_golden_vector() -> None:
    assert equal_bits(round_main_entries(folder_array("f32in_x")), folder_array("f32in_main_kv"))


def test_entries_are_the_records_that_another_engine_stores() -> None:
    entries = quantise_main_entries(folder_array("record_main_x"))
    assert equal_bits(entries.flatten(), folder_array("record_main_bytes"))
    short = dequantise_main_entries(entries, torch.bfloat16)
    assert equal_bits(short.float(), folder_array("record_main_dequant_bf16"))


def scale_codes_of(amax: torch.Tensor) -> torch.Tensor:
    x = torch.zeros(len(amax), 16)
    x[:, 7] = -amax
    return quantise_main_entries(x)[:, 8]


def test_scales_of_all_bf16_maxima_are_the_golden_ones() -> None:
    bits = torch.arange(0x8000, dtype=torch.int32)[BF16_FROM_FLOOR_TO_2688]
    amax = bits.to(torch.int16).view(torch.bfloat16).float()
    kept = kept_vectors()["main_scale_codes"]
    counts = torch.tensor(kept["counts"])
    expected = torch.arange(kept["code_min"], kept["code_min"] + len(counts)).repeat_interleave(
        counts
    )
    assert amax[[0, -1]].tolist() == [6 * 2.0**-9, 2688.0]
    assert equal_bits(scale_codes_of(amax), expected.to(torch.uint8))


def test_scales_of_all_bf16_maxima_are_those_of_the_golden_folder() -> None:
    amax = folder_array("e4m3_scale_all_bf16_amax")
    assert equal_bits(scale_codes_of(amax), folder_array("e4m3_scale_all_bf16_byte"))


def test_scales_round_to_nearest_even_at_every_tie() -> None:
    near = [value for tie in midpoints(E4M3) for value in neighbours(6 * tie)]
    expected = [encode_main_group([float(value)])[1] for value in near]
    assert len(set(expected)) == 126
    assert scale_codes_of(torch.from_numpy(np.array(near))).tolist() == expected


@given(rows_of(32, E2M1))
def test_entries_are_those_of_exact_arithmetic(x: np.ndarray) -> None:
    entries = quantise_main_entries(torch.from_numpy(x)[None])
    assert entries[0].tolist() == exact_entry(x)
    codes, scale_codes = encode_row(x, 16, encode_main_group)
    expected = decode_values(codes, [E4M3[code] for code in scale_codes], E2M1, E2M1_SIGN)
    assert equal_bits(dequantise_main_entries(entries), torch.tensor([expected]))


def test_codes_round_to_nearest_even_at_every_tie_of_every_scale() -> None:
    rows = []
    for scale in E4M3[1:]:
        near = [value for tie in midpoints(E2M1) for value in neighbours(tie * scale)]
        signed = [*near, *(-value for value in near)]
        largest = 6 * float(scale)
        rows += [[largest, *signed[at : at + 14], -largest] for at in (0, 14, 28)]
    x = np.array(rows, np.float32)
    assert x.shape == (126 * 3, 16)
    expected = [exact_entry(row) for row in x]
    assert quantise_main_entries(torch.from_numpy(x)).tolist() == expected


def test_values_are_divided_by_the_scale_not_multiplied_by_its_inverse() -> None:
    # The quotient is the tie 2.5, whose even code is that of 2; times the inverse it lies above.
    scale = 15 / 8
    tie = 2.5 * scale
    assert np.float32(tie) * (np.float32(1) / np.float32(scale)) > np.float32(2.5)
    assert round_main_entries(group_of(6 * scale, tie))[0, 1] == 2 * scale


def test_zeros_keep_their_sign_and_take_the_least_scale() -> None:
    entry = quantise_main_entries(group_of(0.0, -0.0, -0.0))[0].tolist()
    assert entry == [0x80, 0x08, *[0] * 6, 1]
    assert equal_bits(round_main_entries(group_of(-0.0)), group_of(-0.0))


def test_values_below_the_floor_round_to_steps_of_the_least_scale() -> None:
    step = 2.0**-10
    x = group_of(step, 0.5 * step, 0.75 * step, -0.5 * step, 2.0**-140, -1e-45)
    assert equal_bits(round_main_entries(x), group_of(step, 0.0, step, -0.0, 0.0, -0.0))


@pytest.mark.parametrize("huge", [2688.0, 2689.0, 2800.0, 1e6, 3.4e38])
def test_values_saturate_at_2688(huge: float) -> None:
    x = group_of(huge, -huge, 2240.0, 447.9)
    entry = quantise_main_entries(x)
    assert entry[0, 8] == 0x7E  # 448
    # 2240 is 5 x 448: a tie, and 4 is the even code.
    assert round_main_entries(x)[0, :4].tolist() == [2688.0, -2688.0, 4 * 448.0, 448.0]


def test_every_byte_reads_back_as_the_numbers_it_stands_for() -> None:
    entries = torch.full((32, 9), 0x38, dtype=torch.uint8)
    entries[:, :8] = torch.arange(256).view(32, 8)
    numbers = dequantise_main_entries(entries).view(256, 2).tolist()
    signed = [float(m) for m in E2M1] + [-float(m) for m in E2M1]
    assert numbers == [[signed[byte % 16], signed[byte // 16]] for byte in range(256)]


def test_every_scale_reads_back_as_the_number_it_stands_for() -> None:
    entries = torch.full((127, 9), 0x22, dtype=torch.uint8)
    entries[:, 8] = torch.arange(127)
    assert dequantise_main_entries(entries)[:, 5].tolist() == [float(m) for m in E4M3]
    entries[:, 8] = 0x7F
    assert dequantise_main_entries(entries).isnan().all()


def test_rounding_twice_is_rounding_once_when_scales_are_normal_numbers() -> None:
    # Among subnormal scales the distance of two is large: 4 x 2 x 2^-9 would take the scale 2^-9.
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(5)).exp() + 0.1
    once = round_main_entries(x)
    assert equal_bits(round_main_entries(once), once)
