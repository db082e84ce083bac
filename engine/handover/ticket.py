"""The ticket of a hand-over: what the engine that takes a sequence over must know, as bytes.

    magic | version | length of the body | seal of the body | body: msgpack of HandoverTicket

Blocks and state are not in it: they wait at an agent, in runs that the ticket names. It travels by
way of the client, so what comes back is checked like anything from outside. The seal is keyed: who
has the key is an engine, and nobody else can put other tokens to the runs, whose blocks would then
be hits of a text that they are not of. Format: docs/formats/handover.md. How the runs are filled
and taken is `sender`'s and `receiver`'s.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Annotated, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta, Struct

from kvstore.client import RunOffer
from kvstore.key import TOKEN_BYTES, Namespace
from kvstore.layout import BLOCK_TOKENS

from ..errors import HandoverRefused, InvalidRequest
from ..model_runner import Buffer
from ..request import Request
from ..sampling import Sampling

MAGIC = b"CACHTCKT"
VERSION = 2
SEAL_BYTES = 16
HEAD = struct.Struct(f"<8sII{SEAL_BYTES}s")
"""magic, version, length of the body, seal of the body."""

TOKENS_MAX = 1 << 20
"""Of prompt and answer together."""
STOP_IDS_MAX = 1024
MARKS_BYTES_MAX = 1 << 16
TICKET_BYTES_MAX = TOKENS_MAX * TOKEN_BYTES + (1 << 18)

Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Word: TypeAlias = Annotated[int, Meta(ge=0)]
"""Up to 2^64 - 1, which is what msgpack has."""
Identifier: TypeAlias = Annotated[bytes, Meta(min_length=16, max_length=16)]
ShortName: TypeAlias = Annotated[str, Meta(max_length=128)]
TokenBytes: TypeAlias = Annotated[bytes, Meta(max_length=TOKENS_MAX * TOKEN_BYTES)]
"""Token ids as int32, little-endian."""


class SentRun(Struct, frozen=True, forbid_unknown_fields=True):
    """A run of the arena that waits at an agent until it is taken."""

    ticket: Identifier
    """What the agent knows it by; whoever has it may take the run, once."""
    host: Annotated[str, Meta(max_length=256)]
    """Address of that agent for other agents; empty if it has none."""
    section_xxh3: Annotated[list[Word], Meta(min_length=1, max_length=1024)]
    """xxh3-64 of each section: of all its blocks, one after the other."""

    def offer(self, namespace: Namespace, blocks: int) -> RunOffer:
        """The offer as the agent knows it, of a run of so many blocks of the namespace."""
        return RunOffer(
            ticket=self.ticket,
            host=self.host,
            namespace_id=namespace.namespace_id,
            layout=namespace.layout.fingerprint,
            blocks=blocks,
        )


class HandoverTicket(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Fields in the order of the format. `answer_ids` have all been given to the client, and the
    last of them is not computed yet. `marks` is what the runner's `pack_state` returned. There is
    no id of the request: each engine names its requests itself."""

    namespace_id: Identifier
    prompt_ids: TokenBytes
    answer_ids: TokenBytes
    max_tokens: Count
    temperature: float
    top_k: Count
    top_p: float
    seed: Word
    stop_ids: Annotated[list[Count], Meta(max_length=STOP_IDS_MAX)]
    ttl_class: ShortName
    replay_first: Count | None
    computed_tokens: Count
    marks: Annotated[bytes, Meta(max_length=MARKS_BYTES_MAX)]
    blocks: SentRun
    state: SentRun | None
    """None for a model that keeps nothing beside blocks."""
    moves: Annotated[int, Meta(ge=0, le=255)]
    """How often a drained engine has sent the sequence away, this time included."""

    @property
    def block_count(self) -> int:
        """Blocks of the run, the last of which may not be complete."""
        return -(-self.computed_tokens // BLOCK_TOKENS)

    def request(self, request_id: str) -> Request:
        """The request as an engine goes on with it. Raises HandoverRefused for values that no
        request has."""
        try:
            sampling = Sampling(
                temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, seed=self.seed
            )
        except InvalidRequest as error:
            raise HandoverRefused(error.what, given=error.given, expected=error.expected) from error
        return Request(
            request_id=request_id,
            prompt_ids=decode_ids(self.prompt_ids),
            max_tokens=self.max_tokens,
            sampling=sampling,
            stop_ids=frozenset(self.stop_ids),
            ttl_class=self.ttl_class,
            answered_ids=tuple(decode_ids(self.answer_ids)),
            replay_first=self.replay_first,
        )


def encode_ids(token_ids: list[int]) -> bytes:
    """Token ids as int32, little-endian."""
    return np.asarray(token_ids, dtype="<i4").tobytes()


def decode_ids(encoded: bytes) -> list[int]:
    """What `encode_ids` was given."""
    token_ids: list[int] = np.frombuffer(encoded, dtype="<i4").tolist()
    return token_ids


def seal_of(body: Buffer, key: bytes) -> bytes:
    """BLAKE2b-128 of a body, keyed; without a key it finds damage and no forgery."""
    return hashlib.blake2b(body, digest_size=SEAL_BYTES, key=key, person=MAGIC).digest()


def write_ticket(ticket: HandoverTicket, key: bytes = b"") -> bytes:
    """The ticket as it travels. `key`: of all engines that hand over to each other, at most 64
    bytes."""
    body = msgspec.msgpack.encode(ticket)
    return HEAD.pack(MAGIC, VERSION, len(body), seal_of(body, key)) + body


def read_ticket(data: bytes, key: bytes = b"") -> HandoverTicket:
    """The ticket in these bytes, of an engine that has the key. Raises HandoverRefused that names
    the first part that is wrong."""
    most = TICKET_BYTES_MAX
    expect("length of the ticket", len(data), HEAD.size <= len(data) <= most, f"at most {most}")
    magic, version, body_bytes, seal = HEAD.unpack_from(data)
    expect("magic of the ticket", magic, magic == MAGIC, MAGIC)
    expect("version of the ticket", version, version == VERSION, VERSION)
    body = memoryview(data)[HEAD.size :]
    expect("length of the body", len(body), len(body) == body_bytes, body_bytes)
    # What the seal should be is not said: it would make a ticket of any bytes.
    is_sealed = hmac.compare_digest(seal, seal_of(body, key))
    expect("seal of the ticket", seal.hex(), is_sealed, "that of its bytes, by these engines' key")
    try:
        ticket = msgspec.msgpack.decode(body, type=HandoverTicket)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise HandoverRefused(
            "fields of the ticket", given=f"some that say: {error}", expected="those of the format"
        ) from error
    _check_tokens(ticket)
    return ticket


def _check_tokens(ticket: HandoverTicket) -> None:
    """Numbers that each may be and that do not go together."""
    for what, encoded in (("prompt", ticket.prompt_ids), ("answer", ticket.answer_ids)):
        is_whole = len(encoded) > 0 and len(encoded) % TOKEN_BYTES == 0
        expect(f"bytes of the {what}", len(encoded), is_whole, "one or more int32")
        least = int(np.frombuffer(encoded, dtype="<i4").min())
        expect(f"least token id of the {what}", least, least >= 0, "0 or more")
    answered = len(ticket.answer_ids) // TOKEN_BYTES
    known = len(ticket.prompt_ids) // TOKEN_BYTES + answered
    expect("tokens", known, known <= TOKENS_MAX, f"at most {TOKENS_MAX}")
    most = ticket.max_tokens - 1
    expect("answer tokens", answered, answered <= most, f"fewer than {ticket.max_tokens}")
    computed = ticket.computed_tokens
    expect("computed tokens", computed, computed == known - 1, f"all but the last of {known}")
    first = ticket.replay_first
    is_border = first is None or (first % BLOCK_TOKENS == 0 and first <= computed)
    expect("replay start", first, is_border, f"a multiple of {BLOCK_TOKENS}, at most {computed}")


def expect(what: str, given: object, is_right: bool, expected: object) -> None:
    """Raises HandoverRefused for a part of a ticket that is not as it should be."""
    if not is_right:
        raise HandoverRefused(what, given=given, expected=expected)
