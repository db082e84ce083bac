"""What holds for every kind of quantised row: shapes, types, and a row's bytes are its own."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from kernels.reference.index_entries import (
    dequantise_index_entries,
    quantise_index_entries,
    round_index_entries,
)
from kernels.reference.main_entries import (
    dequantise_main_entries,
    quantise_main_entries,
    round_main_entries,
)
from kernels.reference.window_rows import (
    dequantise_window_rows,
    quantise_window_rows,
    round_window_rows,
)
from tests.kernels.golden_quant import equal_bits


@dataclass(frozen=True)
class Kind:
    """Rows as one tensor of bytes, the index entries' two parts joined."""

    quantise: Callable[[torch.Tensor], torch.Tensor]
    dequantise: Callable[[torch.Tensor, torch.dtype], torch.Tensor]
    round: Callable[[torch.Tensor], torch.Tensor]
    bytes_of_64_channels: int
    group_channels: int


def quantise_index_rows(x: torch.Tensor) -> torch.Tensor:
    return torch.cat(quantise_index_entries(x), dim=-1)


def dequantise_index_rows(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    data_bytes = rows.shape[-1] * 16 // 17
    return dequantise_index_entries(rows[..., :data_bytes], rows[..., data_bytes:], dtype)


KINDS = {
    "window": Kind(quantise_window_rows, dequantise_window_rows, round_window_rows, 66, 32),
    "main": Kind(quantise_main_entries, dequantise_main_entries, round_main_entries, 36, 16),
    "index": Kind(quantise_index_rows, dequantise_index_rows, round_index_entries, 34, 32),
}


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def random_rows(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


@pytest.mark.parametrize("leading", [(), (0,), (1,), (17,), (2, 3, 5)])
def test_rounding_is_quantising_and_reading_back_for_any_leading_dimensions(
    kind: Kind, leading: tuple[int, ...]
) -> None:
    x = random_rows(*leading, 64)
    rows = kind.quantise(x)
    assert rows.dtype == torch.uint8
    assert rows.shape == (*leading, kind.bytes_of_64_channels)
    assert equal_bits(kind.round(x), kind.dequantise(rows, torch.float32))


def test_a_row_has_the_same_bytes_alone_in_company_and_strided(kind: Kind) -> None:
    x = random_rows(19, 96)
    rows = kind.quantise(x)
    alone = torch.cat([kind.quantise(x[at : at + 1]) for at in range(len(x))])
    assert equal_bits(alone, rows)
    assert equal_bits(kind.quantise(x.T.contiguous().T), rows)
    wide = x.repeat(1, 3)[:, 96:192]
    assert equal_bits(kind.quantise(wide), rows)


def test_rows_are_read_where_they_lie_in_a_wider_record(kind: Kind) -> None:
    rows = kind.quantise(random_rows(19, 96))
    record = torch.full((19, 2, 200), 0xFF, dtype=torch.uint8)
    inside = record[:, 1, 50 : 50 + rows.shape[1]]
    inside.copy_(rows)
    expected = kind.dequantise(rows, torch.float32)
    assert equal_bits(kind.dequantise(inside, torch.float32), expected)


@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_a_group_reads_back_as_nan_when_it_holds_no_number(kind: Kind, bad: float) -> None:
    x = random_rows(2, 96)
    good = kind.round(x)
    x[1, 40] = bad
    first = 40 // kind.group_channels * kind.group_channels
    expected = good.clone()
    expected[1, first : first + kind.group_channels] = torch.nan
    # Any NaN gives the same bytes, so that equal rows have equal blocks.
    changed = kind.quantise(x)
    x[1, 40] = torch.nan
    assert equal_bits(changed, kind.quantise(x))
    found = kind.round(x)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7))
    assert torch.equal(kind.dequantise(changed, torch.float32).isnan(), expected.isnan())


def test_rounding_keeps_the_type_and_has_no_gradient(kind: Kind) -> None:
    x = random_rows(3, 64).requires_grad_()
    assert not kind.round(x).requires_grad
    short = x.detach().bfloat16()
    assert kind.round(short).dtype == torch.bfloat16
    # So few bits fit into BF16.
    assert equal_bits(kind.round(short).float(), kind.round(short.float()))


def test_the_input_is_left_as_it_was(kind: Kind) -> None:
    x = random_rows(5, 64)
    before = x.clone()
    kind.round(x)
    assert equal_bits(x, before)


def test_rounding_works_outside_of_inference_mode_after_it_worked_inside(kind: Kind) -> None:
    x = random_rows(2, 64).requires_grad_()
    with torch.inference_mode():
        inside = kind.round(x.detach().clone())
    straight_through = x + (kind.round(x) - x).detach()
    (gradient,) = torch.autograd.grad(straight_through.square().sum(), x)
    assert torch.allclose(gradient, 2 * straight_through.detach())
    assert torch.equal(inside.clone(), kind.round(x))


@pytest.mark.parametrize("channels", [0, 8, 40])
def test_channels_that_fill_no_group_are_refused(kind: Kind, channels: int) -> None:
    expected = rf"given shape \[2, {channels}\], expected a multiple of {kind.group_channels} "
    with pytest.raises(ValueError, match=expected):
        kind.quantise(torch.zeros(2, channels))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.uint8])
def test_inputs_of_other_types_are_refused(kind: Kind, dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"given {dtype}, expected float32"):
        kind.round(torch.zeros(2, 64, dtype=dtype))


def test_rows_that_have_no_such_size_or_type_are_refused(kind: Kind) -> None:
    rows = kind.quantise(torch.zeros(2, 64))
    for wrong in (rows[:, :-1], rows[:, :0], rows.to(torch.int32)):
        with pytest.raises(ValueError, match=r"expected uint8 \[\.\.\., "):
            kind.dequantise(wrong, torch.float32)
