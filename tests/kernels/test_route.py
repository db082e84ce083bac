"""Routing: golden choices, the formula in float64, ties and biases."""

import math

import pytest
import torch

from kernels.reference.route import route_tokens
from tests.kernels.golden_vectors import SOURCES, golden_vectors
from tests.kernels.row_invariance import check_row_invariance, normal

CASES = {"gate384": 1.5, "gate9": 2.0, "gate_top1": 1.5}


def exact_route(
    logits: list[float], bias: list[float], k: int, scaling: float
) -> tuple[list[int], list[float]]:
    """One row, in Python's floats."""
    scores = [math.sqrt(math.log1p(math.exp(-abs(a))) + max(a, 0)) for a in logits]
    biased = [score + b for score, b in zip(scores, bias, strict=True)]
    chosen = sorted(sorted(range(len(logits)), key=lambda expert: (-biased[expert], expert))[:k])
    weights = [scores[expert] for expert in chosen]
    total = sum(weights) + 1e-20 if k > 1 else 1
    return chosen, [scaling * weight / total for weight in weights]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("case", CASES)
def test_choices_and_weights_are_the_golden_ones(source: str, case: str) -> None:
    golden = {
        name.removeprefix(f"{case}_"): array
        for name, array in golden_vectors("experts", source).items()
        if name.startswith(case)
    }
    expected, order = golden["out_experts"].to(torch.int64).sort(dim=-1)
    assert golden["gap"].min() > 1e-5, "no choice hangs on the last bits"
    assert 0 < golden["image_mask"].sum() < len(expected)
    experts, weights = route_tokens(
        golden["logits"],
        golden["bias"],
        golden["bias_vl"],
        golden["image_mask"],
        expected.shape[1],
        CASES[case],
    )
    assert torch.equal(experts, expected)
    assert torch.allclose(weights, golden["out_weights"].gather(1, order), rtol=1e-6, atol=0)


@pytest.mark.parametrize("k", [1, 2, 4, 6])
@pytest.mark.parametrize("spread", [0.1, 3.0, 60.0])
def test_choices_and_weights_are_those_of_the_formula(k: int, spread: float) -> None:
    logits, bias = normal(20, 9, spread=spread), normal(9, seed=1, spread=0.3)
    experts, weights = route_tokens(logits, bias, torch.zeros(9), None, k, 2.5)
    assert experts.dtype == torch.int64
    for row in range(20):
        chosen, expected = exact_route(logits[row].tolist(), bias.tolist(), k, 2.5)
        assert experts[row].tolist() == chosen
        assert weights[row].tolist() == pytest.approx(expected, rel=3e-6, abs=1e-20)


def test_bias_is_for_the_choice_only() -> None:
    bias = torch.tensor([0.0, 0.0, 100.0, 50.0])
    experts, weights = route_tokens(torch.zeros(1, 4), bias, bias, None, 2, 1.0)
    assert experts.tolist() == [[2, 3]]
    assert weights.tolist() == [[0.5, 0.5]]


def test_images_have_a_bias_of_their_own() -> None:
    bias, bias_image = torch.tensor([9.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, 9.0])
    is_image = torch.tensor([False, True, False])
    experts, _ = route_tokens(torch.zeros(3, 3), bias, bias_image, is_image, 1, 1.0)
    assert experts.tolist() == [[0], [2], [0]]
    nowhere = torch.zeros(3, dtype=torch.bool)
    for mask in (nowhere, None):
        experts, _ = route_tokens(torch.zeros(3, 3), bias, bias_image, mask, 1, 1.0)
        assert experts.tolist() == [[0], [0], [0]]


@pytest.mark.parametrize("experts", [4, 17, 384])
def test_lowest_numbers_are_chosen_among_equals(experts: int) -> None:
    logits = torch.zeros(5, experts)
    logits[:, experts - 1] = 1
    chosen, _ = route_tokens(logits, torch.zeros(experts), torch.zeros(experts), None, 3, 1.0)
    assert chosen.tolist() == [[0, 1, experts - 1]] * 5


def test_weights_are_zero_when_no_expert_has_a_score() -> None:
    _, weights = route_tokens(
        torch.full((1, 4), -1e4), torch.zeros(4), torch.zeros(4), None, 2, 1.5
    )
    assert weights.tolist() == [[0.0, 0.0]]


def test_one_expert_keeps_its_score_as_weight() -> None:
    _, weights = route_tokens(
        torch.tensor([[1.0, 0.0]]), torch.zeros(2), torch.zeros(2), None, 1, 3
    )
    assert weights.item() == pytest.approx(3 * math.sqrt(math.log1p(math.e)), rel=1e-6)


@pytest.mark.parametrize(("experts", "k"), [(8, 2), (9, 3), (384, 6), (8, 1)])
def test_bits_of_a_row_do_not_depend_on_the_others(experts: int, k: int) -> None:
    logits, bias = normal(13, experts), normal(experts, seed=1)
    is_image = torch.arange(13) % 3 == 0

    def route(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return route_tokens(logits[rows], bias, -bias, is_image[rows], k, 1.5)

    check_row_invariance(route, 13)


@pytest.mark.parametrize("k", [1, 3, 6])
def test_weights_have_the_gradient_of_float64(k: int) -> None:
    logits = normal(2, 5, 9).double().requires_grad_()
    direction = normal(2, 5, k, seed=1).double()

    def weigh(logits: torch.Tensor) -> torch.Tensor:
        weights = route_tokens(logits, torch.zeros(9), torch.zeros(9), None, k, 1.5)[1]
        return (weights * direction.to(weights.dtype)).sum()

    assert torch.autograd.gradcheck(weigh, logits)
    single = logits.detach().float().requires_grad_()
    (found,) = torch.autograd.grad(weigh(single), single)
    (expected,) = torch.autograd.grad(weigh(logits), logits)
    assert torch.allclose(found.double(), expected, rtol=1e-4, atol=1e-6)
