"""A plain blocking client of one node, for tests: frames by kvstore.wire and nothing else of ours.

It shares no code with kvstore.client, so that a mistake there and one in the node cannot agree.
"""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack

import numpy as np
from xxhash import xxh3_64_intdigest

from kvstore import wire

TIMEOUT_S = 20.0


class FrameFields(TypedDict, total=False):
    """What a test may say of a request frame; see wire.pack_frame."""

    body: bytes
    count: int
    epoch: int
    deadline_ms: int
    status: int
    target: int
    is_last: bool
    is_probe: bool
    payload_bytes: int


class BatchFields(TypedDict, total=False):
    """Fields of WRITE_BATCH that a test sets itself."""

    namespace_id: bytes
    layout: bytes
    ttl_class: bytes
    k: int
    m: int
    shard: int
    shard_bytes: int
    block_bytes: int
    anchor: bytes


@dataclass(frozen=True)
class Shard:
    """One shard to be written, with the header fields that tests care about."""

    key: bytes
    payload: bytes
    block_xxh3: int = 1
    block_index: int = 0
    payload_xxh3: int | None = None
    last_used_s: int = 0

    @property
    def checksum(self) -> int:
        return xxh3_64_intdigest(self.payload) if self.payload_xxh3 is None else self.payload_xxh3


@dataclass(frozen=True)
class Answer:
    """All frames of one response."""

    headers: list[wire.Header]
    bodies: list[bytes]
    payloads: list[bytes]

    @property
    def status(self) -> wire.Status:
        return wire.Status(self.headers[-1].status)

    @property
    def body(self) -> bytes:
        return self.bodies[-1]


@dataclass(frozen=True)
class ReadShard:
    """What a READ said of one key."""

    payload: bytes
    shard: int
    generation: int
    payload_xxh3: int
    block_xxh3: int


@dataclass
class RawClient:
    """One connection. `target` and `target_number` go into every frame."""

    address: tuple[str, int]
    cluster: bytes
    target: str
    target_number: int = 0
    epoch: int = 1
    socket: socket.socket = field(init=False)
    last_id: int = 0

    def __post_init__(self) -> None:
        self.socket = socket.create_connection(self.address, TIMEOUT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    # Frames ---------------------------------------------------------------------------------------

    def frame(self, op: wire.Op, **fields: Unpack[FrameFields]) -> bytes:
        self.last_id += 1
        usual = FrameFields(epoch=self.epoch, target=self.target_number, deadline_ms=10_000)
        every: FrameFields = {**usual, **fields}
        return wire.pack_frame(op, wire.KIND_REQUEST, request_id=self.last_id, **every)

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def receive(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            piece = self.socket.recv(min(count - len(data), 1 << 20))
            if not piece:
                raise ConnectionResetError(f"closed after {len(data)} of {count} bytes")
            data += piece
        return bytes(data)

    def receive_frame(self) -> tuple[wire.Header, bytes, bytes]:
        header = wire.parse_header(self.receive(wire.HEADER_BYTES))
        body = self.receive(header.body_bytes)
        wire.check_body(header, body)
        return header, body, self.receive(header.payload_bytes)

    def receive_answer(self) -> Answer:
        answer = Answer([], [], [])
        while not answer.headers or not answer.headers[-1].is_last:
            header, body, payload = self.receive_frame()
            assert header.kind == wire.KIND_RESPONSE
            answer.headers.append(header)
            answer.bodies.append(body)
            answer.payloads.append(payload)
        assert answer.headers[0].request_id <= self.last_id
        return answer

    def ask(self, op: wire.Op, *, payload: bytes = b"", **fields: Unpack[FrameFields]) -> Answer:
        fields["payload_bytes"] = len(payload)
        self.send(self.frame(op, **fields) + payload)
        return self.receive_answer()

    # Operations -----------------------------------------------------------------------------------

    def hello(self) -> Answer:
        return self.ask(wire.Op.HELLO, body=wire.pack_hello(self.cluster, self.target))

    def match(self, keys: Sequence[bytes]) -> list[bool]:
        answer = self.ask(wire.Op.MATCH, body=wire.join_keys(keys), count=len(keys))
        assert answer.status is wire.Status.OK
        bits = [bool(answer.body[i // 8] >> (i % 8) & 1) for i in range(len(keys))]
        assert len(answer.body) == -(-len(keys) // 8)
        return bits

    def locate(self, keys: Sequence[bytes]) -> list[dict[str, int]]:
        answer = self.ask(wire.Op.LOCATE, body=wire.join_keys(keys), count=len(keys))
        assert answer.status is wire.Status.OK
        records = wire.parse_records(answer.body, wire.LOCATION, len(keys))
        return [dict(zip(wire.LOCATION.names or (), row.tolist(), strict=True)) for row in records]

    def read(self, keys: Sequence[bytes], shard_bytes: int) -> list[ReadShard | None]:
        answer = self.ask(wire.Op.READ, body=wire.pack_read(keys, shard_bytes), count=len(keys))
        assert answer.status is wire.Status.OK, (answer.status, answer.body)
        return parse_read_answer(answer, len(keys), shard_bytes)

    def write(
        self, shards: Sequence[Shard], **batch: Unpack[BatchFields]
    ) -> list[wire.WriteOutcome]:
        answer = self.ask_write(shards, **batch)
        assert answer.status is wire.Status.OK, (answer.status, answer.body)
        return [wire.WriteOutcome(outcome) for outcome in answer.body]

    def ask_write(self, shards: Sequence[Shard], **batch: Unpack[BatchFields]) -> Answer:
        body, payload = pack_write(shards, **batch)
        return self.ask(wire.Op.WRITE, body=body, count=len(shards), payload=payload)

    def forget(self, keys: Sequence[bytes]) -> list[bool]:
        answer = self.ask(wire.Op.FORGET, body=wire.join_keys(keys), count=len(keys))
        assert answer.status is wire.Status.OK
        return [bool(byte) for byte in answer.body]

    def report(self, items: Sequence[tuple[bytes, int]]) -> Answer:
        body = np.array(list(items), wire.REPORT_ITEM).tobytes()
        return self.ask(wire.Op.REPORT, body=body, count=len(items))

    def stat(self) -> dict[str, Any]:
        answer = self.ask(wire.Op.STAT)
        assert answer.status is wire.Status.OK
        found: dict[str, Any] = json.loads(answer.body)
        return found

    def target_stat(self) -> dict[str, Any]:
        found: dict[str, Any]
        (found,) = [t for t in self.stat()["targets"] if t["name"] == self.target]
        return found


def parse_read_answer(answer: Answer, count: int, shard_bytes: int) -> list[ReadShard | None]:
    """The shards in the frames of a READ response; asserts that the frames cover all keys."""
    found: list[ReadShard | None] = []
    for header, body, payload in zip(answer.headers, answer.bodies, answer.payloads, strict=True):
        part = wire.parse_part_columns(body, header.count)
        assert part.first == len(found)
        at = 0
        for head, *fields in zip(*part[1:], strict=True):
            if not head & 0xFF:
                found.append(None)
                continue
            shard = head >> 8 & 0xFF
            assert head == wire.part_head(1, shard, shard_bytes)
            data = payload[at : at + shard_bytes]
            at += shard_bytes
            read = ReadShard(data, shard, *fields)
            assert xxh3_64_intdigest(data) == read.payload_xxh3
            found.append(read)
        assert at == len(payload)
    assert len(found) == count
    return found


def pack_write(shards: Sequence[Shard], **batch: Unpack[BatchFields]) -> tuple[bytes, bytes]:
    """Body and payload of a WRITE; `batch` replaces fields of the batch record."""
    shard_bytes = len(shards[0].payload) if shards else 0
    usual = BatchFields(
        namespace_id=b"n" * 16,
        layout=b"l" * 16,
        ttl_class=b"chat",
        k=10,
        m=2,
        shard=3,
        shard_bytes=shard_bytes,
        block_bytes=10 * shard_bytes,
    )
    fields: BatchFields = {**usual, **batch}
    record = np.zeros(1, wire.WRITE_BATCH)
    for name, value in fields.items():
        record[name] = value
    items = np.zeros(len(shards), wire.WRITE_ITEM)
    for item, shard in zip(items, shards, strict=True):
        item["key"] = shard.key
        item["block_index"] = shard.block_index
        item["last_used_s"] = shard.last_used_s
        item["payload_xxh3"] = shard.checksum
        item["block_xxh3"] = shard.block_xxh3
    payload = b"".join(shard.payload for shard in shards)
    return record.tobytes() + items.tobytes(), payload


def make_shards(
    rng: random.Random, count: int, shard_bytes: int, block_xxh3: int = 1
) -> list[Shard]:
    """Shards with random keys and bytes, blocks 0 to `count` of a chain."""
    return [
        Shard(rng.randbytes(32), rng.randbytes(shard_bytes), block_xxh3, index)
        for index in range(count)
    ]


def keys_of(shards: Sequence[Shard]) -> list[bytes]:
    return [shard.key for shard in shards]
