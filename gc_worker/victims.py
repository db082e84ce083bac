"""A batch of victims on its way out, as records: what the journal keeps and the nodes are told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore import wire
from kvstore.wire import EvictReason

from .cluster_link import ClusterLink
from .columns import TargetColumns
from .headers import Headers

BATCH_VICTIMS_MAX = 1024
"""Victims that go together; as many as a request may name."""
WITHDRAW_SLACK_S = 2
"""Nodes that saw the same use wrote it down by clocks of their own, not further apart than this."""
assert BATCH_VICTIMS_MAX <= wire.KEYS_PER_REQUEST_MAX

VICTIM = np.dtype(
    [
        ("location", "<u8"),
        ("generation", "<u8"),
        ("key", "V32"),
        ("anchor", "V32"),
        ("block_xxh3", "<u8"),
        ("used_until_s", "<u4"),
        ("slot_bytes", "<u4"),
        ("reason", "u1"),
        ("zero", "V7"),
    ]
)
assert VICTIM.itemsize == 104


def make_victims(
    columns: TargetColumns, rows: NDArray[np.int64], reasons: NDArray[np.uint8], found: Headers
) -> NDArray[Any]:
    """Records (dtype VICTIM) of those of `rows` whose headers were found."""
    victims = np.zeros(len(found.rows), VICTIM)
    kept = rows[found.rows]
    victims["location"] = columns.location[kept]
    victims["generation"] = columns.generation[kept]
    victims["used_until_s"] = columns.last_used_s[kept]
    victims["slot_bytes"] = columns.slot_bytes[kept]
    victims["reason"] = reasons[found.rows]
    for name in ("key", "anchor", "block_xxh3"):
        victims[name] = found.headers[name]
    return victims


def pack_evict(victims: NDArray[Any]) -> bytes:
    """Body of the EVICT for them."""
    items = np.zeros(len(victims), wire.EVICT_ITEM)
    for name in ("location", "generation", "used_until_s", "reason"):
        items[name] = victims[name]
    return items.tobytes()


def make_withdrawals(victims: NDArray[Any]) -> NDArray[Any]:
    """What to tell the peers (dtype WITHDRAW_ITEM)."""
    items = np.zeros(len(victims), wire.WITHDRAW_ITEM)
    for name in ("key", "block_xxh3", "reason"):
        items[name] = victims[name]
    until_s = victims["used_until_s"].astype(np.uint64) + WITHDRAW_SLACK_S
    items["used_until_s"] = np.minimum(until_s, 0xFFFFFFFF)
    return items


@dataclass(frozen=True, slots=True)
class VictimGroup:
    """Victims of one code group: their rows in the batch, and the targets of their other shards."""

    rows: NDArray[np.int64]
    peers: tuple[str, ...]


def group_victims(link: ClusterLink, own_target: str, victims: NDArray[Any]) -> list[VictimGroup]:
    """The victims by the code group that their anchors are placed in.

    Those that the map of today places elsewhere have no peers: whoever has other shards of them
    sees for itself that they age, and shards in the right place are none of our business.
    """
    rows_by_group: dict[tuple[str, ...], list[int]] = {}
    for row, anchor in enumerate(victims["anchor"].tolist()):
        targets = link.place(anchor).group.targets
        peers = tuple(name for name in targets if name != own_target)
        is_ours = len(peers) < len(targets)
        rows_by_group.setdefault(peers if is_ours else (), []).append(row)
    return [VictimGroup(np.array(rows, np.int64), peers) for peers, rows in rows_by_group.items()]


def reason_name(reason: int) -> str:
    """The name of a reason as statistics have it."""
    return EvictReason(reason).name.lower()
