"""What all loops of one worker share: its node, its peers, the policy, time, and its counters.

Every loop is `async def run(context: WorkerContext) -> None` and runs until it is cancelled. A loop
waits with `context.sleep` only, and asks nodes through `context.link`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore.cluster.entities import Target
from kvstore.node.clock import Clock
from kvstore.retention import DEFAULT_POLICY, RetentionPolicy

from .cluster_link import ClusterLink
from .counters import EventRing, WorkerCounters
from .traffic import Traffic
from .usage import Usage

Sleep = Callable[[float], Awaitable[None]]
"""`asyncio.sleep`, or a virtual one."""


@dataclass(slots=True, kw_only=True)
class WorkerContext:
    """The state of one worker process. Belongs to its event loop."""

    node: str
    """The own node's name in the map."""
    cluster_path: Path
    """The cluster map's file."""
    link: ClusterLink
    """The way to all nodes; follows the cluster map."""
    clock: Clock
    sleep: Sleep
    rng: random.Random
    policy: RetentionPolicy = DEFAULT_POLICY
    """The newest policy that this worker has seen; policy_sync replaces it."""
    policy_known: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the own node has told its policy: nothing is evicted by a default before."""
    policy_changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set whenever `policy` was replaced; the eviction loop clears it."""
    counters: WorkerCounters = field(default_factory=WorkerCounters)
    events: EventRing = field(default_factory=EventRing)
    traffic: Traffic = field(default_factory=Traffic)
    """How busy the own node is; paced work asks `traffic.rate_factor`."""
    node_stat: Mapping[str, Any] = field(default_factory=dict)
    """The own node's last answer to STAT; empty until there is one."""
    usage: dict[str, Usage] = field(default_factory=dict)
    """How full each own target was when last looked at, by target name."""
    backlog: dict[str, int] = field(default_factory=dict)
    """What waits to be done, by kind: evict_shards, repair_blocks, ... Set by whoever does it."""
    reports: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """Last finished reports that JSON can show, by kind: redundancy, scrub, drain, ..."""

    def own_targets(self) -> tuple[Target, ...]:
        """The own node's targets in the map as it is now."""
        return self.link.map.targets_by_node.get(self.node, ())

    def folder(self, target: Target) -> Path:
        """Where a target of the own node lies on this machine."""
        return target.folder(self.cluster_path)

    def now_s(self) -> int:
        """Unix time in whole seconds, as nodes count the last use of a shard."""
        return self.clock.unix_ns() // 1_000_000_000

    def number(self, setting: str) -> float:
        """A hot setting of the policy as it is now. Raises InvalidArgument for an unknown name."""
        return float(self.policy.setting(setting))

    def is_on(self, setting: str) -> bool:
        """A hot setting that is a switch."""
        return bool(self.policy.setting(setting))
