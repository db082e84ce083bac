"""Answers land in their places however the network cuts their bytes."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore import wire
from kvstore.client.receiver import INBOX_BYTES, SCATTER_VIEWS_MAX, AnswerReceiver, WaitingRequest
from kvstore.errors import NodeError


@dataclass(frozen=True)
class Part:
    """One frame of an answer: its body, and a payload that lands in pieces of these sizes."""

    body_bytes: int
    piece_bytes: tuple[int, ...]


class PlacingSink:
    """Gives each piece of each payload a place of its own; detaches before frame `detach_at`."""

    def __init__(self, parts: Sequence[Part], detach_at: int | None) -> None:
        self.is_detached = detach_at == 0
        self.bodies: list[bytes] = []
        self.places = [[bytearray(size) for size in part.piece_bytes] for part in parts]
        self.payloads = 0
        self.has_ended = False
        self._detach_at = detach_at

    def detach(self) -> None:
        self.is_detached = True

    def on_frame(self, header: wire.Header, body: bytes) -> Sequence[memoryview]:
        number = len(self.bodies)
        self.bodies.append(body)
        self.is_detached |= number == self._detach_at
        return [memoryview(place) for place in self.places[number]]

    def on_payload(self) -> None:
        self.payloads += 1

    def on_end(self) -> None:
        self.has_ended = True

    def on_failure(self, error: NodeError) -> None:
        raise AssertionError(error)


@pytest.fixture(scope="module")
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    with near, far:
        near.setblocking(False)
        far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield near, far


parts = st.builds(
    Part,
    body_bytes=st.one_of(st.integers(0, 200), st.integers(0, 2 * INBOX_BYTES)),
    piece_bytes=st.one_of(
        st.lists(st.integers(1, 300), max_size=SCATTER_VIEWS_MAX + 20),
        st.lists(st.integers(1, 2 * INBOX_BYTES), max_size=4),
    ).map(tuple),
)
answers = st.tuples(
    st.lists(parts, min_size=1, max_size=3), st.one_of(st.none(), st.integers(0, 2))
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(asked=st.lists(answers, min_size=1, max_size=4), cuts=st.lists(st.integers(1, 60_000)))
def test_every_answer_lands_in_its_place_however_its_bytes_are_cut(
    ends: tuple[socket.socket, socket.socket],
    asked: list[tuple[list[Part], int | None]],
    cuts: list[int],
) -> None:
    near, far = ends
    waiting: deque[WaitingRequest] = deque()
    receiver = AnswerReceiver("n01", waiting, lambda request, is_ok: None)
    sinks, stream = [], b""
    for number, (frames, detach_at) in enumerate(asked):
        sinks.append(PlacingSink(frames, detach_at))
        waiting.append(WaitingRequest(number, wire.Op.READ, sinks[-1], 0.0))
        for at, part in enumerate(frames):
            stream += pack_part(number, part, is_last=at == len(frames) - 1)
    sizes = [*cuts, len(stream)]
    while stream:
        piece, stream = stream[: sizes[0]], stream[sizes.pop(0) :]
        far.sendall(piece)
        receive_all(receiver, near)
    assert not waiting
    for number, (sink, (frames, detach_at)) in enumerate(zip(sinks, asked, strict=True)):
        heard = len(frames) if detach_at is None else min(detach_at, len(frames))
        assert sink.has_ended
        assert [len(body) for body in sink.bodies] == [part.body_bytes for part in frames]
        assert sink.payloads == heard
        for at, places in enumerate(sink.places):
            wanted = payload_of(number, frames[at]) if at < heard else b""
            assert b"".join(places).rstrip(b"\0") == wanted


def payload_of(number: int, part: Part) -> bytes:
    return bytes(1 + (number + i) % 250 for i in range(sum(part.piece_bytes)))


def pack_part(number: int, part: Part, *, is_last: bool) -> bytes:
    payload = payload_of(number, part)
    head = wire.pack_frame(
        wire.Op.READ,
        wire.KIND_RESPONSE,
        request_id=number,
        body=bytes(part.body_bytes),
        payload_bytes=len(payload),
        is_last=is_last,
    )
    return head + payload


def receive_all(receiver: AnswerReceiver, near: socket.socket) -> None:
    """As the event loop does: again for as long as there is something to be received."""
    try:
        while near.recv(1, socket.MSG_PEEK):
            receiver.receive(near)
    except BlockingIOError:
        return
