"""What a hand-over costs the engine's thread: nothing that grows with the prompt, and no thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import Event, Thread, current_thread

import pytest

from engine.errors import EngineBusy, HandoverRefused, InvalidRequest
from engine.handover import receiver as receiver_module
from engine.handover import ticket as ticket_module
from engine.handover import ticket_reader as ticket_reader_module
from engine.handover.receiver import Arrival
from engine.handover.ticket import HandoverTicket, encode_ids, read_ticket
from engine.request_checks import prepare_request
from tests.engine.handover.bench import REQUEST, SHORT, Handover, changed
from tests.engine.handover.waiting import wait_for

pytestmark = pytest.mark.parametrize("family", ["llama"], indirect=True)


@contextmanager
def held_reading(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Tickets are read when the block is left; the names of the threads that wait for that."""
    may_go_on, waiting = Event(), list[str]()

    def read(data: bytes, key: bytes) -> HandoverTicket:
        waiting.append(current_thread().name)
        assert may_go_on.wait(30)
        return read_ticket(data, key)

    monkeypatch.setattr(ticket_reader_module, "read_ticket", read)
    yield waiting
    may_go_on.set()


def test_engine_goes_on_while_a_ticket_is_read(
    handover: Handover, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket = handover.send(handover.source.answer(REQUEST, 2))
    with held_reading(monkeypatch) as readers:
        handover.receiver.begin(ticket, "arrived")
        beside = handover.target.answer(SHORT, 2)
        assert handover.receiver.poll() == []
        wait_for(lambda: readers)
        assert current_thread().name not in readers
    handover.target.release(beside)
    (arrival,) = wait_for(handover.receiver.poll)
    assert arrival == Arrival(request_id="arrived")
    handover.target.release(handover.target.attached.pop())


def test_tickets_that_wait_to_be_read_are_bounded(
    handover: Handover, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver_module, "ARRIVALS_MAX", 3)
    with held_reading(monkeypatch):
        for number in range(3):
            handover.receiver.begin(b"no ticket", f"r{number}")
        with pytest.raises(EngineBusy, match="3 hand-overs are on their way"):
            handover.receiver.begin(b"no ticket", "one too many")
    found: list[Arrival] = []
    while len(found) < 3:
        found += wait_for(handover.receiver.poll)
    assert all(isinstance(arrival.refusal, HandoverRefused) for arrival in found)
    counts = handover.receiver.counts
    assert (counts.refused, counts.busy, handover.receiver.in_flight) == (3, 1, 0)


def test_poll_moves_on_a_few_and_asks_to_be_called_again(
    handover: Handover, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver_module, "MOVED_ON_MAX", 2)
    told: list[None] = []
    monkeypatch.setattr(handover.receiver, "_on_change", lambda: told.append(None))
    for number in range(5):
        handover.receiver.begin(b"no ticket", f"r{number}")
    wait_for(lambda: len(told) == 5)
    sizes = []
    for _ in range(3):
        told.clear()
        sizes.append((len(handover.receiver.poll()), len(told)))
    assert sizes == [(2, 1), (2, 1), (1, 0)]


def of_another_model(ticket: bytes) -> bytes:
    return changed(ticket, namespace_id=bytes(16))


def longer_than_the_context(ticket: bytes) -> bytes:
    tokens = 1 << 19
    return changed(ticket, prompt_ids=encode_ids([5] * tokens), computed_tokens=tokens + 1)


@pytest.mark.parametrize(
    ("change", "what"), [(of_another_model, "namespace"), (longer_than_the_context, "tokens")]
)
def test_ticket_that_cannot_be_used_is_refused_without_a_look_at_its_tokens(
    handover: Handover,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[bytes], bytes],
    what: str,
) -> None:
    ticket = handover.send(handover.source.answer(SHORT, 2))
    decoded: list[bytes] = []

    def decode(encoded: bytes) -> list[int]:
        decoded.append(encoded)
        return []

    with monkeypatch.context() as patched:
        patched.setattr(ticket_module, "decode_ids", decode)
        assert handover.refusal(change(ticket)).what == what
    assert decoded == []
    handover.target.release(handover.receive(ticket))


def test_ticket_that_never_fits_is_an_invalid_request(handover: Handover) -> None:
    ticket = handover.send(handover.source.answer(SHORT, 2))
    handover.receiver.begin(changed(ticket, ttl_class="\n"), "r")
    (arrival,) = wait_for(handover.receiver.poll)
    assert isinstance(arrival.refusal, InvalidRequest)
    assert "ttl_class" in str(arrival.refusal)
    handover.target.release(handover.receive(ticket))


def test_prepared_request_has_the_keys_of_prompt_and_answer(handover: Handover) -> None:
    runner = handover.target.runner
    request = replace(REQUEST, answered_ids=tuple(range(3, 203)))
    prepared = prepare_request(request, runner)
    tokens = [*request.prompt_ids, *request.answered_ids]
    assert prepared.request is request
    assert prepared.chain.keys == runner.namespace.block_keys(tokens)
    with pytest.raises(InvalidRequest, match="token id"):
        prepare_request(replace(request, answered_ids=(runner.vocabulary,)), runner)


def test_hand_over_needs_no_thread_that_was_not_there_from_the_beginning(
    handover: Handover, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Thread, "start", start)
    sequence = handover.source.open(REQUEST)
    handover.source.prefill_until_last(sequence)
    handover.sender.begin(sequence)
    handover.source.step(sequence)
    expected = handover.source.contents(sequence)
    arrived = handover.receive(handover.send(sequence))
    assert handover.target.contents(arrived) == expected
    handover.target.release(arrived)
