"""Engram: rows of a table in both formats, and the gate against golden numbers and float64."""

import math

import pytest
import torch

from kernels.reference.engram import gate_engram, read_table_rows
from kernels.reference.weight_formats import quantise_fp8_rows
from tests.kernels.golden_vectors import SOURCES, golden_vectors
from tests.kernels.row_invariance import check_row_invariance, normal

EPS = 1e-20
ROWS, STREAMS, CHANNELS = 13, 4, 24


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Streams, keys and values, query scale, key scale."""
    return (
        normal(ROWS, STREAMS, CHANNELS),
        normal(ROWS, (STREAMS + 1) * CHANNELS, seed=1, spread=3),
        normal(STREAMS, CHANNELS, seed=2),
        normal(STREAMS, CHANNELS, seed=3),
    )


def gate(*tensors: torch.Tensor, is_masked: torch.Tensor | None = None) -> torch.Tensor:
    streams, keys_values, query_scale, key_scale = tensors
    return gate_engram(streams, keys_values, query_scale, key_scale, is_masked, EPS)


def exact_gated(
    h: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """One stream of one row in float64."""
    h, key, value, scale = (x.double() for x in (h, key, value, scale))
    size = (h.square().mean() + EPS).sqrt() * (key.square().mean() + EPS).sqrt()
    u = float((h * key * scale).sum() / size / math.sqrt(len(h)))
    root = math.copysign(math.sqrt(max(abs(u), 1e-6)), u)
    return h + value / (1 + math.exp(-root))


@pytest.mark.parametrize("source", SOURCES)
def test_gated_streams_are_the_golden_ones(source: str) -> None:
    golden = golden_vectors("engram", source)
    streams, kv, query_scale, key_scale, is_live, expected = (
        golden[f"gate_{name}"] for name in ("x", "kv", "q_weight", "k_weight", "mask", "y")
    )
    assert not is_live.all()
    found = gate_engram(streams, kv, query_scale, key_scale, ~is_live, EPS)
    assert torch.allclose(found, expected, rtol=0, atol=2e-6)


def test_gated_streams_are_those_of_the_formula() -> None:
    streams, kv, query_scale, key_scale = inputs()
    found = gate_engram(streams, kv, query_scale, key_scale, None, EPS)
    *keys, value = kv.view(ROWS, STREAMS + 1, CHANNELS).unbind(1)
    for row in range(ROWS):
        for k in range(STREAMS):
            scale = query_scale[k].double() * key_scale[k].double()
            expected = exact_gated(streams[row, k], keys[k][row], value[row], scale)
            assert torch.allclose(found[row, k].double(), expected, rtol=0, atol=1e-5)


def test_masked_rows_stay_to_the_bit() -> None:
    streams, *others = inputs()
    is_masked = torch.arange(ROWS) % 3 == 1
    found = gate(streams, *others, is_masked=is_masked)
    everywhere = gate(streams, *others)
    assert torch.equal(found[is_masked], streams[is_masked])
    assert torch.equal(found[~is_masked], everywhere[~is_masked])


def test_match_of_zero_counts_as_the_smallest_positive_one() -> None:
    kv = torch.cat([torch.zeros(1, 2 * 8), torch.ones(1, 8)], dim=1)
    found = gate_engram(torch.zeros(1, 2, 8), kv, torch.ones(2, 8), torch.ones(2, 8), None, EPS)
    assert found.flatten().tolist() == pytest.approx([1 / (1 + math.exp(-0.001))] * 16)


def test_bits_of_a_row_do_not_depend_on_the_others() -> None:
    streams, kv, query_scale, key_scale = inputs()
    is_masked = torch.arange(ROWS) % 5 == 2

    def gate_rows(rows: torch.Tensor) -> torch.Tensor:
        scales = query_scale, key_scale
        return gate(streams[rows], kv[rows], *scales, is_masked=is_masked[rows])

    check_row_invariance(gate_rows, ROWS)


def test_gradients_are_those_of_float64() -> None:
    doubles = [x.double().requires_grad_() for x in inputs()]
    is_masked = torch.arange(ROWS) % 3 == 1
    direction = normal(ROWS, STREAMS, CHANNELS, seed=4)

    def loss(*given: torch.Tensor) -> torch.Tensor:
        gated = gate(*given, is_masked=is_masked)
        return (gated * direction.to(gated.dtype)).sum()

    singles = [x.detach().float().requires_grad_() for x in doubles]
    expected = torch.autograd.grad(loss(*doubles), doubles)
    for one, other in zip(torch.autograd.grad(loss(*singles), singles), expected, strict=True):
        assert torch.allclose(one.double(), other, rtol=1e-3, atol=1e-4)
    small = [x.detach()[:2, ..., :].clone().requires_grad_() for x in doubles[:2]]
    scales = [x.detach() for x in doubles[2:]]
    assert torch.autograd.gradcheck(lambda *given: gate(*given, *scales), small, fast_mode=True)


def test_rows_are_read_as_they_are_without_scales() -> None:
    table, index = normal(50, 32), torch.tensor([[0, 49], [7, 7]])
    for dtype in (torch.float32, torch.bfloat16):
        rows = read_table_rows(table.to(dtype), None, index)
        assert rows.dtype == torch.float32
        assert torch.equal(rows, table.to(dtype).float()[index])


def test_rows_with_scales_are_the_products_of_code_and_scale() -> None:
    values, scales = quantise_fp8_rows(normal(50, 64) * torch.logspace(-6, 6, 64))
    index = torch.tensor([[0, 49, 3], [7, 7, 11]])
    rows = read_table_rows(values, scales, index)
    exponents = scales.view(torch.uint8).double() - 127
    exact = values.double() * torch.exp2(exponents).repeat_interleave(32, dim=1)
    assert rows.shape == (2, 3, 64)
    assert torch.equal(rows.double(), exact[index])
