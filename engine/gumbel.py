"""Gumbel noise of tokens, and which token has the largest sum of logit and noise. Pure.

Noise comes from the counter-based generator Philox 4x64. Its raw words are turned into numbers
here, because numpy keeps the words of a generator stable between versions, but not the numbers its
distributions draw. The two logarithms of a number cost more than its word, so they are only taken
of tokens that may win.
"""

import math
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

FloatArray: TypeAlias = npt.NDArray[np.floating[Any]]
TokenIds: TypeAlias = npt.NDArray[np.intp]
Words: TypeAlias = npt.NDArray[np.uint64]

STEP_WORDS = 4
"""Words that the generator makes in one step."""

JUMP_WORDS = 500
"""A jump of the generator takes as long as so many words."""

HEAD_TOKENS = 512
"""Tokens whose sums are always computed, and which the others have to reach."""


def noise_words(vocabulary: int, *, seed: int, position: int) -> Words:
    """A word for each token."""
    words: Words = _philox(seed, position).random_raw(vocabulary)
    return words


def noise_words_of(token_ids: TokenIds, *, seed: int, position: int) -> Words:
    """Those of these tokens: one at least, ascending."""
    end = int(token_ids[-1]) + 1
    if len(token_ids) * JUMP_WORDS > end:
        return noise_words(end, seed=seed, position=position)[token_ids]
    generator = _philox(seed, position)
    words = np.empty(len(token_ids), dtype=np.uint64)
    steps_made = 0
    for index, token_id in enumerate(token_ids.tolist()):
        step, word = divmod(token_id, STEP_WORDS)
        generator.advance(step - steps_made)
        words[index] = generator.random_raw(word + 1)[-1]
        steps_made = step + 1
    return words


def gumbel_noise(words: Words) -> FloatArray:
    """A standard Gumbel number, float64, of each word."""
    # The upper 53 bits, shifted by half a step so that neither 0 nor 1 can come out.
    uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return -np.log(-np.log(uniform))


def choose_largest_sum(logits: FloatArray, words: Words, *, prefers_likely: bool) -> int:
    """Index of the largest logit + noise. Of equal sums the first, or that of the largest logit
    first."""
    rivals = _find_rivals(logits, words)
    sums = logits[rivals] + gumbel_noise(words[rivals])
    best = np.argmax(sums)
    if prefers_likely:
        equal = np.flatnonzero(sums == sums[best])
        if len(equal) > 1:
            best = equal[np.argmax(logits[rivals[equal]])]
    return int(rivals[best])


def _find_rivals(logits: FloatArray, words: Words) -> TokenIds:
    """Ascending indexes, among them all whose sum is the largest.

    Whoever is not of the head has to reach the head's best sum from below its least logit, by noise
    alone; so much of it only few words give.
    """
    count = len(logits)
    if count < 2 * HEAD_TOKENS or not np.isfinite(logits.max()):
        return np.arange(count)
    head = np.argpartition(logits, count - HEAD_TOKENS)[count - HEAD_TOKENS :]
    best = float((logits[head] + gumbel_noise(words[head])).max())
    least = float(logits[head].min())
    # Less by more than rounding can take or give.
    noise = best - least - 1e-9 - 1e-14 * (abs(best) + abs(least))
    if not math.isfinite(noise):
        return np.arange(count)
    uniform = math.exp(-math.exp(-max(noise, -4.0)))  # there is no noise below -3.7
    is_rival = words >= np.uint64(max(0, int(uniform * 2.0**53) - 8) << 11)
    is_rival[head] = True
    return np.flatnonzero(is_rival)


def _philox(seed: int, position: int) -> np.random.Philox:
    return np.random.Philox(key=np.array([seed, position], dtype=np.uint64))
