"""Runs that one engine has offered and another one may take: tickets, and how long they are good.

An offered run belongs to the agent, so it outlives the engine that offered it; it is taken once, or
free when its time is up. Who is at another host reads the run first and takes it then: reading
changes nothing, and of several who read only one takes. Pure but for its clock and its tickets:
whose the memory is stands in `leases`, and what lies in it is nobody's business here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from ..agent_messages import TICKET_BYTES
from ..window.record import layout_prefix_of
from .leases import Lease, LeaseBook
from .replies import RequestRefused

OFFERS_MAX = 1024
EXPIRE_INTERVAL_S = 0.25
"""A run whose time is up is free so much later at most; nobody can take it meanwhile."""


class OfferedRun(NamedTuple):
    """Which run is wanted. `layout_prefix`: the first 16 bytes of the fingerprint. Whoever is wrong
    about any of it finds nothing."""

    ticket: bytes
    namespace_id: bytes
    layout_prefix: bytes
    blocks: int


@dataclass(slots=True)
class OfferCounters:
    """Since the agent was started."""

    made: int = 0
    refused: int = 0
    """There was no room for another one."""
    taken: int = 0
    """By engines of this host."""
    sent: int = 0
    """Taken by agents of other hosts."""
    withdrawn: int = 0
    expired: int = 0


@dataclass(frozen=True, slots=True)
class _Offer:
    lease: Lease
    named: OfferedRun
    until_s: float


class OfferBook:
    """All offers of one agent. `make_ticket` gives 16 random bytes.

    All runs on offer but the largest have at most `bytes_max` bytes together: a long sequence can
    be handed over, whose state is a second run, and many of them do not fill the arena.
    """

    def __init__(
        self,
        leases: LeaseBook,
        *,
        clock: Callable[[], float],
        make_ticket: Callable[[], bytes],
        bytes_max: int,
        offers_max: int = OFFERS_MAX,
    ) -> None:
        self.counters = OfferCounters()
        self._leases = leases
        self._clock = clock
        self._make_ticket = make_ticket
        self._bytes_max = bytes_max
        self._offers_max = offers_max
        self._offers: dict[bytes, _Offer] = {}
        self._bytes = 0

    def offer(self, lease: Lease, namespace_id: bytes, ttl_s: float) -> bytes:
        """The ticket by which the run may be taken within `ttl_s`; it leaves its session. Raises
        RequestRefused if too much is offered already, and the run stays leased."""
        run_bytes = lease.layout.run_bytes
        problem = self._why_full(run_bytes)
        if problem:
            self.counters.refused += 1
            raise RequestRefused(problem)
        ticket = self._make_ticket()
        assert len(ticket) == TICKET_BYTES
        assert ticket not in self._offers
        self._leases.begin_offer(lease)
        layout = lease.layout
        named = OfferedRun(ticket, namespace_id, layout_prefix_of(layout.layout), layout.blocks)
        self._offers[ticket] = _Offer(lease, named, self._clock() + ttl_s)
        self._bytes += run_bytes
        self.counters.made += 1
        return ticket

    def find(self, wanted: OfferedRun) -> Lease | None:
        """The run if it is on offer now; nothing changes."""
        offer = self._offers.get(wanted.ticket)
        if offer is None or offer.named != wanted or offer.until_s <= self._clock():
            return None
        return offer.lease

    def take(self, wanted: OfferedRun, *, owner: int, namespace: int) -> Lease | None:
        """The run is the session's from now on; None if it is not on offer."""
        lease = self.find(wanted)
        if lease is not None:
            self._forget(wanted.ticket)
            self._leases.take(lease, owner=owner, namespace=namespace)
            self.counters.taken += 1
        return lease

    def give_away(self, wanted: OfferedRun) -> bool:
        """Another host has the run's bytes and takes it: whether it was on offer still. The run is
        free."""
        lease = self.find(wanted)
        if lease is None:
            return False
        self._forget(wanted.ticket)
        self.counters.sent += 1
        self._leases.end_offer(lease)
        return True

    def withdraw(self, ticket: bytes) -> bool:
        """Nobody shall take it: whether it was on offer still. The run is free."""
        offer = self._offers.get(ticket)
        if offer is None:
            return False
        self._forget(ticket)
        self.counters.withdrawn += 1
        self._leases.end_offer(offer.lease)
        return True

    def expire(self) -> None:
        """Frees the runs whose time is up."""
        now_s = self._clock()
        for offer in [one for one in self._offers.values() if one.until_s <= now_s]:
            self._forget(offer.named.ticket)
            self.counters.expired += 1
            self._leases.end_offer(offer.lease)

    async def run(self, sleep: Callable[[float], Awaitable[None]]) -> None:
        """Looks for those whose time is up, until it is cancelled."""
        while True:
            await sleep(EXPIRE_INTERVAL_S)
            self.expire()

    def describe(self) -> dict[str, Any]:
        """For the status document."""
        return {"open": len(self._offers), "open_bytes": self._bytes, **asdict(self.counters)}

    def _why_full(self, run_bytes: int) -> str:
        if len(self._offers) >= self._offers_max:
            return f"{len(self._offers)} runs are offered already"
        sizes = [offer.lease.layout.run_bytes for offer in self._offers.values()]
        if self._bytes + run_bytes - max([run_bytes, *sizes]) > self._bytes_max:
            return (
                f"{self._bytes} bytes of runs are offered already, "
                f"at most {self._bytes_max} beside the largest run"
            )
        return ""

    def _forget(self, ticket: bytes) -> None:
        """Before the lease changes: a run that is free is given to the next one at once."""
        self._bytes -= self._offers.pop(ticket).lease.layout.run_bytes
