"""The client of the agent of this host: what `StoreClient` does, and runs of shared memory.

    async with AgentClient.connect("/run/cachalot/agent.sock") as agent:   # or AgentClient.open(..)
        found = await agent.match(ns, tokens)
        run = await agent.lease_run(ns, found.plan.stored_blocks)
        if run is not None:  # it is None, or has fewer blocks, when the arena is full
            with run:
                fetch = agent.fetch_run(ns, found.keys[: run.blocks], run)  # begins it
                await run.until_ready(section=0, blocks=run.blocks, deadline_s=1.0)
                print((await fetch).blocks)

`match`, `fetch`, `save`, `forget` and `node_reports` are those of `StoreClient`, and so is what
they take, return and refuse. Beyond that every call may raise AgentUnreachable: at once if the
agent dies, a second after its deadline if the agent stands still. The client connects again by
itself. docs/engine-client.md shows how an engine uses it.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, overload

from ..agent_messages import (
    AskNodes,
    AskStatus,
    Forget,
    Forgotten,
    Match,
    Matched,
    MatchPrompt,
    NodeReportRow,
    NodeReports,
    PromptMatched,
    StatusTold,
)
from ..errors import ProtocolError
from ..key import ImageSpan, Namespace, TokenIds
from .agent_arguments import bound_deadline, check_chain, is_key_chain
from .agent_results import PromptMatch, find_match_problem
from .agent_run_calls import AgentRunCalls
from .arguments import (
    check_first_block,
    check_keys,
    check_range,
    check_ttl_class,
    hold_buffers,
)
from .results import FetchResult, SaveResult
from .statistics import NodeReport, read_statistics

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

    from .agent_blocking import BlockingAgentClient

STATUS_DEADLINE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HashedPrompt:
    """Keys of a prompt's full blocks."""

    keys: list[bytes]
    prompt_tokens: int
    hash_s: float


class AgentClient(AgentRunCalls):
    """A connection to the agent of this host. Belongs to the event loop in which it was opened.

    Make one with `connect` or `open`. Operations may run concurrently.
    """

    @staticmethod
    @asynccontextmanager
    async def connect(socket_path: str | Path, *, name: str = "") -> AsyncIterator[AgentClient]:
        """A client for the agent behind a socket.

        If there is no agent now the client is there all the same, and connects when there is one.
        Raises InvalidArgument for a path that no socket can have.
        """
        client = AgentClient(socket_path, name=name)
        try:
            await client.wait_for_first_attempt()
            yield client
        finally:
            try:
                await client.finish_writes()
            finally:
                await client.end_background()
                client.close()

    @staticmethod
    def open(socket_path: str | Path, *, name: str = "") -> BlockingAgentClient:
        """The same client with blocking calls, for code without an event loop."""
        from .agent_blocking import BlockingAgentClient

        return BlockingAgentClient(socket_path, name=name)

    @overload
    async def match(
        self, namespace: Namespace, keys: Sequence[bytes], *, deadline_s: float = 1.0
    ) -> int: ...

    @overload
    async def match(
        self,
        namespace: Namespace,
        keys: TokenIds,
        *,
        images: Iterable[ImageSpan] = (),
        is_dense: bool = False,
        deadline_s: float = 1.0,
    ) -> PromptMatch: ...

    async def match(
        self,
        namespace: Namespace,
        keys: Sequence[bytes] | TokenIds,
        *,
        images: Iterable[ImageSpan] = (),
        is_dense: bool = False,
        deadline_s: float = 1.0,
    ) -> int | PromptMatch:
        """Of keys: the number of leading blocks that are stored, see StoreClient.match. Of the
        token ids of a prompt: what of it can be had, by the rule for models without window state if
        `is_dense`. An empty list is a list of keys.

        A hint: a block may be gone when it is fetched. Raises InvalidArgument, ClientClosed,
        AgentError.
        """
        if is_key_chain(keys):
            return await self.match_keys(namespace, keys, deadline_s=deadline_s)
        self._check_open("match")
        prompt = self.hash_prompt(namespace, cast(TokenIds, keys), images)
        return await self.match_prompt(namespace, prompt, is_dense=is_dense, deadline_s=deadline_s)

    async def match_keys(
        self, namespace: Namespace, keys: Sequence[bytes], *, deadline_s: float
    ) -> int:
        """`match` of keys."""
        self._check_open("match")
        check_chain(namespace, keys)
        deadline_s = bound_deadline(deadline_s)
        if not keys:
            return 0
        connection, number = await self._namespace(namespace, deadline_s)
        request = Match(namespace=number, keys=b"".join(keys), deadline_s=deadline_s)
        found = (await connection.session.ask(request, Matched, deadline_s)).blocks
        if found > len(keys):
            what = f"{found} blocks of {len(keys)} are there"
            raise connection.session.end_of_nonsense(what)
        return found

    def hash_prompt(
        self, namespace: Namespace, token_ids: TokenIds, images: Iterable[ImageSpan] = ()
    ) -> HashedPrompt:
        """The part of `match` that may run in any thread. Tokens that an earlier prompt began with
        too are not hashed again."""
        check_keys(namespace, ())
        started_at_s = self._clock()
        keys = self._keys.block_keys(namespace, token_ids, images)
        check_chain(namespace, keys)
        return HashedPrompt(
            keys=keys, prompt_tokens=len(token_ids), hash_s=self._clock() - started_at_s
        )

    async def match_prompt(
        self, namespace: Namespace, prompt: HashedPrompt, *, is_dense: bool, deadline_s: float
    ) -> PromptMatch:
        """`match` of a prompt that is hashed."""
        self._check_open("match")
        deadline_s = bound_deadline(deadline_s)
        connection, number = await self._namespace(namespace, deadline_s)
        request = MatchPrompt(
            namespace=number,
            keys=b"".join(prompt.keys),
            prompt_tokens=prompt.prompt_tokens,
            is_dense=is_dense,
            deadline_s=deadline_s,
        )
        found = await connection.session.ask(request, PromptMatched, deadline_s)
        if problem := find_match_problem(found, blocks=len(prompt.keys)):
            raise connection.session.end_of_nonsense(f"matched a prompt: {problem}")
        return PromptMatch(
            matched_blocks=found.matched_blocks,
            hit_tokens=found.hit_tokens,
            replay_tokens=found.replay_tokens,
            window_anchor=found.window_anchor,
            window_host=found.window_host,
            keys=prompt.keys,
            hash_s=prompt.hash_s,
            match_s=found.match_s,
            lookup_s=found.lookup_s,
        )

    async def fetch(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        buffers: Sequence[WriteableBuffer],
        *,
        first_block: int = 0,
        deadline_s: float = 2.0,
    ) -> FetchResult:
        """See StoreClient.fetch. The blocks come by way of a run, and are copied as they come; in
        several rounds if the arena is small."""
        self._check_open("fetch")
        check_chain(namespace, keys)
        check_range(keys, buffers, first_block)
        deadline_s = bound_deadline(deadline_s)
        views, held = hold_buffers(buffers, namespace.layout.block_bytes, writable=True)
        with held:
            return await self._buffers.fetch(
                *await self._namespace(namespace, deadline_s),
                namespace.layout,
                keys,
                views,
                first_block=first_block,
                deadline_s=deadline_s,
            )

    async def save(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        buffers: Sequence[ReadableBuffer],
        *,
        first_block: int = 0,
        ttl_class: str = "chat",
        deadline_s: float = 10.0,
    ) -> SaveResult:
        """See StoreClient.save. Blocks are copied into runs, which are handed over to the agent;
        blocks that its queue dropped, or for which there was no room, are among the failed."""
        self._check_open("save")
        check_chain(namespace, keys)
        check_range(keys, buffers, first_block)
        check_ttl_class(ttl_class)
        deadline_s = bound_deadline(deadline_s)
        views, held = hold_buffers(buffers, namespace.layout.block_bytes, writable=False)
        with held:
            return await self._buffers.save(
                *await self._namespace(namespace, deadline_s),
                namespace.layout,
                keys,
                views,
                first_block=first_block,
                ttl_class=ttl_class,
                deadline_s=deadline_s,
            )

    async def forget(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        *,
        first_block: int = 0,
        deadline_s: float = 10.0,
    ) -> int:
        """See StoreClient.forget."""
        self._check_open("forget")
        check_chain(namespace, keys)
        check_first_block(keys, first_block)
        deadline_s = bound_deadline(deadline_s)
        if first_block == len(keys):
            return 0
        connection, number = await self._namespace(namespace, deadline_s)
        request = Forget(
            namespace=number,
            keys=b"".join(keys),
            first_block=first_block,
            deadline_s=deadline_s,
        )
        return (await connection.session.ask(request, Forgotten, deadline_s)).blocks

    async def node_reports(self, *, deadline_s: float = 2.0) -> list[NodeReport]:
        """See StoreClient.node_reports."""
        self._check_open("node_reports")
        deadline_s = bound_deadline(deadline_s)
        session = self._link.connection.session
        answer = await session.ask(AskNodes(deadline_s), NodeReports, deadline_s)
        return [_read_report(row) for row in answer.nodes]

    async def status(self, *, deadline_s: float = STATUS_DEADLINE_S) -> dict[str, Any]:
        """What the agent says of itself: the document in docs/formats/agent-socket.md."""
        self._check_open("status")
        session = self._link.connection.session
        answer = await session.ask(AskStatus(), StatusTold, bound_deadline(deadline_s))
        document: dict[str, Any] = json.loads(answer.status)
        return document


def _read_report(row: NodeReportRow) -> NodeReport:
    statistics: dict[str, Any] = {}
    problem, is_alive = row.problem, row.is_alive
    if row.statistics:
        try:
            statistics = read_statistics(row.node, row.statistics)
        except ProtocolError as error:
            problem, is_alive = error.detail, False
    return NodeReport(
        node=row.node,
        address=row.address,
        is_alive=is_alive,
        problem=problem,
        statistics=statistics,
    )
