"""One question to one node, one frame as the answer, as a future."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from .. import wire
from ..errors import DeadlineExceeded, NodeError
from .channel import NodeChannel


def require_single_frame(header: wire.Header) -> None:
    """FrameError unless this is all of an answer that has one frame and no payload."""
    if not header.is_last or header.payload_bytes:
        raise wire.FrameError("more than the one frame without a payload that was expected")


async def ask_node(
    channel: NodeChannel,
    op: wire.Op,
    *,
    body: bytes = b"",
    count: int = 0,
    deadline_s: float,
    loop: asyncio.AbstractEventLoop,
) -> bytes:
    """Body of the answer. Raises NodeError: unreachable, refused, or not within `deadline_s`."""
    inquiry = Inquiry(loop)
    channel.submit(op, inquiry, body=body, count=count, deadline_s=deadline_s)
    try:
        async with asyncio.timeout(deadline_s):
            return await inquiry.answer
    except TimeoutError as error:
        raise DeadlineExceeded(channel.node, f"no answer within {deadline_s:.2f} s") from error
    finally:
        channel.detach(inquiry)


class SingleFrameSink:
    """The base of sinks whose answer is one frame without a payload: `on_frame` of each begins with
    `require_single_frame`."""

    is_detached = False

    def detach(self) -> None:
        self.is_detached = True

    def on_payload(self) -> None:
        """`require_single_frame` refuses one."""


class Inquiry(SingleFrameSink):
    """The sink of `ask_node`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.answer: asyncio.Future[bytes] = loop.create_future()
        self._body = b""

    def on_frame(self, header: wire.Header, body: bytes) -> Sequence[memoryview]:
        require_single_frame(header)
        self._body = bytes(body)
        return ()

    def on_end(self) -> None:
        if not self.answer.done():
            self.answer.set_result(self._body)

    def on_failure(self, error: NodeError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)
