"""What the agent asks of its workers: jobs, and the messages that carry them to one of the workers.

    u32 length of what follows | u32 job number | msgpack of one of the structs below

A descriptor of the run's waker goes beside a FetchPiece (SCM_RIGHTS). Both ends are processes
of one agent and of one version: there is no version number and no compatibility to keep.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import TypeAlias

import msgspec
from msgspec import Struct

from ..agent_messages import HEAD, MESSAGE_BYTES_MAX
from ..arena.run_layout import RunCode, RunLayout
from ..client.results import ClientCounters
from ..errors import InvalidArgument
from ..key import KEY_BYTES, Namespace
from ..layout import BlockLayout, Section


class WorkerKind(Enum):
    """What a worker is for. Each could do both, but a fetch must not wait behind a save."""

    FETCH = "fetch"
    STORE = "store"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunJob:
    """What a fetch and a save have in common: blocks `first_block` to the end of the chain `keys`
    (32 bytes each, joined) in a run of `run_blocks` blocks at `run_offset` of the arena, from its
    first block on. `owner`: number of the session that asked for it.

    Raises InvalidArgument if that is no range of blocks, or more than the run has.
    """

    owner: int
    namespace: Namespace
    keys: bytes
    first_block: int
    run_offset: int
    run_blocks: int
    deadline_s: float
    code: RunCode | None = None
    """Of the parity that the run has room for."""

    def __post_init__(self) -> None:
        if len(self.keys) % KEY_BYTES:
            raise InvalidArgument(
                "keys", given=f"{len(self.keys)} bytes", expected=f"whole keys of {KEY_BYTES} bytes"
            )
        if not 0 <= self.first_block <= self.end_block:
            raise InvalidArgument(
                "first_block", given=self.first_block, expected=f"0 to {self.end_block}"
            )
        if self.blocks > self.run_blocks:
            raise InvalidArgument(
                "keys",
                given=f"{self.blocks} blocks",
                expected=f"at most {self.run_blocks}, what the run has",
            )

    @property
    def run_layout(self) -> RunLayout:
        return RunLayout(self.namespace.layout, self.run_blocks, self.code)

    @property
    def end_block(self) -> int:
        return len(self.keys) // KEY_BYTES

    @property
    def blocks(self) -> int:
        return self.end_block - self.first_block


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchJob(RunJob):
    """Blocks from the nodes into a run. Raises InvalidArgument, too, if what is lost is to be left
    to the reader of a run that has no room for parity (`code`), or not in layer order."""

    is_by_layer: bool
    is_left_to_reader: bool = False

    def __post_init__(self) -> None:
        super(FetchJob, self).__post_init__()
        if self.is_left_to_reader and (self.code is None or not self.is_by_layer):
            raise InvalidArgument(
                "is_left_to_reader",
                given="true",
                expected="false, or a fetch in layer order into a run with room for parity",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreJob(RunJob):
    """Blocks out of a run to the nodes."""

    ttl_class: str


class NamespaceSpec(Struct, frozen=True, array_like=True):
    """A Namespace as it is sent. Equal ones are equal, so a worker builds each once."""

    model: str
    weights: str
    tokenizer: str
    lora: str
    tenant: str
    sections: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, namespace: Namespace) -> NamespaceSpec:
        return cls(
            model=namespace.model,
            weights=namespace.weights,
            tokenizer=namespace.tokenizer,
            lora=namespace.lora,
            tenant=namespace.tenant,
            sections=tuple((one.name, one.bytes) for one in namespace.layout.sections),
        )

    def build(self) -> Namespace:
        return Namespace(
            model=self.model,
            weights=self.weights,
            tokenizer=self.tokenizer,
            lora=self.lora,
            tenant=self.tenant,
            layout=BlockLayout(tuple(Section(name, size) for name, size in self.sections)),
        )


# To a worker --------------------------------------------------------------------------------------


class Order(Struct, tag=True, kw_only=True):
    """Base of all messages to a worker; the tag is the name of the class."""


class FetchPiece(Order, kw_only=True):
    """Blocks `first_block` to the end of `keys` to blocks `place`.. of the run, and their progress
    into row `piece` of the run's table; answered by FetchDone. `keys` begins at a span border of
    the chain, from which its blocks are counted. The run's waker goes with it."""

    namespace: NamespaceSpec
    keys: bytes
    first_block: int
    run_offset: int
    run_blocks: int
    place: int
    piece: int
    is_by_layer: bool
    deadline_s: float
    is_left_to_reader: bool = False
    code: RunCode | None = None
    """Of the parity that the run has room for."""


class SavePiece(Order, kw_only=True):
    """Blocks `first_block` to the end of the chain `keys` out of blocks 0.. of the run; answered by
    SaveDone."""

    namespace: NamespaceSpec
    keys: bytes
    first_block: int
    run_offset: int
    run_blocks: int
    ttl_class: str
    deadline_s: float


class CancelJob(Order):
    """The job of this number is to end; it is answered like any other, once nothing is written any
    more. Nothing happens if it has ended."""


class Ping(Order):
    """Is anybody there? Answered by Pong, with the same number."""


class Finish(Order):
    """No more jobs: end, once the nodes have what was sent to them. Answered by nothing."""


# From a worker ------------------------------------------------------------------------------------


class WorkerUsage(Struct, array_like=True):
    """What a worker has used and done since it was started."""

    cpu_s: float = 0.0
    jobs: int = 0
    fetched_bytes: int = 0
    saved_bytes: int = 0
    counters: ClientCounters = msgspec.field(default_factory=ClientCounters)

    def plus(self, other: WorkerUsage) -> WorkerUsage:
        """Of two workers together."""
        mine, others = asdict(self.counters), asdict(other.counters)
        return WorkerUsage(
            cpu_s=self.cpu_s + other.cpu_s,
            jobs=self.jobs + other.jobs,
            fetched_bytes=self.fetched_bytes + other.fetched_bytes,
            saved_bytes=self.saved_bytes + other.saved_bytes,
            counters=ClientCounters(**{name: mine[name] + others[name] for name in mine}),
        )


class Report(Struct, tag=True, kw_only=True):
    """Base of all messages from a worker."""


class Started(Report):
    """First message: the map is read, the arena is mapped, jobs may come."""


class StartFailed(Report, kw_only=True):
    """Only message of a worker that cannot serve; it ends."""

    problem: str


class FetchDone(Report, kw_only=True):
    """`blocks` leading blocks of the piece are verified; `ended` is the value of a FetchEnd.
    Nothing of the run is written any more."""

    blocks: int
    ended: str
    decoded_blocks: int
    left_blocks: int
    rejected_shards: int
    usage: WorkerUsage


class SaveDone(Report, kw_only=True):
    """Each block counts once. Nothing of the run is read any more."""

    stored: int
    known: int
    failed: int
    degraded: int
    usage: WorkerUsage


class Pong(Report, kw_only=True):
    usage: WorkerUsage


OrderMessage: TypeAlias = FetchPiece | SavePiece | CancelJob | Ping | Finish
ReportMessage: TypeAlias = Started | StartFailed | FetchDone | SaveDone | Pong

order_decoder = msgspec.msgpack.Decoder(OrderMessage)
report_decoder = msgspec.msgpack.Decoder(ReportMessage)
_encoder = msgspec.msgpack.Encoder()


def pack(number: int, message: Order | Report) -> bytes:
    """A message as it goes over the channel. Raises ValueError if it is longer than allowed."""
    body = _encoder.encode(message)
    if len(body) > MESSAGE_BYTES_MAX:
        raise ValueError(f"a message of {len(body)} bytes, at most {MESSAGE_BYTES_MAX}")
    return HEAD.pack(len(body), number) + body


def split_keys(keys: bytes) -> list[bytes]:
    """The keys of a chain, one by one."""
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
