"""What the agent's request handling needs of the parts that move bytes or talk to other hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ..agent_messages import FetchEnded, StoreEnded
from ..arena.wakeup import Waker
from ..client.statistics import NodeReport
from ..key import Namespace
from ..layout import BlockLayout
from .jobs import FetchJob, StoreJob


class Jobs(Protocol):
    """Fetches into runs and saves out of them, by other processes."""

    async def fetch(self, job: FetchJob, waker: Waker) -> FetchEnded:
        """Returns, also when it is cancelled, only when nobody writes into the run any more."""

    async def store(self, job: StoreJob) -> StoreEnded:
        """Returns, also when it is cancelled, only when nobody reads the run any more."""

    def describe(self) -> dict[str, Any]:
        """For the status document."""


class Store(Protocol):
    """What of a StoreClient is used without bytes of blocks."""

    async def match(
        self, namespace: Namespace, keys: Sequence[bytes], *, deadline_s: float = ...
    ) -> int: ...

    async def forget(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        *,
        first_block: int = ...,
        deadline_s: float = ...,
    ) -> int: ...

    async def node_reports(self, *, deadline_s: float = ...) -> list[NodeReport]: ...


class WindowOutcome(Protocol):
    """How a fetch of a window record ended."""

    @property
    def is_found(self) -> bool: ...

    @property
    def host(self) -> str: ...


class Windows(Protocol):
    """Window records of this host and of others."""

    def put(
        self, key: bytes, namespace_id: bytes, layout: BlockLayout, data: memoryview | bytearray
    ) -> bool:
        """Keeps a copy of the record; whether there is room for it."""

    async def lookup(self, keys: Sequence[bytes], deadline_s: float) -> list[str | None]:
        """For each key the address of the agent that has its record: empty for this one, None if
        nobody is known to have it. Never raises because others do not answer."""

    async def fetch(
        self,
        namespace_id: bytes,
        layout: BlockLayout,
        key: bytes,
        into: memoryview,
        deadline_s: float,
    ) -> WindowOutcome:
        """The record, verified, into `into`, layout.block_bytes long. Nothing is written there
        after the return."""

    def describe(self) -> dict[str, Any]:
        """For the status document."""
