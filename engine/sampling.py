"""Chooses the next token from logits: greedy, or seeded sampling.

The noise of a position is a function of (seed, position) alone: not of the process, of earlier
draws, or of which tokens the filters left. The same request with the same seed gives the same
answer wherever and however often it runs.
"""

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .errors import InvalidRequest
from .gumbel import choose_largest_sum, noise_words, noise_words_of
from .likely_tokens import keep_likely

FloatArray: TypeAlias = npt.NDArray[np.floating[Any]]

SEED_MAX = 2**64 - 1

TEMPERATURE_MIN = 1e-6
"""Logits divided by less may leave the range of numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to choose tokens. Raises InvalidRequest for values outside the ranges below.

    `temperature`: 0 is greedy; from 1e-6 on it divides the logits. `top_k`: only the k most likely
    tokens, 0 for all. `top_p`: only the fewest most likely tokens whose probabilities reach p.
    Both filters apply after the temperature, top_k first. `seed`: 0 to 2^64 - 1.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        is_sampled = math.isfinite(self.temperature) and self.temperature >= TEMPERATURE_MIN
        if not (is_sampled or self.temperature == 0):
            expected = f"0 (greedy), or {TEMPERATURE_MIN} or more"
            raise InvalidRequest("temperature", given=self.temperature, expected=expected)
        if self.top_k < 0:
            raise InvalidRequest("top_k", given=self.top_k, expected="0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise InvalidRequest("top_p", given=self.top_p, expected="above 0, at most 1")
        if not 0 <= self.seed <= SEED_MAX:
            raise InvalidRequest("seed", given=self.seed, expected=f"0 to {SEED_MAX}")


GREEDY = Sampling()


def choose_token(logits: FloatArray, sampling: Sampling, position: int) -> int:
    """Id of the token at `position` (its index in the whole sequence), from logits [vocabulary].

    Among equal logits the lowest id wins. Sampling adds Gumbel noise to the log-probabilities and
    takes the largest sum, which draws exactly from the softmax (Gumbel, 1954; Maddison et al.,
    2014). Of equal sums the lowest id wins; with a filter, of the most likely ones among them.
    """
    assert logits.ndim == 1, logits.shape
    if sampling.temperature == 0:
        return int(np.argmax(logits))
    scaled = logits.astype(np.float64) / sampling.temperature
    if sampling.top_p == 1 and not 0 < sampling.top_k < len(scaled):
        words = noise_words(len(scaled), seed=sampling.seed, position=position)
        return choose_largest_sum(scaled, words, prefers_likely=False)
    kept = keep_likely(scaled, top_k=sampling.top_k, top_p=sampling.top_p)
    words = noise_words_of(kept, seed=sampling.seed, position=position)
    return int(kept[choose_largest_sum(scaled[kept], words, prefers_likely=True)])
