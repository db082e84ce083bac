"""The routes that show: status, nodes, agents, metrics, history, what the worker did, one block.

Nothing is decided here and nothing is changed. What the fields mean stands in docs/control-api.md.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import asdict

from fastapi import APIRouter
from starlette.responses import Response

from ... import wire
from ...client import NodeReport
from ...client.statistics import read_statistics
from ...cluster.entities import Node
from ...errors import InvalidArgument, NodeError, shown
from ...key import KEY_BYTES
from ...metrics.exposition import CONTENT_TYPE
from ...retention import RetentionPolicy
from ..cluster_status import ClusterStatus, describe_cluster, summarise
from ..worker_status import render_workers
from .agent_gather import AgentGatherer
from .changes import VerifyBody
from .gather import WorkerGatherer
from .handle import Values, WorkerHandle
from .metric_sources import gather_sources
from .metrics import render_metrics

STAT_DEADLINE_S = 2.0
INSPECT_DEADLINE_S = 5.0
REPORT_KINDS = ("redundancy", "scrub", "drain", "ages")

_KEY = re.compile(rf"[0-9a-fA-F]{{{2 * KEY_BYTES}}}")


class StateRoutes:
    """Answers from the worker and the nodes."""

    def __init__(self, handle: WorkerHandle, token: str) -> None:
        self._handle = handle
        self._gatherer = WorkerGatherer(handle, token, self.worker)
        self._agents = AgentGatherer(handle)

    def router(self) -> APIRouter:
        """The routes, to be included by the application."""
        router = APIRouter(tags=["state"])
        add = router.add_api_route
        add("/healthz", self.healthz, summary="Whether this process serves")
        add("/api/status", self.status, summary="The cluster, its redundancy, and this worker")
        add("/api/worker", self.worker, summary="This worker and its reports; asks no node")
        add("/api/workers", self.workers, summary="What the workers of all nodes say together")
        add("/api/agents", self.agents, summary="What every agent says of itself, in short")
        add("/api/nodes", self.nodes, summary="What every node says of itself")
        add("/api/events", self.events, summary="What this worker did last")
        add("/api/history", self.history, summary="Figures of the last day")
        add("/api/inspect/{key}", self.inspect, summary="Where the shards of a block are")
        add("/api/verify", self.verify, methods=["POST"], summary="Read random blocks and check")
        add("/metrics", self.metrics, summary="Metrics for Prometheus", response_class=Response)
        return router

    async def healthz(self) -> Values:
        """Needs no token and says nothing of the cluster."""
        return {"is_serving": True}

    async def status(self) -> Values:
        """The cluster as this worker's node sees it, the policy, and what the worker knows.

        `redundancy` is of the blocks that this node answers for; the sum over all nodes is the
        cluster's.
        """
        handle = self._handle
        cluster = describe_cluster(handle.map, await self._ask_all())
        return {
            **await self.worker(),
            "cluster": cluster.cluster,
            "epoch": cluster.epoch,
            "code": {"k": cluster.k, "m": cluster.m},
            "nodes_total": len(cluster.nodes),
            "nodes_alive": cluster.nodes_alive,
            "spare_nodes": cluster.spare_nodes,
            "summary": summarise(cluster),
            "nodes": [asdict(node) for node in cluster.nodes],
            "policy": _describe_policy(handle.policy, cluster),
        }

    async def worker(self) -> Values:
        """Of this worker alone: for whoever asks all workers of a cluster by itself."""
        handle = self._handle
        now_s = handle.now_s()
        return {
            "at_s": now_s,
            "worker": {"node": handle.node, **handle.describe()},
            **{kind: _with_age(handle.report(kind), now_s) for kind in REPORT_KINDS},
        }

    async def workers(self) -> Values:
        """Each worker's state, count of shards and fill; `redundancy` is of the whole cluster.

        One that does not answer within 2 s is named as such.
        """
        found = await self._gatherer.gather()
        return {"at_s": self._handle.now_s(), **render_workers(found)}

    async def agents(self) -> Values:
        """The entrypoints of the map first, then the agents that speak with them.

        One that does not answer within 1 s is down, with the reason.
        """
        found = await self._agents.gather()
        summary = found.describe() if found.agents else ""
        return {
            "at_s": self._handle.now_s(),
            "summary": summary,
            "agents": found.render_json(),
            "unasked": found.unasked,
        }

    async def nodes(self) -> Values:
        """The STAT answer of each node, or why there is none."""
        controls = {node.name: node.control for node in self._handle.map.nodes}
        reports = await self._ask_all()
        rows = [asdict(report) | {"control": controls.get(report.node)} for report in reports]
        return {"at_s": self._handle.now_s(), "nodes": rows}

    async def events(self) -> Values:
        """Oldest first. Older ones than these are in the log."""
        return {"events": list(self._handle.events())}

    async def history(self) -> Values:
        """Columns and rows of numbers; lost when the worker ends."""
        return self._handle.history()

    async def inspect(self, key: str) -> Values:
        """`key`: 64 hex digits."""
        if not _KEY.fullmatch(key):
            raise InvalidArgument("key", given=shown(key), expected=f"{2 * KEY_BYTES} hex digits")
        return await self._handle.inspect(bytes.fromhex(key), deadline_s=INSPECT_DEADLINE_S)

    async def verify(self, body: VerifyBody) -> Values:
        """Renews nothing: a block that is verified gets no younger."""
        return await self._handle.verify(body.sample, deadline_s=body.deadline_s)

    async def metrics(self) -> Response:
        """What docs/metrics.md lists."""
        sources = await gather_sources(self._handle)
        return Response(render_metrics(sources), headers={"content-type": CONTENT_TYPE})

    async def _ask_all(self) -> list[NodeReport]:
        cluster_map = self._handle.map
        nodes = [node for node in cluster_map.nodes if cluster_map.targets_by_node[node.name]]
        return list(await asyncio.gather(*(self._ask(node) for node in nodes)))

    async def _ask(self, node: Node) -> NodeReport:
        try:
            body = await self._handle.ask(node.name, wire.Op.STAT, deadline_s=STAT_DEADLINE_S)
            statistics = read_statistics(node.name, body)
        except NodeError as error:
            return NodeReport(
                node=node.name, address=node.address, is_alive=False, problem=error.detail
            )
        return NodeReport(
            node=node.name, address=node.address, is_alive=True, statistics=statistics
        )


def _describe_policy(policy: RetentionPolicy, cluster: ClusterStatus) -> Values:
    return {
        "version": policy.version,
        "watermarks": policy.watermarks.to_values(),
        "ttl_s": dict(sorted(policy.ttl_s.items())),
        "draining": sorted(policy.draining),
        "versions": {node.node: node.policy_version for node in cluster.nodes if node.is_alive},
    }


def _with_age(report: Values | None, now_s: int) -> Values | None:
    """A report with `age_s`, the time since it was finished, where it says when that was."""
    if report is None:
        return None
    at_s, duration_s = report.get("at_s"), 0
    if at_s is None:
        at_s, duration_s = report.get("started_at_s"), report.get("duration_s", 0)
    if not isinstance(at_s, int | float) or not isinstance(duration_s, int | float):
        return report
    return {**report, "age_s": max(0, now_s - at_s - duration_s)}
