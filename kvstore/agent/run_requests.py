"""Requests about runs of the arena: leasing them, filling them, saving them, and window records.

A run is checked, and its state changed, before anything is waited for; so nobody else gets it.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from .. import agent_messages as m
from ..arena.run_layout import RunCode
from ..client.arguments import check_ttl_class
from ..client.results import FetchEnd
from ..errors import InvalidArgument
from .arena_runs import ArenaRuns
from .counters import FetchCounters
from .jobs import FetchJob, StoreJob
from .leases import Lease
from .offers import OfferBook
from .options import Role
from .parts import Jobs, Windows
from .replies import Reply, RequestRefused, Running
from .request_checks import (
    find_namespace,
    require_lease_room,
    require_role,
    window_layout_of,
)
from .run_receiver import RunReceiver
from .run_sender import RunSender
from .session import Session
from .session_bounds import SessionBounds
from .store_queue import StoreQueue

SECTION_COST_BYTES = 512
"""To find a section of a record takes as long as to copy and hash so many bytes, 0.2 us."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaParts:
    """What is there in an agent that moves bytes. `descriptor`: of the arena; `code`: of the
    cluster."""

    descriptor: int
    code: RunCode
    runs: ArenaRuns
    jobs: Jobs
    queue: StoreQueue
    offers: OfferBook
    sender: RunSender
    receiver: RunReceiver

    def describe_offers(self) -> dict[str, Any]:
        """For the status document."""
        sent = {"sent_bytes": self.sender.sent_bytes}
        return self.offers.describe() | sent | self.receiver.describe()


class RunRequests:
    """What RequestHandler (see `requests`) does about runs. `arena`: None if there is none."""

    def __init__(
        self,
        roles: frozenset[Role],
        *,
        arena: ArenaParts | None,
        windows: Windows,
        bounds: SessionBounds,
    ) -> None:
        self._roles = roles
        self._arena = arena
        self._windows = windows
        self._bounds = bounds
        self.fetches = FetchCounters()

    def end_session(self, session: Session) -> None:
        """Its runs are free as soon as nobody writes there."""
        if self._arena is not None:
            self._arena.runs.book.end_owner(session.number)

    def lease_run(self, session: Session, request: m.LeaseRun) -> Reply | Running:
        arena = self.use_arena()
        runs = arena.runs
        opened = find_namespace(session, request.namespace)
        layout = opened.namespace.layout
        if request.is_window:
            layout = window_layout_of(opened)
            if request.blocks != 1:
                raise InvalidArgument("blocks", given=request.blocks, expected="1, a window record")
        if request.is_window and request.has_parity_room:
            raise InvalidArgument(
                "has_parity_room", given="true", expected="false for a window record"
            )
        require_lease_room(runs.book, session, self._bounds)
        wish = runs.ask(
            owner=session.number,
            namespace=request.namespace,
            layout=layout,
            blocks=request.blocks,
            is_window=request.is_window,
            code=arena.code if request.has_parity_room else None,
        )
        if wish.is_settled:
            return runs.reply_of(wish)
        return Running(runs.wait(wish, request.deadline_s))

    def release_run(self, session: Session, request: m.ReleaseRun) -> Reply:
        runs = self.use_arena().runs
        runs.book.release(runs.find(session.number, request.run))
        return Reply(m.Done())

    def fetch_run(self, session: Session, request: m.FetchRun) -> Running:
        require_role(self._roles, Role.FETCH)
        arena = self.use_arena()
        lease = arena.runs.find_idle(session.number, request.run, is_window=False)
        job = FetchJob(
            owner=session.number,
            namespace=find_namespace(session, lease.namespace).namespace,
            keys=request.keys,
            first_block=request.first_block,
            run_offset=lease.offset,
            run_blocks=lease.layout.blocks,
            deadline_s=request.deadline_s,
            is_by_layer=request.is_by_layer,
            is_left_to_reader=request.is_left_to_reader,
            code=lease.layout.code,
        )

        async def work() -> Reply:
            assert lease.waker is not None
            ended = await arena.jobs.fetch(job, lease.waker)
            block_bytes = job.namespace.layout.block_bytes
            self.fetches.add(ended, asked_blocks=job.blocks, block_bytes=block_bytes)
            return Reply(ended)

        def count_end(is_given_up: bool) -> None:
            self.fetches.running -= 1
            self.fetches.given_up += is_given_up

        self.fetches.running += 1
        given_up = m.FetchEnded(blocks=0, ended=FetchEnd.DEADLINE.value)
        return _fill_run(arena.runs, lease, work(), Reply(given_up), count_end)

    def store_run(self, session: Session, request: m.StoreRun) -> Running:
        require_role(self._roles, Role.STORE)
        arena = self.use_arena()
        lease = arena.runs.find_idle(session.number, request.run, is_window=False)
        check_ttl_class(request.ttl_class)
        job = StoreJob(
            owner=session.number,
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

    # Windows --------------------------------------------------------------------------------------

    def put_window(self, session: Session, request: m.PutWindow) -> Reply:
        windows, runs = self._use_windows(), self.use_arena().runs
        opened = find_namespace(session, request.namespace)
        layout = window_layout_of(opened)
        lease = runs.find_idle(session.number, request.run, is_window=True)
        runs.check_window_layout(lease, layout)
        record = runs.gather_record(lease)
        is_kept = windows.put(request.key, opened.namespace.namespace_id, layout, record)
        return Reply(m.Done(is_kept=is_kept))

    def fetch_window(self, session: Session, request: m.FetchWindow) -> Running:
        windows, arena = self._use_windows(), self.use_arena()
        opened = find_namespace(session, request.namespace)
        layout = window_layout_of(opened)
        lease = arena.runs.find_idle(session.number, request.run, is_window=True)
        arena.runs.check_window_layout(lease, layout)
        fetch = partial(windows.fetch, opened.namespace.namespace_id, layout, request.key)
        given_up = Reply(m.WindowFetched(is_found=False, host="", elapsed_s=0.0))
        work = arena.runs.fetch_record(lease, fetch, request.deadline_s)
        return _fill_run(arena.runs, lease, work, given_up)

    # What there is --------------------------------------------------------------------------------

    def use_arena(self) -> ArenaParts:
        """Raises RequestRefused if there is none."""
        if self._arena is None:
            raise RequestRefused("it has no arena: its only role is check")
        return self._arena

    def _use_windows(self) -> Windows:
        require_role(self._roles, Role.WINDOW)
        return self._windows


def copied_bytes(session: Session, request: m.PutWindow) -> int:
    """How long a record's copy and its checksum take, as bytes; 0 if it will be refused."""
    if request.namespace >= len(session.namespaces):
        return 0
    layout = session.namespaces[request.namespace].window_layout
    return 0 if layout is None else layout.block_bytes + len(layout.sections) * SECTION_COST_BYTES


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
