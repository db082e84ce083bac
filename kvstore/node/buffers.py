"""Memory for shards on their way: buffers from one pool with a fixed limit.

Everything large that a node holds for its peers comes from here, so the limit of the pool bounds
what any number of peers can make it allocate. Belongs to the event loop; a thread may fill a buffer
that the loop keeps for it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ..wire import KEYS_PER_REQUEST_MAX
from .waiting import Waiter

BUFFER_BYTES_MIN = 64 << 10
WRITE_SHARE_PERCENT = 75
"""So much of the memory may wait for payloads of writes."""


class Buffer:
    """Bytes of one operation until it releases them; `view` is as long as asked, or longer."""

    def __init__(self, size_bytes: int, pool: BufferPool) -> None:
        self.size_bytes = size_bytes
        self.is_for_write = False
        self.view = memoryview(bytearray(size_bytes))
        self._pool = pool
        self._pieces: list[memoryview] = []

    def pieces(self, piece_bytes: int) -> list[memoryview]:
        """The buffer cut into equal pieces, as many as a request may have shards.

        Kept with the buffer until another size is asked for, which is seldom.
        """
        if not self._pieces or len(self._pieces[0]) != piece_bytes:
            count = min(self.size_bytes // piece_bytes, KEYS_PER_REQUEST_MAX)
            starts = range(0, count * piece_bytes, piece_bytes)
            self._pieces = [self.view[at : at + piece_bytes] for at in starts]
        return self._pieces

    def release(self) -> None:
        """Give the bytes back; nobody may touch them afterwards."""
        self._pool.release(self)


@dataclass(frozen=True, slots=True)
class _Place:
    """One in line."""

    size_bytes: int
    is_for_write: bool
    waiter: Waiter


class BufferPool:
    """At most `limit_bytes` of buffers, those in use and those kept for the next user together.

    Buffers for writes are filled by peers, as slowly as those like. They get at most
    `write_limit_bytes`, so that a read always finds room after those before it.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.write_limit_bytes = limit_bytes * WRITE_SHARE_PERCENT // 100
        self.used_bytes = 0
        self._write_bytes = 0
        self._kept_bytes = 0
        self._kept: dict[int, list[Buffer]] = {}
        self._line: deque[_Place] = deque()

    @property
    def has_line(self) -> bool:
        """Whether somebody waits."""
        return any(not place.waiter.has_left for place in self._line)

    def fits(self, size_bytes: int, *, is_for_write: bool = False) -> bool:
        """Whether a buffer of this size could ever be had."""
        limit_bytes = self.write_limit_bytes if is_for_write else self.limit_bytes
        return round_size(size_bytes) <= limit_bytes

    def try_acquire(self, size_bytes: int, *, is_for_write: bool = False) -> Buffer | None:
        """A buffer of at least `size_bytes`, or None if one would have to wait for it."""
        for place in self._line:
            # Writes that wait for their own share stand in no read's way.
            if not place.waiter.has_left and (is_for_write or not self._exceeds_share(place)):
                return None
        return self._acquire(round_size(size_bytes), is_for_write=is_for_write)

    def wait(self, size_bytes: int, waiter: Waiter, *, is_for_write: bool = False) -> None:
        """Join the line; `serve(buffer)` is called when there is room."""
        assert self.fits(size_bytes, is_for_write=is_for_write)
        self._line = deque(place for place in self._line if not place.waiter.has_left)
        self._line.append(_Place(round_size(size_bytes), is_for_write, waiter))

    def release(self, buffer: Buffer) -> None:
        """Take a buffer back, and serve those in line that now have room."""
        self.used_bytes -= buffer.size_bytes
        self._write_bytes -= buffer.size_bytes if buffer.is_for_write else 0
        self._kept_bytes += buffer.size_bytes
        self._kept.setdefault(buffer.size_bytes, []).append(buffer)
        line, self._line = self._line, deque()
        is_write_waiting = False
        while line:
            place = line.popleft()
            if place.waiter.has_left:
                continue
            is_blocked = place.is_for_write and is_write_waiting
            if is_blocked or self._exceeds_share(place):
                is_write_waiting = True
                self._line.append(place)
                continue
            found = self._acquire(place.size_bytes, is_for_write=place.is_for_write)
            if found is None:
                self._line.append(place)
                break
            place.waiter.serve(found)
        self._line += line

    def _exceeds_share(self, place: _Place) -> bool:
        """Whether it is a write that waits for other writes, however much memory there is."""
        return place.is_for_write and (
            self._write_bytes + place.size_bytes > self.write_limit_bytes
        )

    def _acquire(self, size_bytes: int, *, is_for_write: bool) -> Buffer | None:
        if self.used_bytes + size_bytes > self.limit_bytes:
            return None
        if is_for_write and self._write_bytes + size_bytes > self.write_limit_bytes:
            return None
        kept = self._kept.get(size_bytes)
        if kept:
            # The one used last is the one most likely still in the processor's cache.
            buffer = kept.pop()
            self._kept_bytes -= size_bytes
        else:
            self._trim(self.limit_bytes - self.used_bytes - size_bytes)
            buffer = Buffer(size_bytes, self)
        buffer.is_for_write = is_for_write
        self.used_bytes += size_bytes
        self._write_bytes += size_bytes if is_for_write else 0
        return buffer

    def _trim(self, kept_bytes_max: int) -> None:
        """Drop kept buffers of any size until at most so much is kept."""
        for size_bytes, kept in self._kept.items():
            while kept and self._kept_bytes > kept_bytes_max:
                kept.pop()
                self._kept_bytes -= size_bytes


def round_size(size_bytes: int) -> int:
    """The size of buffer that holds `size_bytes`: a quarter of a power of two, at most 1/4 more."""
    size_bytes = max(size_bytes, BUFFER_BYTES_MIN)
    step = 1 << max(size_bytes.bit_length() - 3, 0)
    return -(-size_bytes // step) * step
