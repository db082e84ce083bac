"""A worker's side of the control API over real nodes, without a `gc_worker`, and a small client.

What only a worker can do is answered by what the test puts there.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore import wire
from kvstore.admin.control.serving import listen_for_control, serve_control
from kvstore.client.inquiry import ask_node
from kvstore.client.router import Lane, Router
from kvstore.cluster.entities import ClusterMap
from kvstore.cluster.map import load_cluster_map
from kvstore.errors import NodeError
from kvstore.retention import DEFAULT_POLICY, RetentionPolicy

TOKEN = "0123456789abcdefghijklmnopqrstuvwxyz"


@dataclass
class HostedWorker:
    """A `WorkerHandle` whose questions go to real nodes."""

    node: str
    router: Router
    loop: asyncio.AbstractEventLoop
    policy: RetentionPolicy = DEFAULT_POLICY
    reports: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    planned: list[RetentionPolicy] = field(default_factory=list)
    """The policies for which a plan was asked."""
    asked: int = 0
    """Questions to nodes."""
    inspected: list[bytes] = field(default_factory=list)
    verify_s: float = 0.0
    is_verifying: bool = False
    is_verify_cancelled: bool = False
    fault: Exception | None = None

    def reset(self) -> None:
        """As it was made."""
        self.reports, self.planned, self.inspected, self.asked = {}, [], [], 0
        self.verify_s, self.is_verify_cancelled, self.fault = 0.0, False, None
        self.is_verifying = False

    @property
    def map(self) -> ClusterMap:
        return self.router.map

    def take_policy(self, policy: RetentionPolicy) -> None:
        if policy.is_newer_than(self.policy):
            self.policy = policy

    def now_s(self) -> int:
        return int(time.time())

    async def ask(
        self, node: str, op: wire.Op, *, body: bytes = b"", count: int = 0, deadline_s: float
    ) -> bytes:
        self.asked += 1
        targets = self.map.targets_by_node[node]
        if not targets:
            raise NodeError(node, "has no target in the cluster map")
        channel = self.router.channel(targets[0].name, Lane.READ)
        return await ask_node(
            channel, op, body=body, count=count, deadline_s=deadline_s, loop=self.loop
        )

    def describe(self) -> Mapping[str, Any]:
        return {"pid": 1, "counters": {}, "backlog": {}, "usage": {}}

    def report(self, kind: str) -> Mapping[str, Any] | None:
        return self.reports.get(kind)

    def events(self) -> Sequence[Mapping[str, Any]]:
        return [{"at_s": 5, "kind": "evicted", "shards": 3}]

    def history(self) -> Mapping[str, Any]:
        return {"columns": [], "tiers": []}

    async def plan_gc(self, policy: RetentionPolicy) -> Mapping[str, Any]:
        self.planned.append(policy)
        return {"policy_version": policy.version, "victims": []}

    async def run_gc(self, *, deadline_s: float) -> Mapping[str, Any]:
        return {"is_done": True, "deadline_s": deadline_s}

    async def inspect(self, key: bytes, *, deadline_s: float) -> Mapping[str, Any]:
        self.inspected.append(key)
        if self.fault is not None:
            raise self.fault
        return {"key": key.hex()}

    async def verify(self, sample: int, *, deadline_s: float) -> Mapping[str, Any]:
        self.is_verifying = True
        try:
            await asyncio.sleep(self.verify_s)
        except asyncio.CancelledError:
            self.is_verify_cancelled = True
            raise
        return {"sampled": sample}


@dataclass(frozen=True)
class Reply:
    """An HTTP answer."""

    status: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def json(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads(self.content)
        return values


@dataclass(frozen=True)
class ControlApi:
    """A served API, its worker's side, and the way to ask it."""

    worker: HostedWorker
    port: int

    def ask(
        self, method: str, path: str, body: object = None, *, token: str | None = TOKEN
    ) -> Reply:
        """One request."""
        return request(self.port, method, path, body, token)


def request(
    port: int, method: str, path: str, body: object = None, token: str | None = TOKEN
) -> Reply:
    """One request; `body` is sent as JSON, bytes as they are."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30.0)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    content = body if isinstance(body, bytes) else None
    if body is not None and content is None:
        content = json.dumps(body).encode()
    if content is not None:
        headers["Content-Type"] = "application/json"
    try:
        connection.request(method, path, body=content, headers=headers)
        answer = connection.getresponse()
        found = {name.lower(): value for name, value in answer.getheaders()}
        return Reply(answer.status, found, answer.read())
    finally:
        connection.close()


@contextmanager
def serve_worker(cluster_path: Path, node: str = "n01") -> Iterator[ControlApi]:
    """The control API of one node of a running cluster, served by a loop in a thread."""
    is_served = threading.Event()
    served: list[ControlApi] = []
    stops: list[Callable[[], object]] = []

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        router = Router(load_cluster_map(cluster_path), loop, time.monotonic)
        worker = HostedWorker(node=node, router=router, loop=loop)
        listener = listen_for_control("127.0.0.1", 0)
        served.append(ControlApi(worker, listener.getsockname()[1]))
        serving = asyncio.create_task(serve_control(listener, worker, TOKEN))
        stops.append(lambda: loop.call_soon_threadsafe(serving.cancel))
        is_served.set()
        await asyncio.wait([serving])
        router.close()

    thread = threading.Thread(target=asyncio.run, args=[serve()])
    thread.start()
    try:
        assert is_served.wait(10.0)
        yield served[0]
    finally:
        stops[0]()
        thread.join(10.0)
        assert not thread.is_alive()
