"""Requests out of bytes: whole ones however they are cut, and nothing but an error out of noise."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import agent_messages as m
from kvstore.agent.message_reader import MalformedMessage, MessageReader

MESSAGES: list[m.Message] = [
    m.Hello(version=1, client="x"),
    m.Match(namespace=0, keys=bytes(64), deadline_s=1.0),
    m.AskStatus(),
    m.LeaseRun(namespace=3, blocks=65_536, deadline_s=0.5),
    m.PutWindow(namespace=1, key=bytes(32), run=2**53),
]


def raw(content: object, request_id: int = 1) -> bytes:
    body = msgspec.msgpack.encode(content)
    return m.HEAD.pack(len(body), request_id) + body


def read_all(reader: MessageReader, data: bytes) -> list[tuple[int, m.Request]]:
    reader.add(memoryview(data))
    found = []
    while (taken := reader.take()) is not None:
        request_id, _, request = taken
        found.append((request_id, request))
    return found


@given(cuts=st.lists(st.integers(1, 40), min_size=1), chosen=st.lists(st.sampled_from(MESSAGES)))
def test_messages_are_whole_however_they_are_cut(cuts: list[int], chosen: list[m.Message]) -> None:
    stream = b"".join(m.pack_message(number, one) for number, one in enumerate(chosen))
    reader, found, at = MessageReader(), [], 0
    while at < len(stream):
        step = cuts[at % len(cuts)]
        found += read_all(reader, stream[at : at + step])
        at += step
    assert found == list(enumerate(chosen))
    assert reader.begun_bytes == 0


@given(st.binary(min_size=8, max_size=200))
def test_noise_is_malformed_or_not_complete(data: bytes) -> None:
    reader = MessageReader()
    try:
        read_all(reader, data)
    except MalformedMessage:
        return
    assert reader.begun_bytes <= len(data)


@given(st.sampled_from(MESSAGES), st.data())
def test_changed_message_is_malformed_or_still_within_all_limits(
    message: m.Message, data: st.DataObject
) -> None:
    packed = bytearray(m.pack_message(1, message))
    at = data.draw(st.integers(m.HEAD.size, len(packed) - 1))
    packed[at] = data.draw(st.integers(0, 255))
    try:
        found = read_all(MessageReader(), bytes(packed))
    except MalformedMessage:
        return
    for _, request in found:
        again = msgspec.msgpack.encode(request)
        assert m.request_decoder.decode(again) == request


@pytest.mark.parametrize(
    "content",
    [
        {"type": "Match", "namespace": 0, "keys": b"", "deadline_s": float("nan")},
        {"type": "Match", "namespace": 0, "keys": b"", "deadline_s": float("inf")},
        {"type": "Match", "namespace": 0, "keys": b"", "deadline_s": 0.0},
        {"type": "Match", "namespace": -1, "keys": b"", "deadline_s": 1.0},
        {"type": "Match", "namespace": True, "keys": b"", "deadline_s": 1.0},
        {"type": "Match", "namespace": 0, "keys": "text", "deadline_s": 1.0},
        {"type": "Match", "namespace": 0, "keys": b""},
        {"type": "Match", "namespace": 0, "keys": b"", "deadline_s": 1.0, "more": 1},
        {"type": "Match", "namespace": 0, "keys": bytes(32 * 16_385), "deadline_s": 1.0},
        {"type": "LeaseRun", "namespace": 0, "blocks": 0, "deadline_s": 1.0},
        {"type": "LeaseRun", "namespace": 0, "blocks": 65_537, "deadline_s": 1.0},
        {"type": "PutWindow", "namespace": 0, "key": bytes(31), "run": 1},
        {"type": "Hello", "version": 1, "client": "x" * 129},
        {"type": "Welcome"},
        {"type": "NoSuchMessage"},
        {"version": 1},
        [],
        None,
        2**64 - 1,
        "Hello",
    ],
)
def test_content_beyond_the_rules_is_malformed(content: object) -> None:
    with pytest.raises(MalformedMessage):
        read_all(MessageReader(), raw(content))


@pytest.mark.parametrize(
    "data",
    [
        m.HEAD.pack(m.MESSAGE_BYTES_MAX + 1, 1),
        m.HEAD.pack(2**32 - 1, 1),
        m.HEAD.pack(0, 1),
        m.HEAD.pack(100_000, 1) + b"\x91" * 100_000,
        m.HEAD.pack(5, 1) + b"\xdd\xff\xff\xff\xff",
        raw({"type": "AskStatus"})[:-1] + b"\xff",
    ],
)
def test_frame_beyond_the_rules_is_malformed(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        read_all(MessageReader(), data)


def test_length_alone_costs_no_memory() -> None:
    reader = MessageReader()
    assert read_all(reader, m.HEAD.pack(m.MESSAGE_BYTES_MAX, 1)) == []
    assert reader.begun_bytes == m.HEAD.size
