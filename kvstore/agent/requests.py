"""What each request of the agent's socket means: checks it, and has the right part do it.

A request that breaks a rule raises InvalidArgument, which the session answers by Refused. Errors of
other kinds than StoreError are faults of ours, and end the agent.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from .. import agent_messages as m
from ..client.arguments import check_first_block
from ..client.statistics import NodeReport
from ..errors import InvalidArgument
from ..key import Namespace
from .counters import FetchCounters
from .matching import PromptMatcher
from .offer_requests import OfferRequests
from .options import Role, role_names
from .parts import Store, Windows
from .replies import Reply, RequestRefused, Running
from .request_checks import find_namespace, keys_of, layout_of, require_role
from .run_requests import ArenaParts, RunRequests, copied_bytes
from .session import OpenedNamespace, Session
from .session_bounds import SessionBounds

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
    address: str
    """Where other agents reach it."""


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
        clock: Callable[[], float],
    ) -> None:
        self._identity = identity
        self._store = store
        self._matcher = matcher
        self._arena = arena
        self._windows = windows
        self._status = status
        self._bounds = bounds
        self._runs = RunRequests(identity.roles, arena=arena, windows=windows, bounds=bounds)
        offers = OfferRequests(
            self._runs.use_arena, address=identity.address, bounds=bounds, clock=clock
        )
        self.is_stopping = False
        self._begin_by_type: dict[type, Callable[[Session, Any], Reply | Running]] = {
            m.Hello: self._greet,
            m.OpenNamespace: self._open_namespace,
            m.Match: self._match,
            m.MatchPrompt: self._match_prompt,
            m.LeaseRun: self._runs.lease_run,
            m.ReleaseRun: self._runs.release_run,
            m.FetchRun: self._runs.fetch_run,
            m.StoreRun: self._runs.store_run,
            m.OfferRun: offers.offer_run,
            m.TakeRun: offers.take_run,
            m.WithdrawOffer: offers.withdraw_offer,
            m.Forget: self._forget,
            m.AskNodes: self._ask_nodes,
            m.PutWindow: self._runs.put_window,
            m.LookUpWindows: self._look_up_windows,
            m.FetchWindow: self._runs.fetch_window,
            m.AskStatus: self._tell_status,
        }

    @property
    def fetches(self) -> FetchCounters:
        """Of all sessions."""
        return self._runs.fetches

    def begin(self, session: Session, request: m.Request) -> Reply | Running:
        """See `session.Handler`."""
        if session.client is None and not isinstance(request, m.Hello):
            first = m.Refused(what="first message", given=type(request).__name__, expected="Hello")
            return Reply(first, is_last=True)
        if self.is_stopping:
            raise RequestRefused("it stops")
        return self._begin_by_type[type(request)](session, request)

    def copied_bytes(self, session: Session, request: m.Request) -> int:
        """See `session.Handler`."""
        return copied_bytes(session, request) if isinstance(request, m.PutWindow) else 0

    def end_session(self, session: Session) -> None:
        """See `session.Handler`."""
        self._runs.end_session(session)

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
        sections = sum(map(_sections_of, (*session.namespaces, opened)))
        if sections > self._bounds.sections_max:
            raise InvalidArgument(
                "sections of all namespaces",
                given=sections,
                expected=f"at most {self._bounds.sections_max} a session",
            )
        session.namespaces.append(opened)
        return Reply(m.NamespaceOpened(len(session.namespaces) - 1))

    # Matching -------------------------------------------------------------------------------------

    def _match(self, session: Session, request: m.Match) -> Running:
        require_role(self._identity.roles, Role.CHECK)
        namespace = find_namespace(session, request.namespace).namespace
        keys = keys_of(request.keys)

        async def work() -> Reply:
            return Reply(m.Matched(await self._matcher.match(namespace, keys, request.deadline_s)))

        return Running(work())

    def _match_prompt(self, session: Session, request: m.MatchPrompt) -> Running:
        require_role(self._identity.roles, Role.CHECK)
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

    def _look_up_windows(self, session: Session, request: m.LookUpWindows) -> Running:
        if not self._identity.roles & {Role.CHECK, Role.WINDOW}:
            require_role(self._identity.roles, Role.WINDOW)
        find_namespace(session, request.namespace)
        keys = keys_of(request.keys)

        async def work() -> Reply:
            return Reply(m.WindowsFound(await self._windows.lookup(keys, request.deadline_s)))

        return Running(work())

    # Itself ---------------------------------------------------------------------------------------

    def _tell_status(self, session: Session, request: m.AskStatus) -> Reply:
        return Reply(m.StatusTold(json.dumps(self._status()).encode()))


def _sections_of(opened: OpenedNamespace) -> int:
    window = opened.window_layout
    return len(opened.namespace.layout.sections) + (0 if window is None else len(window.sections))


def rows_of(reports: Collection[NodeReport], bytes_max: int) -> list[m.NodeReportRow]:
    """Reports as they are sent; once `bytes_max` of statistics are there, the rest come without."""
    rows = []
    for report in reports:
        statistics = json.dumps(report.statistics).encode() if report.is_alive else b""
        bytes_max -= len(statistics)
        is_left_out = report.is_alive and bytes_max < 0
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
