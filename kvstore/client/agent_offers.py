"""What an `AgentClient` does to hand a run to another engine: offer it, take it, withdraw it."""

from __future__ import annotations

import asyncio

from ..agent_messages import Done, OfferRun, RunOffered, TakeRun, WithdrawOffer
from ..errors import AgentError, AgentRefused
from ..layout import BlockLayout
from .agent_link import AgentConnection
from .agent_results import RunOffer
from .agent_runs import AgentRuns
from .agent_session import Received
from .arena_run import ArenaRun

OFFER_DEADLINE_S = 2.0


class AgentOffers:
    """The offer calls of one client; see AgentClient."""

    def __init__(self, runs: AgentRuns, loop: asyncio.AbstractEventLoop) -> None:
        self._runs = runs
        self._loop = loop

    async def offer(self, connection: AgentConnection, run: ArenaRun, *, ttl_s: float) -> RunOffer:
        """Offers the run. If this is cancelled, nobody will know of the offer: it is withdrawn,
        also where it was just made."""
        outcome = self._begin_offer(connection, run, ttl_s=ttl_s)
        try:
            return await outcome
        except asyncio.CancelledError:
            if outcome.done() and not outcome.cancelled() and outcome.exception() is None:
                self._forget(connection, outcome.result().ticket)
            raise

    def _begin_offer(
        self, connection: AgentConnection, run: ArenaRun, *, ttl_s: float
    ) -> asyncio.Future[RunOffer]:
        connection.check_own_run(run)
        session = connection.session
        outcome: asyncio.Future[RunOffer] = self._loop.create_future()
        answer = session.send(OfferRun(run=run.number, ttl_s=ttl_s), OFFER_DEADLINE_S)
        run.begin_offer()

        def settle(received: asyncio.Future[Received]) -> None:
            try:
                offered = session.expect(received.result(), RunOffered)
            except AgentError as error:
                # Refused: it is this engine's still. If the session is gone, so is the run.
                if isinstance(error, AgentRefused):
                    run.refuse_offer()
                if not outcome.done():
                    outcome.set_exception(error)
                return
            connection.runs.pop(run.number, None)
            run.end_offer()
            if outcome.done():
                self._forget(connection, offered.ticket)
                return
            outcome.set_result(
                RunOffer(
                    ticket=offered.ticket,
                    host=offered.host,
                    namespace_id=offered.namespace_id,
                    layout=run.layout.layout.fingerprint,
                    blocks=run.blocks,
                )
            )

        answer.add_done_callback(settle)
        return outcome

    async def take(
        self,
        connection: AgentConnection,
        namespace: int,
        layout: BlockLayout,
        offer: RunOffer,
        *,
        deadline_s: float,
    ) -> ArenaRun | None:
        request = TakeRun(
            namespace=namespace,
            ticket=offer.ticket,
            host=offer.host,
            namespace_id=offer.namespace_id,
            layout=offer.layout,
            blocks=offer.blocks,
            deadline_s=deadline_s,
        )
        return await self._runs.receive(
            connection, request, layout, offer.blocks, deadline_s=deadline_s
        )

    async def withdraw(self, connection: AgentConnection, ticket: bytes) -> bool:
        request = WithdrawOffer(ticket=ticket)
        return (await connection.session.ask(request, Done, OFFER_DEADLINE_S)).is_kept

    def _forget(self, connection: AgentConnection, ticket: bytes) -> None:
        """An offer that nobody knows of."""
        try:
            answer = connection.session.send(WithdrawOffer(ticket=ticket), OFFER_DEADLINE_S)
        except AgentError:
            return  # the run expires
        answer.add_done_callback(_forget_outcome)


def _forget_outcome(answer: asyncio.Future[Received]) -> None:
    """An error is known to all who still use the session; the run expires."""
    if not answer.cancelled():
        answer.exception()
