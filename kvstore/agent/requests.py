"""What each request of the agent's socket means: checks it, and has the right part do it.

A request that breaks a rule raises InvalidArgument, which the session answers by Refused. Errors of
other kinds than StoreError are faults of ours, and end the agent.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from .. import agent_messages as m
from ..client.arguments import check_first_block, check_ttl_class
from ..client.results import FetchEnd
from ..client.statistics import NodeReport
from ..errors import InvalidArgument
from ..key import Namespace
from .arena_runs import ArenaRuns
from .counters import FetchCounters
from .jobs import FetchJob, StoreJob
from .leases import Lease
from .matching import PromptMatcher
from .options import Role, role_names
from .parts import Jobs, Store, Windows
from .replies import Reply, RequestRefused, Running
from .request_checks import find_namespace, keys_of, layout_of, window_layout_of
from .session import OpenedNamespace, Session
from .session_bounds import SessionBounds
from .store_queue import StoreQueue

log = logging.getLogger(__name__)

NODE_REPORTS_BYTES_MAX = m.MESSAGE_BYTES_MAX // 2
"""Statistics of nodes beyond that are left out of an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentIdentity:
    """What an agent says of itself to everybody who connects."""

    name: str
    instance: int
    roles: frozenset[Role]
    cluster_path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaParts:
    """What is there in an agent that moves bytes. `descriptor`: of the arena."""

    descriptor: int
    runs: ArenaRuns
    jobs: Jobs
    queue: StoreQueue


class RequestHandler:
    """The Handler of all sessions of an agent (see `session`)."""

    def __init__(
        self,
        identity: AgentIdentity,
        *,
        store: Store,
        matcher: PromptMatcher,
        arena: ArenaParts | None,
        windows: Windows,
        status: Callable[[], dict[str, Any]],
        bounds: SessionBounds,
    ) -> None:
        self._identity = identity
        self._store = store
        self._matcher = matcher
        self._arena = arena
        self._windows = windows
        self._status = status
        self._bounds = bounds
        self.fetches = FetchCounters()
        self.is_stopping = False
        self._begin_by_type: dict[type, Callable[[Session, Any], Reply | Running]] = {
            m.Hello: self._greet,
            m.OpenNamespace: self._open_namespace,
            m.Match: self._match,
            m.MatchPrompt: self._match_prompt,
            m.LeaseRun: self._lease_run,
            m.ReleaseRun: self._release_run,
            m.FetchRun: self._fetch_run,
            m.StoreRun: self._store_run,
            m.Forget: self._forget,
            m.AskNodes: self._ask_nodes,
            m.PutWindow: self._put_window,
            m.LookUpWindows: self._look_up_windows,
            m.FetchWindow: self._fetch_window,
            m.AskStatus: self._tell_status,
        }

    def begin(self, session: Session, request: m.Request) -> Reply | Running:
        """See `session.Handler`."""
        if session.client is None and not isinstance(request, m.Hello):
            first = m.Refused(what="first message", given=type(request).__name__, expected="Hello")
            return Reply(first, is_last=True)
        if self.is_stopping:
            raise RequestRefused("it stops")
        return self._begin_by_type[type(request)](session, request)

    def end_session(self, session: Session) -> None:
        """See `session.Handler`."""
        if self._arena is not None:
            self._arena.runs.book.end_owner(session.number)

    # Names ----------------------------------------------------------------------------------------

    def _greet(self, session: Session, request: m.Hello) -> Reply:
        if request.version != m.PROTOCOL_VERSION:
            wrong = m.Refused(
                what="protocol version",
                given=str(request.version),
                expected=str(m.PROTOCOL_VERSION),
            )
            return Reply(wrong, is_last=True)
        if session.client is not None:
            raise InvalidArgument("Hello", given="a second one", expected="one, the first message")
        session.client = "".join(c if c.isprintable() else "?" for c in request.client)
        log.info(
            "session began session=%d client=%s pid=%d",
            session.number,
            session.client,
            session.peer.pid,
        )
        arena = self._arena
        welcome = m.Welcome(
            version=m.PROTOCOL_VERSION,
            agent=self._identity.name,
            instance=self._identity.instance,
            roles=role_names(self._identity.roles),
            arena_bytes=0 if arena is None else arena.runs.book.size_bytes,
            cluster_path=self._identity.cluster_path,
        )
        return Reply(welcome, None if arena is None else arena.descriptor)

    def _open_namespace(self, session: Session, request: m.OpenNamespace) -> Reply:
        windows = request.window_sections
        opened = OpenedNamespace(
            Namespace(
                model=request.model,
                weights=request.weights,
                tokenizer=request.tokenizer,
                layout=layout_of(request.sections),
                lora=request.lora,
                tenant=request.tenant,
            ),
            None if windows is None else layout_of(windows),
        )
        if opened in session.namespaces:
            return Reply(m.NamespaceOpened(session.namespaces.index(opened)))
        if len(session.namespaces) >= self._bounds.namespaces_max:
            raise InvalidArgument(
                "namespaces", given="too many", expected=f"{self._bounds.namespaces_max} a session"
            )
        session.namespaces.append(opened)
        return Reply(m.NamespaceOpened(len(session.namespaces) - 1))

    # Matching -------------------------------------------------------------------------------------

    def _match(self, session: Session, request: m.Match) -> Running:
        self._require(Role.CHECK)
        namespace = find_namespace(session, request.namespace).namespace
        keys = keys_of(request.keys)

        async def work() -> Reply:
            return Reply(m.Matched(await self._matcher.match(namespace, keys, request.deadline_s)))

        return Running(work())

    def _match_prompt(self, session: Session, request: m.MatchPrompt) -> Running:
        self._require(Role.CHECK)
        namespace = find_namespace(session, request.namespace).namespace
        keys = keys_of(request.keys)

        async def work() -> Reply:
            found = await self._matcher.match_prompt(
                namespace,
                keys,
                prompt_tokens=request.prompt_tokens,
                is_dense=request.is_dense,
                deadline_s=request.deadline_s,
            )
            return Reply(found)

        return Running(work())

    # Runs -----------------------------------------------------------------------------------------

    def _lease_run(self, session: Session, request: m.LeaseRun) -> Reply | Running:
        runs = self._use_arena().runs
        opened = find_namespace(session, request.namespace)
        layout = opened.namespace.layout
        if request.is_window:
            layout = window_layout_of(opened)
            if request.blocks != 1:
                raise InvalidArgument("blocks", given=request.blocks, expected="1, a window record")
        if runs.book.runs_of(session.number) >= self._bounds.leases_max:
            raise RequestRefused(f"more than {self._bounds.leases_max} runs of one session")
        if runs.book.waiting >= self._bounds.waiting_max:
            raise RequestRefused(f"more than {self._bounds.waiting_max} requests wait for a run")
        wish = runs.ask(
            owner=session.number,
            namespace=request.namespace,
            layout=layout,
            blocks=request.blocks,
            is_window=request.is_window,
        )
        if wish.is_settled:
            return runs.reply_of(wish)
        return Running(runs.wait(wish, request.deadline_s))

    def _release_run(self, session: Session, request: m.ReleaseRun) -> Reply:
        runs = self._use_arena().runs
        runs.book.release(runs.find(session.number, request.run))
        return Reply(m.Done())

    def _fetch_run(self, session: Session, request: m.FetchRun) -> Reply | Running:
        self._require(Role.FETCH)
        arena = self._use_arena()
        lease = arena.runs.find_idle(session.number, request.run, is_window=False)
        job = FetchJob(
            namespace=find_namespace(session, lease.namespace).namespace,
            keys=request.keys,
            first_block=request.first_block,
            run_offset=lease.offset,
            run_blocks=lease.layout.blocks,
            deadline_s=request.deadline_s,
            is_by_layer=request.is_by_layer,
        )

        async def work() -> Reply:
            ended = await arena.jobs.fetch(job, lease.eventfd)
            block_bytes = job.namespace.layout.block_bytes
            self.fetches.add(ended, asked_blocks=job.blocks, block_bytes=block_bytes)
            return Reply(ended)

        def count_end(is_given_up: bool) -> None:
            self.fetches.running -= 1
            self.fetches.given_up += is_given_up

        self.fetches.running += 1
        given_up = m.FetchEnded(blocks=0, ended=FetchEnd.DEADLINE.value)
        return _fill_run(arena.runs, lease, work(), Reply(given_up), count_end)

    def _store_run(self, session: Session, request: m.StoreRun) -> Running:
        self._require(Role.STORE)
        arena = self._use_arena()
        lease = arena.runs.find_idle(session.number, request.run, is_window=False)
        check_ttl_class(request.ttl_class)
        job = StoreJob(
            namespace=find_namespace(session, lease.namespace).namespace,
            keys=request.keys,
            first_block=request.first_block,
            run_offset=lease.offset,
            run_blocks=lease.layout.blocks,
            deadline_s=request.deadline_s,
            ttl_class=request.ttl_class,
        )
        arena.runs.begin_store(lease)
        ended = arena.queue.hand_over(lease, job)

        async def work() -> Reply:
            return Reply(await ended)

        return Running(work(), is_awaited_at_stop=True)

    # The nodes ------------------------------------------------------------------------------------

    def _forget(self, session: Session, request: m.Forget) -> Running:
        namespace = find_namespace(session, request.namespace).namespace
        keys = keys_of(request.keys)
        check_first_block(keys, request.first_block)

        async def work() -> Reply:
            forgotten = await self._store.forget(
                namespace, keys, first_block=request.first_block, deadline_s=request.deadline_s
            )
            return Reply(m.Forgotten(forgotten))

        return Running(work())

    def _ask_nodes(self, session: Session, request: m.AskNodes) -> Running:
        async def work() -> Reply:
            reports = await self._store.node_reports(deadline_s=request.deadline_s)
            return Reply(m.NodeReports(rows_of(reports, NODE_REPORTS_BYTES_MAX)))

        return Running(work())

    # Windows --------------------------------------------------------------------------------------

    def _put_window(self, session: Session, request: m.PutWindow) -> Reply:
        windows, runs = self._use_windows(), self._use_arena().runs
        opened = find_namespace(session, request.namespace)
        layout = window_layout_of(opened)
        lease = runs.find_idle(session.number, request.run, is_window=True)
        runs.check_window_layout(lease, layout)
        record = runs.gather_record(lease)
        is_kept = windows.put(request.key, opened.namespace.namespace_id, layout, record)
        return Reply(m.Done(is_kept=is_kept))

    def _look_up_windows(self, session: Session, request: m.LookUpWindows) -> Running:
        if not self._identity.roles & {Role.CHECK, Role.WINDOW}:
            self._require(Role.WINDOW)
        find_namespace(session, request.namespace)
        keys = keys_of(request.keys)

        async def work() -> Reply:
            return Reply(m.WindowsFound(await self._windows.lookup(keys, request.deadline_s)))

        return Running(work())

    def _fetch_window(self, session: Session, request: m.FetchWindow) -> Running:
        windows, arena = self._use_windows(), self._use_arena()
        opened = find_namespace(session, request.namespace)
        layout = window_layout_of(opened)
        lease = arena.runs.find_idle(session.number, request.run, is_window=True)
        arena.runs.check_window_layout(lease, layout)
        fetch = partial(windows.fetch, opened.namespace.namespace_id, layout, request.key)
        given_up = Reply(m.WindowFetched(is_found=False, host="", elapsed_s=0.0))
        work = arena.runs.fetch_record(lease, fetch, request.deadline_s)
        return _fill_run(arena.runs, lease, work, given_up)

    # Itself ---------------------------------------------------------------------------------------

    def _tell_status(self, session: Session, request: m.AskStatus) -> Reply:
        return Reply(m.StatusTold(json.dumps(self._status()).encode()))

    def _require(self, role: Role) -> None:
        if role not in self._identity.roles:
            raise RequestRefused(f"it has no role {role.value}")

    def _use_arena(self) -> ArenaParts:
        if self._arena is None:
            raise RequestRefused("it has no arena: its only role is check")
        return self._arena

    def _use_windows(self) -> Windows:
        self._require(Role.WINDOW)
        return self._windows


def _fill_run(
    runs: ArenaRuns,
    lease: Lease,
    work: Coroutine[Any, Any, Reply],
    given_up: Reply,
    on_end: Callable[[bool], None] | None = None,
) -> Running:
    """Work that writes into a run: until it has ended, the run is nobody else's. `on_end` is told
    whether it was given up."""
    running = Running(work, when_cancelled=given_up)

    def end() -> None:
        assert running.task is not None
        if on_end is not None:
            on_end(running.task.cancelled())
        runs.book.end_fetch(lease)

    running.on_end = end
    runs.book.begin_fetch(lease, running.cancel)
    return running


def rows_of(reports: Collection[NodeReport], bytes_max: int) -> list[m.NodeReportRow]:
    """Reports as they are sent; once `bytes_max` of statistics are there, the rest come without."""
    rows = []
    for report in reports:
        statistics = json.dumps(report.statistics).encode() if report.is_alive else b""
        bytes_max -= len(statistics)
        is_left_out = bytes_max < 0
        rows.append(
            m.NodeReportRow(
                node=report.node,
                address=report.address,
                is_alive=report.is_alive,
                problem="too many statistics for one answer" if is_left_out else report.problem,
                statistics=b"" if is_left_out else statistics,
            )
        )
    return rows
