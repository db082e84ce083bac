"""Requests by which one engine hands a run of the arena to another: offer, take, withdraw."""

from __future__ import annotations

from collections.abc import Callable

from .. import agent_messages as m
from ..errors import InvalidArgument
from ..window.messages import check_host
from ..window.record import layout_prefix_of
from .arena_runs import NO_RUN
from .leases import LeaseRequest
from .offers import OfferedRun
from .replies import Reply, Running
from .request_checks import find_namespace, require_lease_room
from .run_requests import ArenaParts
from .session import OpenedNamespace, Session
from .session_bounds import SessionBounds

LEASE_SHARE = 0.5
"""Part of the time for a take from another host that may go by waiting for memory."""


class OfferRequests:
    """What RequestHandler (see `requests`) does about offers. `address`: where other agents reach
    this one; `use_arena` raises RequestRefused if there is none."""

    def __init__(
        self,
        use_arena: Callable[[], ArenaParts],
        *,
        address: str,
        bounds: SessionBounds,
        clock: Callable[[], float],
    ) -> None:
        self._use_arena = use_arena
        self._address = address
        self._bounds = bounds
        self._clock = clock

    def offer_run(self, session: Session, request: m.OfferRun) -> Reply:
        arena = self._use_arena()
        lease = arena.runs.find_idle(session.number, request.run, is_window=False)
        namespace_id = find_namespace(session, lease.namespace).namespace.namespace_id
        ticket = arena.offers.offer(lease, namespace_id, request.ttl_s)
        arena.runs.cut_off(lease)
        return Reply(m.RunOffered(ticket=ticket, host=self._address, namespace_id=namespace_id))

    def withdraw_offer(self, session: Session, request: m.WithdrawOffer) -> Reply:
        return Reply(m.Done(is_kept=self._use_arena().offers.withdraw(request.ticket)))

    def take_run(self, session: Session, request: m.TakeRun) -> Reply | Running:
        arena = self._use_arena()
        opened = find_namespace(session, request.namespace)
        _require_same(request, opened)
        require_lease_room(arena.runs.book, session, self._bounds)
        wanted = OfferedRun(
            ticket=request.ticket,
            namespace_id=request.namespace_id,
            layout_prefix=layout_prefix_of(opened.namespace.layout),
            blocks=request.blocks,
        )
        if request.host in ("", self._address):
            lease = arena.offers.take(wanted, owner=session.number, namespace=request.namespace)
            return Reply(NO_RUN) if lease is None else arena.runs.tell(lease)
        check_host(request.host)
        if not arena.runs.book.can_hold(opened.namespace.layout, request.blocks):
            return Reply(NO_RUN)
        wish = arena.runs.ask(
            owner=session.number,
            namespace=request.namespace,
            layout=opened.namespace.layout,
            blocks=request.blocks,
            is_window=False,
        )
        running = Running(self._take_from_other(request, wanted, wish, lambda: running.cancel()))
        return running

    async def _take_from_other(
        self,
        request: m.TakeRun,
        wanted: OfferedRun,
        wish: LeaseRequest,
        cancel: Callable[[], object],
    ) -> Reply:
        """Until the bytes have come, or not, the run that they come into is nobody else's."""
        arena = self._use_arena()
        begun_s = self._clock()
        await arena.runs.settle(wish, request.deadline_s * LEASE_SHARE)
        lease = wish.lease
        if lease is None:
            return Reply(NO_RUN)
        is_taken = False
        arena.runs.book.begin_fetch(lease, cancel)
        try:
            left_s = request.deadline_s - (self._clock() - begun_s)
            if lease.layout.blocks == wanted.blocks and left_s > 0:
                into = arena.runs.memory(lease).data
                is_taken = await arena.receiver.take(request.host, wanted, into, left_s)
        finally:
            arena.runs.book.end_fetch(lease)
        if not is_taken:
            arena.runs.book.release(lease)
            return Reply(NO_RUN)
        return arena.runs.tell(lease)


def _require_same(request: m.TakeRun, opened: OpenedNamespace) -> None:
    """The offer is one of blocks of the session's namespace. Raises InvalidArgument."""
    pairs = {
        "namespace": (request.namespace_id, opened.namespace.namespace_id),
        "layout": (request.layout, opened.namespace.layout.fingerprint),
    }
    for what, (given, expected) in pairs.items():
        if given != expected:
            raise InvalidArgument(
                f"{what} of the offer",
                given=f"{given.hex()[:16]}...",
                expected=f"{expected.hex()[:16]}..., that of the taker",
            )
