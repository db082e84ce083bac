"""The clients for code without an event loop: the same calls, blocking.

A thread of its own runs the loop, so that late answers are drained and the last shard of a save is
sent while the caller computes. Calls may come from any thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

from ..cluster.entities import ClusterMap
from ..cluster.source import FileMapSource, MapSource
from ..errors import ClientClosed
from ..key import Namespace
from .results import ClientCounters, FetchResult, SaveResult
from .statistics import NodeReport
from .store_client import StoreClient

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

ResultT = TypeVar("ResultT")
STOP_DEADLINE_S = 5.0


class LoopClient(Protocol):
    """A client that belongs to an event loop."""

    @property
    def background_tasks(self) -> frozenset[asyncio.Task[None]]: ...

    async def finish_writes(self) -> None: ...

    async def end_background(self) -> None: ...

    def close(self) -> None: ...


ClientT = TypeVar("ClientT", bound=LoopClient)


class BlockingClient(Generic[ClientT]):
    """A client in a loop in a thread. Close it, or use it in `with`."""

    def __init__(self, make_client: Callable[[], Coroutine[Any, Any, ClientT]], name: str) -> None:
        """`make_client` runs in the loop; what it raises is raised, and nothing is left behind."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()
        self._lock = threading.Lock()
        self._is_closed = False
        try:
            self._client = self._run(make_client(), "open")
        except BaseException:
            self._is_closed = True
            self._end_loop()
            raise

    def close(self) -> None:
        """Closes all connections and ends the thread; operations of other threads end with
        ClientClosed. May be called again."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        asyncio.run_coroutine_threadsafe(_close_client(self._client), self._loop).result()
        self._end_loop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _check_open(self, operation: str) -> None:
        if self._is_closed:
            raise ClientClosed(operation)

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_DEADLINE_S)
        assert not self._thread.is_alive(), "the loop of a closed client did not stop"
        self._loop.close()

    def _run(self, operation: Coroutine[Any, Any, ResultT], name: str) -> ResultT:
        has_ended = threading.Event()

        async def run_to_its_end() -> ResultT:
            try:
                return await operation
            except asyncio.CancelledError:
                pass  # and raised anew: the frames of this one hold the caller's buffers
            finally:
                self._loop.call_soon(has_ended.set)
            raise asyncio.CancelledError

        with self._lock:
            if self._is_closed:
                operation.close()
                raise ClientClosed(name)
            future = asyncio.run_coroutine_threadsafe(run_to_its_end(), self._loop)
        try:
            return future.result()
        except CancelledError:
            raise ClientClosed(name) from None
        except BaseException:
            # Interrupted: the operation must not write to the caller's memory any more.
            future.cancel()
            has_ended.wait(STOP_DEADLINE_S)
            raise


async def _close_client(client: LoopClient) -> None:
    """Ends the operations that run, then the client."""
    others = asyncio.all_tasks() - {asyncio.current_task()} - client.background_tasks
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await client.finish_writes()
    await client.end_background()
    client.close()


class StoreCalls(LoopClient, Protocol):
    """The calls that all clients of the store have alike; see StoreClient."""

    @property
    def map(self) -> ClusterMap: ...

    @property
    def counters(self) -> ClientCounters: ...

    async def fetch(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        buffers: Sequence[WriteableBuffer],
        *,
        first_block: int = 0,
        deadline_s: float = 2.0,
    ) -> FetchResult: ...

    async def save(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        buffers: Sequence[ReadableBuffer],
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


CallsT = TypeVar("CallsT", bound=StoreCalls)


class BlockingStoreCalls(BlockingClient[CallsT]):
    """What the blocking forms of all clients of the store have alike."""

    def fetch(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        buffers: Sequence[WriteableBuffer],
        *,
        first_block: int = 0,
        deadline_s: float = 2.0,
    ) -> FetchResult:
        """See StoreClient.fetch."""
        return self._run(
            self._client.fetch(
                namespace, keys, buffers, first_block=first_block, deadline_s=deadline_s
            ),
            "fetch",
        )

    def save(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        buffers: Sequence[ReadableBuffer],
        *,
        first_block: int = 0,
        ttl_class: str = "chat",
        deadline_s: float = 10.0,
    ) -> SaveResult:
        """See StoreClient.save."""
        return self._run(
            self._client.save(
                namespace,
                keys,
                buffers,
                first_block=first_block,
                ttl_class=ttl_class,
                deadline_s=deadline_s,
            ),
            "save",
        )

    def forget(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        *,
        first_block: int = 0,
        deadline_s: float = 10.0,
    ) -> int:
        """See StoreClient.forget."""
        return self._run(
            self._client.forget(namespace, keys, first_block=first_block, deadline_s=deadline_s),
            "forget",
        )

    def node_reports(self, *, deadline_s: float = 2.0) -> list[NodeReport]:
        """See StoreClient.node_reports."""
        return self._run(self._client.node_reports(deadline_s=deadline_s), "node_reports")

    @property
    def map(self) -> ClusterMap:
        """The cluster map this client uses."""
        return self._client.map

    @property
    def counters(self) -> ClientCounters:
        """What this client has done since it was opened."""
        return self._client.counters


class BlockingStoreClient(BlockingStoreCalls[StoreClient]):
    """`StoreClient` with blocking calls; what each does, takes and raises is written there."""

    def __init__(self, path: str | Path) -> None:
        source = FileMapSource(path)
        cluster_map = source.load()
        super().__init__(lambda: _make_client(cluster_map, source), "store-client")

    def match(self, namespace: Namespace, keys: Sequence[bytes], *, deadline_s: float = 1.0) -> int:
        """See StoreClient.match."""
        return self._run(self._client.match(namespace, keys, deadline_s=deadline_s), "match")


async def _make_client(cluster_map: ClusterMap, source: MapSource) -> StoreClient:
    return StoreClient(cluster_map, source=source)
