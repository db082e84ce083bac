"""Brings a run that was offered at another host into a run of this one, and takes it away there.

The bytes come in pieces, a few of them on their way at a time, straight into the arena; each has a
checksum. Once all are here the run is taken (TAKE), which is the one step that decides who has it:
before it nobody has lost anything, and without its answer this host has nothing. So a run is never
in two hands, whatever is lost on the way.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from xxhash import xxh3_64_intdigest

from .. import wire
from ..client.channel import NodeChannel
from ..errors import NodeError
from ..window.peers import Peers
from ..window.remote import RemoteEnd
from .offers import OfferedRun
from .run_messages import (
    PIECE_BYTES_MAX,
    RunPiece,
    pack_piece,
    pack_take,
    parse_checksum,
)

log = logging.getLogger(__name__)

PIECE_BYTES = PIECE_BYTES_MAX
PIECES_AHEAD = 4
"""Pieces of one run that are asked for and not here: the peer sends one while the next comes in."""
TRANSFERS_MAX = 16
"""Runs that come at one time; others wait, within their deadlines."""
FAIR_DEADLINE_S = 0.1
"""A host that is asked for less time than this, and is late, has not failed."""


@dataclass(slots=True)
class ReceiveCounters:
    """Runs wanted from other hosts, by how that ended (see RemoteEnd)."""

    asked: int = 0
    skipped: int = 0
    """The host was not asked: it had just failed, or too many runs were on their way."""
    remote_found: int = 0
    remote_absent: int = 0
    remote_rejected: int = 0
    remote_unreachable: int = 0
    remote_late: int = 0
    received_bytes: int = 0


class RunReceiver:
    """Belongs to the event loop. `peers`: its own connections, so that the bytes of a run hold up
    no window record."""

    def __init__(
        self, peers: Peers, *, loop: asyncio.AbstractEventLoop, clock: Callable[[], float]
    ) -> None:
        self.counters = ReceiveCounters()
        self._peers = peers
        self._loop = loop
        self._clock = clock
        self._places = asyncio.Semaphore(TRANSFERS_MAX)

    async def take(
        self, host: str, wanted: OfferedRun, into: memoryview, deadline_s: float
    ) -> bool:
        """Whether the run is here, every byte of it verified, and nobody else can have it.

        `into`: the sections of a run of the same layout and number of blocks; undefined unless the
        run was taken. Nothing is written there after the return, also when this is cancelled.
        Returns within `deadline_s`.
        """
        self.counters.asked += 1
        end_at_s = self._clock() + deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                await self._places.acquire()
        except TimeoutError:
            self.counters.skipped += 1
            return False
        try:
            return await self._take(host, wanted, into, end_at_s - self._clock())
        finally:
            self._places.release()

    def close(self) -> None:
        """Ends all connections."""
        self._peers.close()

    def describe(self) -> dict[str, Any]:
        """For the status document."""
        return asdict(self.counters)

    async def _take(
        self, host: str, wanted: OfferedRun, into: memoryview, deadline_s: float
    ) -> bool:
        channel = self._peers.channel(host)
        if not channel.health.is_available:
            self.counters.skipped += 1
            return False
        end = await take_remote(channel, wanted, into, deadline_s=deadline_s, loop=self._loop)
        if end is RemoteEnd.LATE and deadline_s >= FAIR_DEADLINE_S:
            channel.health.on_failed()
        name = f"remote_{end.value}"
        setattr(self.counters, name, getattr(self.counters, name) + 1)
        if end is RemoteEnd.FOUND:
            self.counters.received_bytes += len(into)
            return True
        log.info("run of %d blocks at %s: %s", wanted.blocks, host, end.value)
        return False


async def take_remote(
    channel: NodeChannel,
    wanted: OfferedRun,
    into: memoryview,
    *,
    deadline_s: float,
    loop: asyncio.AbstractEventLoop,
) -> RemoteEnd:
    """Reads a run at the host behind `channel` and takes it: FOUND if both were done."""
    asked: deque[_AnswerSink] = deque()

    def ask(op: wire.Op, body: bytes, place: memoryview | None) -> None:
        sink = _AnswerSink(place, loop)
        asked.append(sink)
        channel.submit(op, sink, body=body, deadline_s=deadline_s)

    async def take_in_first() -> RemoteEnd:
        end = await asked[0].end
        asked.popleft()
        return end

    try:
        async with asyncio.timeout(deadline_s):
            for start in range(0, len(into), PIECE_BYTES):
                if len(asked) >= PIECES_AHEAD and (end := await take_in_first()) is not _FOUND:
                    return end
                place = into[start : start + PIECE_BYTES]
                ask(wire.Op.RUN, pack_piece(RunPiece(wanted, start, len(place))), place)
            while asked:
                if (end := await take_in_first()) is not _FOUND:
                    return end
            ask(wire.Op.TAKE, pack_take(wanted), None)
            return await take_in_first()
    except TimeoutError:
        return RemoteEnd.LATE
    finally:
        for sink in asked:
            channel.detach(sink)


_FOUND = RemoteEnd.FOUND


class _AnswerSink:
    """The answer to one RUN, whose payload goes to `place`, or to one TAKE, which has none: one
    frame that counts 1, or 0 if the run is not on offer."""

    is_detached = False

    def __init__(self, place: memoryview | None, loop: asyncio.AbstractEventLoop) -> None:
        self.end: asyncio.Future[RemoteEnd] = loop.create_future()
        self._place = place
        self._has_place = place is not None
        self._length = 0 if place is None else len(place)
        self._xxh3: int | None = None
        self._found = RemoteEnd.ABSENT

    def detach(self) -> None:
        self.is_detached = True
        self._place = None

    def on_frame(self, header: wire.Header, body: bytes) -> Sequence[memoryview]:
        if not header.is_last or header.count > 1:
            raise wire.FrameError(f"{header.count} runs or more to come, expected at most one")
        expected_bytes = self._length if header.count else 0
        if header.payload_bytes != expected_bytes:
            raise wire.FrameError(
                f"{header.payload_bytes} bytes of a run, expected {expected_bytes}"
            )
        if header.count and self._has_place:
            self._xxh3 = parse_checksum(body)
        elif body:
            raise wire.FrameError(f"a body of {len(body)} bytes, expected none")
        if not header.count:
            return ()
        self._found = RemoteEnd.FOUND
        return () if self._place is None else (self._place,)

    def on_payload(self) -> None:
        if self._xxh3 is not None and self._place is not None:
            is_intact = xxh3_64_intdigest(self._place) == self._xxh3
            self._found = RemoteEnd.FOUND if is_intact else RemoteEnd.REJECTED

    def on_end(self) -> None:
        self._finish(self._found)

    def on_failure(self, error: NodeError) -> None:
        self._finish(RemoteEnd.UNREACHABLE)

    def _finish(self, end: RemoteEnd) -> None:
        if not self.end.done():
            self.end.set_result(end)
