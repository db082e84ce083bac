"""The quick choice of a token is that of the definition, to the last bit of noise and mass."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.gumbel import choose_largest_sum, gumbel_noise, noise_words, noise_words_of
from engine.likely_tokens import keep_likely
from engine.sampling import FloatArray, Sampling, choose_token
from tests.engine.sampling_reference import (
    choose_by_definition,
    kept_by_definition,
    noise_by_definition,
)

V41_VOCABULARY = 129_280
POSITIONS = range(3)

seeds = st.integers(0, 2**64 - 1)
temperatures = st.sampled_from([1e-6, 1e-3, 0.8, 1.0, 50.0, 1e300]) | st.floats(0.1, 5)
top_ks = st.sampled_from([0, 1, 2, 50, 511, 512, 513, 5000]) | st.integers(0, 3000)
top_ps = st.sampled_from([1e-9, 0.5, 0.9, 0.95, 0.999999, 1 - 2**-53, 1.0]) | st.floats(1e-6, 1)


def spread(count: int, seed: int, kind: str) -> FloatArray:
    """Logits as models have them (few stand out), and as none has."""
    rng = np.random.default_rng(seed)
    logits = (3 * rng.standard_normal(count)).astype(np.float32)
    match kind:
        case "peaked":
            logits[rng.integers(0, count, 5)] += 15
        case "tied":
            logits = np.round(logits)
        case "flat":
            logits[:] = 1.5
        case "nearly flat":
            logits *= 1e-4
        case "steep":
            logits *= 1e4
        case "infinite":
            logits[rng.integers(0, count, 1 + count // 3)] = -np.inf
        case "only infinite":
            logits[:] = -np.inf
        case "beyond all":
            logits[rng.integers(0, count, 2)] = np.inf
        case "huge":
            logits *= 1e37
        case "broken":
            logits[rng.integers(0, count, 3)] = np.nan
        case "coarse":
            # Noise is rounded to multiples of 2, so that sums of unequal logits are equal.
            return 2.0**53 + 2.0 * rng.integers(0, 5, count)
        case "level tail":
            # All have the same rounding error in float32.
            logits[rng.permutation(count)[400:]] = -1.3
        case "no tail":
            logits[rng.permutation(count)[400:]] = -1000.0
    return logits


KINDS = [
    *("plain", "peaked", "tied", "flat", "nearly flat", "steep", "infinite", "only infinite"),
    *("beyond all", "huge", "broken", "coarse", "level tail", "no tail"),
]


def assert_as_defined(logits: FloatArray, sampling: Sampling) -> None:
    for position in POSITIONS:
        expected = choose_by_definition(logits, sampling, position)
        assert choose_token(logits, sampling, position) == expected, (sampling, position)


@given(
    count=st.integers(1, 40) | st.integers(1000, 6000),
    kind=st.sampled_from(KINDS),
    seed=seeds,
    temperature=temperatures,
    top_k=top_ks,
    top_p=top_ps,
)
@example(count=5000, kind="flat", seed=1, temperature=1.0, top_k=0, top_p=0.5)
@example(count=5000, kind="infinite", seed=1, temperature=1.0, top_k=4000, top_p=0.9)
@example(count=5000, kind="broken", seed=1, temperature=1.0, top_k=4999, top_p=1.0)
def test_choice_is_that_of_the_definition(
    count: int, kind: str, seed: int, temperature: float, top_k: int, top_p: float
) -> None:
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    assert_as_defined(spread(count, seed, kind), sampling)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("top_k", "top_p"), [(0, 1.0), (50, 1.0), (0, 0.95), (0, 0.999), (50, 0.9), (100_000, 0.999)]
)
def test_choice_is_that_of_the_definition_for_a_whole_vocabulary(
    kind: str, top_k: int, top_p: float
) -> None:
    logits = spread(V41_VOCABULARY, 5, kind)
    assert_as_defined(logits, Sampling(temperature=0.8, top_k=top_k, top_p=top_p, seed=9))


@given(
    st.lists(st.floats(width=32), min_size=1, max_size=12),
    st.integers(0, 14),
    st.floats(1e-6, 1),
)
def test_filters_keep_what_the_definition_keeps_of_any_numbers(
    values: list[float], top_k: int, top_p: float
) -> None:
    logits = np.array(values, dtype=np.float64)
    sampling = Sampling(temperature=1.0, top_k=top_k, top_p=top_p)
    with np.errstate(invalid="ignore"):
        expected = kept_by_definition(logits, sampling)
    assert keep_likely(logits, top_k=top_k, top_p=top_p).tolist() == sorted(expected.tolist())


@pytest.mark.parametrize("kind", ["peaked", "level tail", "no tail"])
@pytest.mark.parametrize("count", [1024, 10_000, V41_VOCABULARY])
def test_mass_that_is_reached_to_the_last_bit_is_decided_as_defined(count: int, kind: str) -> None:
    """The mass of a head, and its neighbours among numbers: rounding alone decides."""
    scaled = spread(count, 3, kind).astype(np.float64)
    ordered = scaled[np.argsort(-scaled, kind="stable")]
    weights = np.exp(ordered - ordered[0])
    reached = np.cumsum(weights) / weights.sum()
    for tokens in (1, 5, 60, 301, 399, 511, 512, 700):
        for top_p in neighbours(float(reached[tokens - 1])):
            sampling = Sampling(temperature=1.0, top_p=top_p)
            expected = len(kept_by_definition(scaled, sampling))
            assert len(keep_likely(scaled, top_k=0, top_p=top_p)) == expected


def neighbours(value: float) -> list[float]:
    """As far as they are masses; a sum may come out above 1."""
    around = (np.nextafter(value, 0), value, np.nextafter(value, 2))
    return [min(float(one), 1.0) for one in around]


@given(
    ids=st.sets(st.integers(0, V41_VOCABULARY - 1), min_size=1, max_size=30),
    seed=seeds,
    position=st.integers(0, 2**63),
)
@example(ids={0}, seed=1, position=0)
@example(ids={3, 4, 5, 100_000, 100_001, 100_003, 100_004}, seed=2**64 - 1, position=7)
def test_noise_of_some_tokens_is_that_among_all(ids: set[int], seed: int, position: int) -> None:
    some = np.array(sorted(ids), dtype=np.intp)
    among_all = noise_by_definition(V41_VOCABULARY, seed=seed, position=position)
    words = noise_words_of(some, seed=seed, position=position)
    assert gumbel_noise(words).tobytes() == among_all[some].tobytes()
    if len(ids) == 1:
        all_words = noise_words(V41_VOCABULARY, seed=seed, position=position)
        assert gumbel_noise(all_words).tobytes() == among_all.tobytes()


@pytest.mark.parametrize("count", [5, 40, 5000])
def test_of_equal_sums_the_first_wins_or_that_of_the_most_likely_token(count: int) -> None:
    differences = 0
    for seed in range(60):
        logits = spread(count, seed, "coarse")
        words = noise_words(count, seed=seed, position=0)
        sums = logits + gumbel_noise(words)
        equal = np.flatnonzero(sums == sums.max())
        first, likely = int(equal[0]), int(equal[np.argmax(logits[equal])])
        assert choose_largest_sum(logits, words, prefers_likely=False) == first
        assert choose_largest_sum(logits, words, prefers_likely=True) == likely
        differences += first != likely
    assert differences > 0, "the cases show nothing"


def test_answer_of_a_model_sorts_no_vocabulary_and_makes_no_noise_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sorted_numbers: list[int] = []
    noise_numbers: list[int] = []
    plain_sort, plain_log = np.sort, np.log

    def sort(values: FloatArray) -> FloatArray:
        sorted_numbers.append(len(values))
        return np.asarray(plain_sort(values))

    def log(values: FloatArray) -> FloatArray:
        noise_numbers.append(len(values))
        return np.asarray(plain_log(values))

    monkeypatch.setattr(np, "sort", sort)
    monkeypatch.setattr(np, "log", log)
    logits = spread(V41_VOCABULARY, 5, "peaked")
    for values in ({"top_p": 0.95}, {"top_k": 50}, {"top_k": 50, "top_p": 0.95}, {}):
        choose_token(logits, Sampling(temperature=0.8, seed=1, **values), 3)
    assert max(sorted_numbers) <= 512
    assert max(noise_numbers) < V41_VOCABULARY // 50
