"""Samples of the whole cluster for the charts of the web page, every ten seconds.

One loop of the worker; what a sample becomes is decided in `kvstore.admin.control.history`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from kvstore.admin.control.history import SAMPLE_INTERVAL_S, ClusterSample, History
from kvstore.errors import NodeError

from .context import WorkerContext

log = logging.getLogger(__name__)

ASKED_AT_ONCE_MAX = 64


class HistorySampler:
    """Fills a history from what all nodes say. Belongs to the worker's event loop."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._history = History()

    async def run(self) -> None:
        """Sample after sample, until cancelled. A node that does not answer is counted as down."""
        while True:
            await self.sample()
            await self._context.sleep(SAMPLE_INTERVAL_S)

    async def sample(self) -> None:
        """Ask all nodes now. They are given two seconds, all at once."""
        context = self._context
        cluster_map = context.link.map
        names = [node.name for node in cluster_map.nodes if cluster_map.targets_by_node[node.name]]
        gate = asyncio.Semaphore(ASKED_AT_ONCE_MAX)
        stats = await asyncio.gather(*(self._ask(name, gate) for name in names))
        self._history.add(
            context.clock.monotonic_s(),
            ClusterSample(
                stats=dict(zip(names, stats, strict=True)),
                usage={name: usage.to_values() for name, usage in context.usage.items()},
                redundancy=context.reports.get("redundancy", {}),
            ),
        )

    def to_values(self) -> dict[str, Any]:
        """The history as the control API shows it."""
        return self._history.to_values(monotonic_s=self._context.clock.monotonic_s())

    async def _ask(self, node: str, gate: asyncio.Semaphore) -> Mapping[str, Any] | None:
        async with gate:
            try:
                return await self._context.link.statistics(node)
            except NodeError as error:
                log.debug("history without node=%s: %s", node, error)
                return None
