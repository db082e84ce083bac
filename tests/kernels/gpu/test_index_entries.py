"""Index entries on a GPU: the bytes and the numbers of the reference."""

import numpy as np
import pytest
import torch
from hypothesis import given

from kernels.gpu import index_entries as gpu
from kernels.reference import index_entries as reference
from tests.kernels.exact_formats import E2M1, midpoints, neighbours, rows_of
from tests.kernels.golden_quant import equal_bits
from tests.kernels.gpu.rows_contract import RowsContract
from tests.kernels.gpu.rows_on_device import (
    DEVICES,
    DTYPES,
    Kind,
    check_quantise,
    random_numbers,
)

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
        # 6 x 2^e, the numbers next to it and those one bit of the type away, for every exponent.
        exponents = torch.arange(-130, 126)
        edges = (6 * torch.exp2(exponents.double())).float()
        above = edges.view(torch.int32) + (1 if dtype == torch.float32 else 1 << 16)
        amax = torch.cat([edges, above.view(torch.float32)])
        groups = torch.zeros(len(amax), 32, dtype=dtype)
        groups[:, 9] = -amax.to(dtype)
        check_quantise(KIND, KIND.rows_of_groups(groups), device)

    @pytest.mark.parametrize("exponent", [-126, -9, 0, 100])
    def test_numbers_at_every_tie_have_the_references_codes(
        self, exponent: int, dtype: torch.dtype, device: str
    ) -> None:
        near = [value for tie in midpoints(E2M1) for value in neighbours(tie)]
        values = torch.tensor([*near, *(-value for value in near)])
        groups = torch.zeros(2, 32)
        groups[:, 0] = 6
        groups[0, 1:22], groups[1, 1:22] = values[:21], values[21:]
        scaled = torch.ldexp(groups, torch.tensor(float(exponent)))
        check_quantise(KIND, KIND.rows_of_groups(scaled.to(dtype)), device)


@given(rows_of(32, E2M1))
def test_any_float32_group_has_the_references_bytes(x: np.ndarray) -> None:
    check_quantise(KIND, KIND.rows_of_groups(torch.from_numpy(x)[None]), "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_entries_are_rounded_as_by_the_reference_on_a_device(dtype: torch.dtype) -> None:
    x = random_numbers(64 * 17, 128, dtype).view(17, 64, 128)
    found = gpu.round_index_entries(x.cuda()).cpu()
    assert equal_bits(found, reference.round_index_entries(x))
