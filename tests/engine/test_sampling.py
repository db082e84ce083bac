"""Tokens are drawn with the right probabilities, and the same again for the same seed."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidRequest
from engine.gumbel import gumbel_noise, noise_words
from engine.sampling import GREEDY, FloatArray, Sampling, choose_token

LOGITS = np.array([1.0, 3.0, 2.0, 3.0, -1.0, 0.5], dtype=np.float32)
DRAWS = 6000


def draw(logits: np.ndarray[Any, Any], sampling: Sampling) -> np.ndarray[Any, Any]:
    """Shares of each token over many positions."""
    drawn = [choose_token(logits, sampling, position) for position in range(DRAWS)]
    return np.bincount(drawn, minlength=len(logits)) / DRAWS


def softmax(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    weights = np.exp(logits.astype(np.float64))
    return np.asarray(weights / weights.sum())


def noise(count: int, seed: int, position: int) -> FloatArray:
    return gumbel_noise(noise_words(count, seed=seed, position=position))


def assert_drawn_with(probabilities: np.ndarray[Any, Any], shares: np.ndarray[Any, Any]) -> None:
    # Five standard deviations of a share: one false alarm in a million, and the draws are fixed.
    allowed = 5 * np.sqrt(probabilities * (1 - probabilities) / DRAWS)
    assert (np.abs(shares - probabilities) <= allowed).all(), (shares, probabilities)


def test_greedy_takes_the_lowest_id_when_logits_are_equal() -> None:
    assert choose_token(LOGITS, GREEDY, 0) == 1


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_sampling_draws_from_the_softmax(temperature: float) -> None:
    shares = draw(LOGITS, Sampling(temperature=temperature, seed=5))
    assert_drawn_with(softmax(LOGITS / temperature), shares)


def test_sampling_draws_only_the_k_most_likely_tokens() -> None:
    shares = draw(LOGITS, Sampling(temperature=1.0, top_k=3, seed=6))
    kept = np.array([-np.inf, 3.0, 2.0, 3.0, -np.inf, -np.inf])
    assert_drawn_with(softmax(kept), shares)


@pytest.mark.parametrize(
    ("top_p", "kept_ids"),
    # Cumulated probabilities in order 1, 3, 2, 0, 5, 4: 0.384, 0.768, 0.909, 0.961, 0.993, 1.
    [(0.3, [1]), (0.384, [1]), (0.5, [1, 3]), (0.9, [1, 3, 2]), (0.95, [1, 3, 2, 0])],
)
def test_sampling_draws_only_the_fewest_tokens_that_reach_p(
    top_p: float, kept_ids: list[int]
) -> None:
    shares = draw(LOGITS, Sampling(temperature=1.0, top_p=top_p, seed=7))
    kept = np.full(len(LOGITS), -np.inf)
    kept[kept_ids] = LOGITS[kept_ids]
    assert_drawn_with(softmax(kept), shares)


def test_top_p_counts_what_top_k_has_left() -> None:
    # Of 1 and 3 alone each has half, so 0.5 is reached by the first.
    shares = draw(LOGITS, Sampling(temperature=1.0, top_k=2, top_p=0.5, seed=8))
    assert shares.tolist() == [0, 1, 0, 0, 0, 0]


def test_filters_keep_the_lowest_ids_when_logits_are_equal() -> None:
    shares = draw(np.zeros(5, dtype=np.float32), Sampling(temperature=1.0, top_k=2, seed=9))
    assert_drawn_with(np.array([0.5, 0.5, 0, 0, 0]), shares)


@given(
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**31),
    logits=st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=50),
    temperature=st.floats(0.1, 5),
    top_k=st.integers(0, 60),
    top_p=st.floats(0.01, 1),
)
def test_choice_is_the_same_again_and_one_of_the_tokens(
    seed: int, position: int, logits: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    array = np.array(logits, dtype=np.float32)
    chosen = choose_token(array, sampling, position)
    assert 0 <= chosen < len(logits)
    assert chosen == choose_token(array, sampling, position)


def test_noise_does_not_depend_on_the_filters() -> None:
    # A token that both leave in and that wins without a filter wins with it, too.
    for position in range(200):
        free = choose_token(LOGITS, Sampling(temperature=1.0, seed=3), position)
        kept = choose_token(LOGITS, Sampling(temperature=1.0, seed=3, top_k=3), position)
        assert kept == free or free not in (1, 2, 3)


def test_noise_differs_between_seeds_and_between_positions() -> None:
    noises = [noise(64, seed, p) for seed in range(5) for p in range(5)]
    assert len({numbers.tobytes() for numbers in noises}) == 25
    neighbours = np.corrcoef(noise(20_000, 1, 1), noise(20_000, 1, 2))
    assert abs(neighbours[0, 1]) < 0.03


def philox(counter: int, key: tuple[int, int]) -> list[int]:
    """Four words of Philox 4x64-10, by the paper (Salmon et al., SC 2011)."""
    mask = 2**64 - 1
    x = [counter, 0, 0, 0]
    k0, k1 = key
    for _ in range(10):
        low, high = x[0] * 0xD2E7470EE14C6C93, x[2] * 0xCA5A826395121157
        x = [(high >> 64) ^ x[1] ^ k0, high & mask, (low >> 64) ^ x[3] ^ k1, low & mask]
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
    return x


@pytest.mark.parametrize(("seed", "position"), [(42, 7), (2**64 - 1, 0), (0, 8191)])
def test_noise_is_that_of_philox_with_the_seed_and_position_as_key(
    seed: int, position: int
) -> None:
    words = [word for counter in (1, 2) for word in philox(counter, (seed, position))]
    expected = [-math.log(-math.log(((word >> 11) + 0.5) / 2**53)) for word in words]
    assert noise(8, seed, position) == pytest.approx(expected, abs=1e-12)


def test_noise_has_the_moments_of_a_gumbel_distribution() -> None:
    numbers = noise(200_000, 11, 0)
    assert numbers.mean() == pytest.approx(np.euler_gamma, abs=0.02)
    assert numbers.var() == pytest.approx(math.pi**2 / 6, abs=0.03)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -0.1},
        {"temperature": 5e-324},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"seed": -1},
        {"seed": 2**64},
    ],
)
def test_sampling_refuses_values_out_of_range(values: dict[str, Any]) -> None:
    (name,) = values
    with pytest.raises(InvalidRequest, match=f"{name}: given .*, expected"):
        Sampling(**values)
