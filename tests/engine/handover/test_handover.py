"""A sequence that goes over goes on as if it had stayed: tokens, blocks and state, bit for bit."""

from __future__ import annotations

import pytest

from engine.handover.receiver import HandoverReceiver
from engine.handover.sender import HandoverSender
from engine.sequence import Sequence
from engine.store_faults import StoreFaults
from kvstore.client import BlockingAgentClient
from kvstore.policy import HitPlan
from tests.engine.handover.bench import SAMPLED, Handover, request_of
from tests.engine.handover.lone_engine import OpenEngine
from tests.engine.handover.waiting import wait_for

LENGTHS = (1, 127, 128, 130, 134, 135, 255, 257, 262)
REPLAY = HitPlan(hit_tokens=128, replay_tokens=128, window_anchor=None)


def check_goes_on(handover: Handover, sequence: Sequence, steps: int) -> None:
    """Hand the sequence over and let it stay too; compare the two now and some tokens later."""
    source, target = handover.source, handover.target
    expected = source.contents(sequence)
    arrived = handover.receive(handover.send(sequence, stays=True))
    assert target.contents(arrived) == expected
    for _ in range(steps):
        target.step(arrived)
        source.step(sequence)
    assert arrived.token_ids == sequence.token_ids
    assert target.contents(arrived) == source.contents(sequence)
    target.release(arrived)
    source.release(sequence)


@pytest.mark.parametrize("prompt_tokens", LENGTHS)
def test_prefill_handover_decode_is_one_engine_bit_for_bit(
    handover: Handover, prompt_tokens: int
) -> None:
    request = request_of(prompt_tokens)
    sequence = handover.source.open(request)
    handover.source.prefill_until_last(sequence)
    handover.sender.begin(sequence)
    handover.source.step(sequence)
    check_goes_on(handover, sequence, steps=2)


@pytest.mark.parametrize("answered", [3, 4, 5])
def test_sequence_moves_at_any_token_of_its_answer(handover: Handover, answered: int) -> None:
    request = request_of(124)  # its first block is complete after four tokens
    sequence = handover.source.answer(request, answered)
    check_goes_on(handover, sequence, steps=2)


def test_sequence_moves_again_and_back(
    open_engine: OpenEngine, client: BlockingAgentClient
) -> None:
    there = Handover.between(open_engine, client, client)
    sender = HandoverSender(client, there.target.runner, faults=StoreFaults())
    receiver = HandoverReceiver(client, there.source, on_change=lambda: None)
    back = Handover(there.target, there.source, sender, receiver)
    request = request_of(124)  # the first block is complete on the way
    sequence = there.source.answer(request, 1)
    for way in (there, back, there, back):
        sequence = way.receive(way.send(sequence, moves=1))
        for _ in range(2):
            way.target.step(sequence)
    assert sequence.token_ids == there.source.answer(request, 9).token_ids
    assert there.target.free() == (8, there.target.runner.free_states)
    there.close()
    back.close()


@pytest.mark.parametrize("family", ["v41"], indirect=True)
def test_replayed_sequence_keeps_its_bits_and_says_where_it_was_replayed(
    open_engine: OpenEngine, handover: Handover
) -> None:
    request = request_of(400)
    cold_engine = open_engine()
    cold = cold_engine.answer(request, 1)

    def replayed() -> Sequence:
        sequence = handover.source.open(request)
        handover.source.start_after(sequence, REPLAY, cold_engine, cold)
        handover.source.prefill_until_last(sequence)
        handover.source.step(sequence)
        return sequence

    sequence, stayed = replayed(), replayed()
    assert handover.source.contents(stayed) != cold_engine.contents(cold)
    arrived = handover.receive(handover.send(sequence))
    assert (arrived.hit, arrived.replay_first) == (REPLAY, 128)
    assert handover.target.contents(arrived) == handover.source.contents(stayed)
    handover.source.release(stayed)
    handover.target.release(arrived)


@pytest.mark.parametrize("prompt_tokens", [128, 263])
def test_sequence_goes_over_between_hosts(
    open_engine: OpenEngine,
    client: BlockingAgentClient,
    other_client: BlockingAgentClient,
    prompt_tokens: int,
) -> None:
    handover = Handover.between(open_engine, client, other_client)
    request = request_of(prompt_tokens)
    sequence = handover.source.answer(request, 2)
    check_goes_on(handover, sequence, steps=2)
    handover.close()


def test_request_goes_on_with_all_that_it_asked_for(handover: Handover) -> None:
    request = request_of(140, stop_ids=frozenset({7001, 7000}), ttl_class="agent", max_tokens=9)
    ticket = handover.send(handover.source.answer(request, 3), moves=1)
    handover.receiver.begin(ticket, "mine")
    (arrival,) = wait_for(handover.receiver.poll)
    assert (arrival.request_id, arrival.moves, arrival.refusal) == ("mine", 1, None)
    sequence = handover.target.attached.pop()
    begun = sequence.request
    assert (begun.request_id, begun.max_tokens, begun.ttl_class) == ("mine", 9, "agent")
    assert begun.sampling == SAMPLED
    assert begun.stop_ids == {7000, 7001}
    assert (begun.prompt_ids, len(begun.answered_ids)) == (request.prompt_ids, 3)
    assert sequence.token_ids == [*begun.prompt_ids, *begun.answered_ids]
    handover.target.release(sequence)


@pytest.mark.parametrize("family", ["v41"], indirect=True)
def test_nothing_of_another_sequence_goes_over(
    open_engine: OpenEngine, client: BlockingAgentClient
) -> None:
    used, fresh = open_engine(fill=0xA5), open_engine()
    used.release(used.answer(request_of(140), 3))
    request = request_of(5)
    used_contents = used.contents(used.answer(request, 1))
    assert used_contents == fresh.contents(fresh.answer(request, 1))
    # What goes is what the runner packs; here it comes out of the arena.
    handover = Handover.between(open_engine, client, client)
    arrived = handover.receive(handover.send(handover.source.answer(request, 1)))
    _, open_block, state, _ = used_contents
    assert bytes(handover.target.runner.pool.buffer(arrived.block_ids[0])) == open_block
    assert arrived.state.memory.numpy().tobytes() == state
    handover.close()
