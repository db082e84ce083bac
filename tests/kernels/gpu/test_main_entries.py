"""Main entries on a GPU: the bytes and the numbers of the reference."""

import numpy as np
import pytest
import torch
from hypothesis import given

from kernels.gpu import main_entries as gpu
from kernels.reference import main_entries as reference
from tests.kernels.exact_formats import E2M1, E4M3, rows_of
from tests.kernels.gpu.rows_contract import RowsContract
from tests.kernels.gpu.rows_on_device import (
    DEVICES,
    DTYPES,
    Kind,
    check_dequantise,
    check_quantise,
    random_numbers,
)
from tests.kernels.tie_groups import main_code_ties, main_scale_ties

KIND = Kind(
    gpu.FORMAT,
    gpu.row_layout,
    gpu.quantise_main_entries,
    gpu.dequantise_main_entries,
    reference.quantise_main_entries,
    reference.dequantise_main_entries,
    512,
)


class TestRows(RowsContract):
    kind = KIND
    golden = "main"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
class TestQuantise:
    def test_every_scale_has_the_references_code_around_its_ties(
        self, dtype: torch.dtype, device: str
    ) -> None:
        check_quantise(KIND, KIND.rows_of_groups(main_scale_ties(dtype)), device)


@pytest.mark.parametrize("device", DEVICES)
def test_float32_numbers_at_every_tie_of_every_scale_have_the_references_codes(
    device: str,
) -> None:
    check_quantise(KIND, KIND.rows_of_groups(main_code_ties()), device)


@pytest.mark.parametrize("device", DEVICES)
def test_all_bfloat16_numbers_under_every_scale_have_the_references_codes(device: str) -> None:
    numbers = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16)
    for scales in torch.split(torch.tensor([float(scale) for scale in E4M3[1:]]), 21):
        groups = []
        for scale in scales:
            # Above 6 scales there are only those that would make another scale.
            under = numbers[numbers.float() <= 6 * scale]
            under = torch.cat([under, under.new_zeros(-len(under) % 15)]).view(-1, 15)
            under[:, 1::2] *= -1
            largest = torch.full((len(under), 1), 6 * scale.item(), dtype=torch.bfloat16)
            groups.append(torch.cat([largest, under], dim=1))
        check_quantise(KIND, KIND.rows_of_groups(torch.cat(groups)), device)


@given(rows_of(16, E2M1))
def test_any_float32_group_has_the_references_bytes(x: np.ndarray) -> None:
    check_quantise(KIND, KIND.rows_of_groups(torch.from_numpy(x)[None]), "cpu")


@pytest.mark.parametrize("device", DEVICES)
def test_entries_that_no_vector_fits_have_the_references_bytes(device: str) -> None:
    x = random_numbers(300, 48, torch.bfloat16)
    check_quantise(KIND, x, device)
    check_dequantise(KIND, (reference.quantise_main_entries(x),), torch.float32, device)
