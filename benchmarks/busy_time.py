"""Time in which something was busy, as spans (start, end) in seconds: sums and overlaps."""

from collections.abc import Iterable

Span = tuple[float, float]


def merge(spans: Iterable[Span]) -> list[Span]:
    """The same time as spans that are ascending and do not touch."""
    merged: list[Span] = []
    for start_s, end_s in sorted(spans):
        if merged and start_s <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end_s))
        elif start_s < end_s:
            merged.append((start_s, end_s))
    return merged


def total_s(spans: Iterable[Span]) -> float:
    """Seconds in which any of the spans lasted."""
    return sum(end_s - start_s for start_s, end_s in merge(spans))


def overlap_s(spans: Iterable[Span], others: Iterable[Span]) -> float:
    """Seconds that belong to a span of both."""
    both, other = merge(spans), merge(others)
    return total_s(both) + total_s(other) - total_s([*both, *other])
