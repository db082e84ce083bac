"""The reference's bytes of cache rows do not depend on the device: a block that a GPU has quantised
is that of the same numbers on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch

from kernels.operations import REFERENCE
from kernels.reference import fp4, fp8, main_entries
from tests.kernels.gpu_division import GpuDivision
from tests.kernels.tie_groups import (
    INDEX_EXPONENTS,
    WINDOW_EXPONENTS,
    index_code_ties,
    index_scale_steps,
    main_code_ties,
    main_scale_ties,
    window_code_ties,
    window_scale_steps,
)

DEVICES = (
    pytest.param("cpu", id="divisions-of-a-gpu-on-the-cpu"),
    pytest.param("cuda", marks=pytest.mark.gpu),
)
FLOAT = torch.float32


@dataclass(frozen=True)
class Kind:
    quantise: Callable[[torch.Tensor], torch.Tensor | tuple[torch.Tensor, ...]]
    dequantise: Callable[..., torch.Tensor]
    groups: Callable[[], list[torch.Tensor]]

    def bytes_of(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = self.quantise(x)
        return made if isinstance(made, tuple) else (made,)


KINDS = {
    "main": Kind(
        REFERENCE.quantise_main_entries,
        REFERENCE.dequantise_main_entries,
        lambda: [main_scale_ties(FLOAT), main_code_ties()],
    ),
    "index": Kind(
        REFERENCE.quantise_index_entries,
        REFERENCE.dequantise_index_entries,
        lambda: [index_scale_steps(FLOAT), *(index_code_ties(e, FLOAT) for e in INDEX_EXPONENTS)],
    ),
    "window": Kind(
        REFERENCE.quantise_window_rows,
        REFERENCE.dequantise_window_rows,
        lambda: [
            window_scale_steps(FLOAT),
            *(window_code_ties(e, FLOAT) for e in WINDOW_EXPONENTS),
        ],
    ),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", KINDS)
def test_rows_have_one_set_of_bytes_and_numbers_on_every_device(name: str, device: str) -> None:
    kind = KINDS[name]
    for groups in kind.groups():
        expected = kind.bytes_of(groups)
        with GpuDivision() if device == "cpu" else nullcontext():
            found = kind.bytes_of(groups.to(device))
            numbers = kind.dequantise(*found)
        for part, expected_part in zip(found, expected, strict=True):
            assert torch.equal(part.cpu(), expected_part)
        expected_numbers = kind.dequantise(*expected)
        assert torch.equal(numbers.cpu().view(torch.int32), expected_numbers.view(torch.int32))


@pytest.mark.parametrize("device", DEVICES)
def test_index_queries_are_rounded_alike_on_every_device(device: str) -> None:
    groups = torch.cat([index_code_ties(e, FLOAT) for e in INDEX_EXPONENTS])
    with GpuDivision() if device == "cpu" else nullcontext():
        found = REFERENCE.round_index_entries(groups.to(device)).cpu()
    expected = REFERENCE.round_index_entries(groups)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("device", DEVICES)
def test_division_by_a_number_is_another_one_on_a_gpu(device: str) -> None:
    """That the comparisons above can fail."""
    amax = -main_scale_ties(FLOAT)[:, 7]
    with GpuDivision() if device == "cpu" else nullcontext():
        quotients = (amax.to(device) / fp4.E2M1_MAX).cpu()
    codes, expected = (
        fp8.encode_e4m3(x.clamp(max=fp8.E4M3_MAX)) for x in (quotients, amax / fp4.E2M1_MAX)
    )
    assert not torch.equal(codes, expected)


def test_scale_of_a_main_entry_is_the_quotient_of_its_amax_and_6() -> None:
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(0, 0x7F800000, (1 << 14,), generator=generator, dtype=torch.int32)
    for amax in (-main_scale_ties(FLOAT)[:, 7], bits.view(FLOAT)):
        groups = torch.zeros(len(amax), 16)
        groups[:, 3] = amax
        quotients = amax.clamp(min=main_entries.AMAX_MIN) / 6.0
        expected = fp8.encode_e4m3(quotients.clamp(max=fp8.E4M3_MAX))
        assert torch.equal(REFERENCE.quantise_main_entries(groups)[:, -1], expected)
