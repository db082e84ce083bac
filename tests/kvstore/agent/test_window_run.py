"""A window record in a run: the same bytes in one piece and cut into its sections."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.agent.window_run import gather_record, space_for_record, spread_record
from kvstore.arena.region import ArenaRegion, RunMemory
from kvstore.arena.run_layout import RunLayout
from kvstore.layout import BlockLayout, Section


@contextmanager
def run_of(sizes: list[int]) -> Iterator[RunMemory]:
    layout = BlockLayout(tuple(Section(f"w{index}", size) for index, size in enumerate(sizes)))
    descriptor = ArenaRegion.create(1 << 20)
    try:
        with ArenaRegion(descriptor) as region:
            yield region.run(8_192, RunLayout(layout, 1))
    finally:
        os.close(descriptor)


@given(sizes=st.lists(st.integers(1, 3_000), min_size=1, max_size=12), seed=st.integers(0, 9))
def test_record_is_the_same_after_it_was_gathered_and_spread(sizes: list[int], seed: int) -> None:
    sizes = [*sizes, 1_024]
    content = np.random.default_rng(seed).bytes(sum(sizes))
    with run_of(sizes) as run:
        space_for_record(run)[:] = content
        spread_record(run)
        at = 0
        for index, size in enumerate(sizes):
            assert bytes(run.section(index)) == content[at : at + size]
            at += size
        assert bytes(gather_record(run)) == content


@pytest.mark.parametrize(("sizes", "is_copied"), [([640, 640], False), ([528, 528], True)])
def test_record_is_copied_only_when_the_run_has_gaps(sizes: list[int], is_copied: bool) -> None:
    with run_of(sizes) as run:
        assert isinstance(gather_record(run), bytearray) == is_copied
