"""The client of an agent for code without an event loop: the same calls, blocking.

Runs are the same objects as `AgentClient` hands out. An engine waits for their sections in its own
thread, without a message or a change of threads (`ArenaRun.wait_ready`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, overload

from ..key import ImageSpan, Namespace, TokenIds
from ..layout import BlockLayout
from .agent_arguments import is_key_chain
from .agent_client import STATUS_DEADLINE_S, AgentClient
from .agent_link import check_socket_path
from .agent_results import PromptMatch, RunOffer, RunOperation, WindowFetch
from .arena_run import ArenaRun
from .arguments import Rebuild
from .blocking import BlockingStoreCalls
from .results import FetchResult, SaveResult

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer


class BlockingAgentClient(BlockingStoreCalls[AgentClient]):
    """`AgentClient` with blocking calls; what each does, takes and raises is written there."""

    def __init__(self, socket_path: str | Path, *, name: str = "") -> None:
        check_socket_path(socket_path)
        super().__init__(lambda: _make_client(socket_path, name), "agent-client")

    @overload
    def match(
        self, namespace: Namespace, keys: Sequence[bytes], *, deadline_s: float = 1.0
    ) -> int: ...

    @overload
    def match(
        self,
        namespace: Namespace,
        keys: TokenIds,
        *,
        images: Iterable[ImageSpan] = (),
        is_dense: bool = False,
        deadline_s: float = 1.0,
    ) -> PromptMatch: ...

    def match(
        self,
        namespace: Namespace,
        keys: Sequence[bytes] | TokenIds,
        *,
        images: Iterable[ImageSpan] = (),
        is_dense: bool = False,
        deadline_s: float = 1.0,
    ) -> int | PromptMatch:
        """See AgentClient.match. A prompt is hashed in the caller's thread."""
        if is_key_chain(keys):
            asked = self._client.match_keys(namespace, keys, deadline_s=deadline_s)
            return self._run(asked, "match")
        self._check_open("match")
        prompt = self._client.hash_prompt(namespace, cast(TokenIds, keys), images)
        found = self._client.match_prompt(
            namespace, prompt, is_dense=is_dense, deadline_s=deadline_s
        )
        return self._run(found, "match")

    def status(self, *, deadline_s: float = STATUS_DEADLINE_S) -> dict[str, Any]:
        """See AgentClient.status."""
        return self._run(self._client.status(deadline_s=deadline_s), "status")

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection now. It may be gone a moment later."""
        return self._client.is_connected

    @property
    def arena(self) -> memoryview | None:
        """See AgentClient.arena."""
        return self._client.arena

    # Runs ---------------------------------------------------------------------------------------

    def lease_run(
        self,
        namespace: Namespace,
        blocks: int,
        *,
        has_parity_room: bool = False,
        deadline_s: float = 1.0,
    ) -> ArenaRun | None:
        """See AgentClient.lease_run."""
        lease = self._client.lease_run(
            namespace, blocks, has_parity_room=has_parity_room, deadline_s=deadline_s
        )
        return self._run(lease, "lease_run")

    def fetch_run(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        run: ArenaRun,
        *,
        first_block: int = 0,
        is_by_layer: bool = True,
        rebuild: Rebuild = "agent",
        deadline_s: float = 2.0,
    ) -> RunOperation[FetchResult]:
        """See AgentClient.fetch_run. Begins it; `join` of what is returned gives the result."""

        async def begin() -> RunOperation[FetchResult]:
            return self._client.fetch_run(
                namespace,
                keys,
                run,
                first_block=first_block,
                is_by_layer=is_by_layer,
                rebuild=rebuild,
                deadline_s=deadline_s,
            )

        return self._run(begin(), "fetch_run")

    def save_run(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        run: ArenaRun,
        *,
        first_block: int = 0,
        ttl_class: str = "chat",
        deadline_s: float = 10.0,
    ) -> RunOperation[SaveResult]:
        """See AgentClient.save_run. Hands it over; `join` of what is returned gives the result."""

        async def hand_over() -> RunOperation[SaveResult]:
            return self._client.save_run(
                namespace,
                keys,
                run,
                first_block=first_block,
                ttl_class=ttl_class,
                deadline_s=deadline_s,
            )

        return self._run(hand_over(), "save_run")

    # Handing over ---------------------------------------------------------------------------------

    def offer_run(self, run: ArenaRun, *, ttl_s: float = 30.0) -> RunOffer:
        """See AgentClient.offer_run."""
        return self._run(self._client.offer_run(run, ttl_s=ttl_s), "offer_run")

    def take_run(
        self, namespace: Namespace, offer: RunOffer, *, deadline_s: float = 2.0
    ) -> ArenaRun | None:
        """See AgentClient.take_run."""
        return self._run(self._client.take_run(namespace, offer, deadline_s=deadline_s), "take_run")

    def withdraw_offer(self, offer: RunOffer) -> bool:
        """See AgentClient.withdraw_offer."""
        return self._run(self._client.withdraw_offer(offer), "withdraw_offer")

    # Window state -------------------------------------------------------------------------------

    def open_namespace(
        self, namespace: Namespace, *, window_layout: BlockLayout | None = None
    ) -> None:
        """See AgentClient.open_namespace."""
        self._run(
            self._client.open_namespace(namespace, window_layout=window_layout), "open_namespace"
        )

    def lease_window(self, namespace: Namespace, *, deadline_s: float = 1.0) -> ArenaRun | None:
        """See AgentClient.lease_window."""
        return self._run(
            self._client.lease_window(namespace, deadline_s=deadline_s), "lease_window"
        )

    def put_window(
        self,
        namespace: Namespace,
        key: bytes,
        record: ReadableBuffer | ArenaRun,
        *,
        deadline_s: float = 1.0,
    ) -> bool:
        """See AgentClient.put_window."""
        return self._run(
            self._client.put_window(namespace, key, record, deadline_s=deadline_s), "put_window"
        )

    def lookup(
        self, namespace: Namespace, keys: Sequence[bytes], *, deadline_s: float = 1.0
    ) -> list[str | None]:
        """See AgentClient.lookup."""
        return self._run(self._client.lookup(namespace, keys, deadline_s=deadline_s), "lookup")

    def fetch_window(
        self,
        namespace: Namespace,
        key: bytes,
        into: WriteableBuffer | ArenaRun,
        *,
        deadline_s: float = 1.0,
    ) -> WindowFetch:
        """See AgentClient.fetch_window."""
        return self._run(
            self._client.fetch_window(namespace, key, into, deadline_s=deadline_s), "fetch_window"
        )


async def _make_client(socket_path: str | Path, name: str) -> AgentClient:
    client = AgentClient(socket_path, name=name)
    await client.wait_for_first_attempt()
    return client
