"""A ticket whose runs are gone is refused; where there is no room none is spent."""

from __future__ import annotations

import msgspec
import pytest

from engine.errors import EngineBusy
from engine.handover.receiver import HandoverReceiver
from engine.handover.sender import state_namespace
from engine.handover.ticket import read_ticket
from kvstore.client import AgentClient, BlockingAgentClient, RunOffer
from kvstore.errors import AgentRefused
from kvstore.key import Namespace
from tests.engine.handover.bench import (
    REQUEST,
    SHORT,
    Handover,
    arena_runs,
    changed,
    request_of,
)
from tests.engine.handover.lone_engine import OpenEngine
from tests.engine.handover.waiting import wait_for
from tests.kvstore.agent.agent_process import AgentProcess


def test_ticket_is_good_once(handover: Handover) -> None:
    ticket = handover.send(handover.source.answer(SHORT, 2))
    first = handover.receive(ticket)
    assert handover.refusal(ticket).what == "run of blocks"
    handover.target.release(first)


@pytest.mark.parametrize("family", ["v41"], indirect=True)
def test_ticket_is_refused_when_its_offers_have_expired(
    open_engine: OpenEngine, client: BlockingAgentClient, agent: AgentProcess
) -> None:
    handover = Handover.between(open_engine, client, client, offer_ttl_s=0.05)
    free = handover.target.free()
    ticket = handover.send(handover.source.answer(REQUEST, 2))
    wait_for(lambda: arena_runs(agent) == 0)
    assert handover.refusal(ticket).what == "run of blocks"
    assert handover.target.free() == free
    handover.close()


@pytest.mark.parametrize("family", ["v41"], indirect=True)
def test_blocks_go_back_when_the_state_cannot_be_taken(
    handover: Handover, client: BlockingAgentClient
) -> None:
    ticket = handover.send(handover.source.answer(REQUEST, 2))
    read = read_ticket(ticket)
    assert read.state is not None
    gone = msgspec.structs.replace(read.state, ticket=bytes(16))
    assert handover.refusal(changed(ticket, state=gone)).what == "run of state"
    namespace = state_namespace(handover.source.runner)
    assert namespace is not None
    assert client.withdraw_offer(read.state.offer(namespace, 1))


def test_sequence_is_not_sent_when_the_arena_is_full(
    open_engine: OpenEngine, client: BlockingAgentClient, agent: AgentProcess
) -> None:
    handover = Handover.between(open_engine, client, client, lease_deadline_s=0.05)
    free = handover.source.free()
    wanted = 16 << 20  # the whole arena: what there is of it comes
    blocks = wanted // handover.source.runner.namespace.layout.block_bytes
    with AgentClient.open(agent.socket_path) as greedy:
        hoard = greedy.lease_run(handover.source.runner.namespace, blocks)
        assert hoard is not None
        sequence = handover.source.open(REQUEST)
        handover.source.prefill_until_last(sequence)
        handover.sender.begin(sequence)
        handover.source.step(sequence)
        reasons: list[str] = []
        ticket = handover.sender.finish(sequence, on_unsent=reasons.append)
        handover.source.release(sequence)
        assert ticket.result(timeout=20) is None
        assert reasons == ["no room in the arena of its agent"]
        hoard.release()
    assert handover.source.free() == free
    assert (handover.sender.counts.failed, handover.faults.count) == (1, 0)
    wait_for(lambda: arena_runs(agent) == 0)
    handover.close()


def test_ticket_is_as_good_as_before_when_a_receiver_has_no_room(
    open_engine: OpenEngine, client: BlockingAgentClient, agent: AgentProcess
) -> None:
    handover = Handover.between(open_engine, client, client)
    ticket = handover.send(handover.source.answer(REQUEST, 2))
    other = handover.target.open(request_of(7 * 128))
    handover.receiver.begin(ticket, "r")
    free = handover.target.free()
    (arrival,) = wait_for(handover.receiver.poll)
    assert isinstance(arrival.refusal, EngineBusy)
    assert handover.target.free() == free
    handover.target.release(other)
    roomy = open_engine()
    receiver = HandoverReceiver(client, roomy, on_change=lambda: None)
    receiver.begin(ticket, "r")
    (arrival,) = wait_for(receiver.poll)
    assert arrival.refusal is None
    assert receiver.close(20)
    handover.close()


def test_runs_go_back_when_nobody_will_use_the_ticket(handover: Handover) -> None:
    sequence = handover.source.answer(SHORT, 2)
    sent = handover.sender.finish(sequence)
    handover.source.release(sequence)
    handover.sender.withdraw(sent)
    ticket = sent.result(timeout=20)
    assert ticket is not None
    assert handover.sender.close(20)
    assert handover.refusal(ticket).what == "run of blocks"


def offer_until_refused(client: BlockingAgentClient, namespace: Namespace) -> list[RunOffer]:
    """Offers until the agent takes not one block more."""
    offers: list[RunOffer] = []
    for blocks in (16, 1):
        while True:
            run = client.lease_run(namespace, blocks)
            assert run is not None
            with run:
                try:
                    offers.append(client.offer_run(run))
                except AgentRefused:
                    break
    return offers


def test_agent_that_takes_no_offer_any_more_is_no_fault_and_counted_by_itself(
    handover: Handover, client: BlockingAgentClient
) -> None:
    offers = offer_until_refused(client, handover.source.runner.namespace)
    reasons: list[str] = []
    sequence = handover.source.answer(REQUEST, 2)
    sent = handover.sender.finish(sequence, on_unsent=reasons.append)
    handover.source.release(sequence)
    assert sent.result(timeout=20) is None
    counts = handover.sender.counts
    assert (counts.sent, counts.failed, counts.refused) == (0, 0, 1)
    assert handover.faults.count == 0
    assert "are offered already" in reasons[0]
    for offer in offers:
        assert client.withdraw_offer(offer)
