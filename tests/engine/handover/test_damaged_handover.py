"""What is not what was sent is refused, with the name of the part, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from engine.errors import HandoverRefused
from engine.handover.arrival import Pickup
from engine.handover.sender import state_namespace
from engine.handover.ticket import SentRun, encode_ids, read_ticket
from engine.kv.memcpy_mover import MemcpyMover
from engine.kv.mover import ComputeMark, Transfer
from kvstore.client import BlockingAgentClient
from kvstore.key import Namespace
from tests.engine.handover.bench import REQUEST, SHORT, Handover, changed


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


class CopyOfALostRun(MemcpyMover):
    """The run is somebody else's, who writes to it, before this client has heard of its loss."""

    def to_pool(
        self,
        part: memoryview,
        section: int,
        block_ids: Sequence[int],
        *,
        after: ComputeMark = None,
    ) -> Transfer:
        part[len(part) // 2] ^= 0x10
        return super().to_pool(part, section, block_ids, after=after)


@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_bytes_that_change_while_they_are_copied_are_found(
    handover: Handover, client: BlockingAgentClient
) -> None:
    ticket = read_ticket(handover.send(handover.source.answer(REQUEST, 2)))
    runner = handover.target.runner
    pickup = Pickup(
        agent=client,
        mover=CopyOfALostRun(runner.pool, runner.namespace.layout),
        namespace=runner.namespace,
        state_namespace=None,
        deadline_s=20.0,
    )
    block_ids = runner.pool.allocate(ticket.block_count)
    with pytest.raises(HandoverRefused, match="checksum of section 0 of the blocks"):
        pickup.collect(ticket, block_ids)
    runner.pool.release(block_ids)


MarksChange = Callable[[bytes], bytes]


@pytest.mark.parametrize(
    "change", [lambda marks: b"", lambda marks: marks[:-1], lambda marks: bytes(len(marks))]
)
def test_marks_that_are_none_of_the_model_are_refused(
    handover: Handover, change: MarksChange
) -> None:
    ticket = handover.send(handover.source.answer(SHORT, 2))
    refused = handover.refusal(changed(ticket, marks=change(read_ticket(ticket).marks)))
    assert refused.what.endswith(" of the marks")


def test_marks_of_another_length_of_the_sequence_are_refused(
    handover: Handover, family: str
) -> None:
    early = handover.source.answer(SHORT, 1)
    marks = handover.source.contents(early)[3]
    handover.source.release(early)
    ticket = handover.send(handover.source.answer(SHORT, 2))
    # Those of v41 say which state they go with.
    what = {"llama": "computed tokens of the marks", "v41": "checksum of the body"}[family]
    assert handover.refusal(changed(ticket, marks=marks)).what == what


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
    assert handover.refusal(changed(ticket, **fields)).what == what
    assert (handover.target.free(), handover.receiver.in_flight) == (free, 0)
    handover.target.release(handover.receive(ticket))


def test_state_is_refused_where_there_is_none_and_missed_where_there_is(
    handover: Handover,
) -> None:
    ticket = handover.send(handover.source.answer(SHORT, 2))
    read = read_ticket(ticket)
    state = read.blocks if read.state is None else None
    assert "state" in handover.refusal(changed(ticket, state=state)).what
    handover.target.release(handover.receive(ticket))
