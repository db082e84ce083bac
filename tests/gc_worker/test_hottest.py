"""Hottest first in bounded memory: the same order as sorting everything, whatever the band."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from gc_worker.hottest import Band, HottestRows, walk_hottest, walk_slots
from gc_worker.verification import Sampler
from kvstore import wire
from kvstore.node.segment import LOCATION_BITS


class Slots:
    """What a node answers to SCAN: for each segment the last use of each slot, None where free."""

    def __init__(self, segments: dict[int, list[int | None]]) -> None:
        self._segments = segments
        self.scans = 0

    async def scan(
        self, segment: int, first_slot: int, slots_max: int
    ) -> tuple[wire.ScanHead, NDArray[Any]]:
        self.scans += 1
        numbers = sorted(n for n in self._segments if n >= segment)
        if numbers and numbers[0] == segment and first_slot >= len(self._segments[segment]):
            numbers.pop(0)
        if not numbers:
            return wire.ScanHead(0, 0, 0, 0, 0, 0, is_end=True), np.zeros(0, wire.SCAN_ROW)
        number = numbers[0]
        start = first_slot if number == segment else 0
        slots = self._segments[number][start : start + slots_max]
        rows = np.zeros(len(slots), wire.SCAN_ROW)
        for i, used_s in enumerate(slots):
            if used_s is not None:
                rows[i]["status"], rows[i]["last_used_s"] = 1, used_s
                rows[i]["generation"] = 1 + (number << 20) + start + i
        end = start + len(slots)
        is_whole = end == len(self._segments[number])
        following = numbers[1] if is_whole and len(numbers) > 1 else number
        head = wire.ScanHead(
            number,
            start,
            len(slots),
            64,
            following,
            0 if is_whole else end,
            is_end=is_whole and len(numbers) == 1,
        )
        return head, rows

    def in_order(self) -> list[tuple[int, int]]:
        """(last use, location) of every shard, hottest first."""
        shards = [
            (used_s, (number << LOCATION_BITS) + slot)
            for number, slots in self._segments.items()
            for slot, used_s in enumerate(slots)
            if used_s is not None
        ]
        return sorted(shards, key=lambda shard: (-shard[0], shard[1]))


segments = st.dictionaries(
    st.integers(0, 9),
    st.lists(st.one_of(st.none(), st.integers(0, 6)), min_size=1, max_size=30),
    max_size=4,
)


async def bands_of(slots: Slots, band_rows_max: int, slots_per_scan: int) -> list[Band]:
    return [
        band
        async for band in walk_hottest(
            slots.scan, band_rows_max=band_rows_max, slots_per_scan=slots_per_scan
        )
    ]


@given(segments, st.integers(1, 12), st.integers(1, 40))
def test_bands_give_every_shard_once_in_the_order_of_its_last_use(
    given_segments: dict[int, list[int | None]], band_rows_max: int, slots_per_scan: int
) -> None:
    slots = Slots(given_segments)
    bands = asyncio.run(bands_of(slots, band_rows_max, slots_per_scan))
    assert all(0 < len(band) <= band_rows_max for band in bands)
    found = [
        shard
        for band in bands
        for shard in zip(band.last_used_s.tolist(), band.location.tolist(), strict=True)
    ]
    assert found == slots.in_order()


def test_rows_are_dropped_early_when_they_cannot_belong_to_the_band() -> None:
    hottest = HottestRows(10, None)
    for first in range(0, 10_000, 100):
        location = np.arange(first, first + 100, dtype=np.int64)
        used_s = (location % 997).astype(np.uint32)
        hottest.add(Band(location, location.astype(np.uint64), used_s))
        assert sum(len(piece) for piece in hottest._pieces) <= 20 + 100
    assert hottest.build().last_used_s.tolist() == [996] * 10


async def test_walk_ends_when_a_node_does_not_get_on() -> None:
    head = wire.ScanHead(3, 0, 1, 64, 0, 0, is_end=False)

    async def scan(*_: int) -> tuple[wire.ScanHead, NDArray[Any]]:
        return head, np.zeros(1, wire.SCAN_ROW)

    assert len([one async for one in walk_slots(scan)]) == 1


@given(st.integers(0, 40), st.integers(1, 20), st.integers(0, 2**32))
def test_sampler_draws_different_rows_and_as_many_as_it_may(
    rows: int, count: int, seed: int
) -> None:
    sampler = Sampler(count, seed)
    for at in range(0, rows, 7):
        location = np.arange(at, min(at + 7, rows), dtype=np.int64)
        sampler.add(Band(location, location.astype(np.uint64), location.astype(np.uint32)))
    drawn = sampler.build().location.tolist()
    assert len(set(drawn)) == len(drawn) == min(rows, count)
    assert set(drawn) <= set(range(rows))


def test_sampler_gives_each_row_an_equal_chance() -> None:
    counts = np.zeros(20)
    for seed in range(2000):
        sampler = Sampler(5, seed)
        for at in (0, 3, 11):
            location = np.arange(at, {0: 3, 3: 11, 11: 20}[at], dtype=np.int64)
            sampler.add(Band(location, location.astype(np.uint64), location.astype(np.uint32)))
        counts[sampler.build().location] += 1
    # 2,000 draws of 5 of 20: 500 each, standard deviation 19.
    assert (np.abs(counts - 500) < 100).all()
