"""Sections keep their bytes and their places on the way between a run and the pool."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.block_pool import BlockPool
from engine.section_copy import SectionCopy
from kvstore.layout import BlockLayout, Section

CAPACITY = 9


@given(
    sizes=st.lists(st.integers(1, 700), min_size=1, max_size=4),
    block_ids=st.lists(st.integers(0, CAPACITY - 1), min_size=1, unique=True),
    seed=st.integers(0, 2**32 - 1),
)
def test_sections_copied_into_the_pool_stand_in_their_blocks_and_come_out_the_same(
    sizes: list[int], block_ids: list[int], seed: int
) -> None:
    sections = [Section("head", 1024), *(Section(f"s{i}", size) for i, size in enumerate(sizes))]
    layout = BlockLayout(tuple(sections))
    pool = BlockPool(block_bytes=layout.block_bytes, capacity_blocks=CAPACITY)
    pool.allocate(CAPACITY)
    copy = SectionCopy(pool, layout)
    content = np.random.default_rng(seed).integers(
        0, 256, (len(block_ids), layout.block_bytes), np.uint8
    )
    at = 0
    for number, section in enumerate(layout.sections):
        rows = np.ascontiguousarray(content[:, at : at + section.bytes])
        copy.to_pool(memoryview(rows.tobytes()), number, block_ids)
        back = bytearray(rows.nbytes)
        copy.from_pool(memoryview(back), number, block_ids)
        assert back == rows.tobytes()
        at += section.bytes
    for row, block_id in enumerate(block_ids):
        assert pool.buffer(block_id) == content[row].tobytes()
    untouched = set(range(CAPACITY)) - set(block_ids)
    assert not any(any(pool.buffer(block_id)) for block_id in untouched)
