"""Window rows on a GPU: the bytes and the numbers of the reference."""

import numpy as np
import pytest
import torch
from hypothesis import given

from kernels.gpu import window_rows as gpu
from kernels.reference import window_rows as reference
from tests.kernels.exact_formats import E4M3, midpoints, neighbours, rows_of
from tests.kernels.gpu.rows_contract import RowsContract
from tests.kernels.gpu.rows_on_device import (
    DEVICES,
    DTYPES,
    Kind,
    check_quantise,
)

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
        # 448 x 2^e and the number of the type above it, for every exponent from below the floor.
        exponents = torch.arange(-25, 120)
        edges = (448 * torch.exp2(exponents.double())).float()
        above = edges.view(torch.int32) + (1 if dtype == torch.float32 else 1 << 16)
        floor = torch.tensor(1e-4).view(torch.int32) + torch.arange(-2, 3)
        amax = torch.cat([edges, above.view(torch.float32), floor.int().view(torch.float32)])
        groups = torch.zeros(len(amax), 32, dtype=dtype)
        groups[:, 30] = -amax.to(dtype)
        check_quantise(KIND, KIND.rows_of_groups(groups), device)

    @pytest.mark.parametrize("exponent", [-22, 0, 119])
    def test_numbers_at_every_tie_have_the_references_codes(
        self, exponent: int, dtype: torch.dtype, device: str
    ) -> None:
        near = torch.tensor([value for tie in midpoints(E4M3) for value in neighbours(tie)])
        values = torch.cat([near, -near, near.new_zeros(-2 * len(near) % 31)]).view(-1, 31)
        groups = torch.cat([torch.full((len(values), 1), 448.0), values], dim=1)
        scaled = torch.ldexp(groups, torch.tensor(float(exponent)))
        check_quantise(KIND, KIND.rows_of_groups(scaled.to(dtype)), device)


@given(rows_of(32, E4M3))
def test_any_float32_group_has_the_references_bytes(x: np.ndarray) -> None:
    check_quantise(KIND, KIND.rows_of_groups(torch.from_numpy(x)[None]), "cpu")
