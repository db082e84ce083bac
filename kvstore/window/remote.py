"""Fetches one window record from the agent of another host, straight into the caller's memory.

Only a record that is the wanted one, whole and unharmed is a find; everything else is a value that
says what went wrong. The sender does not hold a record still while it sends, so the checksum of
what arrived is the only proof.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from enum import Enum

from xxhash import xxh3_64

from .. import wire
from ..client.channel import NodeChannel
from ..errors import NodeError
from .messages import WindowRequest, pack_window_request
from .record import WindowHead, parse_head


class RemoteEnd(Enum):
    """How a fetch from another host ended."""

    FOUND = "found"
    """The bytes are in place, and are the right ones."""
    ABSENT = "absent"
    """The host does not have it: evicted, expired, or of another namespace or layout."""
    REJECTED = "rejected"
    """The bytes do not fit their checksum, as when the record was overwritten meanwhile."""
    UNREACHABLE = "unreachable"
    """No connection, a refusal, or what came was no answer."""
    LATE = "late"
    """The deadline passed."""


async def fetch_remote(
    channel: NodeChannel,
    wanted: WindowRequest,
    into: Sequence[memoryview],
    *,
    deadline_s: float,
    loop: asyncio.AbstractEventLoop,
) -> RemoteEnd:
    """Asks the host behind `channel` for a record. `into`: writable byte views of
    `wanted.size_bytes` in all; what is in them is undefined unless the record was found. Nothing is
    written there after the return, also when this is cancelled."""
    sink = _WindowSink(wanted, into, loop)
    channel.submit(wire.Op.WINDOW, sink, body=pack_window_request(wanted), deadline_s=deadline_s)
    try:
        async with asyncio.timeout(deadline_s):
            return await sink.end
    except TimeoutError:
        return RemoteEnd.LATE
    finally:
        channel.detach(sink)


class _WindowSink:
    """The answer to one WINDOW: one frame, with the record as its payload or without any."""

    is_detached = False

    def __init__(
        self, wanted: WindowRequest, into: Sequence[memoryview], loop: asyncio.AbstractEventLoop
    ) -> None:
        self.end: asyncio.Future[RemoteEnd] = loop.create_future()
        self._wanted = wanted
        self._into = into
        self._head: WindowHead | None = None
        self._is_intact = False

    def detach(self) -> None:
        self.is_detached = True
        self._into = ()

    def on_frame(self, header: wire.Header, body: bytes) -> Sequence[memoryview]:
        if not header.is_last or header.count > 1:
            raise wire.FrameError(f"{header.count} records or more to come, expected at most one")
        if header.count == 0:
            if body or header.payload_bytes:
                raise wire.FrameError("no record, and bytes of one")
            return ()
        self._head = _check_head(self._wanted, header, body)
        return self._into

    def on_payload(self) -> None:
        if self._head is None:
            return  # a payload of no bytes
        digest = xxh3_64()
        for view in self._into:
            digest.update(view)
        self._is_intact = digest.intdigest() == self._head.xxh3

    def on_end(self) -> None:
        if self._head is None:
            self._finish(RemoteEnd.ABSENT)
        else:
            self._finish(RemoteEnd.FOUND if self._is_intact else RemoteEnd.REJECTED)

    def on_failure(self, error: NodeError) -> None:
        self._finish(RemoteEnd.UNREACHABLE)

    def _finish(self, end: RemoteEnd) -> None:
        if not self.end.done():
            self.end.set_result(end)


def _check_head(wanted: WindowRequest, header: wire.Header, body: bytes) -> WindowHead:
    """The head of the record in an answer; FrameError unless it is that of the wanted record."""
    try:
        head = parse_head(body)
    except ValueError as error:
        raise wire.FrameError(str(error)) from error
    found = WindowRequest(head.key, head.namespace_id, head.layout_prefix, head.size_bytes)
    if found != wanted or header.payload_bytes != wanted.size_bytes:
        raise wire.FrameError(
            f"a record of {header.payload_bytes} bytes, key {head.key[:4].hex()}..., expected"
            f" {wanted.size_bytes} bytes, key {wanted.key[:4].hex()}..."
        )
    return head
