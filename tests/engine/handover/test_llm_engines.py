"""Two engines with schedules of their own, one of which prefills for the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from engine.handover.receiver import HandoverReceiver
from engine.handover.sender import HandoverSender
from engine.handover.ticket import HEAD, MAGIC, VERSION, decode_ids, read_ticket, seal_of
from engine.llm_engine import LLMEngine
from engine.request import Request, TokenEvent
from engine.store_faults import StoreFaults
from kvstore.client import BlockingAgentClient
from tests.engine.handover.bench import request_of
from tests.engine.handover.lone_engine import OpenEngine
from tests.engine.handover.waiting import wait_for

REQUESTS = [replace(request_of(length), max_tokens=6) for length in (200, 1, 125, 128)]

OpenWorker = Callable[[], "Worker"]


@dataclass(eq=False)
class Worker:
    """An engine that sends and receives, and the tokens that its clients have been given."""

    engine: LLMEngine
    sender: HandoverSender
    receiver: HandoverReceiver
    given: dict[str, list[int]] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)

    @staticmethod
    def make(engine: LLMEngine, client: BlockingAgentClient) -> Worker:
        sender = HandoverSender(client, engine.runner, faults=StoreFaults())
        receiver = HandoverReceiver(client, engine, on_change=engine.wake)
        engine.on_last_chunk = sender.begin
        return Worker(engine, sender, receiver)

    def step(self) -> list[TokenEvent]:
        events = self.engine.step(wait_s=0.01)
        for event in events:
            given = self.given.setdefault(event.request_id, [])
            assert event.position == len(given) or not event.token_ids
            given += event.token_ids
            if event.finish_reason is not None:
                self.ended.add(event.request_id)
        return events

    def send(self, request_id: str) -> bytes:
        sequence = self.engine.detach(request_id)
        sent: Future[bytes | None] = self.sender.finish(sequence)
        self.engine.release(sequence)
        ticket = sent.result(timeout=20)
        assert ticket is not None
        return ticket

    def receive(self, ticket: bytes, request_id: str, given: list[int]) -> None:
        assert decode_ids(read_ticket(ticket).answer_ids) == given
        self.receiver.begin(ticket, request_id)
        self.given[request_id] = list(given)

    def take_arrivals(self) -> None:
        def take() -> bool:
            for arrival in self.receiver.poll():
                assert arrival.refusal is None
            return not self.receiver.in_flight

        wait_for(take)

    def close(self) -> None:
        assert self.sender.close(20)
        assert self.receiver.close(20)
        assert self.engine.close()
        pool = self.engine.runner.pool
        assert pool.free_blocks == pool.capacity_blocks


@pytest.fixture
def open_worker(open_engine: OpenEngine, client: BlockingAgentClient) -> Iterator[OpenWorker]:
    workers: list[Worker] = []

    def open_one() -> Worker:
        engine = LLMEngine(open_engine(pool_blocks=16, slots=4).runner)
        workers.append(Worker.make(engine, client))
        return workers[-1]

    yield open_one
    for worker in workers:
        worker.close()


def answers_of_one_engine(worker: Worker, requests: list[Request]) -> dict[str, list[int]]:
    for request in requests:
        worker.engine.add_request(request)
    wait_for(lambda: worker.step() is not None and len(worker.ended) == len(requests))
    return worker.given


def prefill_all(worker: Worker, requests: list[Request]) -> dict[str, bytes]:
    """Tickets after the first token of each."""
    for request in requests:
        worker.engine.add_request(replace(request, ends_after_prefill=True))
    tickets: dict[str, bytes] = {}
    while len(tickets) < len(requests):
        for event in worker.step():
            assert event.is_prefilled
            tickets[event.request_id] = worker.send(event.request_id)
    return tickets


def test_one_engine_prefills_for_another_and_the_answers_are_those_of_one(
    open_worker: OpenWorker,
) -> None:
    expected = answers_of_one_engine(open_worker(), REQUESTS)
    prefill, decode = open_worker(), open_worker()
    for request_id, ticket in prefill_all(prefill, REQUESTS).items():
        decode.receive(ticket, request_id, prefill.given[request_id])
    decode.take_arrivals()
    wait_for(lambda: decode.step() is not None and len(decode.ended) == len(REQUESTS))
    assert decode.given == expected
    assert prefill.engine.status.free_blocks == 16


def test_engine_drains_in_the_middle_of_answers_and_the_tokens_are_the_same(
    open_worker: OpenWorker,
) -> None:
    expected = answers_of_one_engine(open_worker(), REQUESTS)
    first, second = open_worker(), open_worker()
    for request in REQUESTS:
        first.engine.add_request(request)
    wait_for(lambda: first.step() is not None and len(first.given.get("p200", ())) >= 2)
    leaving = first.engine.decoding_ids()
    assert leaving
    for request_id in leaving:
        second.receive(first.send(request_id), request_id, first.given[request_id])
    second.take_arrivals()
    wait_for(lambda: second.step() is not None and second.ended >= set(leaving))
    # What did not decode yet stays here, and is answered.
    wait_for(lambda: first.step() is not None and not first.engine.has_requests)
    assert {**first.given, **second.given} == expected


@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_ticket_with_other_bits_has_a_typed_end_and_leaves_nothing(open_worker: OpenWorker) -> None:
    """Bits of its fields, under a seal that fits, which a client can make where there is no key."""
    source, target = open_worker(), open_worker()
    (ticket,) = prefill_all(source, REQUESTS[:1]).values()
    body = ticket[HEAD.size :]
    host = read_ticket(ticket).blocks.host.encode()
    first_host, last_host = body.find(host), body.rfind(host)
    # The runs are taken, so that no changed ticket has any.
    target.receive(ticket, "first", source.given["p200"])
    target.take_arrivals()
    free_blocks = target.engine.status.free_blocks

    @given(st.integers(0, len(body) - 1), st.integers(1, 255))
    def try_changed(at: int, bits: int) -> None:
        # An agent would ask the other host that it then names.
        assume(not any(first <= at < first + len(host) for first in (first_host, last_host)))
        changed = body[:at] + bytes([body[at] ^ bits]) + body[at + 1 :]
        head = HEAD.pack(MAGIC, VERSION, len(changed), seal_of(changed, b""))
        target.receiver.begin(head + changed, "changed")
        (arrival,) = wait_for(target.receiver.poll)
        assert arrival.refusal is not None
        assert target.engine.status.free_blocks == free_blocks

    try_changed()


def test_request_that_is_aborted_while_it_leaves_is_gone(open_worker: OpenWorker) -> None:
    worker = open_worker()
    request = replace(request_of(140), ends_after_prefill=True)
    worker.engine.add_request(request)
    (event,) = wait_for(worker.step)
    assert event.is_prefilled
    worker.engine.abort(request.request_id)
    worker.sender.drop(request.request_id)
    (last,) = wait_for(worker.step)
    assert last.finish_reason == "aborted"
