"""Single shards, raw, with what their node says of them: for repair and for checks.

`fetch` and `save` work on whole blocks and do not come through here. Nothing is decoded, and a read
does not count as a use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from .. import wire
from ..errors import DeadlineExceeded, NodeError, ProtocolError
from .channel import NodeChannel
from .inquiry import Inquiry


@dataclass(frozen=True, slots=True)
class ShardAnswers:
    """What one node has of n blocks.

    `records`: dtype wire.PART_RECORD (n,), status 1 where a shard arrived. `is_good`: bool (n,),
    true where it arrived and fits the checksum that its node told.
    """

    records: NDArray[Any]
    is_good: NDArray[np.bool_]


async def read_shards(
    channel: NodeChannel,
    keys: Sequence[bytes],
    *,
    into: Sequence[memoryview],
    deadline_s: float,
    loop: asyncio.AbstractEventLoop,
) -> ShardAnswers:
    """Reads what one node has of `keys`, at most 1,024, each into its view; all are equally long.

    Views of shards that did not arrive hold undefined bytes; after the return nothing is written to
    any of them. Raises NodeError: unreachable, refused, or not within `deadline_s`.
    """
    sink = _ShardSink(into, loop)
    body = wire.pack_read(keys, len(into[0]), is_use=False)
    channel.submit(wire.Op.READ, sink, body=body, count=len(keys), deadline_s=deadline_s)
    try:
        async with asyncio.timeout(deadline_s):
            await sink.done
    except TimeoutError as error:
        raise DeadlineExceeded(channel.node, f"no shards within {deadline_s:.2f} s") from error
    finally:
        channel.detach(sink)
    return ShardAnswers(sink.records, sink.is_good)


async def write_shards(
    channel: NodeChannel,
    batch: NDArray[Any],
    items: NDArray[Any],
    payloads: Sequence[memoryview],
    *,
    deadline_s: float,
    loop: asyncio.AbstractEventLoop,
) -> NDArray[np.uint8]:
    """Writes one shard of each of n blocks to one node; a wire.WriteOutcome for each, uint8 (n,).

    `batch`: dtype wire.WRITE_BATCH (1,), `items`: wire.WRITE_ITEM (n,). Raises NodeError; then each
    shard may have been stored or not.
    """
    inquiry = Inquiry(loop)
    request_id = channel.submit(
        wire.Op.WRITE,
        inquiry,
        body=batch.tobytes() + items.tobytes(),
        count=len(items),
        payload=payloads,
        payload_bytes=sum(map(len, payloads)),
        deadline_s=deadline_s,
    )
    try:
        async with asyncio.timeout(deadline_s):
            answer = await inquiry.answer
    except TimeoutError as error:
        raise DeadlineExceeded(channel.node, f"no answer within {deadline_s:.2f} s") from error
    finally:
        channel.detach(inquiry)
        channel.keep_payload(request_id)
    try:
        return wire.parse_records(answer, np.dtype("u1"), len(items))
    except wire.FrameError as error:
        raise ProtocolError(channel.node, str(error)) from error


class _ShardSink:
    """The sink of `read_shards`."""

    def __init__(self, into: Sequence[memoryview], loop: asyncio.AbstractEventLoop) -> None:
        self.is_detached = False
        self.done: asyncio.Future[None] = loop.create_future()
        self.records: NDArray[Any] = np.zeros(len(into), wire.PART_RECORD)
        self.is_good: NDArray[np.bool_] = np.zeros(len(into), np.bool_)
        self._into: Sequence[memoryview] = into
        self._count = len(into)
        self._shard_bytes = len(into[0])
        self._next_row = 0
        self._rows: list[int] = []

    def detach(self) -> None:
        self.is_detached = True
        self._into = ()

    def on_frame(self, header: wire.Header, body: bytes) -> Sequence[memoryview]:
        first = wire.parse_part_columns(body, header.count).first
        end = first + header.count
        if first != self._next_row or end > self._count or not header.count:
            raise wire.FrameError(f"blocks {first} to {end}, expected {self._next_row}")
        if header.is_last != (end == self._count):
            raise wire.FrameError(f"last frame ends at block {end} of {self._count}")
        self._next_row = end
        records = wire.parse_records(body, wire.PART_RECORD, header.count, 8)
        is_here = records["status"] == 1
        if (records["payload_bytes"][is_here] != self._shard_bytes).any():
            raise wire.FrameError(f"a shard that is not of {self._shard_bytes} bytes")
        self._rows = (np.flatnonzero(is_here) + first).tolist()
        if header.payload_bytes != len(self._rows) * self._shard_bytes:
            raise wire.FrameError(
                f"payload of {header.payload_bytes} bytes for {len(self._rows)} shards"
            )
        self.records[first:end] = records
        return [] if self.is_detached else [self._into[row] for row in self._rows]

    def on_payload(self) -> None:
        for row in self._rows:
            computed = xxh3_64_intdigest(self._into[row])
            self.is_good[row] = computed == int(self.records["payload_xxh3"][row])

    def on_end(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def on_failure(self, error: NodeError) -> None:
        if not self.done.done():
            self.done.set_exception(error)
