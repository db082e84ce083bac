"""What the control API asks of the process that hosts it.

The API knows HTTP and the policy; the worker beside a storage node knows the node, its peers and
what it did. This is the seam between the two: `gc_worker` implements it, and nothing here knows
`gc_worker`. Values are such that JSON can show them; their fields stand in docs/control-api.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ... import wire
from ...cluster.entities import ClusterMap
from ...retention import RetentionPolicy

Values = Mapping[str, Any]
"""A JSON object."""


class WorkerHandle(Protocol):
    """The worker, as far as the API may see it. Belongs to one event loop."""

    @property
    def node(self) -> str:
        """The name in the map of the node that the worker stands beside."""

    @property
    def map(self) -> ClusterMap:
        """The cluster map as it is now."""

    @property
    def policy(self) -> RetentionPolicy:
        """The newest policy that the worker has seen."""

    def take_policy(self, policy: RetentionPolicy) -> None:
        """Tell the worker of a policy; it obeys it from now on if it is newer than its own."""

    def now_s(self) -> int:
        """Unix time in whole seconds."""

    async def ask(
        self,
        node: str,
        op: wire.Op,
        *,
        body: bytes = b"",
        count: int = 0,
        deadline_s: float,
    ) -> bytes:
        """The body of a node's answer to an operation that is not tied to a target.

        Raises NodeError: unreachable, refused, or not within `deadline_s`.
        """

    def describe(self) -> Values:
        """The worker itself: pid, uptime_s, counters, backlog, usage of each target."""

    def report(self, kind: str) -> Values | None:
        """The last finished report of a kind: redundancy, scrub, drain. None: not yet one."""

    def events(self) -> Sequence[Values]:
        """What the worker did last, oldest first: at_s, kind, and fields of that kind."""

    def history(self) -> Values:
        """Figures of the last day, for charts."""

    async def plan_gc(self, policy: RetentionPolicy) -> Values:
        """What would be evicted from the own node now under `policy`. Changes nothing."""

    async def run_gc(self, *, deadline_s: float) -> Values:
        """Evict now what the policy in force demands; what was done until it was done, or late."""

    async def inspect(self, key: bytes, *, deadline_s: float) -> Values:
        """What each node says of a block."""

    async def verify(self, sample: int, *, deadline_s: float) -> Values:
        """Read `sample` random blocks of the own node from all holders and check every byte."""
