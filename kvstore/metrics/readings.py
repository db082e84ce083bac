"""What a metric is called and made of, and how it is read from what a process says of itself. Pure.

The sources are JSON-like values of another process, perhaps of another version: a figure that is
missing or is not a number gives no sample, never an error and never a zero that nobody counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal, TypeAlias

LABEL_VALUES_MAX = 256
"""Values of one label that come from outside, such as namespaces; the rest is summed up."""
LABEL_CHARACTERS_MAX = 64
FIGURE_MAX = 2**63 - 1
"""What a process says of itself is not believed above that."""
OTHERS = "(other)"
"""The name that a node uses too for what it sums up."""

NOTHING: Mapping[str, Any] = {}


Kind: TypeAlias = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class MetricHead:
    """What a metric is called. A counter's name ends in `_total`; units are those of Prometheus."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    unit: str
    help: str

    def __post_init__(self) -> None:
        assert self.name.startswith("cachalot_")
        assert self.name.endswith("_total") == (self.kind == "counter"), self.name
        assert self.help.endswith("."), self.name


@dataclass(frozen=True, slots=True)
class Sample:
    """A number with the values of the metric's labels, but for the first: that says whose it is."""

    labels: tuple[str, ...]
    value: float


@dataclass(frozen=True, slots=True)
class Distribution:
    """A histogram: `cumulative[i]` observations were <= `bounds[i]`; the last bound is +Inf."""

    labels: tuple[str, ...]
    bounds: tuple[float, ...]
    cumulative: tuple[float, ...]
    total: float


Reading: TypeAlias = Sample | Distribution


def read_number(value: object) -> float | None:
    """A number from 0 to FIGURE_MAX, or a truth value as 1 or 0; None for all else."""
    if isinstance(value, bool):
        return float(value)
    # Whole numbers in JSON may be too large for a float; what is not a number fails comparisons.
    if not isinstance(value, int | float) or not 0 <= value <= FIGURE_MAX:
        return None
    return float(value)


def read_mapping(value: object) -> Mapping[str, Any]:
    """`value` if it is an object, otherwise an empty one."""
    return value if isinstance(value, Mapping) else NOTHING


def sample_of(value: object, *labels: str) -> Iterator[Sample]:
    """A sample of a number; none of anything else."""
    number = read_number(value)
    if number is not None:
        yield Sample(tuple(cut_label(label) for label in labels), number)


def samples_of(first: tuple[str, ...], by_label: Mapping[str, Any]) -> Iterator[Sample]:
    """A sample for each label; of too many, the largest ones and the sum of all others."""
    pairs = [(cut_label(key), read_number(value)) for key, value in by_label.items()]
    found: dict[str, float] = {}
    for key, number in pairs:
        if number is not None:
            found[key] = found.get(key, 0.0) + number
    ranked = sorted(found.items(), key=lambda item: (-item[1], item[0]))
    for key, number in ranked[:LABEL_VALUES_MAX]:
        yield Sample((*first, key), number)
    if len(ranked) > LABEL_VALUES_MAX:
        yield Sample((*first, OTHERS), sum(number for _, number in ranked[LABEL_VALUES_MAX:]))


def distribution_of(labels: tuple[str, ...], value: object) -> Distribution | None:
    """A histogram as `kvstore.histogram` writes it: `bounds_s`, one more `counts` (the last above
    all bounds), `sum_s`."""
    figures = read_mapping(value)
    bounds = read_numbers(figures.get("bounds_s"))
    counts = read_numbers(figures.get("counts"))
    total = read_number(figures.get("sum_s"))
    if bounds is None or counts is None or total is None or len(counts) != len(bounds) + 1:
        return None
    if any(low >= high for low, high in pairwise(bounds)):
        return None
    return Distribution(labels, (*bounds, math.inf), tuple(accumulate(counts)), total)


def read_numbers(value: object) -> list[float] | None:
    """All numbers of a list; None if it is no list, or one of them is no number."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return None
    numbers = [read_number(one) for one in value]
    found = [number for number in numbers if number is not None]
    return found if len(found) == len(numbers) else None


def cut_label(label: object) -> str:
    """A label of bounded length that can be written: JSON may hold halves of characters."""
    return str(label)[:LABEL_CHARACTERS_MAX].encode(errors="replace").decode()
