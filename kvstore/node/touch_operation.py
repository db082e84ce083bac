"""TOUCH: shards were used elsewhere in their code group, and so count as used here too.

A fetch reads from one node fewer than hold the block, so a node may not know of a use.
"""

from __future__ import annotations

from collections.abc import Sequence

from .. import wire
from .answers import Request, answer
from .effects import Operation, Send
from .node import Node
from .segment import ABSENT
from .target import Target


def touch(node: Node, target: Target, request: Request) -> Operation:
    """Answer a TOUCH."""
    items = wire.parse_records(request.body, wire.TOUCH_ITEM, request.header.count)
    is_here = touch_keys(target, items["key"].tolist(), items["last_used_s"].tolist())
    target.statistics.touched += sum(is_here)
    yield Send([answer(node, request, body=bytes(is_here), count=len(items))])


def touch_keys(target: Target, keys: Sequence[bytes], used_s: Sequence[int]) -> list[bool]:
    """Let shards count as used at these Unix times, if that makes them younger; which are here.

    A time in the future counts as now, so that nothing can be made to stay for ever.
    """
    now_s = target.clock.unix_ns() // 1_000_000_000
    locations = target.index.find(keys)
    for location, given_s in zip(locations, used_s, strict=True):
        if location == ABSENT:
            continue
        segment, slot = target.index.resolve(location)
        last_used_s = segment.columns.last_used_s
        last_used_s[slot] = max(int(last_used_s[slot]), min(given_s, now_s))
    return [location != ABSENT for location in locations]
