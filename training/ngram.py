"""3-gram models: the baseline that a trained model has to beat.

Interpolated Kneser-Ney smoothing with three discounts an order (Chen and Goodman, 1998, equations
24 to 26), over bytes or over tokens. A model is a proper distribution over all symbols after any
two symbols, seen or not, and so its bits compare with those of a neural model. Counts are sorted
arrays: some ten million n-grams are counted and looked up in seconds.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BYTE_END, BYTE_START = 256, 257
BYTE_SYMBOLS = 258
"""The bytes, the end of a text, and what stands before its start."""

_FALLBACK_DISCOUNT = 0.5
"""Where too few n-grams were seen once or twice to estimate one, as in very small corpora."""

_DISCOUNT_MIN = 0.05
"""Odd counts of counts give less, even below zero: a context would leave nothing for the unseen."""


@dataclass(frozen=True)
class Order:
    """Discounted counts of one order: contexts are numbers, `keys` are context x symbols + outcome.

    `keys` int64 [N] ascending with `kept` f64 [N], the probability that an n-gram keeps for itself;
    `contexts` int64 [C] ascending with `left_over` f64 [C], what goes to the lower order.
    """

    symbols: int
    keys: NDArray[np.int64]
    kept: NDArray[np.float64]
    contexts: NDArray[np.int64]
    left_over: NDArray[np.float64]

    def interpolate(
        self,
        contexts: NDArray[np.int64],
        outcomes: NDArray[np.int64],
        lower: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """Probabilities [T] of outcomes after contexts; `lower` [T] those of the order below."""
        kept = _look_up(self.keys, self.kept, contexts * self.symbols + outcomes, 0.0)
        return kept + _look_up(self.contexts, self.left_over, contexts, 1.0) * lower


@dataclass(frozen=True)
class TrigramModel:
    """P(symbol | two symbols before) over symbols 0 to `symbols` - 1.

    `start` is the symbol that stands twice before each document.
    """

    symbols: int
    start: int
    unigram: Order
    bigram: Order
    trigram: Order

    def probabilities(
        self,
        first: NDArray[np.int64],
        second: NDArray[np.int64],
        outcomes: NDArray[np.int64],
    ) -> NDArray[np.float64]:
        """P(outcome | first, second), f64 [T], for arrays int64 [T] of symbols."""
        uniform = np.full(outcomes.shape, 1.0 / self.symbols)
        low = self.unigram.interpolate(np.zeros_like(outcomes), outcomes, uniform)
        middle = self.bigram.interpolate(second, outcomes, low)
        return self.trigram.interpolate(first * self.symbols + second, outcomes, middle)

    def bits(self, document: NDArray[np.int64]) -> float:
        """Bits that the symbols int64 [T] of one document take, its end too if it is in there."""
        probabilities = self.probabilities(*_split_trigrams([document], self.start))
        return float(-np.log2(probabilities).sum())


def train_trigrams(
    documents: Iterable[NDArray[np.int64]], *, symbols: int, start: int
) -> TrigramModel:
    """Count documents of symbols int64 [T], each with its end symbol; raises ValueError if none.

    The lower orders count in how many contexts a symbol was seen, not how often: a symbol that
    always follows the same one says little about new contexts (Kneser and Ney, 1995).
    """
    first, second, outcome = _split_trigrams(documents, start)
    if not len(outcome):
        raise ValueError("documents to count: given no symbols, expected one or more")
    trigrams, counts = np.unique((first * symbols + second) * symbols + outcome, return_counts=True)
    bigrams, continuations = np.unique(trigrams % (symbols * symbols), return_counts=True)
    unigrams, spread = np.unique(bigrams % symbols, return_counts=True)
    return TrigramModel(
        symbols,
        start,
        _discount(unigrams, spread, symbols),
        _discount(bigrams, continuations, symbols),
        _discount(trigrams, counts, symbols),
    )


def train_byte_trigrams(texts: Iterable[bytes]) -> TrigramModel:
    """3-grams over the bytes of texts and their ends."""
    return train_trigrams(map(byte_symbols, texts), symbols=BYTE_SYMBOLS, start=BYTE_START)


def byte_symbols(text: bytes, *, has_end: bool = True) -> NDArray[np.int64]:
    """Symbols of a text, int64 [bytes + 1]; without `has_end` those of a text that goes on."""
    symbols = np.frombuffer(text, np.uint8).astype(np.int64)
    return np.append(symbols, BYTE_END) if has_end else symbols


def estimate_discounts(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Discounts of counts 0, 1, 2 and 3 or more, f64 [4] (Chen and Goodman, equation 26)."""
    once, twice, thrice, four = (int((counts == times).sum()) for times in (1, 2, 3, 4))
    if not (once and twice and thrice):
        return np.array([0.0, *[_FALLBACK_DISCOUNT] * 3])
    ratio = once / (once + 2 * twice)
    discounts = [
        1 - 2 * ratio * twice / once,
        2 - 3 * ratio * thrice / twice,
        3 - 4 * ratio * four / thrice,
    ]
    return np.clip([0.0, *discounts], [0, *[_DISCOUNT_MIN] * 3], [0, 1, 2, 3])


def _discount(keys: NDArray[np.int64], counts: NDArray[np.int64], symbols: int) -> Order:
    taken = estimate_discounts(counts)[np.minimum(counts, 3)]
    contexts, starts, members = np.unique(keys // symbols, return_index=True, return_inverse=True)
    totals = np.add.reduceat(counts, starts).astype(np.float64)
    return Order(
        symbols,
        keys,
        (counts - taken) / totals[members],
        contexts,
        np.add.reduceat(taken, starts) / totals,
    )


def _split_trigrams(
    documents: Iterable[NDArray[np.int64]], start: int
) -> Sequence[NDArray[np.int64]]:
    """First, second and third symbol [T] of every 3-gram that ends within a document."""
    before = np.array([start, start], np.int64)
    padded = [np.concatenate([before, document]) for document in documents]
    if not padded:
        return [np.empty(0, np.int64)] * 3
    return [
        np.concatenate([document[place : len(document) - 2 + place] for document in padded])
        for place in range(3)
    ]


def _look_up(
    keys: NDArray[np.int64],
    values: NDArray[np.float64],
    wanted: NDArray[np.int64],
    default: float,
) -> NDArray[np.float64]:
    places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[places] == wanted, values[places], default)
