"""In which order the shards of a run are asked for, if its first sections are wanted first.

Pure decisions. A *unit* is what is asked for at once: consecutive blocks of one span.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from ..arena.run_layout import cut_sections
from ..layout import BlockLayout, shard_bytes

SLOW_MIN_S = 0.02
SLOW_FACTOR = 5.0


class Ask(NamedTuple):
    """Ask for `shard` of the blocks of `unit`. Asks compare as they are to be made: by the first
    section that a shard has bytes of, then by unit."""

    section: int
    unit: int
    shard: int


class SectionShards(NamedTuple):
    """Which data shards have bytes of which sections."""

    shards_by_section: tuple[tuple[int, ...], ...]
    first_section_of_shard: tuple[int, ...]
    """For each data shard; the last section for one that is only the padding of a block."""
    sections_of_shard: tuple[tuple[int, ...], ...]

    @property
    def first_shards(self) -> tuple[int, ...]:
        """The shards of the first section, which are asked for before all others."""
        return self.shards_by_section[0]


@lru_cache(maxsize=64)
def find_section_shards(layout: BlockLayout, k: int) -> SectionShards:
    """Where the sections of `layout` lie under a code of k data shards."""
    size = shard_bytes(layout.block_bytes, k)
    last = len(layout.sections) - 1
    sections_of_shard = tuple(
        tuple(piece.section for piece in cut_sections(layout, j * size, (j + 1) * size))
        for j in range(k)
    )
    return SectionShards(
        shards_by_section=tuple(
            tuple(j for j in range(k) if section in sections_of_shard[j])
            for section in range(last + 1)
        ),
        first_section_of_shard=tuple(
            sections[0] if sections else last for sections in sections_of_shard
        ),
        sections_of_shard=sections_of_shard,
    )


def plan_layer_order(units: Iterable[int], section_of_shard: Sequence[int]) -> list[Ask]:
    """All data shards of `units`, in the order of the first section they hold, unit by unit within
    a section."""
    return sorted(
        Ask(section, unit, shard)
        for unit in units
        for shard, section in enumerate(section_of_shard)
    )


def find_slow(delays_s: Sequence[float | None]) -> list[bool]:
    """Which of some nodes are so slow, or down (None), that what only they have is not waited for.

    More patient than `choose_shards`: to do without a node costs the order of whole units here,
    where it costs a batch no more than the decoding of one shard.
    """
    known_s = sorted(delay for delay in delays_s if delay is not None)
    if not known_s:
        return [True] * len(delays_s)
    slow_s = max(SLOW_MIN_S, SLOW_FACTOR * known_s[len(known_s) // 2])
    return [delay is None or delay > slow_s for delay in delays_s]


def count_leading(found: Sequence[object], expected: Sequence[object]) -> int:
    """How many values at the beginning of both are equal."""
    if found == expected:
        return len(expected)
    pairs = zip(found, expected, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(found), len(expected)))
