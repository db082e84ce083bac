"""What clients told of themselves by NOTE, added up. STAT shows it, so that it can be scraped.

A client is many and comes and goes; a node stays. Clients are believed: nothing is decided by these
figures. They are checked for form only, and there is room for so many namespaces and no more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..histogram import COUNT_MAX, Histogram, parse_counts
from .statistics import OTHER_NAME

NAMESPACES_MAX = 64
LABEL_LENGTH_MAX = 64
MISS_REASONS = ("not_stored", "too_few_shards", "rejected", "deadline")
STAGES = ("match", "fetch", "decode")
"""What a client measures: asking what is there, getting blocks, and putting them together."""

_COUNTS = ("matched_tokens", "hit_tokens")


class _NamespaceTokens:
    """Tokens of one namespace: what clients found stored, got, and did not get."""

    __slots__ = ("counts", "misses")

    def __init__(self) -> None:
        self.counts = dict.fromkeys(_COUNTS, 0)
        self.misses = dict.fromkeys(MISS_REASONS, 0)

    def add(self, values: Mapping[str, Any]) -> None:
        for name in _COUNTS:
            self.counts[name] += values.get(name, 0)
        for reason, count in values.get("miss_tokens", {}).items():
            self.misses[reason] += count


class ClientNotes:
    """Sums of all notes since the process started."""

    def __init__(self) -> None:
        self._by_namespace: dict[str, _NamespaceTokens] = {}
        self._latencies = {stage: Histogram() for stage in STAGES}

    def add(self, document: bytes) -> None:
        """Take in a note (see docs/formats/wire.md): all of it or, with ValueError, nothing."""
        namespaces, latencies = _parse(document)
        for label, values in namespaces.items():
            self._tokens_of(label).add(values)
        for stage, (counts, sum_s) in latencies.items():
            self._latencies[stage].merge(counts, sum_s)

    def describe(self) -> dict[str, Any]:
        """What STAT shows: `namespaces` and `client_latency`."""
        namespaces = {
            label: {**tokens.counts, "miss_tokens": dict(tokens.misses)}
            for label, tokens in self._by_namespace.items()
        }
        latencies = {stage: one.to_values() for stage, one in self._latencies.items()}
        return {"namespaces": namespaces, "client_latency": latencies}

    def _tokens_of(self, label: str) -> _NamespaceTokens:
        """Where tokens of a namespace are counted; the last place is for all that have none."""
        if label not in self._by_namespace and len(self._by_namespace) >= NAMESPACES_MAX - 1:
            label = OTHER_NAME
        return self._by_namespace.setdefault(label, _NamespaceTokens())


def _parse(
    document: bytes,
) -> tuple[dict[str, Mapping[str, Any]], dict[str, tuple[list[int], float]]]:
    """Namespaces and latencies of a note; ValueError says what is wrong with it."""
    try:
        note = json.loads(document)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(note, dict) or not set(note) <= {"namespaces", "latency"}:
        raise ValueError("a note is an object with namespaces and latency")
    namespaces, latencies = note.get("namespaces", {}), note.get("latency", {})
    if not isinstance(namespaces, dict) or not isinstance(latencies, dict):
        raise ValueError("namespaces and latency are objects")
    for label, values in namespaces.items():
        if not label.isprintable() or len(label) > LABEL_LENGTH_MAX:
            raise ValueError(f"a label is printable and at most {LABEL_LENGTH_MAX} long")
        _check_tokens(values)
    buckets = len(Histogram().counts)
    checked = {}
    for stage, values in latencies.items():
        if stage not in STAGES:
            raise ValueError(f"stage {stage[:LABEL_LENGTH_MAX]!r}, expected one of {STAGES}")
        checked[stage] = parse_counts(values, buckets)
    return namespaces, checked


def _check_tokens(values: object) -> None:
    if not isinstance(values, dict) or not set(values) <= {*_COUNTS, "miss_tokens"}:
        raise ValueError(f"a namespace has {', '.join(_COUNTS)} and miss_tokens")
    misses = values.get("miss_tokens", {})
    if not isinstance(misses, dict) or not set(misses) <= set(MISS_REASONS):
        raise ValueError(f"miss_tokens has {', '.join(MISS_REASONS)}")
    for count in (*(values.get(name, 0) for name in _COUNTS), *misses.values()):
        if type(count) is not int or not 0 <= count <= COUNT_MAX:
            raise ValueError("tokens are whole numbers that are not negative")
