"""Sequences that leave an engine and that come to it, and the answers that their clients get.

Belongs to the engine's thread. How bytes travel is `engine.handover`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any

from kvstore.client import BlockingAgentClient

from ..errors import EngineBusy
from ..handover.receiver import HandoverReceiver, Refusal
from ..handover.sender import HandoverSender
from ..kv.mover import SectionMover
from ..llm_engine import LLMEngine
from ..sequence import Sequence
from ..store_faults import StoreFaults
from .messages import HandedOver, Refused
from .outbox import Delivery

log = logging.getLogger(__name__)

LEAVING_MAX = 32
"""Sequences of a drain that leave at one time: they stand still until they are elsewhere, and the
others go on with their answers until it is their turn."""
MOVES_MAX = 16
"""Drains that a request goes through with its cache; beyond it is run again elsewhere."""


@dataclass(frozen=True, slots=True)
class _Leaving:
    ticket: Future[bytes | None]
    report: dict[str, Any]
    reasons: list[str]
    """Why there is no ticket: one, if there is none."""


class HandOvers:
    """Sends and receives for one engine. `on_change` is called from any thread when `poll` has
    something to do."""

    def __init__(
        self,
        engine: LLMEngine,
        agent: BlockingAgentClient,
        *,
        faults: StoreFaults,
        on_change: Callable[[], None],
        mover: SectionMover | None = None,
        ticket_key: bytes = b"",
    ) -> None:
        """`mover`: for the engine's pool, None for one of the host. It is the caller's.
        `ticket_key`: of all engines that hand over to each other."""
        self._engine = engine
        self._on_change = on_change
        self._sender = HandoverSender(
            agent, engine.runner, faults=faults, mover=mover, ticket_key=ticket_key
        )
        self._receiver = HandoverReceiver(
            agent, engine, on_change=on_change, mover=mover, ticket_key=ticket_key
        )
        self._leaving: dict[str, _Leaving] = {}
        self._moves: dict[str, int] = {}
        """Of the sequences that came from elsewhere and are still here."""

    def begin(self, sequence: Sequence) -> None:
        """The last pass of a prompt that is to be handed over begins."""
        self._sender.begin(sequence)

    def send(
        self, request_id: str, *, is_drain: bool, report: dict[str, Any] | None = None
    ) -> None:
        """Send a sequence that decodes, or has its first token; `poll` has its ticket then.
        `report` goes to its client beside it."""
        moves = self._moves.pop(request_id, 0) + is_drain
        sequence = self._engine.detach(request_id)
        reasons: list[str] = []
        if moves > MOVES_MAX:
            reasons.append(f"it was moved {MOVES_MAX} times already")
            ticket: Future[bytes | None] = Future()
            ticket.set_result(None)
        else:
            ticket = self._sender.finish(sequence, moves=moves, on_unsent=reasons.append)
        self._engine.release(sequence)
        self._leaving[request_id] = _Leaving(ticket, report or {}, reasons)
        ticket.add_done_callback(lambda _: self._on_change())

    def receive(self, request_id: str, ticket: bytes) -> Refused | None:
        """Let a sequence come; or why not, if too many do. `poll` says when it could not be taken
        after all."""
        try:
            self._receiver.begin(ticket, request_id)
        except EngineBusy as error:
            return _refused(error)
        return None

    def forget(self, request_id: str) -> None:
        """The request has ended, or nobody waits for it any more."""
        self._sender.drop(request_id)
        self._receiver.cancel(request_id)
        leaving = self._leaving.pop(request_id, None)
        if leaving is not None:
            self._sender.withdraw(leaving.ticket)
        self._moves.pop(request_id, None)

    def poll(self) -> list[Delivery]:
        """Tickets of those that left, and refusals of those that did not come."""
        found: list[Delivery] = []
        for request_id, leaving in list(self._leaving.items()):
            if leaving.ticket.done():
                del self._leaving[request_id]
                if leaving.reasons:
                    log.info("request=%s: not handed over: %s", request_id, leaving.reasons[0])
                found.append((request_id, _answer_of(leaving)))
        for arrival in self._receiver.poll():
            if arrival.refusal is None:
                self._moves[arrival.request_id] = arrival.moves
            else:
                # The client hears of no room, and tries again here or elsewhere.
                level = logging.INFO if isinstance(arrival.refusal, EngineBusy) else logging.WARNING
                log.log(level, "request=%s: %s", arrival.request_id, arrival.refusal)
                found.append((arrival.request_id, _refused(arrival.refusal)))
        return found

    @property
    def may_send(self) -> bool:
        """Whether one sequence more of a drain may leave now."""
        return self._sender.in_flight < LEAVING_MAX

    def is_under_way(self, request_id: str) -> bool:
        """Whether a ticket for it is being made, or it is being taken in."""
        return request_id in self._leaving or self._receiver.is_arriving(request_id)

    def counts(self) -> dict[str, Any]:
        """For the status document."""
        return {"out": asdict(self._sender.counts), "in": asdict(self._receiver.counts)}

    def close(self, deadline_s: float) -> bool:
        """End the threads; False if one hung."""
        is_sent = self._sender.close(deadline_s)
        return self._receiver.close(deadline_s) and is_sent


def _answer_of(leaving: _Leaving) -> HandedOver:
    return HandedOver(
        ticket=leaving.ticket.result(), report=leaving.report, reason="; ".join(leaving.reasons)
    )


def _refused(refusal: Refusal) -> Refused:
    """Another worker may take a ticket for which there is no room here."""
    is_busy = isinstance(refusal, EngineBusy)
    return Refused(reason=str(refusal), cause="busy" if is_busy else "ticket")
