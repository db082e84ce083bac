"""3-gram models: proper distributions, equal to the formula, and better than fewer symbols."""

import math
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.training.small_library import source_text
from training.ngram import (
    BYTE_END,
    BYTE_START,
    BYTE_SYMBOLS,
    byte_symbols,
    estimate_discounts,
    train_byte_trigrams,
    train_trigrams,
)

SYMBOLS = 7
START = 6

DOCUMENTS = st.lists(
    st.lists(st.integers(0, SYMBOLS - 2), min_size=1, max_size=40), min_size=1, max_size=8
)
SYMBOL = st.integers(0, SYMBOLS - 1)


def arrays(documents: list[list[int]]) -> list[NDArray[np.int64]]:
    return [np.array(document, np.int64) for document in documents]


def every_outcome(symbols: int) -> NDArray[np.int64]:
    return np.arange(symbols, dtype=np.int64)


@given(DOCUMENTS, SYMBOL, SYMBOL)
@example([[0, 2, 1, 0], [2, 1, 1, 0, 1, 0]], 0, 2)  # One discount came out as 0.
def test_probabilities_sum_to_one_after_any_two_symbols(
    documents: list[list[int]], first: int, second: int
) -> None:
    model = train_trigrams(arrays(documents), symbols=SYMBOLS, start=START)
    given_first, given_second = np.full(SYMBOLS, first), np.full(SYMBOLS, second)
    probabilities = model.probabilities(given_first, given_second, every_outcome(SYMBOLS))
    assert probabilities.sum() == pytest.approx(1.0, abs=1e-12)
    assert (probabilities > 0).all()


@given(st.lists(st.binary(min_size=1, max_size=60), min_size=1, max_size=5), st.binary(max_size=2))
def test_byte_probabilities_sum_to_one(texts: list[bytes], before: bytes) -> None:
    model = train_byte_trigrams(texts)
    first, second = [BYTE_START, BYTE_START, *before][-2:]
    outcomes = every_outcome(BYTE_SYMBOLS)
    probabilities = model.probabilities(
        np.full(BYTE_SYMBOLS, first), np.full(BYTE_SYMBOLS, second), outcomes
    )
    assert probabilities.sum() == pytest.approx(1.0, abs=1e-12)
    assert (probabilities > 0).all()


def plain_probability(documents: list[list[int]], first: int, second: int, outcome: int) -> float:
    """The same formula with dictionaries, one n-gram at a time."""
    trigrams: Counter[tuple[int, ...]] = Counter()
    for document in documents:
        padded = [START, START, *document]
        trigrams.update(zip(padded, padded[1:], padded[2:], strict=False))
    bigrams = Counter(trigram[1:] for trigram in trigrams)
    unigrams = Counter(bigram[1:] for bigram in bigrams)
    probability = 1 / SYMBOLS
    for counts, context in ((unigrams, ()), (bigrams, (second,)), (trigrams, (first, second))):
        times = Counter(counts.values())
        kept = dict.fromkeys((1, 2, 3), 0.5)
        if times[1] and times[2] and times[3]:
            y = times[1] / (times[1] + 2 * times[2])
            kept = {
                k: min(max(k - (k + 1) * y * times[k + 1] / times[k], 0.05), k) for k in (1, 2, 3)
            }
        after: dict[tuple[int, ...], dict[int, int]] = defaultdict(dict)
        for ngram, count in counts.items():
            after[ngram[:-1]][ngram[-1]] = count
        if context in after:
            seen = after[context]
            total = sum(seen.values())
            freed = sum(kept[min(count, 3)] for count in seen.values()) / total
            own = seen.get(outcome, 0)
            probability *= freed
            probability += (own - kept[min(own, 3)]) / total if own else 0.0
    return probability


@given(DOCUMENTS, SYMBOL, SYMBOL, SYMBOL)
def test_probability_is_that_of_the_formula(
    documents: list[list[int]], first: int, second: int, outcome: int
) -> None:
    model = train_trigrams(arrays(documents), symbols=SYMBOLS, start=START)
    (probability,) = model.probabilities(np.array([first]), np.array([second]), np.array([outcome]))
    expected = plain_probability(documents, first, second, outcome)
    assert probability == pytest.approx(expected, rel=1e-9)


def test_discounts_are_those_of_chen_and_goodman() -> None:
    # 8 n-grams seen once, 4 twice, 2 thrice, 1 four times: Y = 8 / (8 + 2 * 4) = 1/2.
    counts = np.array([1] * 8 + [2] * 4 + [3] * 2 + [4] + [9] * 5)
    assert estimate_discounts(counts).tolist() == [0.0, 0.5, 1.25, 2.0]


def test_discounts_stay_in_range_when_counts_are_odd() -> None:
    assert estimate_discounts(np.array([1, 1, 1])).tolist() == [0.0, 0.5, 0.5, 0.5]
    # 2 - 3 Y n3 / n2 would be below zero: no probability left for what was not seen.
    assert estimate_discounts(np.array([1] * 9 + [2] + [3] * 30))[2] == 0.05


def test_bits_are_the_logarithm_of_the_documents_probability() -> None:
    documents = [[0, 1, 2, 0, 1, 3, 5], [0, 1, 2, 2, 5], [4, 1, 2, 5]]
    model = train_trigrams(arrays(documents), symbols=SYMBOLS, start=START)
    padded = [START, START, *documents[1]]
    expected = -sum(
        math.log2(plain_probability(documents, *padded[place : place + 3]))
        for place in range(len(documents[1]))
    )
    assert model.bits(np.array(documents[1])) == pytest.approx(expected)


def test_probabilities_of_all_short_documents_sum_to_one() -> None:
    # With an end symbol 0 and two others, documents of every length share the whole probability.
    model = train_trigrams(arrays([[1, 2, 0], [2, 0], [1, 0], [1, 1, 0]]), symbols=4, start=3)
    sums = 0.0
    open_texts = [[]]  # type: list[list[int]]
    for _ in range(7):
        sums += sum(2 ** -model.bits(np.array([*text, 0])) for text in open_texts)
        open_texts = [[*text, symbol] for text in open_texts for symbol in (1, 2, 3)]
    left = sum(2 ** -model.bits(np.array(text)) for text in open_texts)
    assert sums + left == pytest.approx(1.0)
    assert sums > 0.9


def test_text_like_the_training_side_takes_fewer_bits_than_other_text() -> None:
    model = train_byte_trigrams(source_text(number).encode() for number in range(20))
    alike = source_text(30).encode()
    backwards = alike[::-1]
    assert model.bits(byte_symbols(alike)) / len(alike) < 2.0
    assert model.bits(byte_symbols(backwards)) > 2 * model.bits(byte_symbols(alike))


def test_end_is_a_symbol_of_whole_texts_only() -> None:
    assert byte_symbols(b"ab").tolist() == [97, 98, BYTE_END]
    assert byte_symbols(b"ab", has_end=False).tolist() == [97, 98]


def test_no_documents_are_refused() -> None:
    with pytest.raises(ValueError, match="given no symbols"):
        train_trigrams([], symbols=4, start=3)
