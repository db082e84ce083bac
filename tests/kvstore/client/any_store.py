"""The clients of the store by one interface, so that one contract can be asked of all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from kvstore.client import (
    AgentClient,
    BlockingAgentClient,
    BlockingStoreClient,
    ClientCounters,
    FetchResult,
    Namespace,
    NodeReport,
    SaveResult,
    StoreClient,
)
from kvstore.cluster.entities import ClusterMap

KINDS = (
    "StoreClient",
    "BlockingStoreClient",
    "AgentClient",
    "BlockingAgentClient",
    "AgentClient, small arena",
)


class AnyStore(Protocol):
    """What all clients have."""

    async def match(
        self, namespace: Namespace, keys: Sequence[bytes], *, deadline_s: float = 1.0
    ) -> int: ...

    async def fetch(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        buffers: Sequence[Any],
        *,
        first_block: int = 0,
        deadline_s: float = 2.0,
    ) -> FetchResult: ...

    async def save(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        buffers: Sequence[Any],
        *,
        first_block: int = 0,
        ttl_class: str = "chat",
        deadline_s: float = 10.0,
    ) -> SaveResult: ...

    async def forget(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        *,
        first_block: int = 0,
        deadline_s: float = 10.0,
    ) -> int: ...

    async def node_reports(self, *, deadline_s: float = 2.0) -> list[NodeReport]: ...

    @property
    def map(self) -> ClusterMap: ...

    @property
    def counters(self) -> ClientCounters: ...


class InThread:
    """A blocking client, each call in a thread."""

    def __init__(self, client: BlockingStoreClient | BlockingAgentClient) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (methods of all signatures)
        value = getattr(self._client, name)
        return _in_thread(value) if callable(value) else value


def _in_thread(call: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    async def run(*arguments: object, **named: object) -> object:
        return await asyncio.to_thread(call, *arguments, **named)

    return run


@asynccontextmanager
async def open_store(kind: str, cluster_path: str, socket_path: str) -> AsyncIterator[AnyStore]:
    """A client of the kind; the agent behind `socket_path` works with the same cluster."""
    if kind == "StoreClient":
        async with StoreClient.connect(cluster_path) as store:
            yield store
    elif kind.startswith("AgentClient"):
        async with AgentClient.connect(socket_path) as agent:
            yield agent
    else:
        blocking: BlockingStoreClient | BlockingAgentClient
        if kind == "BlockingStoreClient":
            blocking = StoreClient.open(cluster_path)
        else:
            blocking = AgentClient.open(socket_path)
        try:
            in_thread: Any = InThread(blocking)
            yield in_thread
        finally:
            await asyncio.to_thread(blocking.close)
