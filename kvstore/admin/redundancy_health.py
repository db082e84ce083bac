"""How many shards are left of the blocks of a cluster, from what its workers counted. Pure.

Every worker counts the blocks that it is responsible for, so that the sum over all workers counts
each block once, as long as all of them reach the same targets. When nodes come or go, others become
responsible: counts of before and of after may have a block twice, or not at all, and those of after
a loss have too few shards of it once the nodes are back. So a sum says which counts are of other
targets than answer now, and leaves out those of nodes that do not, whose blocks others count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from .quantities import count_of, format_duration

FIGURE_MAX = 2**63 - 1
SHARDS_MAX = 255
NAMES_SHOWN_MAX = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Redundancy:
    """Blocks by the number of their shards that are there, as one or more workers counted them."""

    by_shards: Mapping[int, int]
    backlog: int = 0
    """Blocks in use that lack shards and wait for repair."""
    age_s: float | None = None
    """Since the count was finished."""
    silent_targets: frozenset[str] | None = None
    """Targets that did not answer meanwhile; None if the worker does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedundancyHealth:
    """All blocks of the cluster by what is left of them."""

    k: int
    m: int
    by_shards: Mapping[int, int]
    """From k + m down to k; blocks with fewer are `unreadable`."""
    unreadable: int
    backlog: int
    nodes_total: int
    uncounted: tuple[str, ...]
    """Nodes of which there is no count, or none that is added up."""
    outdated: tuple[str, ...]
    """Nodes whose count is of other targets than answer now: figures of before."""
    age_s: float | None

    @property
    def nodes_counted(self) -> int:
        return self.nodes_total - len(self.uncounted)

    def describe(self) -> str:
        """One line for a person."""
        whole = self.k + self.m
        if not self.nodes_counted:
            return "redundancy: not counted yet"
        if not self.blocks:
            # As right after a start: the first count is over before there is anything to count.
            age = "" if self.age_s is None else f", up to {format_duration(self.age_s)} ago"
            return f"redundancy: not counted yet (the last counts{age}, found no blocks)"
        parts = [f"{count_of(self.by_shards[whole], 'block')} with all {count_of(whole, 'shard')}"]
        fewer = range(whole - 1, self.k - 1, -1)
        parts += [f"{self.by_shards[shards]:,} with {shards}" for shards in fewer]
        parts.append(f"{self.unreadable:,} with fewer (unreadable)")
        line = f"redundancy: {', '.join(parts)}"
        if self.backlog:
            line += f"; {self.backlog:,} wait for repair"
        if self.uncounted:
            line += f"; counted by {self.nodes_counted} of {count_of(self.nodes_total, 'node')}"
            line += f", not by {_list_names(self.uncounted)}"
        if self.age_s is not None:
            line += f"; as of up to {format_duration(self.age_s)} ago"
        if self.outdated:
            line += f"; counted before nodes came or went: {_list_names(self.outdated)}"
        return line

    @property
    def blocks(self) -> int:
        """All that were counted."""
        return sum(self.by_shards.values()) + self.unreadable

    def render_json(self) -> dict[str, Any]:
        """Shards are names here, because JSON has no other."""
        return {
            "by_shards": {str(shards): blocks for shards, blocks in self.by_shards.items()},
            "unreadable": self.unreadable,
            "repair_backlog": self.backlog,
            "nodes_counted": self.nodes_counted,
            "nodes_total": self.nodes_total,
            "nodes_uncounted": list(self.uncounted),
            "nodes_outdated": list(self.outdated),
            "age_s": self.age_s,
        }


def add_up_redundancy(
    counts: Mapping[str, Redundancy],
    *,
    k: int,
    m: int,
    nodes: Sequence[str],
    silent: AbstractSet[str] | None = None,
) -> RedundancyHealth:
    """The sum of what workers counted, each its own blocks, by node. `nodes`: all of them;
    `silent`: the targets that do not answer now, None if nobody looked."""
    by_shards = dict.fromkeys(range(k + m, k - 1, -1), 0)
    unreadable = 0
    for count in counts.values():
        for shards, blocks in count.by_shards.items():
            if shards < k:
                unreadable += blocks
            else:
                by_shards[min(shards, k + m)] += blocks
    ages = [count.age_s for count in counts.values() if count.age_s is not None]
    return RedundancyHealth(
        k=k,
        m=m,
        by_shards=by_shards,
        unreadable=unreadable,
        backlog=sum(count.backlog for count in counts.values()),
        nodes_total=len(nodes),
        uncounted=tuple(node for node in nodes if node not in counts),
        outdated=tuple(
            node
            for node, count in counts.items()
            if silent is not None and count.silent_targets not in (None, silent)
        ),
        age_s=max(ages) if ages else None,
    )


def parse_redundancy(said: object, *, now_s: object = None) -> Redundancy | None:
    """What a worker counted last; None if it has not, or if it is not understood.

    `said`: its redundancy report, of which `blocks_by_shards[i]` is the blocks with i shards;
    `now_s`: the worker's own clock.
    """
    counts = said.get("blocks_by_shards") if isinstance(said, dict) else None
    if not isinstance(said, dict) or not isinstance(counts, list) or len(counts) > SHARDS_MAX:
        return None
    if not all(type(blocks) is int and 0 <= blocks <= FIGURE_MAX for blocks in counts):
        return None
    return Redundancy(
        by_shards={shards: blocks for shards, blocks in enumerate(counts) if shards},
        backlog=_figure(said.get("backlog")),
        age_s=_age_s(said, now_s),
        silent_targets=_read_names(said.get("silent_targets")),
    )


def _read_names(said: object) -> frozenset[str] | None:
    if not isinstance(said, list) or not all(isinstance(one, str) for one in said):
        return None
    return frozenset(said)


def _age_s(report: Mapping[str, Any], now_s: object) -> float | None:
    """Since the count was finished."""
    started_s, took_s = report.get("started_at_s"), report.get("duration_s", 0.0)
    times = [one for one in map(read_figure, (now_s, started_s, took_s)) if one is not None]
    return max(times[0] - times[1] - times[2], 0.0) if len(times) == 3 else None


def read_figure(value: object) -> float | None:
    """A number that can be, from 0 to FIGURE_MAX; None for all else."""
    # Not a number and infinity fail the comparison.
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not 0 <= value <= FIGURE_MAX
    ):
        return None
    return float(value)


def _figure(value: object) -> int:
    return value if type(value) is int and 0 <= value <= FIGURE_MAX else 0


def _list_names(names: Sequence[str]) -> str:
    more = len(names) - NAMES_SHOWN_MAX
    return ", ".join(names[:NAMES_SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")
