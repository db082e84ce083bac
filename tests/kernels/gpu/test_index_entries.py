"""Index entries on a GPU: the bytes and the numbers of the reference."""

import numpy as np
import pytest
import torch
from hypothesis import given

from kernels.gpu import index_entries as gpu
from kernels.reference import index_entries as reference
from tests.kernels.exact_formats import E2M1, rows_of
from tests.kernels.golden_quant import equal_bits
from tests.kernels.gpu.rows_contract import RowsContract
from tests.kernels.gpu.rows_on_device import (
    DEVICES,
    DTYPES,
    Kind,
    check_quantise,
    random_numbers,
)
from tests.kernels.tie_groups import INDEX_EXPONENTS, index_code_ties, index_scale_steps

KIND = Kind(
    gpu.FORMAT,
    gpu.row_layout,
    gpu.quantise_index_entries,
    gpu.dequantise_index_entries,
    reference.quantise_index_entries,
    reference.dequantise_index_entries,
    128,
)


class TestRows(RowsContract):
    kind = KIND
    golden = "index"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
class TestQuantise:
    def test_scales_step_where_the_references_do(self, dtype: torch.dtype, device: str) -> None:
        groups = index_scale_steps(dtype)
        check_quantise(KIND, KIND.rows_of_groups(groups), device)

    @pytest.mark.parametrize("exponent", INDEX_EXPONENTS)
    def test_numbers_at_every_tie_have_the_references_codes(
        self, exponent: int, dtype: torch.dtype, device: str
    ) -> None:
        groups = index_code_ties(exponent, dtype)
        check_quantise(KIND, KIND.rows_of_groups(groups), device)


@given(rows_of(32, E2M1))
def test_any_float32_group_has_the_references_bytes(x: np.ndarray) -> None:
    check_quantise(KIND, KIND.rows_of_groups(torch.from_numpy(x)[None]), "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_entries_are_rounded_as_by_the_reference_on_a_device(dtype: torch.dtype) -> None:
    x = random_numbers(64 * 17, 128, dtype).view(17, 64, 128)
    found = gpu.round_index_entries(x.cuda()).cpu()
    assert equal_bits(found, reference.round_index_entries(x))
