"""The last 24 hours of a cluster in a bounded ring of a few numbers a step, for the web page. Pure.

The worker takes a sample of all nodes' STAT answers every few seconds and hands it to `History.add`
with a clock that never goes back, so that a jump of the wall clock neither hides nor doubles time.
What nodes count since their start becomes what was added in a step; a node that was started again
or does not answer adds nothing wrong. This is no replacement for Prometheus: it is lost when the
worker ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ...metrics.readings import read_mapping, read_number
from .metric_readers import count_by_health, read_targets

SAMPLE_INTERVAL_S = 10.0
"""How often the worker takes a sample."""

NODES_MAX = 4096
"""Nodes whose last figures are remembered."""


@dataclass(frozen=True, slots=True)
class Tier:
    """Points of `step_s` seconds each, `points_max` of them."""

    step_s: int
    points_max: int

    @property
    def window_s(self) -> int:
        return self.step_s * self.points_max


TIERS = (Tier(10, 360), Tier(60, 360), Tier(240, 360))
"""One hour, six hours, and a day: each is about as many points as a chart has pixels for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A cluster in one step: first what was added within it, then what was the case at its end."""

    hit_tokens: float = 0.0
    miss_tokens: float = 0.0
    evicted_expired: float = 0.0
    evicted_least_used: float = 0.0
    evicted_orphaned: float = 0.0
    evicted_bytes: float = 0.0

    fill: float | None = None
    """Of the fullest target, 0 to 1."""
    nodes_alive: float | None = None
    nodes_total: float | None = None
    blocks_whole: float | None = None
    """Blocks with all shards, of those that this worker answers for."""
    blocks_reduced: float | None = None
    """Blocks that lack shards but can be read."""
    blocks_unreadable: float | None = None


COLUMNS = tuple(one.name for one in fields(Point))
_ADDED = tuple(one.name for one in fields(Point) if one.default == 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSample:
    """What was seen at one moment."""

    stats: Mapping[str, Mapping[str, Any] | None]
    """The STAT answer of each node of the map by its name; None: it did not answer."""
    usage: Mapping[str, Any] = field(default_factory=dict)
    """Of own targets by name: `fraction`, which knows limits that a node cannot see."""
    redundancy: Mapping[str, Any] = field(default_factory=dict)
    """The last redundancy report: `blocks_by_shards`, `k`, `width`."""


class History:
    """Points of one cluster in tiers of growing steps. Belongs to one event loop."""

    def __init__(self, tiers: Iterable[Tier] = TIERS) -> None:
        self._rings = [_Ring(tier) for tier in tiers]
        self._last: dict[str, tuple[object, dict[str, float]]] = {}

    def add(self, monotonic_s: float, sample: ClusterSample) -> None:
        """Take in a sample; `monotonic_s` must not be less than that of the one before."""
        added = self._count_added(sample.stats)
        point = Point(**added, **_describe_state(sample))
        for ring in self._rings:
            ring.add(monotonic_s, point)

    def to_values(self, *, monotonic_s: float) -> dict[str, Any]:
        """All points as JSON shows them, finest tier first.

        `columns` names the numbers of each of a tier's `rows`, oldest row first; `age_s`, the first
        of them, is how long before `monotonic_s` the row's step began. What is not known is None.
        """
        return {
            "columns": ["age_s", *COLUMNS],
            "tiers": [ring.to_values(monotonic_s) for ring in self._rings],
        }

    def _count_added(self, stats: Mapping[str, Mapping[str, Any] | None]) -> dict[str, float]:
        """What all nodes together counted since the sample before."""
        added = dict.fromkeys(_ADDED, 0.0)
        for node, stat in stats.items():
            if stat is None:
                continue
            counted, life = _read_counted(stat), stat.get("pid")
            before_life, before = self._last.get(node, (None, None))
            if before is not None:
                # A node that was started again counts from 0.
                base = before if life == before_life else dict.fromkeys(_ADDED, 0.0)
                for name, value in counted.items():
                    added[name] += max(0.0, value - base[name])
            if node in self._last or len(self._last) < NODES_MAX:
                self._last[node] = (life, counted)
        for node in [name for name in self._last if name not in stats]:
            del self._last[node]
        return added


class _Ring:
    """The points of one tier. All samples within one step become one point."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.points: deque[tuple[float, Point]] = deque(maxlen=tier.points_max)

    def add(self, monotonic_s: float, point: Point) -> None:
        start_s = monotonic_s // self.tier.step_s * self.tier.step_s
        if self.points and self.points[-1][0] >= start_s:
            first_s, before = self.points.pop()
            self.points.append((first_s, _merge(before, point)))
        else:
            self.points.append((start_s, point))

    def to_values(self, monotonic_s: float) -> dict[str, Any]:
        tier = self.tier
        oldest_s = monotonic_s - tier.window_s
        rows = [
            [round(monotonic_s - start_s, 3), *(getattr(point, name) for name in COLUMNS)]
            for start_s, point in self.points
            if start_s >= oldest_s
        ]
        return {"step_s": tier.step_s, "window_s": tier.window_s, "rows": rows}


def _merge(before: Point, after: Point) -> Point:
    """Both in one step: what was added is summed up, of states the later one that is known."""
    merged: dict[str, float | None] = {}
    for name in COLUMNS:
        old, new = getattr(before, name), getattr(after, name)
        merged[name] = old + new if name in _ADDED else (old if new is None else new)
    return Point(**merged)  # type: ignore[arg-type]


def _read_counted(stat: Mapping[str, Any]) -> dict[str, float]:
    """The figures of one node that only grow."""
    counted = dict.fromkeys(_ADDED, 0.0)
    for figures in read_mapping(stat.get("namespaces")).values():
        tokens = read_mapping(figures)
        counted["hit_tokens"] += read_number(tokens.get("hit_tokens")) or 0.0
        misses = read_mapping(tokens.get("miss_tokens"))
        counted["miss_tokens"] += sum(read_number(one) or 0.0 for one in misses.values())
    for _, figures in read_targets(stat):
        evicted = read_mapping(figures.get("evicted"))
        for reason in ("expired", "least_used", "orphaned"):
            counted[f"evicted_{reason}"] += read_number(evicted.get(reason)) or 0.0
        counted["evicted_bytes"] += read_number(figures.get("evicted_bytes")) or 0.0
    return counted


def _describe_state(sample: ClusterSample) -> dict[str, Any]:
    fills = [
        _read_fill(figures)
        for stat in sample.stats.values()
        for name, figures in read_targets(stat)
        if name not in sample.usage
    ]
    fills += [read_number(read_mapping(one).get("fraction")) for one in sample.usage.values()]
    return {
        "fill": max((fill for fill in fills if fill is not None), default=None),
        "nodes_alive": float(sum(stat is not None for stat in sample.stats.values())),
        "nodes_total": float(len(sample.stats)),
        **{f"blocks_{name}": blocks for name, blocks in count_by_health(sample.redundancy).items()},
    }


def _read_fill(figures: Mapping[str, Any]) -> float | None:
    """In bytes: slots have several sizes. None for a target that is lost."""
    used = read_number(figures.get("used_bytes"))
    total = read_number(figures.get("capacity_bytes"))
    if used is None or not total or figures.get("is_lost"):
        return None
    return min(1.0, used / total)
