"""Which tokens the filters of sampling leave. Pure.

The k most likely, or the fewest most likely ones that reach a mass: both are defined by the whole
vocabulary in order of likelihood, equal logits in order of id. To sort it takes most of the time
that a token's choice may take, so it is not sorted where a part of it decides.
"""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

FloatArray: TypeAlias = npt.NDArray[np.floating[Any]]
TokenIds: TypeAlias = npt.NDArray[np.intp]

HEAD_TOKENS = (512, 4096, 32_768)
"""So many of the most likely tokens are looked at, one after the other, before all are."""

TAIL_ERROR = 1e-5
"""Relative, of a sum of exponentials in float32: of each argument above -104, below which they are
0, half of its last place is lost, 4e-6, and of the exponential some last places, 2e-7 each."""


def keep_likely(logits: FloatArray, *, top_k: int, top_p: float) -> TokenIds:
    """Ids of the `top_k` most likely tokens (0: all), and of those only of the fewest most likely
    ones whose probabilities reach `top_p` (1: all). Ascending.

    Of infinite logits, whose probabilities are none, `top_p` leaves the first.
    """
    ranks = -logits  # the smallest is the most likely; what is no number comes last
    candidates = ranks
    if 0 < top_k < len(ranks):
        candidates = np.partition(ranks, top_k - 1)[:top_k]
    count, last = len(candidates), candidates.max()
    if top_p < 1:
        with np.errstate(invalid="ignore"):  # the difference of infinities
            count, last = _cut_at_mass(candidates, top_p)
    kept = np.flatnonzero(ranks <= last)
    if len(kept) > count:
        equal = np.flatnonzero(ranks[kept] == last)
        kept = np.delete(kept, equal[count - len(kept) :])
    if len(kept) < count:  # the last one is no number
        kept = np.sort(np.argsort(ranks, kind="stable")[:count])
    return kept


def _cut_at_mass(ranks: FloatArray, top_p: float) -> tuple[int, Any]:
    """How many of the most likely tokens reach `top_p`, and the rank of the last one of them.

    By definition their exponentials are added one by one, and each sum is divided by numpy's sum
    of all, in that order. A head decides if it does so for every sum of all that can come out.
    """
    token_share = 1.0  # of the mass, at most, that one more token may have
    for count in HEAD_TOKENS:
        if 2 * count > len(ranks) or count * token_share < top_p:
            continue
        parts = np.partition(ranks, count - 1)
        head = np.sort(parts[:count])
        reached = np.cumsum(np.exp(head[0] - head))
        least, most = _bound_sum(reached[-1], head[0] - parts[count:], len(ranks))
        first = np.searchsorted(reached / most, top_p)
        if first < count and first == np.searchsorted(reached / least, top_p):
            return int(first) + 1, head[first]
        token_share = reached[-1] / least / count
    head = np.sort(ranks)
    weights = np.exp(head[0] - head)
    reached = np.cumsum(weights) / weights.sum()
    last = min(int(np.searchsorted(reached, top_p)), len(head) - 1)  # all may stay below it
    return last + 1, head[last]


def _bound_sum(
    head_sum: np.floating[Any], tail_exponents: FloatArray, terms: int
) -> tuple[np.floating[Any], np.floating[Any]]:
    """Between what bounds the float64 sum of all exponentials is, in whatever order it is made."""
    # Below -200 the exponential in float32 is 0; the bound keeps the cast in its range.
    tail = np.exp(np.maximum(tail_exponents, -200).astype(np.float32)).sum(dtype=np.float64)
    # n additions lose at most n half places of the sum each way; 4 n have room for the rest.
    error = TAIL_ERROR * tail + 4 * terms * 2.0**-53 * (head_sum + tail)
    return head_sum + tail - error, head_sum + tail + error
