"""Puts requests together from the bytes of a connection. It has no socket and no clock.

What has arrived is in a small fixed inbox; a body gets room of its own once its header has been
checked. So the most that a peer can make a node hold here is the inbox and one body of the largest
legal request.
"""

from __future__ import annotations

from .. import wire

INBOX_BYTES = 8 << 10


class RequestReader:
    """The receiving side of one connection, between two system calls."""

    __slots__ = ("_body", "_body_got", "_end", "_header", "_inbox", "_start")

    def __init__(self) -> None:
        self._inbox = memoryview(bytearray(INBOX_BYTES))
        self._start = 0
        self._end = 0
        self._header: wire.Header | None = None
        self._body = memoryview(b"")
        self._body_got = 0

    @property
    def has_begun(self) -> bool:
        """Whether a part of a request is here, and not all of it."""
        return self._header is not None or self._end > self._start

    def room(self) -> memoryview:
        """Where the next bytes from the socket go; never empty."""
        if self._header is not None:
            return self._body[self._body_got :]
        if self._start == self._end:
            self._start = self._end = 0
            return self._inbox
        if self._start:
            rest = bytes(self._inbox[self._start : self._end])
            self._inbox[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        return self._inbox[self._end :]

    def received(self, count: int) -> None:
        """`count` bytes are in what `room` returned last."""
        if self._header is not None:
            self._body_got += count
        else:
            self._end += count

    def next_request(self) -> tuple[wire.Header, bytes] | None:
        """Header and body of the next request, or None while something is missing.

        Raises wire.FrameError for bytes that are no request. The request's payload comes next, and
        is for `waiting` and the socket.
        """
        header = self._header
        if header is None:
            body_at = self._start + wire.HEADER_BYTES
            if self._end < body_at:
                return None
            header = wire.parse_header(self._inbox[self._start : body_at])
            wire.check_request(header)
            self._start = body_at
            end = body_at + header.body_bytes
            if self._end < end:
                self._begin_body(header)
                return None
            body = bytes(self._inbox[body_at:end])
            self._start = end
        else:
            if self._body_got < len(self._body):
                return None
            body = bytes(self._body)
            self._header, self._body, self._body_got = None, memoryview(b""), 0
        wire.check_body(header, body)
        return header, body

    def waiting(self) -> memoryview:
        """Bytes that arrived behind the last request: its payload, and then the next request."""
        return self._inbox[self._start : self._end]

    def skip(self, count: int) -> None:
        """`count` bytes of `waiting` were used."""
        assert 0 <= count <= self._end - self._start
        self._start += count

    def _begin_body(self, header: wire.Header) -> None:
        """A body that has not all arrived gets room of its own."""
        self._header = header
        self._body = memoryview(bytearray(header.body_bytes))
        arrived = self._inbox[self._start : self._end]
        self._body[: len(arrived)] = arrived
        self._body_got = len(arrived)
        self._start = self._end
