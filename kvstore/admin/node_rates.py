"""How fast nodes work, from two of their STAT answers: what `cachalot top` shows. Pure.

A counter that has become smaller belongs to a new process: there is no rate for that interval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..client import NodeReport

FIGURE_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTotals:
    """Counters of one node's process, summed over its targets."""

    pid: int
    match_keys: int
    match_hits: int
    shards_read: int
    read_bytes: int
    shards_written: int
    written_bytes: int
    full_refusals: int
    evicted: int
    rejected_shards: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRates:
    """Of one node, or of all together, for a second; None where there is nothing to divide."""

    match_keys_per_s: float
    match_hit_ratio: float | None
    """Of the keys that were asked for in this interval."""
    shards_read_per_s: float
    read_bytes_per_s: float
    shards_written_per_s: float
    written_bytes_per_s: float
    full_refusals_per_s: float
    evicted_per_s: float
    rejected_shards_per_s: float

    def render_json(self) -> dict[str, Any]:
        return asdict(self)


COUNTED = tuple(name for name in NodeTotals.__slots__ if name not in ("pid", "evicted"))


def total_of(report: NodeReport) -> NodeTotals | None:
    """The counters of a node that answered; None if it did not, or is not understood."""
    said = report.statistics
    targets = said.get("targets") if isinstance(said, dict) else None
    if not report.is_alive or not isinstance(targets, list):
        return None
    if not all(isinstance(target, dict) for target in targets):
        return None
    pid = said.get("pid")
    return NodeTotals(
        pid=pid if type(pid) is int else 0,
        evicted=sum(_count_evicted(target.get("evicted")) for target in targets),
        **{name: sum(_count(target.get(name)) for target in targets) for name in COUNTED},
    )


def _count(value: object) -> int:
    return value if type(value) is int and 0 <= value <= FIGURE_MAX else 0


def _count_evicted(by_reason: object) -> int:
    return sum(map(_count, by_reason.values())) if isinstance(by_reason, dict) else 0


def rate_between(
    before: NodeTotals | None, after: NodeTotals | None, elapsed_s: float
) -> NodeRates | None:
    """What happened in between; None if one of them is not there or the process is another."""
    if before is None or after is None or elapsed_s <= 0 or before.pid != after.pid:
        return None
    grown = {name: getattr(after, name) - getattr(before, name) for name in NodeTotals.__slots__}
    if any(value < 0 for value in grown.values()):
        return None
    return _rates(grown, elapsed_s)


def add_up_rates(
    pairs: Sequence[tuple[NodeTotals | None, NodeTotals | None]], elapsed_s: float
) -> NodeRates | None:
    """The same for all nodes that have a rate; None if none has."""
    sums = dict.fromkeys(NodeTotals.__slots__, 0)
    is_any = False
    for before, after in pairs:
        if before is None or after is None or rate_between(before, after, elapsed_s) is None:
            continue
        is_any = True
        for name in sums:
            sums[name] += getattr(after, name) - getattr(before, name)
    return _rates(sums, elapsed_s) if is_any else None


def _rates(grown: Mapping[str, int], elapsed_s: float) -> NodeRates:
    keys, hits = grown["match_keys"], grown["match_hits"]
    return NodeRates(
        match_keys_per_s=keys / elapsed_s,
        match_hit_ratio=min(hits / keys, 1.0) if keys else None,
        shards_read_per_s=grown["shards_read"] / elapsed_s,
        read_bytes_per_s=grown["read_bytes"] / elapsed_s,
        shards_written_per_s=grown["shards_written"] / elapsed_s,
        written_bytes_per_s=grown["written_bytes"] / elapsed_s,
        full_refusals_per_s=grown["full_refusals"] / elapsed_s,
        evicted_per_s=grown["evicted"] / elapsed_s,
        rejected_shards_per_s=grown["rejected_shards"] / elapsed_s,
    )
