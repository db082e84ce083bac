"""Rows of SCAN answers become columns."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from gc_worker.columns import scan_columns
from kvstore import wire
from kvstore.node.segment import LOCATION_BITS
from kvstore.node.slot import HEADER_BYTES

PAYLOAD_BYTES = {0: 512, 3: 4096, 4: 64}


class ScriptedTarget:
    """Segments of slots, in use or free, that are scanned as a node does it."""

    def __init__(self, segments: dict[int, list[bool]]) -> None:
        self.segments = segments
        self.asked: list[tuple[int, int]] = []

    async def scan(
        self, segment: int, first_slot: int, slots_max: int
    ) -> tuple[wire.ScanHead, NDArray[Any]]:
        self.asked.append((segment, first_slot))
        number = min((n for n in self.segments if n >= segment), default=None)
        if number is None:
            return wire.ScanHead(0, 0, 0, 0, 0, 0, is_end=True), np.zeros(0, wire.SCAN_ROW)
        first = first_slot if number == segment else 0
        used = self.segments[number][first : first + slots_max]
        rows = np.zeros(len(used), wire.SCAN_ROW)
        rows["status"] = used
        rows["generation"] = [self.generation(number, first + i) for i in range(len(used))]
        rows["block_index"] = np.arange(first, first + len(used))
        end = first + len(used)
        later = min((n for n in self.segments if n > number), default=None)
        if end < len(self.segments[number]):
            following, slot = number, end
        else:
            following, slot = later or 0, 0
        is_end = end >= len(self.segments[number]) and later is None
        head = wire.ScanHead(
            number, first, len(used), PAYLOAD_BYTES[number], following, slot, is_end=is_end
        )
        return head, rows

    @staticmethod
    def generation(number: int, slot: int) -> int:
        return number * 1000 + slot + 1


@given(
    st.fixed_dictionaries(
        {}, optional={n: st.lists(st.booleans(), min_size=1, max_size=20) for n in PAYLOAD_BYTES}
    ),
    st.integers(1, 8),
)
async def test_columns_have_every_shard_once(
    segments: dict[int, list[bool]], slots_per_scan: int
) -> None:
    target = ScriptedTarget(segments)
    columns = await scan_columns(target.scan, ("chat",), slots_per_scan=slots_per_scan)
    expected = [
        (number, slot)
        for number, used in sorted(segments.items())
        for slot, u in enumerate(used)
        if u
    ]
    assert columns.location.tolist() == [(n << LOCATION_BITS) | slot for n, slot in expected]
    assert columns.generation.tolist() == [target.generation(*place) for place in expected]
    assert columns.slot_bytes.tolist() == [PAYLOAD_BYTES[n] + HEADER_BYTES for n, _ in expected]
    assert columns.block_index.tolist() == [slot for _, slot in expected]
    assert len(set(target.asked)) == len(target.asked)
    some = np.arange(len(columns))[::-2]
    assert columns.take(some).location.tolist() == columns.location[some].tolist()


async def test_scan_ends_when_a_node_does_not_get_on() -> None:
    calls = 0

    async def stuck(segment: int, first: int, _: int) -> tuple[wire.ScanHead, NDArray[Any]]:
        nonlocal calls
        calls += 1
        return wire.ScanHead(segment, first, 0, 64, segment, first, is_end=False), np.zeros(
            0, wire.SCAN_ROW
        )

    assert len(await scan_columns(stuck, ())) == 0
    assert calls == 1
