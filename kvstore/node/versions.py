"""Which of two versions of one shard a node keeps; the reasons are in docs/formats/wire.md."""

from __future__ import annotations

from dataclasses import dataclass

from ..wire import VERSION_RACE_S, WriteOutcome

_RACE_NS = int(VERSION_RACE_S * 1e9)


@dataclass(frozen=True, slots=True)
class ShardVersion:
    """What tells one stored shard of a key from another."""

    block_xxh3: int
    shard: int


def choose_version(
    held: ShardVersion, offered: ShardVersion, *, held_created_ns: int, now_ns: int
) -> WriteOutcome:
    """KNOWN or KEPT if `held` stays, STORED if `offered` is to replace it.

    A clock that was set back makes ages negative; such a shard counts as old, because nothing but
    a new write could ever replace it otherwise.
    """
    if held == offered:
        return WriteOutcome.KNOWN
    is_racing = 0 <= now_ns - held_created_ns < _RACE_NS
    if is_racing and held.block_xxh3 > offered.block_xxh3:
        return WriteOutcome.KEPT
    return WriteOutcome.STORED
