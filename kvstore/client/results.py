"""What the client's operations return. A miss and a refusal are values, never errors."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class FetchEnd(Enum):
    """Why a fetch delivered the run that it delivered."""

    COMPLETE = "complete"
    """Every block that was asked for."""
    TOO_FEW_SHARDS = "too few shards"
    """A block had fewer than k good shards on the nodes that answered."""
    DEADLINE = "deadline"
    """Time ran out before the next block had arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchResult:
    """`blocks` leading blocks lie verified in the caller's buffers; what is in the buffers behind
    them is undefined."""

    blocks: int
    ended: FetchEnd
    decoded_blocks: int = 0
    """Blocks of the run that were rebuilt from parity."""
    left_blocks: int = 0
    """Blocks of the run that its reader is to rebuild and verify; of fetches that leave it that."""
    rejected_shards: int = 0
    """Shards that arrived and failed a check."""
    elapsed_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult:
    """Every block that was given is counted once: stored, known or failed."""

    stored: int
    known: int
    """Blocks that the cluster had already, from this or another writer."""
    failed: int
    """Blocks that too few nodes took: they are down, full, or were too slow."""
    degraded: int = 0
    """Of `stored`: readable, but on fewer nodes than the map's `write_acks`."""
    elapsed_s: float = 0.0


@dataclass(slots=True)
class ClientCounters:
    """What a client has done since it was opened."""

    blocks_fetched: int = 0
    blocks_decoded: int = 0
    blocks_left: int = 0
    """Fetched without a data shard, for the reader of the run to rebuild."""
    blocks_saved: int = 0
    shards_rejected: int = 0
    shards_missing: int = 0
    shards_failed: int = 0
    """Requests for a shard that ended in an error of the node."""
    hedges: int = 0
    """Times that further shards were asked because the first ones were slow or missing."""
