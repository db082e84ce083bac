"""What the control API may see of this worker and ask of it: `control.handle.WorkerHandle`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore import wire
from kvstore.admin.control.handle import Values
from kvstore.cluster.entities import ClusterMap
from kvstore.retention import RetentionPolicy

from .context import WorkerContext
from .eviction import Eviction
from .inspection import inspect_block
from .plan_summary import summarise_look
from .policy_sync import take_policy
from .sampling import HistorySampler
from .verification import verify_sample


@dataclass(kw_only=True)
class Handle:
    """The worker as the control API sees it. Belongs to the worker's event loop."""

    context: WorkerContext
    eviction: Eviction
    sampler: HistorySampler
    pid: int
    _running: asyncio.Task[dict[str, int]] | None = None
    _started_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._started_s = self.context.clock.monotonic_s()

    @property
    def node(self) -> str:
        return self.context.node

    @property
    def map(self) -> ClusterMap:
        return self.context.link.map

    @property
    def policy(self) -> RetentionPolicy:
        return self.context.policy

    def take_policy(self, policy: RetentionPolicy) -> None:
        take_policy(self.context, policy)

    def now_s(self) -> int:
        return self.context.now_s()

    async def ask(
        self, node: str, op: wire.Op, *, body: bytes = b"", count: int = 0, deadline_s: float
    ) -> bytes:
        link = self.context.link
        return await link.ask(
            link.any_target(node), op, body=body, count=count, deadline_s=deadline_s
        )

    def describe(self) -> dict[str, Any]:
        context = self.context
        return {
            "pid": self.pid,
            "uptime_s": round(context.clock.monotonic_s() - self._started_s, 3),
            "policy_version": context.policy.version,
            "rate_factor": context.traffic.rate_factor,
            "clock_is_settling": self.eviction.guard.jumped_at_s is not None,
            "counters": context.counters.to_values(),
            "backlog": dict(context.backlog),
            "usage": {name: usage.to_values() for name, usage in context.usage.items()},
        }

    def report(self, kind: str) -> Values | None:
        return self.context.reports.get(kind)

    def events(self) -> Sequence[Values]:
        return self.context.events.to_values()

    def history(self) -> Values:
        return self.sampler.to_values()

    async def plan_gc(self, policy: RetentionPolicy) -> dict[str, Any]:
        looks = await self.eviction.plan_now(policy)
        marks = policy.watermarks
        targets = [summarise_look(look, high=marks.high, low=marks.low) for look in looks]
        return {
            "node": self.context.node,
            "at_s": self.context.now_s(),
            "policy_version": policy.version,
            "shards": sum(target["shards"] for target in targets),
            "bytes": sum(target["bytes"] for target in targets),
            "targets": targets,
        }

    async def inspect(self, key: bytes, *, deadline_s: float) -> Values:
        return await inspect_block(self.context, key, deadline_s=deadline_s)

    async def verify(self, sample: int, *, deadline_s: float) -> Values:
        report = await verify_sample(self.context, sample, deadline_s=deadline_s)
        return report.to_values()

    async def run_gc(self, *, deadline_s: float) -> dict[str, Any]:
        # One at a time, and never cancelled in the middle: whoever comes meanwhile waits for it.
        if self._running is None or self._running.done():
            self._running = asyncio.ensure_future(self.eviction.run_now())
        running = self._running
        await asyncio.wait({running}, timeout=deadline_s)
        evicted = running.result() if running.done() else {}
        return {"node": self.context.node, "is_done": running.done(), "evicted": evicted}
