"""Window rows on a GPU: the bytes and the numbers of the reference."""

import numpy as np
import pytest
import torch
from hypothesis import given

from kernels.gpu import window_rows as gpu
from kernels.reference import window_rows as reference
from tests.kernels.exact_formats import E4M3, rows_of
from tests.kernels.gpu.rows_contract import RowsContract
from tests.kernels.gpu.rows_on_device import (
    DEVICES,
    DTYPES,
    Kind,
    check_quantise,
)
from tests.kernels.tie_groups import WINDOW_EXPONENTS, window_code_ties, window_scale_steps

KIND = Kind(
    gpu.FORMAT,
    gpu.row_layout,
    gpu.quantise_window_rows,
    gpu.dequantise_window_rows,
    reference.quantise_window_rows,
    reference.dequantise_window_rows,
    512,
)


class TestRows(RowsContract):
    kind = KIND
    golden = "window"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
class TestQuantise:
    def test_scales_step_where_the_references_do(self, dtype: torch.dtype, device: str) -> None:
        groups = window_scale_steps(dtype)
        check_quantise(KIND, KIND.rows_of_groups(groups), device)

    @pytest.mark.parametrize("exponent", WINDOW_EXPONENTS)
    def test_numbers_at_every_tie_have_the_references_codes(
        self, exponent: int, dtype: torch.dtype, device: str
    ) -> None:
        groups = window_code_ties(exponent, dtype)
        check_quantise(KIND, KIND.rows_of_groups(groups), device)


@given(rows_of(32, E4M3))
def test_any_float32_group_has_the_references_bytes(x: np.ndarray) -> None:
    check_quantise(KIND, KIND.rows_of_groups(torch.from_numpy(x)[None]), "cpu")
