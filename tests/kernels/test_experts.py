"""Experts: the golden one, the weighted sum in float64, and rows that do not see each other."""

import pytest
import torch

from kernels.reference.experts import run_experts, swiglu
from kernels.reference.tiles import TILE_ROWS
from tests.kernels.golden_vectors import golden_vectors
from tests.kernels.row_invariance import (
    check_products_of_tiles,
    check_row_invariance,
    normal,
    tiles_of,
)

ROWS, EXPERTS, HIDDEN, INNER, LIMIT = 27, 5, 24, 20, 1.5

Weights = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def exact_swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    gate, up = gate.double().clamp(max=limit), up.double().clamp(-limit, limit)
    return gate * torch.sigmoid(gate) * up


def exact_expert(x: torch.Tensor, matrices: Weights, weight: torch.Tensor) -> torch.Tensor:
    gate, up, down = (matrix.double() for matrix in matrices)
    hidden = exact_swiglu(gate @ x.double(), up @ x.double(), LIMIT)
    return down @ (hidden * weight.double())


def expert_weights() -> Weights:
    return (
        normal(EXPERTS, INNER, HIDDEN, seed=1),
        normal(EXPERTS, INNER, HIDDEN, seed=2),
        normal(EXPERTS, HIDDEN, INNER, seed=3),
    )


def choices(k: int) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.rand(ROWS, EXPERTS, generator=torch.Generator().manual_seed(4))
    return scores.argsort(dim=1)[:, :k].sort(dim=1).values, normal(ROWS, k, seed=5).abs()


@pytest.mark.parametrize("is_weighted", [True, False])
def test_expert_is_the_golden_one(is_weighted: bool) -> None:
    golden = golden_vectors("experts", "folder")
    x = golden["expert_x"]
    weights = golden["expert_route"] if is_weighted else torch.ones(len(x), 1)
    y = run_experts(
        x,
        torch.zeros(len(x), 1, dtype=torch.int64),
        weights,
        golden["expert_w1"][None],
        golden["expert_w3"][None],
        golden["expert_w2"][None],
        float(golden["expert_limit"]),
        tiles_of(torch.arange(len(x))),
    )
    expected = golden["expert_y" if is_weighted else "expert_y_noroute"]
    assert torch.allclose(y, expected, rtol=1e-5, atol=2e-6)


def test_swiglu_clamps_the_gate_from_above_and_the_other_on_both_sides() -> None:
    gate = torch.tensor([-50.0, -1.0, 0.0, 1.0, 2.0, 50.0])
    for up in (-9.0, -0.5, 0.5, 9.0):
        found = swiglu(gate, torch.full((6,), up), LIMIT)
        expected = exact_swiglu(gate, torch.full((6,), up), LIMIT)
        assert torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-20)


@pytest.mark.parametrize("rows", [1, 5, TILE_ROWS, ROWS])
@pytest.mark.parametrize("k", [1, 2, EXPERTS])
def test_output_is_the_weighted_sum_of_the_chosen_experts(rows: int, k: int) -> None:
    x, matrices = normal(ROWS, HIDDEN), expert_weights()
    experts, weights = choices(k)
    y = run_experts(
        x[:rows], experts[:rows], weights[:rows], *matrices, LIMIT, tiles_of(torch.arange(rows))
    )
    for row in range(rows):
        expected = torch.zeros(HIDDEN, dtype=torch.float64)
        for expert, weight in zip(experts[row].tolist(), weights[row], strict=True):
            gate, up, down = (matrix[expert] for matrix in matrices)
            expected += exact_expert(x[row], (gate, up, down), weight)
        assert torch.allclose(y[row].double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("k", [1, 2, EXPERTS])
def test_bits_of_a_row_do_not_depend_on_the_others(k: int) -> None:
    x, matrices = normal(ROWS, HIDDEN), expert_weights()
    experts, weights = choices(k)

    def run(rows: torch.Tensor) -> torch.Tensor:
        return run_experts(x[rows], experts[rows], weights[rows], *matrices, LIMIT, tiles_of(rows))

    check_row_invariance(run, ROWS)


@pytest.mark.parametrize("rows", [1, TILE_ROWS, ROWS])
def test_products_are_those_of_tiles(rows: int) -> None:
    x, (experts, weights) = normal(rows, HIDDEN), choices(2)
    arguments = x, experts[:rows], weights[:rows], *expert_weights(), LIMIT
    tiles = tiles_of(torch.arange(rows), 3)
    check_products_of_tiles(lambda: run_experts(*arguments, tiles), x, 3)


def test_experts_that_no_row_goes_to_are_not_read() -> None:
    matrices = expert_weights()
    for matrix in matrices:
        matrix[3] = float("nan")
    x, experts = normal(ROWS, HIDDEN), torch.tensor([[1, 4]]).expand(ROWS, 2)
    weights = torch.ones(ROWS, 2)
    y = run_experts(x, experts, weights, *matrices, LIMIT, tiles_of(torch.arange(ROWS)))
    assert y.isfinite().all()


def test_infinity_in_an_expert_is_seen_by_those_rows_only_that_go_to_it() -> None:
    matrices = expert_weights()
    matrices[2][3] = float("inf")
    x, experts = normal(TILE_ROWS, HIDDEN), torch.tensor([[1, 4]]).repeat(TILE_ROWS, 1)
    experts[5, 0] = 3
    weights, tiles = torch.ones(TILE_ROWS, 2), tiles_of(torch.arange(TILE_ROWS))
    assert tiles.count == 1
    y = run_experts(x, experts, weights, *matrices, LIMIT, tiles)
    assert torch.equal(y.isfinite().all(-1), torch.arange(TILE_ROWS) != 5)


def test_no_rows_give_no_rows() -> None:
    experts, weights = choices(2)
    none = torch.arange(0)
    y = run_experts(
        normal(0, HIDDEN), experts[:0], weights[:0], *expert_weights(), LIMIT, tiles_of(none)
    )
    assert y.shape == (0, HIDDEN)
