"""Whatever breaks in a hand-over has one typed end, leaves nothing behind, and costs no token."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.errors import EngineBusy, HandoverRefused
from engine.handover.receiver import HandoverReceiver
from engine.handover.sender import HandoverSender, state_namespace
from engine.handover.ticket import SentRun, encode_ids, read_ticket, write_ticket
from engine.store_faults import StoreFaults
from kvstore.client import AgentClient, BlockingAgentClient
from kvstore.key import Namespace
from tests.engine.handover.bench import Handover, request_of
from tests.engine.handover.conftest import AGENT_WORDS, OpenEngine
from tests.engine.handover.waiting import wait_for
from tests.kvstore.agent.agent_process import AgentProcess

REQUEST = request_of(140)
"""A complete block and an open one."""
SHORT = request_of(5)


@pytest.fixture(scope="module")
def frail_process(handover_cluster: Path) -> Iterator[AgentProcess]:
    with AgentProcess(handover_cluster, AGENT_WORDS) as process:
        yield process


@pytest.fixture
def frail_agent(frail_process: AgentProcess) -> AgentProcess:
    """One that a test may end."""
    if frail_process.process.poll() is not None:
        frail_process.start()
    return frail_process


@pytest.fixture
def frail_client(frail_agent: AgentProcess) -> Iterator[BlockingAgentClient]:
    with AgentClient.open(frail_agent.socket_path, name="handover") as opened:
        yield opened


@pytest.fixture
def handover(
    open_engine: OpenEngine, client: BlockingAgentClient, agent: AgentProcess
) -> Iterator[Handover]:
    """Whatever the test does, at its end pools, slots and the arena are as they were."""
    made = Handover.between(open_engine, client, client)
    free = made.source.free(), made.target.free()
    yield made
    made.close()
    assert (made.source.free(), made.target.free()) == free
    wait_for(lambda: arena_runs(agent) == 0)


def arena_runs(agent: AgentProcess) -> int:
    """Runs that somebody has, or that wait."""
    return int(agent.status()["arena"]["runs"])


def changed(ticket: bytes, **fields: object) -> bytes:
    return write_ticket(msgspec.structs.replace(read_ticket(ticket), **fields))


def test_request_goes_on_with_the_same_tokens_where_it_could_not_be_handed_over(
    handover: Handover,
) -> None:
    for answered in (1, 2):
        handover.check_rerun(REQUEST, answered)


# Damage ---------------------------------------------------------------------------------------


def damaged(
    client: BlockingAgentClient, namespace: Namespace, sent: SentRun, blocks: int
) -> SentRun:
    """The same run, but for one bit in the middle of its last section."""
    run = client.take_run(namespace, sent.offer(namespace, blocks))
    assert run is not None
    section = run.section(len(namespace.layout.sections) - 1)
    section[len(section) // 2] ^= 0x10
    offer = client.offer_run(run)
    return msgspec.structs.replace(sent, ticket=offer.ticket)


def test_one_wrong_bit_of_the_blocks_is_found(
    handover: Handover, client: BlockingAgentClient
) -> None:
    ticket = handover.send(handover.source.answer(REQUEST, 2))
    read = read_ticket(ticket)
    wrong = damaged(client, handover.source.runner.namespace, read.blocks, read.block_count)
    refused = handover.refusal(changed(ticket, blocks=wrong))
    last = len(read.blocks.section_xxh3) - 1
    assert refused.what == f"checksum of section {last} of the blocks"


@pytest.mark.parametrize("family", ["v41"], indirect=True)
def test_one_wrong_bit_of_the_state_is_found(
    handover: Handover, client: BlockingAgentClient
) -> None:
    ticket = handover.send(handover.source.answer(REQUEST, 2))
    read, namespace = read_ticket(ticket), state_namespace(handover.source.runner)
    assert namespace is not None
    assert read.state is not None
    refused = handover.refusal(changed(ticket, state=damaged(client, namespace, read.state, 1)))
    last = len(read.state.section_xxh3) - 1
    assert refused.what == f"checksum of section {last} of the state"


MarksChange = Callable[[bytes], bytes]


@pytest.mark.parametrize(
    "change", [lambda marks: b"", lambda marks: marks[:-1], lambda marks: bytes(len(marks))]
)
def test_marks_that_are_none_of_the_model_are_refused(
    handover: Handover, change: MarksChange
) -> None:
    ticket = handover.send(handover.source.answer(SHORT, 2))
    handover.refusal(changed(ticket, marks=change(read_ticket(ticket).marks)))


def test_marks_of_another_length_of_the_sequence_are_refused(handover: Handover) -> None:
    early = handover.source.answer(SHORT, 1)
    marks = handover.source.contents(early)[3]
    handover.source.release(early)
    ticket = handover.send(handover.source.answer(SHORT, 2))
    handover.refusal(changed(ticket, marks=marks))


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"namespace_id": bytes(16)}, "namespace"),
        (
            {"blocks": SentRun(ticket=bytes(16), host="", section_xxh3=[1])},
            "sections of the blocks",
        ),
        ({"prompt_ids": encode_ids([2**31 - 1] * 5)}, "token id"),
        ({"top_p": 0.0}, "top_p"),
    ],
)
def test_ticket_of_another_model_is_refused_before_anything_is_taken(
    handover: Handover, client: BlockingAgentClient, fields: dict[str, Any], what: str
) -> None:
    ticket = handover.send(handover.source.answer(SHORT, 2))
    free = handover.target.free()
    with pytest.raises(HandoverRefused) as refused:
        handover.receiver.begin(changed(ticket, **fields), "r")
    assert refused.value.what == what
    assert (handover.target.free(), handover.receiver.in_flight) == (free, 0)
    handover.target.release(handover.receive(ticket))


def test_state_is_refused_where_there_is_none_and_missed_where_there_is(
    handover: Handover,
) -> None:
    ticket = handover.send(handover.source.answer(SHORT, 2))
    read = read_ticket(ticket)
    state = read.blocks if read.state is None else None
    with pytest.raises(HandoverRefused, match="state"):
        handover.receiver.begin(changed(ticket, state=state), "r")
    handover.target.release(handover.receive(ticket))


# No run, no room ------------------------------------------------------------------------------


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
        ticket = handover.sender.finish(sequence)
        handover.source.release(sequence)
        assert ticket.result(timeout=20) is None
        hoard.release()
    assert handover.source.free() == free
    assert (handover.sender.counts.failed, handover.faults.count) == (1, 0)
    wait_for(lambda: arena_runs(agent) == 0)
    handover.close()


def test_ticket_is_as_good_as_before_when_a_receiver_has_no_room(
    open_engine: OpenEngine, client: BlockingAgentClient, agent: AgentProcess
) -> None:
    handover = Handover.between(open_engine, client, client, target_blocks=1)
    free = handover.target.free()
    ticket = handover.send(handover.source.answer(REQUEST, 2))
    with pytest.raises(EngineBusy):
        handover.receiver.begin(ticket, "r")
    assert handover.target.free() == free
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


# Ends in between ------------------------------------------------------------------------------


def test_request_that_ends_before_it_is_sent_leaves_no_run(handover: Handover) -> None:
    sequence = handover.source.open(REQUEST)
    handover.source.prefill_until_last(sequence)
    handover.sender.begin(sequence)
    handover.sender.drop(REQUEST.request_id)
    handover.sender.drop(REQUEST.request_id)
    handover.source.release(sequence)


def test_sender_that_is_closed_gives_back_what_it_has_begun(handover: Handover) -> None:
    sequence = handover.source.open(REQUEST)
    handover.source.prefill_until_last(sequence)
    handover.sender.begin(sequence)
    handover.source.release(sequence)
    assert handover.sender.close(20)


def test_begun_copy_counts_for_nothing_when_the_sequence_began_anew(handover: Handover) -> None:
    sequence = handover.source.open(REQUEST)
    handover.source.prefill_until_last(sequence)
    handover.sender.begin(sequence)
    # As after a pass that fell short: the same request in other blocks, which were another's.
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
    handover.receiver.cancel("r")
    wait_for(lambda: not handover.receiver.poll() and handover.receiver.in_flight == 0)
    assert handover.target.free() == free
    assert handover.target.attached == []
    assert handover.receiver.counts.cancelled == 1


def test_receiver_that_is_closed_lets_go_of_what_arrives(handover: Handover) -> None:
    free = handover.target.free()
    handover.receiver.begin(handover.send(handover.source.answer(SHORT, 2)), "r")
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


# Agents that die or stand still ---------------------------------------------------------------


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
@pytest.mark.parametrize("is_begun", [False, True])
def test_sequence_is_not_sent_when_the_agent_dies(
    open_engine: OpenEngine,
    frail_client: BlockingAgentClient,
    frail_agent: AgentProcess,
    is_begun: bool,
) -> None:
    handover = Handover.between(open_engine, frail_client, frail_client)
    free = handover.source.free()
    sequence = handover.source.open(REQUEST)
    handover.source.prefill_until_last(sequence)
    if is_begun:
        handover.sender.begin(sequence)
        wait_for(lambda: arena_runs(frail_agent) > 0)
    handover.source.step(sequence)
    frail_agent.kill()
    ticket = handover.sender.finish(sequence)
    handover.source.release(sequence)
    assert ticket.result(timeout=20) is None
    assert (handover.sender.counts.failed, handover.faults.count > 0) == (1, True)
    assert handover.source.free() == free
    handover.check_rerun(REQUEST, 1)
    handover.close()


@pytest.mark.parametrize("family", ["v41"], indirect=True)
def test_ticket_is_refused_when_the_agent_has_died(
    open_engine: OpenEngine, frail_client: BlockingAgentClient, frail_agent: AgentProcess
) -> None:
    handover = Handover.between(open_engine, frail_client, frail_client)
    free = handover.target.free()
    ticket = handover.send(handover.source.answer(REQUEST, 2))
    frail_agent.kill()
    assert handover.refusal(ticket).what == "run of blocks"
    frail_agent.start()
    wait_for(lambda: frail_client.is_connected)
    assert handover.refusal(ticket).what == "run of blocks"
    assert handover.target.free() == free
    handover.close()


@pytest.mark.parametrize("family", ["v41"], indirect=True)
def test_agent_that_stands_still_costs_a_deadline_on_either_side(
    open_engine: OpenEngine, frail_client: BlockingAgentClient, frail_agent: AgentProcess
) -> None:
    handover = Handover.between(open_engine, frail_client, frail_client, lease_deadline_s=0.1)
    free = handover.source.free(), handover.target.free()
    ticket = handover.send(handover.source.answer(REQUEST, 2))
    frail_agent.process.send_signal(signal.SIGSTOP)
    sequence = handover.source.answer(REQUEST, 2)
    sent = handover.sender.finish(sequence)
    handover.source.release(sequence)
    assert sent.result(timeout=30) is None
    assert handover.refusal(ticket).what == "run of blocks"
    frail_agent.process.send_signal(signal.SIGCONT)
    assert (handover.source.free(), handover.target.free()) == free
    handover.check_rerun(REQUEST, 2)
    handover.close()


@pytest.mark.parametrize("family", ["v41"], indirect=True)
def test_ticket_of_a_host_that_is_gone_is_refused(
    open_engine: OpenEngine,
    frail_client: BlockingAgentClient,
    frail_agent: AgentProcess,
    client: BlockingAgentClient,
) -> None:
    handover = Handover.between(open_engine, frail_client, client)
    free = handover.target.free()
    ticket = handover.send(handover.source.answer(REQUEST, 2))
    frail_agent.kill()
    assert handover.refusal(ticket).what == "run of blocks"
    assert handover.target.free() == free
    handover.close()
