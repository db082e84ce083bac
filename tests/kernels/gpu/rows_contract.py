"""What every kind of quantised row does on a device.

A kind's test file subclasses `RowsContract`, and names its kind and its golden vectors.
"""

from typing import ClassVar

import pytest
import torch

from tests.kernels.golden_quant import equal_bits, kept_codes, kept_inputs
from tests.kernels.gpu.rows_on_device import (
    DEVICES,
    DTYPES,
    Kind,
    as_parts,
    check_dequantise,
    check_quantise,
    quantise_on,
    random_bits,
    random_bytes,
    random_numbers,
    special_groups,
)

GOLDEN_CHANNELS = 32
"""Of the golden vectors; zeros fill up the row, and their codes are zeros."""
NUMBERS_MANY = 10 << 20


class RowsContract:
    """The bytes of numbers and the numbers of bytes are those of the reference."""

    kind: ClassVar[Kind]
    golden: ClassVar[str]

    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_random_rows_have_the_references_bytes(self, dtype: torch.dtype, device: str) -> None:
        check_quantise(self.kind, random_bits(37, self.kind.channels, dtype), device)
        check_quantise(self.kind, random_numbers(37, self.kind.channels, dtype), device)

    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_special_numbers_have_the_references_bytes(
        self, dtype: torch.dtype, device: str
    ) -> None:
        groups = special_groups(self.kind.row_format.group_channels, dtype)
        check_quantise(self.kind, self.kind.rows_of_groups(groups), device)

    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_rows_have_the_golden_bytes(self, dtype: torch.dtype, device: str) -> None:
        x = kept_inputs(self.golden).to(dtype)
        filled = torch.cat([x, x.new_zeros(len(x), self.kind.channels - GOLDEN_CHANNELS)], dim=1)
        parts = quantise_on(self.kind, filled, device)
        start = self.kind.row_layout(self.kind.channels).scales_start
        for part, first, name in ((parts[0], 0, "codes"), (parts[-1], start, "scale_codes")):
            kept = kept_codes(self.golden, name)
            assert equal_bits(part[:, first : first + kept.shape[1]], kept)

    @pytest.mark.gpu
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_many_rows_have_the_references_bytes_on_a_device(self, dtype: torch.dtype) -> None:
        # No whole number of what a block of threads takes.
        rows = NUMBERS_MANY // self.kind.channels - 469
        check_quantise(self.kind, random_bits(rows, self.kind.channels, dtype), "cuda")
        check_quantise(self.kind, random_numbers(rows, self.kind.channels, dtype), "cuda")

    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_any_bytes_read_back_as_the_references_numbers(
        self, dtype: torch.dtype, device: str
    ) -> None:
        shapes = as_parts(self.kind.reference_quantise(torch.zeros(259, self.kind.channels)))
        check_dequantise(self.kind, random_bytes(shapes), dtype, device)
