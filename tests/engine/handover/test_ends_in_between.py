"""A request, a sender or a receiver that ends in the middle leaves nothing behind."""

from __future__ import annotations

from dataclasses import replace

from tests.engine.handover.bench import REQUEST, SHORT, Handover, arena_runs, request_of
from tests.engine.handover.waiting import wait_for
from tests.kvstore.agent.agent_process import AgentProcess


def test_request_that_ends_before_it_is_sent_leaves_no_run(
    handover: Handover, agent: AgentProcess
) -> None:
    sequence = handover.source.open(REQUEST)
    handover.source.prefill_until_last(sequence)
    handover.sender.begin(sequence)
    wait_for(lambda: arena_runs(agent) > 0)
    handover.sender.drop(REQUEST.request_id)
    handover.sender.drop(REQUEST.request_id)
    wait_for(lambda: arena_runs(agent) == 0)
    handover.source.release(sequence)


def test_sender_that_is_closed_gives_back_what_it_has_begun(
    handover: Handover, agent: AgentProcess
) -> None:
    sequence = handover.source.open(REQUEST)
    handover.source.prefill_until_last(sequence)
    handover.sender.begin(sequence)
    wait_for(lambda: arena_runs(agent) > 0)
    handover.source.release(sequence)
    assert handover.sender.close(20)
    wait_for(lambda: arena_runs(agent) == 0)


def test_begun_copy_counts_for_nothing_when_the_sequence_began_anew(handover: Handover) -> None:
    # Other tokens stand for other bits, as those of a bounded replay are.
    other = replace(REQUEST, prompt_ids=REQUEST.prompt_ids[::-1])
    sequence = handover.source.open(other)
    handover.source.prefill_until_last(sequence)
    handover.sender.begin(sequence)
    anew = handover.source.answer(REQUEST, 1)
    assert anew.block_ids != sequence.block_ids
    handover.source.release(sequence)
    expected = handover.source.contents(anew)
    arrived = handover.receive(handover.send(anew))
    assert handover.target.contents(arrived) == expected
    handover.target.release(arrived)


def test_arrival_that_nobody_waits_for_is_taken_and_let_go(handover: Handover) -> None:
    free = handover.target.free()
    ticket = handover.send(handover.source.answer(SHORT, 2))
    handover.receiver.begin(ticket, "r")
    wait_for(lambda: not handover.receiver.poll() and handover.target.free() != free)
    handover.receiver.cancel("r")
    wait_for(lambda: not handover.receiver.poll() and handover.receiver.in_flight == 0)
    assert handover.target.free() == free
    assert handover.target.attached == []
    assert handover.receiver.counts.cancelled == 1


def test_ticket_that_nobody_waits_for_is_left_when_its_runs_were_not_taken(
    handover: Handover,
) -> None:
    free = handover.target.free()
    ticket = handover.send(handover.source.answer(SHORT, 2))
    handover.receiver.begin(ticket, "r")
    handover.receiver.cancel("r")
    wait_for(lambda: not handover.receiver.poll() and handover.receiver.in_flight == 0)
    assert handover.target.free() == free
    handover.target.release(handover.receive(ticket))


def test_receiver_that_is_closed_lets_go_of_what_arrives(handover: Handover) -> None:
    free = handover.target.free()
    handover.receiver.begin(handover.send(handover.source.answer(SHORT, 2)), "r")
    wait_for(lambda: not handover.receiver.poll() and handover.target.free() != free)
    assert handover.receiver.close(20)
    assert (handover.target.free(), handover.target.attached) == (free, [])


def test_engine_may_compute_other_sequences_while_one_leaves(handover: Handover) -> None:
    sequence, beside = handover.source.answer(SHORT, 2), handover.source.answer(request_of(9), 1)
    expected = handover.source.contents(sequence)
    sent = handover.sender.finish(sequence)
    handover.source.release(sequence)
    for _ in range(3):
        handover.source.step(beside)
    ticket = sent.result(timeout=20)
    assert ticket is not None
    arrived = handover.receive(ticket)
    assert handover.target.contents(arrived) == expected
    handover.target.release(arrived)
    handover.source.release(beside)
