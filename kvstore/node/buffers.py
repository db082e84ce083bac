"""Memory for shards on their way: buffers from one pool with a fixed limit.

Everything large that a node holds for its peers comes from here, so the limit of the pool bounds
what any number of peers can make it allocate. Belongs to the event loop; a thread may fill a buffer
that the loop keeps for it.
"""

from __future__ import annotations

from collections import deque

from ..wire import KEYS_PER_REQUEST_MAX
from .waiting import Waiter

BUFFER_BYTES_MIN = 64 << 10


class Buffer:
    """Bytes of one operation until it releases them; `view` is as long as asked, or longer."""

    def __init__(self, size_bytes: int, pool: BufferPool) -> None:
        self.size_bytes = size_bytes
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


class BufferPool:
    """At most `limit_bytes` of buffers, those in use and those kept for the next user together."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._kept_bytes = 0
        self._kept: dict[int, list[Buffer]] = {}
        self._line: deque[tuple[int, Waiter]] = deque()

    def fits(self, size_bytes: int) -> bool:
        """Whether a buffer of this size could ever be had."""
        return round_size(size_bytes) <= self.limit_bytes

    def try_acquire(self, size_bytes: int) -> Buffer | None:
        """A buffer of at least `size_bytes`, or None if one would have to wait for it."""
        while self._line and self._line[0][1].has_left:
            self._line.popleft()
        return None if self._line else self._acquire(round_size(size_bytes))

    def wait(self, size_bytes: int, waiter: Waiter) -> None:
        """Join the line; `serve(buffer)` is called when there is room."""
        assert self.fits(size_bytes)
        self._line.append((round_size(size_bytes), waiter))

    def release(self, buffer: Buffer) -> None:
        """Take a buffer back, and serve those in line that now have room."""
        self.used_bytes -= buffer.size_bytes
        self._kept_bytes += buffer.size_bytes
        self._kept.setdefault(buffer.size_bytes, []).append(buffer)
        while self._line:
            size_bytes, waiter = self._line[0]
            found = None if waiter.has_left else self._acquire(size_bytes)
            if found is None and not waiter.has_left:
                return
            self._line.popleft()
            if found is not None:
                waiter.serve(found)

    def _acquire(self, size_bytes: int) -> Buffer | None:
        if self.used_bytes + size_bytes > self.limit_bytes:
            return None
        kept = self._kept.get(size_bytes)
        if kept:
            # The one used last is the one most likely still in the processor's cache.
            buffer = kept.pop()
            self._kept_bytes -= size_bytes
        else:
            self._trim(self.limit_bytes - self.used_bytes - size_bytes)
            buffer = Buffer(size_bytes, self)
        self.used_bytes += size_bytes
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
