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
from .notes import ClientNotes
from .policy_store import PolicyStore
from .statistics import RequestMeter
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
    policy: PolicyStore
    pid: int
    version: str
    started_s: float
    follower: MapFollower | None = None
    connections: int = 0
    counters: NodeCounters = field(default_factory=NodeCounters)
    requests: RequestMeter = field(default_factory=RequestMeter)
    notes: ClientNotes = field(default_factory=ClientNotes)

    @property
    def is_draining(self) -> bool:
        """Whether the policy says that this node takes no more shards."""
        return self.policy.is_draining(self.name)


def describe_node(node: Node) -> dict[str, Any]:
    """The answer to STAT, as JSON will show it. The names are stable; more may be added.

    node, cluster (hex), epoch, version, pid, uptime_s, sync, connections, memory_bytes and
    memory_limit_bytes (of the buffers), unix_s (the node's clock), the fields of NodeCounters,
    policy_version, policy_is_saved and draining (0 or 1), requests_last_s (MATCH, READ, WRITE),
    latency (histograms of some operations), what clients noted (`namespaces`, `client_latency`),
    and `targets`: a list with what `Target.describe` says of each.
    docs/formats/wire.md lists every name.
    """
    counters = node.counters
    return {
        "node": node.name,
        "cluster": node.cluster.hex(),
        "epoch": node.epoch,
        "version": node.version,
        "pid": node.pid,
        "unix_s": round(node.clock.unix_ns() / 1e9, 3),
        "uptime_s": round(node.clock.monotonic_s() - node.started_s, 3),
        "sync": node.sync.value,
        "connections": node.connections,
        "memory_bytes": node.pool.used_bytes,
        "memory_limit_bytes": node.pool.limit_bytes,
        **{name: getattr(counters, name) for name in counters.__slots__},
        "policy_version": node.policy.current.version,
        "policy_is_saved": int(node.policy.is_saved),
        "draining": int(node.is_draining),
        "requests_last_s": node.requests.requests_last_s(node.clock.monotonic_s()),
        "latency": node.requests.describe(),
        **node.notes.describe(),
        "targets": [target.describe() for _, target in sorted(node.targets.items())],
    }
