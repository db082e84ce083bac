"""A node without sockets and threads: its operations run in a plain loop, with a clock that is set.

Production code of the node runs here unchanged; only the clock, and the disk if a test wants that,
are others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from kvstore import wire
from kvstore.node.answers import Request
from kvstore.node.buffers import BufferPool
from kvstore.node.disk import Disk, OsDisk
from kvstore.node.effects import (
    Drain,
    Effect,
    NeedBuffer,
    NeedTurn,
    Operation,
    Receive,
    Send,
    SendFile,
    Work,
)
from kvstore.node.node import Node, SyncPolicy
from kvstore.node.operations import Session, begin_operation
from kvstore.node.policy_store import PolicyStore
from kvstore.node.segment import TargetIdentity
from kvstore.node.target import Target, TargetSettings
from kvstore.node.target_life import close_target, open_target

from .raw_client import (
    Answer,
    BatchFields,
    FrameFields,
    ReadShard,
    Shard,
    pack_write,
    parse_read_answer,
)

IDENTITY = TargetIdentity(cluster=bytes(range(16)), name="t01")
EPOCH = 7


@dataclass
class SetClock:
    """A clock that stands still until a test moves it."""

    now_s: float = 1_000.0
    unix_s: float = 1_800_000_000.0

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_ns(self) -> int:
        return int(self.unix_s * 1e9)

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
        self.unix_s += seconds


def open_test_target(
    folder: Path,
    *,
    clock: SetClock,
    disk: Disk | None = None,
    capacity_bytes: int = 8 << 20,
    segment_bytes: int = 64 << 10,
    slots_max: int = 100_000,
    snapshot_shards_min: int = 100_000,
) -> Target:
    return open_target(
        folder,
        IDENTITY,
        capacity_bytes=capacity_bytes,
        settings=TargetSettings(
            segment_bytes=segment_bytes,
            slots_max=slots_max,
            snapshot_shards_min=snapshot_shards_min,
        ),
        disk=disk or OsDisk(),
        clock=clock,
        pid=1,
    )


@dataclass
class DrivenNode:
    """One target and what a peer can ask of it.

    `on_work` is called before each piece of Work, `on_send` before bytes of a file are sent.
    """

    folder: Path
    clock: SetClock = field(default_factory=SetClock)
    disk: Disk = field(default_factory=OsDisk)
    capacity_bytes: int = 8 << 20
    segment_bytes: int = 64 << 10
    slots_max: int = 100_000
    snapshot_shards_min: int = 100_000
    sync: SyncPolicy = SyncPolicy.NEVER
    memory_bytes: int = 16 << 20
    on_work: Callable[[], None] = lambda: None
    on_send: Callable[[], None] = lambda: None
    node: Node = field(init=False)
    target: Target = field(init=False)

    def __post_init__(self) -> None:
        self.open()

    def open(self) -> None:
        self.target = open_test_target(
            self.folder,
            clock=self.clock,
            disk=self.disk,
            capacity_bytes=self.capacity_bytes,
            segment_bytes=self.segment_bytes,
            slots_max=self.slots_max,
            snapshot_shards_min=self.snapshot_shards_min,
        )
        self.node = Node(
            name="n01",
            cluster=IDENTITY.cluster,
            epoch=EPOCH,
            targets={0: self.target},
            disk=self.disk,
            clock=self.clock,
            pool=BufferPool(self.memory_bytes),
            sync=self.sync,
            policy=PolicyStore(self.folder, self.disk),
            pid=1,
            version="0",
            started_s=self.clock.monotonic_s(),
        )

    def close(self) -> None:
        close_target(self.target, self.disk)

    def crash(self) -> None:
        """End as kill -9 ends a process: descriptors are closed, nothing is synced or finished."""
        for segment in self.target.space.segments.values():
            segment.close(OsDisk())
        self.target.folder.release()

    # Driving --------------------------------------------------------------------------------------

    def begin(self, op: wire.Op, **fields: Unpack[FrameFields]) -> Operation:
        every: FrameFields = {**FrameFields(epoch=EPOCH), **fields}
        frame = wire.pack_frame(op, wire.KIND_REQUEST, request_id=5, **every)
        header = wire.parse_header(frame)
        wire.check_request(header)
        due_s = self.clock.monotonic_s() + 10.0
        request = Request(header, frame[wire.HEADER_BYTES :], due_s)
        return begin_operation(self.node, Session({IDENTITY.name}), request)

    def run(self, operation: Generator[Effect, Any, Any], payload: bytes = b"") -> Answer:
        """Run an operation to its end; everything it waits for is there at once."""
        parser = AnswerParser()
        left = memoryview(payload)
        answer: Any = None
        held_bytes, is_taken = self.node.pool.used_bytes, self.target.writing.is_taken
        while True:
            try:
                effect = (
                    operation.throw(answer)
                    if isinstance(answer, OSError)
                    else operation.send(answer)
                )
            except StopIteration:
                # It gave back whatever it took.
                assert self.node.pool.used_bytes == held_bytes
                assert self.target.writing.is_taken == is_taken
                return parser.answer
            answer = None
            if isinstance(effect, Send):
                parser.add(effect.views)
            elif isinstance(effect, SendFile):
                self.on_send()
                parser.add([effect.head, *map(self._read_piece, effect.pieces)])
            elif isinstance(effect, Receive):
                for view in effect.views:
                    view[:], left = left[: len(view)], left[len(view) :]
            elif isinstance(effect, Drain):
                left = left[effect.size_bytes :]
            elif isinstance(effect, NeedBuffer):
                pool, is_for_write = self.node.pool, effect.is_for_write
                answer = pool.try_acquire(effect.size_bytes, is_for_write=is_for_write)
            elif isinstance(effect, NeedTurn):
                answer = effect.turn.try_take()
            else:
                answer = self._work(effect)

    def _read_piece(self, piece: tuple[int, int, int]) -> memoryview:
        descriptor, offset, size_bytes = piece
        view = memoryview(bytearray(size_bytes))
        self.disk.read(descriptor, view, offset)
        return view

    def _work(self, effect: Work) -> object:
        self.on_work()
        try:
            return effect.call()
        except OSError as error:
            return error

    # Operations -----------------------------------------------------------------------------------

    def ask_write(self, shards: Sequence[Shard], **batch: Unpack[BatchFields]) -> Answer:
        body, payload = pack_write(shards, **batch)
        operation = self.begin(
            wire.Op.WRITE, body=body, count=len(shards), payload_bytes=len(payload)
        )
        return self.run(operation, payload)

    def write(
        self, shards: Sequence[Shard], **batch: Unpack[BatchFields]
    ) -> list[wire.WriteOutcome]:
        answer = self.ask_write(shards, **batch)
        assert answer.status is wire.Status.OK, (answer.status, answer.body)
        return [wire.WriteOutcome(outcome) for outcome in answer.body]

    def ask_read(self, keys: Sequence[bytes], shard_bytes: int) -> Answer:
        body = wire.pack_read(keys, shard_bytes)
        return self.run(self.begin(wire.Op.READ, body=body, count=len(keys)))

    def ask(self, op: wire.Op, body: bytes = b"", count: int = 0) -> Answer:
        return self.run(self.begin(op, body=body, count=count))

    def scan(self, slots_max: int = wire.SCAN_SLOTS_MAX) -> list[ScannedSlot]:
        """Every slot of the target, in as many SCANs as it takes."""
        found: list[ScannedSlot] = []
        segment, slot, is_end = 0, 0, False
        while not is_end:
            answer = self.ask(wire.Op.SCAN, wire.pack_scan(segment, slot, slots_max))
            assert answer.status is wire.Status.OK, (answer.status, answer.body)
            head = wire.parse_scan_head(answer.body)
            rows = wire.parse_records(answer.payloads[-1], wire.SCAN_ROW, head.slots)
            assert answer.headers[-1].count == head.slots <= slots_max
            first = (head.segment << 24) + head.first_slot
            found += [ScannedSlot(first + i, *row.tolist()[:6]) for i, row in enumerate(rows)]
            segment, slot, is_end = head.next_segment, head.next_slot, head.is_end
        return found

    def evict(self, items: Sequence[tuple[int, int, int, int]]) -> list[wire.EvictOutcome]:
        """Each item: location, generation, used_until_s, reason."""
        body = np.array([(*item, b"") for item in items], wire.EVICT_ITEM).tobytes()
        answer = self.ask(wire.Op.EVICT, body, len(items))
        assert answer.status is wire.Status.OK, (answer.status, answer.body)
        return [wire.EvictOutcome(byte) for byte in answer.body]

    def withdraw(self, items: Sequence[tuple[bytes, int, int, int]]) -> list[wire.EvictOutcome]:
        """Each item: key, block_xxh3, used_until_s, reason."""
        body = np.array([(*item, b"") for item in items], wire.WITHDRAW_ITEM).tobytes()
        answer = self.ask(wire.Op.WITHDRAW, body, len(items))
        assert answer.status is wire.Status.OK, (answer.status, answer.body)
        return [wire.EvictOutcome(byte) for byte in answer.body]

    def touch(self, items: Sequence[tuple[bytes, int]]) -> list[bool]:
        """Each item: key, last_used_s."""
        body = np.array([(*item, 0) for item in items], wire.TOUCH_ITEM).tobytes()
        answer = self.ask(wire.Op.TOUCH, body, len(items))
        assert answer.status is wire.Status.OK, (answer.status, answer.body)
        return [bool(byte) for byte in answer.body]

    def locate(self, keys: Sequence[bytes]) -> list[dict[str, int]]:
        answer = self.ask(wire.Op.LOCATE, wire.join_keys(keys), len(keys))
        records = wire.parse_records(answer.body, wire.LOCATION, len(keys))
        return [dict(zip(wire.LOCATION.names or (), row.tolist(), strict=True)) for row in records]

    def stat(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.ask(wire.Op.STAT).body)
        return found

    def target_stat(self) -> dict[str, Any]:
        (found,) = self.stat()["targets"]
        assert isinstance(found, dict)
        return found

    def read(self, keys: Sequence[bytes], shard_bytes: int) -> list[ReadShard | None]:
        answer = self.ask_read(keys, shard_bytes)
        assert answer.status is wire.Status.OK, (answer.status, answer.body)
        return parse_read_answer(answer, len(keys), shard_bytes)

    def match(self, keys: Sequence[bytes]) -> list[bool]:
        body = wire.join_keys(keys)
        answer = self.run(self.begin(wire.Op.MATCH, body=body, count=len(keys)))
        return [bool(answer.body[i // 8] >> (i % 8) & 1) for i in range(len(keys))]

    def forget(self, keys: Sequence[bytes]) -> list[bool]:
        body = wire.join_keys(keys)
        answer = self.run(self.begin(wire.Op.FORGET, body=body, count=len(keys)))
        return [bool(byte) for byte in answer.body]

    def report(self, key: bytes, generation: int) -> wire.ReportOutcome:
        body = key + generation.to_bytes(8, "little")
        answer = self.run(self.begin(wire.Op.REPORT, body=body, count=1))
        assert answer.status is wire.Status.OK, (answer.status, answer.body)
        return wire.ReportOutcome(answer.body[0])


@dataclass(frozen=True)
class ScannedSlot:
    """A row of SCAN and where it is."""

    location: int
    generation: int
    last_used_s: int
    block_index: int
    status: int
    ttl_class: int
    shard: int


class AnswerParser:
    """Takes what an operation sends apart into frames; asserts that nothing is left over."""

    def __init__(self) -> None:
        self.answer = Answer([], [], [])

    def add(self, views: Sequence[memoryview]) -> None:
        data = b"".join(views)
        header = wire.parse_header(data)
        assert not self.answer.headers or not self.answer.headers[-1].is_last
        body = data[wire.HEADER_BYTES : wire.HEADER_BYTES + header.body_bytes]
        wire.check_body(header, body)
        payload = data[wire.HEADER_BYTES + header.body_bytes :]
        assert len(payload) == header.payload_bytes
        self.answer.headers.append(header)
        self.answer.bodies.append(body)
        self.answer.payloads.append(payload)
