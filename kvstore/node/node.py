"""What one storage-node process is: its place in the cluster, its targets, its means."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .buffers import BufferPool
from .clock import Clock
from .disk import Disk
from .map_follower import MapFollower
from .target import Target


class SyncPolicy(enum.Enum):
    """When written shards are put on the device."""

    NEVER = "never"
    """The kernel decides; a kill loses nothing, a power cut what was not yet written back."""
    INTERVAL = "interval"
    """Once a second; a power cut loses at most what was written since."""
    BATCH = "batch"
    """Before each WRITE is acknowledged."""


@dataclass(slots=True)
class NodeCounters:
    """What the process met, apart from its targets. Every number only grows."""

    connections_accepted: int = 0
    connections_refused: int = 0
    """Closed at once because there were too many."""
    bad_frames: int = 0
    """Connections closed because of bytes that are no frame of ours."""
    slow_peers: int = 0
    """Connections closed because a frame, or the reading of an answer, took too long."""
    cut_answers: int = 0
    """Connections closed in the middle of an answer because stored bytes could not be read."""
    busy_refusals: int = 0
    """Requests answered BUSY."""
    expired_requests: int = 0
    """Requests whose deadline had passed."""


@dataclass(slots=True, kw_only=True)
class Node:
    """Everything an operation may use.

    `targets` are by their number in the map of `epoch`. Without a follower the map stays the same.
    """

    name: str
    cluster: bytes
    epoch: int
    targets: Mapping[int, Target]
    disk: Disk
    clock: Clock
    pool: BufferPool
    sync: SyncPolicy
    pid: int
    version: str
    started_s: float
    follower: MapFollower | None = None
    connections: int = 0
    counters: NodeCounters = field(default_factory=NodeCounters)


def describe_node(node: Node) -> dict[str, Any]:
    """The answer to STAT, as JSON will show it. The names are stable; more may be added.

    node, cluster (hex), epoch, version, pid, uptime_s, sync, connections, memory_bytes and
    memory_limit_bytes (of the buffers), the fields of NodeCounters, and `targets`: a list with, for
    each target, name, blocks (shards held), used_bytes (of their slots), capacity_bytes, segments,
    quarantined (slots out of use), is_lost (its folder was removed or replaced), and the fields of
    TargetStatistics.
    """
    counters = node.counters
    return {
        "node": node.name,
        "cluster": node.cluster.hex(),
        "epoch": node.epoch,
        "version": node.version,
        "pid": node.pid,
        "uptime_s": round(node.clock.monotonic_s() - node.started_s, 3),
        "sync": node.sync.value,
        "connections": node.connections,
        "memory_bytes": node.pool.used_bytes,
        "memory_limit_bytes": node.pool.limit_bytes,
        **{name: getattr(counters, name) for name in counters.__slots__},
        "targets": [target.describe() for _, target in sorted(node.targets.items())],
    }
