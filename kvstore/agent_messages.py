"""What engines and gateways say to the agent of their host, and what it answers, over its socket.

    u32 length of what follows | u32 request id | msgpack of one of the structs below

Blocks never travel here: they lie in the arena. Every length is bounded before anything is made of
it; msgspec checks types and limits. The rules are docs/formats/agent-socket.md.
"""

from __future__ import annotations

import struct
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Struct

PROTOCOL_VERSION = 1
MESSAGE_BYTES_MAX = 1 << 20
KEYS_PER_MESSAGE_MAX = 16_384
"""Blocks of a prompt of two million tokens."""
TICKET_BYTES = 16
OFFER_TTL_S_MAX = 120.0
"""A run that nobody takes holds memory so long, also if the engine that offered it is gone."""
HEAD = struct.Struct("<II")

Name: TypeAlias = Annotated[str, Meta(max_length=1024)]
ShortName: TypeAlias = Annotated[str, Meta(max_length=128)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Number: TypeAlias = Annotated[int, Meta(ge=0, le=2**53)]
DeadlineS: TypeAlias = Annotated[float, Meta(gt=0, le=3600)]
JoinedKeys: TypeAlias = Annotated[bytes, Meta(max_length=32 * KEYS_PER_MESSAGE_MAX)]
"""Keys of 32 bytes, one after the other."""
Key: TypeAlias = Annotated[bytes, Meta(min_length=32, max_length=32)]
NamespaceId: TypeAlias = Annotated[bytes, Meta(min_length=16, max_length=16)]
Fingerprint: TypeAlias = Annotated[bytes, Meta(min_length=32, max_length=32)]
Ticket: TypeAlias = Annotated[bytes, Meta(min_length=TICKET_BYTES, max_length=TICKET_BYTES)]
"""Random: who knows it may take what was offered."""
RunBlocks: TypeAlias = Annotated[int, Meta(ge=1, le=65_536)]
SectionRow: TypeAlias = tuple[ShortName, Count]
Sections: TypeAlias = Annotated[list[SectionRow], Meta(min_length=1, max_length=1024)]


class Message(Struct, forbid_unknown_fields=True, tag=True):
    """Base of all messages; the tag is the name of the class."""


# Requests -----------------------------------------------------------------------------------------


class Hello(Message):
    """First message of a session, answered by Welcome with the arena's descriptor beside it."""

    version: Count
    client: ShortName
    """What the log and `cachalot status` call this engine."""


class OpenNamespace(Message):
    """Names a namespace for the rest of the session; answered by NamespaceOpened."""

    model: Name
    weights: Name
    tokenizer: Name
    sections: Sections
    lora: Name = ""
    tenant: Name = "default"
    window_sections: Sections | None = None
    """Layout of the model's window state, where it has one."""


class Match(Message):
    """How many leading blocks are stored? Answered by Matched."""

    namespace: Count
    keys: JoinedKeys
    deadline_s: DeadlineS


class MatchPrompt(Message):
    """What of a prompt can be had? Answered by PromptMatched. `keys`: of its full blocks."""

    namespace: Count
    keys: JoinedKeys
    prompt_tokens: Count
    is_dense: bool
    """The model has no window state."""
    deadline_s: DeadlineS


class LeaseRun(Message):
    """Memory for `blocks` blocks, or for one window record; answered by RunLeased, beside it
    the reading end of its wake-ups if there is a run."""

    namespace: Count
    blocks: RunBlocks
    deadline_s: DeadlineS
    is_window: bool = False
    has_parity_room: bool = False
    """Also for the parity of the blocks; not for a window record."""


class ReleaseRun(Message):
    """The run is not needed any more; answered by Done. A fetch into it is given up."""

    run: Number


class FetchRun(Message):
    """Blocks `first_block` to the end of `keys` into a run, from its first block on; answered by
    FetchEnded when nothing more comes. Progress stands in the run's table until then."""

    run: Number
    keys: JoinedKeys
    first_block: Count
    is_by_layer: bool
    deadline_s: DeadlineS
    is_left_to_reader: bool = False
    """What blocks have lost is rebuilt by the engine; in layer order only, and into a run with room
    for parity."""


class StoreRun(Message):
    """Blocks `first_block` to the end of `keys` out of a run, which is the agent's from now on;
    answered by StoreEnded, at its end."""

    run: Number
    keys: JoinedKeys
    first_block: Count
    ttl_class: ShortName
    deadline_s: DeadlineS


class OfferRun(Message):
    """Another engine may take the run within `ttl_s`; answered by RunOffered, and the run is the
    agent's from then on."""

    run: Number
    ttl_s: Annotated[float, Meta(gt=0, le=OFFER_TTL_S_MAX)]


class TakeRun(Message):
    """A run that was offered to this agent, or to the one at `host`; answered by RunLeased, beside
    it the reading end of its wake-ups if there is a run. The other fields are the offer's."""

    namespace: Count
    ticket: Ticket
    host: Name
    namespace_id: NamespaceId
    layout: Fingerprint
    blocks: RunBlocks
    deadline_s: DeadlineS


class WithdrawOffer(Message):
    """Nobody shall take the run that was offered to this agent; answered by Done, which says by
    `is_kept` whether it was still there."""

    ticket: Ticket


class Forget(Message):
    """Removes blocks; answered by Forgotten."""

    namespace: Count
    keys: JoinedKeys
    first_block: Count
    deadline_s: DeadlineS


class AskNodes(Message):
    """What do the storage nodes say of themselves? Answered by NodeReports."""

    deadline_s: DeadlineS


class PutWindow(Message):
    """Keep the window record that lies in a run; answered by Done, then the run may be changed."""

    namespace: Count
    key: Key
    run: Number


class LookUpWindows(Message):
    """Where are the window records of these keys? Answered by WindowsFound."""

    namespace: Count
    keys: JoinedKeys
    deadline_s: DeadlineS


class FetchWindow(Message):
    """A window record into a run; answered by WindowFetched."""

    namespace: Count
    key: Key
    run: Number
    deadline_s: DeadlineS


class AskStatus(Message):
    """What the agent knows of itself; answered by StatusTold."""


# Answers ------------------------------------------------------------------------------------------


class Welcome(Message):
    version: Count
    agent: ShortName
    instance: Number
    """Random once for a process of the agent: another one is another agent."""
    roles: list[ShortName]
    arena_bytes: Number
    """0, and no descriptor beside it, for an agent without a role that needs an arena."""
    cluster_path: str
    """Absolute path of the cluster map that the agent follows."""


class NamespaceOpened(Message):
    namespace: Count


class Matched(Message):
    blocks: Count


class PromptMatched(Message):
    """See `kvstore.policy.HitPlan`. `window_host`: empty if the record is with this agent."""

    matched_blocks: Count
    hit_tokens: Count
    replay_tokens: Count
    window_anchor: Count | None
    window_host: Name
    match_s: float
    lookup_s: float


class RunLeased(Message):
    """`blocks` are as many as fit, at most those asked for; 0: there is no run. `code`: k and m of
    the shards that it has room for beside the blocks; 0 and 0 for none."""

    run: Number
    offset: Number
    blocks: Count
    code: tuple[Count, Count] = (0, 0)


class RunOffered(Message):
    """What somebody must know to take the run. `host`: where other agents reach this one."""

    ticket: Ticket
    host: Name
    namespace_id: NamespaceId


class FetchEnded(Message):
    """`blocks` leading blocks are verified, but for `left_blocks` of them, which the engine has
    asked to rebuild itself; `ended` is the value of a FetchEnd."""

    blocks: Count
    ended: ShortName
    decoded_blocks: Count = 0
    left_blocks: Count = 0
    rejected_shards: Count = 0
    elapsed_s: float = 0.0


class StoreEnded(Message):
    """What became of the blocks that were handed over. `dropped`: the queue was full."""

    stored: Count = 0
    known: Count = 0
    failed: Count = 0
    dropped: Count = 0
    degraded: Count = 0
    elapsed_s: float = 0.0


class Forgotten(Message):
    blocks: Count


class NodeReportRow(Struct, frozen=True, kw_only=True):
    node: ShortName
    address: Name
    is_alive: bool
    problem: str
    statistics: bytes
    """The STAT document of a node that answered, as it sent it; empty if it did not."""


class NodeReports(Message):
    nodes: list[NodeReportRow]


class WindowsFound(Message):
    hosts: list[str | None]
    """For each key the address of the agent that has it: empty for this one, None for nobody."""


class WindowFetched(Message):
    is_found: bool
    host: str
    elapsed_s: float


class StatusTold(Message):
    status: bytes
    """A JSON object, docs/formats/agent-socket.md."""


class Done(Message):
    is_kept: bool = True


class Refused(Message):
    """The request breaks a rule (`is_mistake`), or the agent cannot serve it."""

    what: str
    given: str = ""
    expected: str = ""
    is_mistake: bool = True


Request: TypeAlias = (
    Hello
    | OpenNamespace
    | Match
    | MatchPrompt
    | LeaseRun
    | ReleaseRun
    | FetchRun
    | StoreRun
    | OfferRun
    | TakeRun
    | WithdrawOffer
    | Forget
    | AskNodes
    | PutWindow
    | LookUpWindows
    | FetchWindow
    | AskStatus
)
Answer: TypeAlias = (
    Welcome
    | NamespaceOpened
    | Matched
    | PromptMatched
    | RunLeased
    | RunOffered
    | FetchEnded
    | StoreEnded
    | Forgotten
    | NodeReports
    | WindowsFound
    | WindowFetched
    | StatusTold
    | Done
    | Refused
)

request_decoder = msgspec.msgpack.Decoder(Request)
answer_decoder = msgspec.msgpack.Decoder(Answer)
_encoder = msgspec.msgpack.Encoder()


def pack_message(request_id: int, message: Message) -> bytes:
    """A message as it goes over the socket. Raises ValueError if it is longer than allowed."""
    body = _encoder.encode(message)
    if len(body) > MESSAGE_BYTES_MAX:
        raise ValueError(f"a message of {len(body)} bytes, at most {MESSAGE_BYTES_MAX}")
    return HEAD.pack(len(body), request_id) + body
