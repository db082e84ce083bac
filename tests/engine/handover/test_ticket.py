"""A ticket is exact bytes, says all of a request, and nothing else is taken for one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import HandoverRefused
from engine.handover.ticket import (
    HEAD,
    MAGIC,
    TICKET_BYTES_MAX,
    TOKENS_MAX,
    VERSION,
    HandoverTicket,
    SentRun,
    encode_ids,
    read_ticket,
    seal_of,
    write_ticket,
)
from engine.sampling import Sampling

VECTORS = json.loads((Path(__file__).parents[2] / "golden" / "handover.json").read_text())


def sent_run(facts: dict[str, Any] | None) -> SentRun | None:
    if facts is None:
        return None
    return SentRun(
        ticket=bytes.fromhex(facts["ticket"]),
        host=facts["host"],
        section_xxh3=facts["section_xxh3"],
    )


def ticket_of(facts: dict[str, Any]) -> HandoverTicket:
    blocks = sent_run(facts["blocks"])
    assert blocks is not None
    return HandoverTicket(
        **{
            **facts,
            "namespace_id": bytes.fromhex(facts["namespace_id"]),
            "prompt_ids": encode_ids(facts["prompt_ids"]),
            "answer_ids": encode_ids(facts["answer_ids"]),
            "marks": bytes.fromhex(facts["marks"]),
            "blocks": blocks,
            "state": sent_run(facts["state"]),
        }
    )


TICKET = ticket_of(VECTORS[1]["fields"])


def framed(body: bytes) -> bytes:
    """A body with the head that fits it."""
    return HEAD.pack(MAGIC, VERSION, len(body), seal_of(body, b"")) + body


def changed(**fields: object) -> bytes:
    """The ticket with other fields, which nobody has checked."""
    return framed(msgspec.msgpack.encode({**msgspec.structs.asdict(TICKET), **fields}))


@pytest.mark.parametrize("vector", VECTORS, ids=["dense", "with state"])
def test_ticket_has_the_bytes_of_the_format(vector: dict[str, Any]) -> None:
    ticket = ticket_of(vector["fields"])
    key = bytes.fromhex(vector["key"])
    assert write_ticket(ticket, key).hex() == vector["bytes"]
    assert read_ticket(bytes.fromhex(vector["bytes"]), key) == ticket


def test_ticket_gives_back_the_request() -> None:
    request = TICKET.request("r7")
    facts = VECTORS[1]["fields"]
    assert request.request_id == "r7"
    assert request.prompt_ids == facts["prompt_ids"]
    assert request.answered_ids == tuple(facts["answer_ids"])
    assert request.sampling == Sampling(temperature=0.75, top_k=40, top_p=0.5, seed=2**64 - 1)
    assert request.stop_ids == {1, 128, 70_000}
    assert (request.max_tokens, request.ttl_class, request.replay_first) == (70_000, "agent", 128)
    assert TICKET.block_count == 3


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"prompt_ids": b""}, "bytes of the prompt"),
        ({"prompt_ids": b"\0" * 7}, "bytes of the prompt"),
        ({"answer_ids": b""}, "bytes of the answer"),
        ({"answer_ids": encode_ids([4, -1, 5])}, "least token id of the answer"),
        ({"prompt_ids": bytes(4 * TOKENS_MAX)}, "tokens"),
        ({"max_tokens": 3}, "answer tokens"),
        ({"computed_tokens": 303}, "computed tokens"),
        ({"computed_tokens": 301}, "computed tokens"),
        ({"replay_first": 100}, "replay start"),
        ({"replay_first": 384}, "replay start"),
        ({"namespace_id": b"short"}, "fields of the ticket"),
        ({"moves": 256}, "fields of the ticket"),
        ({"stop_ids": list(range(1025))}, "fields of the ticket"),
        ({"marks": bytes((1 << 16) + 1)}, "fields of the ticket"),
        ({"seed": -1}, "fields of the ticket"),
        ({"blocks": None}, "fields of the ticket"),
        ({"another": 1}, "fields of the ticket"),
    ],
)
def test_ticket_is_refused_by_name_when_a_field_cannot_be(
    fields: dict[str, object], what: str
) -> None:
    with pytest.raises(HandoverRefused) as refused:
        read_ticket(changed(**fields))
    assert refused.value.what == what


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "length of the ticket"),
        (bytes(TICKET_BYTES_MAX + 1), "length of the ticket"),
        (b"CACHV41S" + write_ticket(TICKET)[8:], "magic of the ticket"),
        (HEAD.pack(MAGIC, 1, 0, bytes(16)), "version of the ticket"),
        (write_ticket(TICKET)[:-1], "length of the body"),
        (write_ticket(TICKET) + b"\0", "length of the body"),
        (write_ticket(TICKET)[:-1] + b"\7", "seal of the ticket"),
    ],
)
def test_bytes_are_refused_by_name_when_they_are_no_ticket(data: bytes, what: str) -> None:
    with pytest.raises(HandoverRefused) as refused:
        read_ticket(data)
    assert refused.value.what == what


def test_ticket_is_refused_by_who_has_another_key_and_nobody_is_told_the_right_seal() -> None:
    key = bytes(range(32))
    sealed = write_ticket(TICKET, key)
    assert read_ticket(sealed, key) == TICKET
    for forged, own in (
        (write_ticket(TICKET), key),
        (sealed, b""),
        (sealed, bytes(32)),
        (write_ticket(msgspec.structs.replace(TICKET, moves=7), bytes(32)), key),
    ):
        with pytest.raises(HandoverRefused) as refused:
            read_ticket(forged, own)
        assert refused.value.what == "seal of the ticket"
        assert seal_of(forged[HEAD.size :], own).hex() not in str(refused.value)


@pytest.mark.parametrize("temperature", [-1.0, float("nan"), float("inf")])
def test_request_is_refused_when_there_is_no_such_sampling(temperature: float) -> None:
    ticket = read_ticket(changed(temperature=temperature))
    with pytest.raises(HandoverRefused) as refused:
        ticket.request("r")
    assert refused.value.what == "temperature"


@given(st.binary(max_size=200))
def test_garbage_is_refused_and_nothing_else_happens(data: bytes) -> None:
    for content in (data, framed(data)):
        with pytest.raises(HandoverRefused):
            read_ticket(content)


@given(at=st.integers(0, len(write_ticket(TICKET)) - 1), bit=st.integers(0, 7))
def test_no_bit_of_a_ticket_can_change_unseen(at: int, bit: int) -> None:
    data = bytearray(write_ticket(TICKET))
    data[at] ^= 1 << bit
    with pytest.raises(HandoverRefused):
        read_ticket(bytes(data))
