"""Requests, and two engines with a sender and a receiver between them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import msgspec

from engine.errors import HandoverRefused
from engine.handover.receiver import Arrival, HandoverReceiver
from engine.handover.sender import HandoverSender
from engine.handover.ticket import read_ticket, write_ticket
from engine.request import Request
from engine.sampling import Sampling
from engine.sequence import Sequence
from engine.store_faults import StoreFaults
from kvstore.client import BlockingAgentClient
from tests.engine.handover.lone_engine import LoneEngine, OpenEngine
from tests.engine.handover.waiting import wait_for
from tests.kvstore.agent.agent_process import AgentProcess
from tests.patience import OPERATION_S, PATIENCE_S

SAMPLED = Sampling(temperature=0.8, top_k=50, seed=11)


def arena_runs(agent: AgentProcess) -> int:
    """Runs that somebody has, or that wait."""
    return int(agent.status()["arena"]["runs"])


def changed(ticket: bytes, *, key: bytes = b"", **fields: object) -> bytes:
    """The ticket with other fields, sealed as by who has no key."""
    return write_ticket(msgspec.structs.replace(read_ticket(ticket, key), **fields))


def request_of(
    prompt_tokens: int,
    *,
    max_tokens: int = 400,
    stop_ids: frozenset[int] = frozenset(),
    ttl_class: str = "chat",
    answered_ids: tuple[int, ...] = (),
) -> Request:
    return Request(
        request_id=f"p{prompt_tokens}",
        prompt_ids=[(number * 37 + prompt_tokens) % 250 + 3 for number in range(prompt_tokens)],
        max_tokens=max_tokens,
        sampling=SAMPLED,
        stop_ids=stop_ids,
        ttl_class=ttl_class,
        answered_ids=answered_ids,
    )


REQUEST = request_of(140)
"""A complete block and an open one."""
SHORT = request_of(5)


@dataclass(eq=False)
class Handover:
    """Two engines, and clients of the agents of their hosts."""

    source: LoneEngine
    target: LoneEngine
    sender: HandoverSender
    receiver: HandoverReceiver

    faults: StoreFaults = field(default_factory=StoreFaults)
    """Of the sender."""

    @staticmethod
    def between(
        open_engine: OpenEngine,
        client: BlockingAgentClient,
        other: BlockingAgentClient,
        *,
        target_blocks: int = 8,
        lease_deadline_s: float = OPERATION_S,
        offer_ttl_s: float = 30.0,
        ticket_key: bytes = b"",
    ) -> Handover:
        source = open_engine()
        target = open_engine(fill=0xA5, pool_blocks=target_blocks)
        faults = StoreFaults()
        sender = HandoverSender(
            client,
            source.runner,
            faults=faults,
            lease_deadline_s=lease_deadline_s,
            offer_ttl_s=offer_ttl_s,
            ticket_key=ticket_key,
        )
        receiver = HandoverReceiver(other, target, on_change=lambda: None, ticket_key=ticket_key)
        return Handover(source, target, sender, receiver, faults)

    def send(self, sequence: Sequence, *, moves: int = 0, stays: bool = False) -> bytes:
        """The ticket of a sequence, which the source then has no more, unless it `stays` there as
        well."""
        sent = self.sender.finish(sequence, moves=moves)
        if not stays:
            self.source.release(sequence)
        ticket = sent.result(timeout=PATIENCE_S)
        assert ticket is not None
        return ticket

    def receive(self, ticket: bytes) -> Sequence:
        self.receiver.begin(ticket, "arrived")
        (arrival,) = wait_for(self.receiver.poll)
        assert arrival == Arrival(request_id="arrived", moves=arrival.moves)
        return self.target.attached.pop()

    def refusal(self, ticket: bytes) -> HandoverRefused:
        """Why a ticket is no good."""
        self.receiver.begin(ticket, "refused")
        (arrival,) = wait_for(self.receiver.poll)
        assert arrival.request_id == "refused"
        assert isinstance(arrival.refusal, HandoverRefused)
        assert self.target.attached == []
        return arrival.refusal

    def check_rerun(self, request: Request, answered: int) -> None:
        """Run again elsewhere with what was given out, the answer goes on with the same tokens."""
        stayed = self.source.answer(request, answered + 2)
        given = tuple(stayed.answer_ids[:answered])
        again = self.target.answer(replace(request, answered_ids=given), 2)
        assert again.token_ids == stayed.token_ids
        self.source.release(stayed)
        self.target.release(again)

    def close(self) -> None:
        assert self.sender.close(20)
        assert self.receiver.close(20)
