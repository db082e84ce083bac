"""Agents that die or stand still cost a hand-over, and no token."""

from __future__ import annotations

import signal

import pytest

from engine.handover.sender import HandoverSender
from engine.store_faults import StoreFaults
from kvstore.client import AgentClient, BlockingAgentClient
from tests.engine.handover.bench import REQUEST, SHORT, Handover, arena_runs
from tests.engine.handover.lone_engine import OpenEngine
from tests.engine.handover.waiting import wait_for
from tests.kvstore.agent.agent_process import AgentProcess


def test_request_goes_on_with_the_same_tokens_where_it_could_not_be_handed_over(
    handover: Handover,
) -> None:
    for answered in (1, 2):
        handover.check_rerun(REQUEST, answered)


def test_offers_outlive_the_engine_that_made_them(
    handover: Handover, open_engine: OpenEngine, agent: AgentProcess
) -> None:
    with AgentClient.open(agent.socket_path, name="dies") as dying:
        sender = HandoverSender(dying, handover.source.runner, faults=StoreFaults())
        sequence = handover.source.answer(SHORT, 2)
        expected = handover.source.contents(sequence)
        ticket = sender.finish(sequence).result(timeout=20)
        handover.source.release(sequence)
        assert sender.close(20)
    assert ticket is not None
    arrived = handover.receive(ticket)
    assert handover.target.contents(arrived) == expected
    handover.target.release(arrived)


@pytest.mark.parametrize("family", ["v41"], indirect=True)
def test_sequence_is_not_sent_when_the_agent_dies(
    open_engine: OpenEngine, other_client: BlockingAgentClient, other_agent: AgentProcess
) -> None:
    """Neither one whose blocks are on their way already, nor one of which nobody has begun."""
    handover = Handover.between(open_engine, other_client, other_client)
    free = handover.source.free()
    begun = handover.source.open(REQUEST)
    handover.source.prefill_until_last(begun)
    handover.sender.begin(begun)
    wait_for(lambda: arena_runs(other_agent) > 0)
    handover.source.step(begun)
    not_begun = handover.source.answer(SHORT, 1)
    other_agent.kill()
    tickets, reasons = [], list[str]()
    for sequence in (begun, not_begun):
        tickets.append(handover.sender.finish(sequence, on_unsent=reasons.append))
        handover.source.release(sequence)
    assert [ticket.result(timeout=20) for ticket in tickets] == [None, None]
    assert len(reasons) == 2
    assert all(reason.startswith("its agent fails: ") for reason in reasons)
    assert (handover.sender.counts.failed, handover.faults.count) == (2, 2)
    assert handover.source.free() == free
    handover.check_rerun(REQUEST, 1)
    handover.close()


@pytest.mark.parametrize("family", ["v41"], indirect=True)
def test_agent_that_is_dead_from_the_beginning_is_one_fault_of_a_sequence(
    open_engine: OpenEngine, other_client: BlockingAgentClient, other_agent: AgentProcess
) -> None:
    """Whatever of its hand-over fails for that: the early copy, and the rest."""
    handover = Handover.between(open_engine, other_client, other_client)
    sequence = handover.source.open(REQUEST)
    handover.source.prefill_until_last(sequence)
    other_agent.kill()
    handover.sender.begin(sequence)
    wait_for(lambda: handover.faults.count == 1)
    handover.source.step(sequence)
    ticket = handover.sender.finish(sequence)
    handover.source.release(sequence)
    assert ticket.result(timeout=20) is None
    assert (handover.sender.counts.failed, handover.faults.count) == (1, 1)
    handover.close()


@pytest.mark.parametrize("family", ["v41"], indirect=True)
def test_ticket_is_refused_at_any_host_when_its_agent_has_died(
    open_engine: OpenEngine,
    other_client: BlockingAgentClient,
    other_agent: AgentProcess,
    client: BlockingAgentClient,
) -> None:
    there = Handover.between(open_engine, other_client, other_client)
    elsewhere = Handover.between(open_engine, other_client, client)
    free = there.target.free(), elsewhere.target.free()
    ticket = there.send(there.source.answer(REQUEST, 2))
    other_agent.kill()
    assert there.refusal(ticket).what == "run of blocks"
    assert elsewhere.refusal(ticket).what == "run of blocks"
    other_agent.start()
    wait_for(lambda: other_client.is_connected)
    assert there.refusal(ticket).what == "run of blocks"
    assert (there.target.free(), elsewhere.target.free()) == free
    there.close()
    elsewhere.close()


@pytest.mark.parametrize("family", ["v41"], indirect=True)
def test_agent_that_stands_still_costs_a_deadline_on_either_side(
    open_engine: OpenEngine, other_client: BlockingAgentClient, other_agent: AgentProcess
) -> None:
    handover = Handover.between(open_engine, other_client, other_client, lease_deadline_s=0.1)
    free = handover.source.free(), handover.target.free()
    ticket = handover.send(handover.source.answer(REQUEST, 2))
    sequence = handover.source.answer(REQUEST, 2)
    other_agent.process.send_signal(signal.SIGSTOP)
    sent = handover.sender.finish(sequence)
    handover.source.release(sequence)
    assert sent.result(timeout=30) is None
    assert handover.refusal(ticket).what == "run of blocks"
    other_agent.process.send_signal(signal.SIGCONT)
    assert (handover.source.free(), handover.target.free()) == free
    handover.check_rerun(REQUEST, 2)
    handover.close()
