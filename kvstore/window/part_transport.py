"""How a part of the window directory is reached: over the network, or in this very process.

Only carries; who is asked for which key, and what silence means, is decided by `announcer`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from .. import wire
from ..client.channel import NodeChannel
from ..client.inquiry import SingleFrameSink, ask_node, require_single_frame
from ..errors import InvalidArgument, NodeError, NodeRefused, ProtocolError
from .directory_host import DirectoryHost
from .messages import AnnounceAnswer, Announcement, pack_announcement, parse_answer, parse_hosts

ANNOUNCE_DEADLINE_S = 2.0

OnAnswer = Callable[[AnnounceAnswer], None]
OnFailure = Callable[[NodeError], None]


class PartTransport(Protocol):
    """How a part of the directory is reached. Answers come from the event loop, never at once."""

    def announce(self, said: Announcement, on_answer: OnAnswer, on_failure: OnFailure) -> None:
        """Tells the part; one of the two is called, once."""

    async def look_up(self, keys: Sequence[bytes], deadline_s: float) -> list[str | None]:
        """Who has the records of `keys`, 1,024 at most. Raises NodeError."""

    def close(self) -> None:
        """No answers from now on."""


class RemotePart:
    """The part of another agent, over its channel."""

    def __init__(self, channel: NodeChannel, loop: asyncio.AbstractEventLoop) -> None:
        self._channel = channel
        self._loop = loop

    def announce(self, said: Announcement, on_answer: OnAnswer, on_failure: OnFailure) -> None:
        body = pack_announcement(said)
        self._channel.submit(
            wire.Op.ANNOUNCE,
            _AnnounceSink(on_answer, on_failure),
            body=body,
            count=len(said.items),
            deadline_s=ANNOUNCE_DEADLINE_S,
        )

    async def look_up(self, keys: Sequence[bytes], deadline_s: float) -> list[str | None]:
        body = await ask_node(
            self._channel,
            wire.Op.LOOKUP,
            body=wire.join_keys(keys),
            count=len(keys),
            deadline_s=deadline_s,
            loop=self._loop,
        )
        try:
            return parse_hosts(body, len(keys))
        except wire.FrameError as error:
            raise ProtocolError(self._channel.node, str(error)) from error

    def close(self) -> None:
        self._channel.close()


class OwnPart:
    """The part that this very agent holds."""

    def __init__(self, directory: DirectoryHost, loop: asyncio.AbstractEventLoop) -> None:
        self._directory = directory
        self._loop = loop

    def announce(self, said: Announcement, on_answer: OnAnswer, on_failure: OnFailure) -> None:
        try:
            answer = self._directory.announce(said)
        except InvalidArgument as error:
            refusal = NodeRefused("this agent", wire.Status.BAD_REQUEST.name, str(error))
            self._loop.call_soon(on_failure, refusal)
        else:
            self._loop.call_soon(on_answer, answer)

    async def look_up(self, keys: Sequence[bytes], deadline_s: float) -> list[str | None]:
        return self._directory.look_up(keys)

    def close(self) -> None:
        """There is no connection."""


class _AnnounceSink(SingleFrameSink):
    """The answer to one ANNOUNCE."""

    def __init__(self, on_answer: OnAnswer, on_failure: OnFailure) -> None:
        self._on_answer = on_answer
        self._on_failure = on_failure
        self._answer: AnnounceAnswer | None = None

    def on_frame(self, header: wire.Header, body: bytes) -> Sequence[memoryview]:
        require_single_frame(header)
        self._answer = parse_answer(body)
        return ()

    def on_end(self) -> None:
        assert self._answer is not None, "an answer without a frame"
        self._on_answer(self._answer)

    def on_failure(self, error: NodeError) -> None:
        self._on_failure(error)
