"""Requests out of the bytes that a session sends, which may be anything. Pure.

A length is checked before anything is kept for it, and bytes are kept only as they come.
"""

from __future__ import annotations

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
        """Bytes kept of messages that were not taken, or are not complete."""
        return len(self._begun)

    def add(self, data: memoryview) -> None:
        """More has come. `data` is not kept."""
        self._begun += data

    def take(self) -> tuple[int, int, Request] | None:
        """Request id, length and content of the next message, None if it is not complete yet.

        Raises MalformedMessage.
        """
        begun = self._begun
        if len(begun) < HEAD.size:
            return None
        length, request_id = HEAD.unpack_from(begun)
        if length > MESSAGE_BYTES_MAX:
            raise MalformedMessage(f"a message of {length} bytes, at most {MESSAGE_BYTES_MAX}")
        end = HEAD.size + length
        if len(begun) < end:
            return None
        body = bytes(memoryview(begun)[HEAD.size : end])
        del begun[:end]
        return request_id, length, decode_request(body)


def decode_request(body: bytes) -> Request:
    """Raises MalformedMessage for anything but exactly one request."""
    try:
        return request_decoder.decode(body)
    except (ValueError, RecursionError) as error:
        raise MalformedMessage(str(error)[:SHOWN_LENGTH_MAX]) from None
