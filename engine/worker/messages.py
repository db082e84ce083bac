"""What a client and an engine worker say to each other over a worker's socket.

    u32 length of what follows | msgpack of one of the structs below

A connection is for one request: a client sends one message, and closes the connection if it wants
no more of the answer. Every length is bounded before anything is made of it; msgspec checks types
and limits. The rules are docs/formats/engine-socket.md.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

PROTOCOL_VERSION = 2
MESSAGE_BYTES_MAX = 9 << 20
"""A prompt and an answer of TOKENS_MAX tokens, 4 bytes each, and what is beside them."""
TOKENS_MAX = 1 << 20
TOKEN_BYTES = 4
STOP_IDS_MAX = 64
HEAD = struct.Struct("<I")
SHOWN_CHARACTERS_MAX = 160

TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenCount: TypeAlias = Annotated[int, Meta(ge=0, le=TOKENS_MAX)]
Word: TypeAlias = Annotated[int, Meta(ge=0)]
"""Up to 2^64 - 1, which is what msgpack has."""
PackedTokens: TypeAlias = Annotated[bytes, Meta(max_length=TOKEN_BYTES * TOKENS_MAX)]
"""Token ids as int32, little-endian."""
Ticket: TypeAlias = Annotated[bytes, Meta(min_length=1, max_length=MESSAGE_BYTES_MAX - 1024)]
Reason: TypeAlias = Annotated[str, Meta(max_length=4096)]


class MalformedMessage(Exception):
    """What came is no message of ours; nothing behind it can be understood."""


class Message(Struct, forbid_unknown_fields=True, tag=True):
    """Base of all messages; the tag is the name of the class."""


# What a client asks -------------------------------------------------------------------------------


class Submit(Message):
    """Answer a prompt, or go on with an answer of which `answered_ids` are known already."""

    prompt_ids: PackedTokens
    max_tokens: Annotated[int, Meta(ge=1, le=TOKENS_MAX)]
    temperature: Annotated[float, Meta(ge=0)] = 0.0
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    seed: Word = 0
    stop_ids: Annotated[tuple[TokenId, ...], Meta(max_length=STOP_IDS_MAX)] = ()
    ttl_class: Annotated[str, Meta(max_length=16)] = "chat"
    answered_ids: PackedTokens = b""
    replay_first: TokenCount | None = None
    version: int = PROTOCOL_VERSION


class Resume(Message):
    """Go on with a sequence that another worker has handed over."""

    ticket: Ticket
    version: int = PROTOCOL_VERSION


class AskStatus(Message):
    """How is the worker? Answered by Status."""

    version: int = PROTOCOL_VERSION


# What a worker says -------------------------------------------------------------------------------


class Tokens(Message):
    """The answer grew: `token_ids` are its tokens number `position` (from 0) and on.

    `replay_first` is what a re-run elsewhere needs to go on with the same bits.
    """

    position: TokenCount
    token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=TOKENS_MAX)]
    replay_first: TokenCount | None = None


class Waiting(Message):
    """The request is here, and no token came of it since this was said last. Until then its client
    need not fear for the worker: one that stands still says nothing.

    `queued`: it was not begun yet; `preempted`: it gave way, and begins anew; `begun`: it is worked
    on. `ahead`: requests before it in line.
    """

    state: Literal["queued", "preempted", "begun"]
    ahead: Word = 0


class Finished(Message):
    """The answer is whole. The last message. `report` says what it cost."""

    reason: Literal["stop", "length"]
    report: dict[str, Any] = {}


class HandedOver(Message):
    """Another worker is to go on, with this ticket; without one (None), from what the store has.
    The last message."""

    ticket: Ticket | None
    report: dict[str, Any] = {}
    reason: Reason = ""
    """Why there is no ticket."""


class Refused(Message):
    """Nothing was begun. `cause` says whether another worker may take it. The last message."""

    reason: Reason
    cause: Literal["busy", "draining", "invalid", "ticket"]


class Failed(Message):
    """The worker cannot go on with a request that it had begun. The last message."""

    reason: Reason


class Status(Message):
    """How the worker is, as a document."""

    document: dict[str, Any]


Request: TypeAlias = Submit | Resume | AskStatus
Answer: TypeAlias = Tokens | Waiting | Finished | HandedOver | Refused | Failed | Status

DRAINING = Refused(reason="the worker is draining", cause="draining")

_Message = TypeVar("_Message")
_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_answer_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def encode_frame(message: Request | Answer) -> bytes:
    """A message with its length before it."""
    body = _encoder.encode(message)
    assert len(body) <= MESSAGE_BYTES_MAX, len(body)
    return HEAD.pack(len(body)) + body


def decode_length(head: bytes) -> int:
    """Bytes of the message behind these four. Raises MalformedMessage beyond the bound."""
    (length,) = HEAD.unpack(head)
    if not 0 < length <= MESSAGE_BYTES_MAX:
        raise MalformedMessage(f"a message of {length} bytes, expected 1 to {MESSAGE_BYTES_MAX}")
    return int(length)


def decode_request(body: bytes) -> Request:
    """Raises MalformedMessage for anything but exactly one request of this version."""
    request = _decode(_request_decoder, body)
    if request.version != PROTOCOL_VERSION:
        raise MalformedMessage(f"version {request.version}, expected {PROTOCOL_VERSION}")
    return request


def decode_answer(body: bytes) -> Answer:
    """Raises MalformedMessage for anything but exactly one answer."""
    return _decode(_answer_decoder, body)


def _decode(decoder: msgspec.msgpack.Decoder[_Message], body: bytes) -> _Message:
    try:
        return decoder.decode(body)
    except (ValueError, RecursionError) as error:
        raise MalformedMessage(str(error)[:SHOWN_CHARACTERS_MAX]) from None


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as they travel. Each is 0 to 2^31 - 1."""
    return struct.pack(f"<{len(token_ids)}i", *token_ids)


def unpack_tokens(packed: bytes) -> tuple[int, ...]:
    """Raises MalformedMessage for half a token and for negative ones."""
    count, rest = divmod(len(packed), TOKEN_BYTES)
    if rest:
        raise MalformedMessage(f"token ids of {len(packed)} bytes, expected 4 for each")
    token_ids: tuple[int, ...] = struct.unpack(f"<{count}i", packed)
    if token_ids and min(token_ids) < 0:
        raise MalformedMessage(f"token id {min(token_ids)}, expected 0 or more")
    return token_ids
