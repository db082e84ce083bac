"""Requests out of the bytes that a session sends, which may be anything. Pure.

A length is checked before anything is kept for it, and bytes are kept only as they come.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..agent_messages import HEAD, MESSAGE_BYTES_MAX, Request, request_decoder

SHOWN_LENGTH_MAX = 160


class MalformedMessage(Exception):
    """What came is no message of ours; nothing behind it can be understood."""


class MessageReader:
    """The bytes of one session, and what of them is not a whole message yet."""

    __slots__ = ("_begun",)

    def __init__(self) -> None:
        self._begun = bytearray()

    @property
    def begun_bytes(self) -> int:
        """Bytes kept of a message that is not complete."""
        return len(self._begun)

    def take(self, data: memoryview) -> Iterator[tuple[int, int, Request]]:
        """Request id, length and content of each message that `data` completes, in order.

        To be iterated to its end before the next call, unless the session ends. `data` is not kept.
        Raises MalformedMessage.
        """
        begun = self._begun
        begun += data
        at = 0
        while len(begun) - at >= HEAD.size:
            length, request_id = HEAD.unpack_from(begun, at)
            if length > MESSAGE_BYTES_MAX:
                raise MalformedMessage(f"a message of {length} bytes, at most {MESSAGE_BYTES_MAX}")
            end = at + HEAD.size + length
            if len(begun) < end:
                break
            body = bytes(memoryview(begun)[at + HEAD.size : end])
            at = end
            yield request_id, length, decode_request(body)
        del begun[:at]


def decode_request(body: bytes) -> Request:
    """Raises MalformedMessage for anything but exactly one request."""
    try:
        return request_decoder.decode(body)
    except (ValueError, RecursionError) as error:
        raise MalformedMessage(str(error)[:SHOWN_LENGTH_MAX]) from None
