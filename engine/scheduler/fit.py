"""Finds the five coefficients of a cost from passes that were measured. Pure.

Not for measuring: that is `engine.fit_cost`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import combinations

import numpy as np
import numpy.typing as npt

from ..errors import InvalidRequest
from .cost import PrefillCost

COEFFICIENTS = len(fields(PrefillCost))


@dataclass(frozen=True, slots=True)
class Sample:
    """A pass took `took_s`: each of `sequences` had `tokens` new ones after `cached_tokens`."""

    tokens: int
    cached_tokens: int
    took_s: float
    sequences: int = 1


@dataclass(frozen=True, slots=True)
class Fit:
    """A cost, and how far it is from what was measured: |cost - took| / took over the samples."""

    cost: PrefillCost
    residual_median: float
    residual_p90: float
    residual_max: float


def fit_cost(samples: Sequence[Sample]) -> Fit:
    """The cost with the least sum of squared relative errors, no coefficient below 0.

    Relative, so that a pass of one block counts as much as one of a whole prompt. Of the best
    unbounded fits over each subset of the coefficients, those without a negative one are compared:
    the least squares under bounds are among them (the conditions of Karush, Kuhn and Tucker), and
    for five coefficients that is exact and cheap. What no sample tells apart is 0, such as a4 where
    none has two sequences. Raises InvalidRequest for fewer than five samples, or times that are not
    positive.
    """
    if len(samples) < COEFFICIENTS:
        raise InvalidRequest(
            "measured passes", given=len(samples), expected=f"{COEFFICIENTS} or more"
        )
    if min(sample.took_s for sample in samples) <= 0:
        raise InvalidRequest(
            "measured pass", given=min(s.took_s for s in samples), expected="more than 0 s"
        )
    tokens = np.array([sample.tokens for sample in samples], dtype=np.float64)
    cached = np.array([sample.cached_tokens for sample in samples], dtype=np.float64)
    took_s = np.array([sample.took_s for sample in samples], dtype=np.float64)
    sequences = np.array([sample.sequences for sample in samples], dtype=np.float64)
    terms = np.stack(
        [
            np.ones_like(tokens),
            sequences * tokens,
            sequences * tokens * cached,
            sequences * tokens * tokens,
            sequences - 1,
        ],
        axis=1,
    )
    solution = _least_squares_above_zero(terms / took_s[:, None])
    residuals = np.abs(terms @ solution / took_s - 1)
    return Fit(
        cost=PrefillCost(*(float(value) for value in solution)),
        residual_median=float(np.median(residuals)),
        residual_p90=float(np.quantile(residuals, 0.9)),
        residual_max=float(residuals.max()),
    )


def _least_squares_above_zero(
    relative_terms: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
    """x >= 0 [columns] with the least |A x - 1|^2, A of shape [samples, columns]."""
    columns = relative_terms.shape[1]
    # The columns differ by many orders of magnitude; scaled alike, the solver keeps its digits.
    norms = np.linalg.norm(relative_terms, axis=0)
    norms[norms == 0] = 1.0
    scaled = relative_terms / norms
    ones = np.ones(len(scaled))
    best, best_error = np.zeros(columns), float(len(scaled))
    for count in range(1, columns + 1):
        for chosen in map(list, combinations(range(columns), count)):
            found, *_ = np.linalg.lstsq(scaled[:, chosen], ones, rcond=None)
            error = float(np.sum((scaled[:, chosen] @ found - 1) ** 2))
            if found.min() >= 0 and error < best_error:
                best, best_error = np.zeros(columns), error
                best[chosen] = found
    unscaled: npt.NDArray[np.float64] = best / norms
    return unscaled
