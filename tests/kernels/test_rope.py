"""Rotary embedding: golden frequencies to the bit, complex products in float64, exact inverse."""

import math
from types import SimpleNamespace

import pytest
import torch

from kernels.reference.rope import Yarn, apply_rope, rope_frequencies, rope_tables
from tests.kernels.golden_vectors import SOURCES, golden_vectors
from tests.kernels.row_invariance import check_row_invariance, normal

Case = tuple[int, float, Yarn | None]


def yarn_from(original_positions: int) -> Yarn:
    return SimpleNamespace(
        factor=16.0, beta_fast=32.0, beta_slow=1.0, original_positions=original_positions
    )


CASES: dict[str, Case] = {
    "real_swa": (64, 10_000.0, None),
    "real_compressed": (64, 160_000.0, yarn_from(65_536)),
    "small_swa": (16, 10_000.0, None),
    "small_compressed": (16, 160_000.0, yarn_from(64)),
}


def exact_frequencies(rope_dim: int, theta: float, yarn: Yarn | None) -> list[float]:
    """In Python's floats, pair by pair."""
    found = []
    for pair in range(rope_dim // 2):
        frequency = theta ** (-2 * pair / rope_dim)
        if yarn is not None:

            def pair_with(turns: float, positions: int = yarn.original_positions) -> float:
                return rope_dim * math.log(positions / (turns * 2 * math.pi)) / 2 / math.log(theta)

            low = max(math.floor(pair_with(yarn.beta_fast)), 0)
            high = min(math.ceil(pair_with(yarn.beta_slow)), rope_dim - 1)
            slowed = min(max((pair - low) / (high - low), 0), 1)
            frequency = frequency * (1 - slowed) + frequency / yarn.factor * slowed
        found.append(frequency)
    return found


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("case", CASES)
def test_frequencies_are_the_golden_ones_to_the_bit(source: str, case: str) -> None:
    golden = golden_vectors("rope", source)
    assert torch.equal(rope_frequencies(*CASES[case]), golden[f"{case}_inv_freq"])


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("case", CASES)
def test_tables_are_the_golden_ones_up_to_a_million_tokens(source: str, case: str) -> None:
    golden = golden_vectors("rope", source)
    cos, sin = rope_tables(rope_frequencies(*CASES[case]), golden["positions"].to(torch.int64))
    assert int(golden["positions"].max()) == 2**20 - 1
    assert (cos - golden[f"{case}_cos"]).abs().max() <= 6e-8
    assert (sin - golden[f"{case}_sin"]).abs().max() <= 6e-8


@pytest.mark.parametrize("source", SOURCES)
def test_rotation_is_the_golden_one(source: str) -> None:
    golden = golden_vectors("rope", source)
    tables = rope_tables(rope_frequencies(*CASES["small_compressed"]), golden["apply_positions"])
    turned = apply_rope(golden["apply_x"], *tables)
    assert torch.allclose(turned, golden["apply_y"], rtol=0, atol=5e-7)
    assert torch.equal(turned[..., :-16], golden["apply_x"][..., :-16])


@pytest.mark.parametrize("case", [*CASES.values(), (16, 10_000.0, yarn_from(2**18))])
def test_frequencies_are_those_of_the_formula(case: Case) -> None:
    # In the last case the ramp ends behind the last pair.
    expected = torch.tensor(exact_frequencies(*case), dtype=torch.float64)
    assert torch.allclose(rope_frequencies(*case).double(), expected, rtol=1e-6, atol=0)


def test_yarn_without_a_ramp_is_a_step() -> None:
    # Both ends of the ramp fall on the first pair.
    yarn = yarn_from(6)
    frequencies = rope_frequencies(8, 10_000.0, yarn)
    plain = rope_frequencies(8, 10_000.0, None)
    assert torch.allclose(frequencies[1:], plain[1:] / 16)
    assert frequencies[0] == plain[0]


@pytest.mark.parametrize("inverse", [False, True])
def test_pairs_are_turned_as_complex_numbers(inverse: bool) -> None:
    positions = torch.tensor([0, 1, 77, 4_095, 1_000_000])
    frequencies = rope_frequencies(16, 10_000.0, None)
    x = normal(5, 3, 40)
    turned = apply_rope(x, *rope_tables(frequencies, positions), inverse=inverse)
    # The angle is a float32 product by definition; all else is exact.
    angles = (positions.to(torch.float32)[:, None] * frequencies).double()
    turns = torch.polar(torch.ones_like(angles), -angles if inverse else angles)[:, None]
    pairs = torch.view_as_complex(x[..., 24:].double().view(5, 3, 8, 2))
    expected = torch.view_as_real(pairs * turns).flatten(-2)
    assert torch.allclose(turned[..., 24:].double(), expected, rtol=0, atol=1e-6)
    assert torch.equal(turned[..., :24], x[..., :24])


def test_all_channels_may_turn_and_several_dimensions_may_lead() -> None:
    x = normal(2, 3, 4, 16)
    positions = torch.tensor([[0, 1, 2], [7, 8, 9]])
    cos, sin = rope_tables(rope_frequencies(16, 10_000.0, None), positions)
    turned = apply_rope(x, cos, sin)
    for row in range(2):
        assert torch.equal(turned[row], apply_rope(x[row], cos[row], sin[row]))
    assert torch.equal(apply_rope(x[:, :, 0], cos, sin), turned[:, :, 0])


def test_inverse_turns_back() -> None:
    x = normal(9, 2, 32)
    tables = rope_tables(rope_frequencies(32, 10_000.0, None), torch.arange(9) * 1_001)
    back = apply_rope(apply_rope(x, *tables), *tables, inverse=True)
    assert torch.allclose(back, x, rtol=0, atol=1e-6)


def test_bits_of_a_row_do_not_depend_on_the_others() -> None:
    x, frequencies = normal(13, 3, 48), rope_frequencies(16, 160_000.0, yarn_from(64))
    check_row_invariance(lambda rows: apply_rope(x[rows], *rope_tables(frequencies, rows + 3)), 13)


def test_gradient_is_the_inverse_rotation() -> None:
    x, direction = normal(5, 2, 24).requires_grad_(), normal(5, 2, 24, seed=1)
    tables = rope_tables(rope_frequencies(16, 10_000.0, None), torch.arange(5))
    (gradient,) = torch.autograd.grad((apply_rope(x, *tables) * direction).sum(), x)
    assert torch.allclose(gradient, apply_rope(direction, *tables, inverse=True), atol=1e-6)
