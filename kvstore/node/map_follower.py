"""How a running node follows its cluster's map.

A map that is changed gets a new epoch, and peers that have it say so in their requests; that is
when the node looks at its own copy, at once: a node that knew the new map only after a while would
seem dead to them. A peer with an older map than the node's says nothing new.

What a running node takes from a new map: the epoch, the other nodes, the groups, the numbers of its
targets, and more room for them. For anything else of its own it must be started again; it says so,
and goes on with what it has.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from ..cluster.entities import ClusterMap
from ..cluster.source import MapSource
from ..errors import ClusterMapError
from .clock import Clock
from .target import Target
from .waiting import Turn

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 1.0
"""Peers may ask often with an epoch that the file does not have yet; for one epoch it is looked at
this seldom."""
LOOKS_MAX = 8
"""Of one interval: a peer that names a new epoch each time costs no more."""


@dataclass(frozen=True, slots=True)
class MapChange:
    """What a new map means for a running node."""

    target_by_number: Mapping[int, str]
    """Names of the targets that it can serve, by their numbers in the new map."""
    capacity_bytes: Mapping[str, int]
    """Targets that have more room now."""
    restart_reasons: tuple[str, ...]
    """What it can only follow when it is started again."""


class MapFollower:
    """Looks for a new map when a peer has a newer one. `current` is the map that is followed."""

    def __init__(self, source: MapSource, current: ClusterMap, node: str, clock: Clock) -> None:
        self.turn = Turn()
        """One look at a time; whoever comes meanwhile waits for what it finds."""
        self.current = current
        self._source = source
        self._node = node
        self._clock = clock
        self._looked_for: set[int] = set()
        """Epochs, in this interval."""
        self._interval_end_s = clock.monotonic_s()

    def may_look(self, epoch: int) -> bool:
        """Whether to look now for a map of this epoch; it counts as looked for then."""
        now_s = self._clock.monotonic_s()
        if now_s >= self._interval_end_s:
            self._looked_for.clear()
            self._interval_end_s = now_s + LOOK_INTERVAL_S
        is_new = epoch > self.current.epoch and epoch not in self._looked_for
        if not is_new or len(self._looked_for) >= LOOKS_MAX:
            return False
        self._looked_for.add(epoch)
        return True

    def look(self) -> ClusterMap | None:
        """A newer map than `current`, if there is one; blocks, and runs in a thread."""
        if not self._source.has_changed():
            return None
        try:
            found = self._source.load()
        except ClusterMapError as error:
            log.error("the cluster map cannot be used, the old one stays: %s", error)
            return None
        return found if found.epoch > self.current.epoch else None

    def follow(self, new: ClusterMap, targets: Mapping[int, Target]) -> Mapping[int, Target]:
        """Take over a map; returns the targets by their numbers in what is `current` then.

        The old map stays if the node is not in the new one.
        """
        if self._node not in new.node_by_name:
            log.error("node=%s not in the map of epoch %d, old one stays", self._node, new.epoch)
            return targets
        change = plan_map_change(self.current, new, self._node)
        by_name = {target.name: target for target in targets.values()}
        for name, capacity_bytes in change.capacity_bytes.items():
            if name in by_name:
                by_name[name].space.grow(capacity_bytes)
        log.info("cluster map: epoch %d follows %d", new.epoch, self.current.epoch)
        if change.restart_reasons:
            reasons = "; ".join(change.restart_reasons)
            log.error("node=%s must be started again to follow the map: %s", self._node, reasons)
        self.current = new
        return {
            number: by_name[name]
            for number, name in change.target_by_number.items()
            if name in by_name
        }


def plan_map_change(old: ClusterMap, new: ClusterMap, node: str) -> MapChange:
    """What `new` changes for a node that is in both maps."""
    before = {target.name: target for target in old.targets_by_node[node]}
    after = {target.name: target for target in new.targets_by_node[node]}
    reasons = [f"target {name} was taken away" for name in before if name not in after]
    reasons += [f"target {name} was added" for name in after if name not in before]
    if old.node_by_name[node].address != new.node_by_name[node].address:
        reasons.append(f"its address is {new.node_by_name[node].address} now")
    kept = [name for name in after if name in before]
    reasons += [
        f"target {name} lies at {after[name].path} now"
        for name in kept
        if after[name].path != before[name].path
    ]
    reasons += [
        f"target {name} became smaller"
        for name in kept
        if after[name].size_bytes < before[name].size_bytes
    ]
    return MapChange(
        target_by_number={new.target_number_by_name[name]: name for name in kept},
        capacity_bytes={
            name: after[name].size_bytes
            for name in kept
            if after[name].size_bytes > before[name].size_bytes
        },
        restart_reasons=tuple(reasons),
    )
