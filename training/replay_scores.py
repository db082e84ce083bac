"""Numbers of many judged answers: bits a byte by the way their prompts were computed.

Differences are taken document by document, since documents differ far more from each other than
the ways do; intervals are over documents.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 10_000
SEED = 0
CONFIDENCE_PERCENTILES = (2.5, 97.5)

INTERVAL_WIDTH = 26
"""Characters of a value and its interval."""


class Prefix(StrEnum):
    """How a prompt was computed before its answer was read.

    WHOLE: every token by every layer. COLD: the decoder half on the prompt's tail only, as every
    engine runs a prompt without a hit. WINDOW: a hit, with the stored window state at its end.
    REPLAY: a hit 128 tokens shorter, and a bounded replay of those. CUT: a hit, and nothing in the
    place of the window state, which no engine does: it shows what the replay is for.
    """

    WHOLE = "whole"
    COLD = "cold"
    WINDOW = "window"
    REPLAY = "replay"
    CUT = "cut"


@dataclass(frozen=True, slots=True)
class Reading:
    """What an answer takes in one way, in bits over all its tokens.

    `divergence` is that of Kullback and Leibler (1951), of what is predicted from what a cold
    prompt predicts: what it costs on average to take one for the other, whatever the document says.
    """

    bits: float
    divergence: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedAnswer:
    """The tokens after the first `prompt_tokens` of a document: their bytes, and how each way reads
    them."""

    path: str
    prompt_tokens: int
    answer_bytes: int
    readings: dict[Prefix, Reading]


@dataclass(frozen=True, slots=True)
class Interval:
    """A value and the interval of 95 % that it lies in."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixScore:
    """In bits a byte. `extra`: what is needed more than by COLD."""

    prefix: Prefix
    bits: float
    extra: Interval
    divergence: Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthScore:
    """Of all answers after prompts of one length, or of all lengths together (None)."""

    prompt_tokens: int | None
    documents: int
    answer_bytes: int
    prefixes: list[PrefixScore]


def score_lengths(answers: Sequence[JudgedAnswer]) -> list[LengthScore]:
    """One score a prompt length, ascending, then one of all together."""
    lengths = sorted({answer.prompt_tokens for answer in answers})
    scores = [
        _score(length, [answer for answer in answers if answer.prompt_tokens == length])
        for length in lengths
    ]
    return [*scores, _score(None, answers)]


def _score(prompt_tokens: int | None, answers: Sequence[JudgedAnswer]) -> LengthScore:
    paths = sorted({answer.path for answer in answers})
    sizes_D = _by_document(paths, answers, lambda answer: answer.answer_bytes)

    def bits_D(prefix: Prefix) -> NDArray[np.float64]:
        return _by_document(paths, answers, lambda answer: answer.readings[prefix].bits)

    def divergence_D(prefix: Prefix) -> NDArray[np.float64]:
        return _by_document(paths, answers, lambda answer: answer.readings[prefix].divergence)

    return LengthScore(
        prompt_tokens=prompt_tokens,
        documents=len(paths),
        answer_bytes=int(sizes_D.sum()),
        prefixes=[
            PrefixScore(
                prefix=prefix,
                bits=float(bits_D(prefix).sum() / sizes_D.sum()),
                extra=bootstrap_interval(bits_D(prefix) - bits_D(Prefix.COLD), sizes_D),
                divergence=bootstrap_interval(divergence_D(prefix), sizes_D),
            )
            for prefix in Prefix
        ],
    )


def _by_document(
    paths: Sequence[str],
    answers: Sequence[JudgedAnswer],
    amount_of: Callable[[JudgedAnswer], float],
) -> NDArray[np.float64]:
    """Amounts of all answers of each document together, in order of the paths."""
    amounts = dict.fromkeys(paths, 0.0)
    for answer in answers:
        amounts[answer.path] += amount_of(answer)
    return np.array([amounts[path] for path in paths])


def bootstrap_interval(amounts_D: NDArray[np.float64], sizes_D: NDArray[np.float64]) -> Interval:
    """sum(amounts) / sum(sizes) over documents, float64 [D] each, with its interval of 95 %.

    Percentiles of the ratio over documents drawn with replacement (Efron, 1979). The draws are the
    same each time.
    """
    draws = np.random.default_rng(SEED).integers(len(sizes_D), size=(RESAMPLES, len(sizes_D)))
    ratios = amounts_D[draws].sum(axis=1) / sizes_D[draws].sum(axis=1)
    low, high = np.percentile(ratios, CONFIDENCE_PERCENTILES)
    return Interval(float(amounts_D.sum() / sizes_D.sum()), float(low), float(high))


def format_lengths(scores: Sequence[LengthScore]) -> list[str]:
    """Lines of text: bits a byte of COLD, and of each other way what it adds and how far it
    diverges, in thousandths of a bit a byte."""
    others = [prefix for prefix in Prefix if prefix is not Prefix.COLD]
    columns = "".join(f"{prefix:>{INTERVAL_WIDTH}}" for prefix in others)
    lines = [f"{'prompt':>10}  {Prefix.COLD:>6}{columns}"]
    for score in scores:
        by_prefix = {line.prefix: line for line in score.prefixes}
        prompt = "all" if score.prompt_tokens is None else f"{score.prompt_tokens}"
        extras = "".join(_format(by_prefix[prefix].extra, "+") for prefix in others)
        divergences = "".join(_format(by_prefix[prefix].divergence, "") for prefix in others)
        lines.append(f"{prompt:>10}  {by_prefix[Prefix.COLD].bits:6.4f}{extras}")
        lines.append(f"{'divergence':>18}{divergences}")
    return lines


def _format(interval: Interval, sign: str) -> str:
    value, low, high = (1e3 * bits for bits in (interval.value, interval.low, interval.high))
    text = f"{value:{sign}.2f} [{low:{sign}.2f}, {high:{sign}.2f}]"
    return f"{text:>{INTERVAL_WIDTH}}"
