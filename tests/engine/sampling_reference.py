"""The definition of which token is chosen: all tokens in order, noise for each. Slow, and plain."""

from typing import Any

import numpy as np

from engine.sampling import FloatArray, Sampling


def choose_by_definition(logits: FloatArray, sampling: Sampling, position: int) -> int:
    if sampling.temperature == 0:
        return int(np.argmax(logits))
    scaled = logits.astype(np.float64) / sampling.temperature
    with np.errstate(invalid="ignore"):  # infinite logits
        kept = kept_by_definition(scaled, sampling)
    noise = noise_by_definition(len(logits), seed=sampling.seed, position=position)
    return int(kept[np.argmax(scaled[kept] + noise[kept])])


def noise_by_definition(count: int, *, seed: int, position: int) -> FloatArray:
    key = np.array([seed, position], dtype=np.uint64)
    words = np.random.Philox(key=key).random_raw(count)
    uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return -np.log(-np.log(uniform))


def kept_by_definition(scaled: FloatArray, sampling: Sampling) -> np.ndarray[Any, Any]:
    """Ids the filters leave, most likely first; equal logits in order of id."""
    is_filtered = sampling.top_p < 1 or 0 < sampling.top_k < len(scaled)
    if not is_filtered:
        return np.arange(len(scaled))
    order = np.argsort(-scaled, kind="stable")
    if sampling.top_k:
        order = order[: sampling.top_k]
    if sampling.top_p < 1:
        weights = np.exp(scaled[order] - scaled[order[0]])
        reached = np.cumsum(weights) / weights.sum()
        order = order[: int(np.searchsorted(reached, sampling.top_p)) + 1]
    return order
