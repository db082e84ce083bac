"""Where everything lies in a run: sections apart from each other, blocks next to one another."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.arena.run_layout import (
    RUN_ALIGN_BYTES,
    RUN_BLOCKS_MAX,
    RUN_PIECES_MAX,
    SECTION_ALIGN_BYTES,
    RunCode,
    RunLayout,
    cut_sections,
)
from kvstore.errors import InvalidArgument
from kvstore.layout import BlockLayout, shard_bytes
from tests.kvstore.runs import ODD, PRIMES, SMOLLM2, V41_FLASH, layout_of

layouts = (
    st.lists(st.integers(1, 3000), min_size=1, max_size=40)
    .filter(lambda sizes: sum(sizes) >= 1024)
    .map(lambda sizes: layout_of(*sizes))
)


@given(layouts, st.integers(1, 300))
def test_sections_lie_apart_on_cache_lines_behind_the_table(
    layout: BlockLayout, blocks: int
) -> None:
    run = RunLayout(layout, blocks)
    ranges = [(0, run.table_bytes)]
    for index, section in enumerate(layout.sections):
        start, end = run.section_range(index)
        assert end - start == section.bytes * blocks
        assert start % SECTION_ALIGN_BYTES == 0
        ranges.append((start, end))
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(ranges))
    assert ranges[-1][1] <= run.run_bytes
    assert run.run_bytes % RUN_ALIGN_BYTES == run.table_bytes % RUN_ALIGN_BYTES == 0


@given(layouts, st.integers(1, 50))
def test_blocks_of_a_section_follow_one_another(layout: BlockLayout, blocks: int) -> None:
    run = RunLayout(layout, blocks)
    for index, section in enumerate(layout.sections):
        start, end = run.section_range(index)
        places = [run.place(index, block) for block in range(blocks)]
        assert places == list(range(start, end, section.bytes))


@given(layouts, st.data())
def test_a_cut_covers_each_byte_once_and_in_order(layout: BlockLayout, data: st.DataObject) -> None:
    size = layout.block_bytes
    start = data.draw(st.integers(0, size + 100))
    end = data.draw(st.integers(start, size + 200))
    begins = list(itertools.accumulate((s.bytes for s in layout.sections), initial=0))
    covered: list[int] = []
    for piece in cut_sections(layout, start, end):
        assert piece.offset >= 0
        assert piece.bytes > 0
        assert piece.offset + piece.bytes <= layout.sections[piece.section].bytes
        first = begins[piece.section] + piece.offset
        covered += range(first, first + piece.bytes)
    assert covered == list(range(start, min(end, size)))
    assert RunLayout(layout, 1).cut(start, end) == cut_sections(layout, start, end)


@given(layouts)
def test_the_table_has_a_row_for_each_piece_that_may_be_filled(layout: BlockLayout) -> None:
    run = RunLayout(layout, 7)
    assert run.piece_row_bytes >= 64 + 8 * len(layout.sections)
    assert run.piece_row_bytes % 64 == 0
    assert 64 + RUN_PIECES_MAX * run.piece_row_bytes <= run.table_bytes


@pytest.mark.parametrize(
    ("layout", "blocks", "table_bytes", "offsets", "run_bytes"),
    [
        (V41_FLASH, 1, 4096, (4096, 26_880, 49_664, 72_448), 118_784),
        (V41_FLASH, 600, 4096, (4096, 13_674_496, 27_344_896, 41_015_296), 68_358_144),
        (SMOLLM2, 2, 8192, tuple(8192 + 196_608 * s for s in range(30)), 5_906_432),
    ],
)
def test_offsets_of_known_layouts_are_those_of_the_format_page(
    layout: BlockLayout, blocks: int, table_bytes: int, offsets: tuple[int, ...], run_bytes: int
) -> None:
    run = RunLayout(layout, blocks)
    assert (run.table_bytes, run.section_offsets, run.run_bytes) == (
        table_bytes,
        offsets,
        run_bytes,
    )


def test_sections_of_odd_sizes_begin_at_the_next_cache_line() -> None:
    run = RunLayout(ODD, 3)
    at = run.table_bytes
    for offset, size in zip(run.section_offsets, PRIMES, strict=True):
        assert offset == -(-at // 64) * 64
        at = offset + 3 * size


@pytest.mark.parametrize("blocks", [0, -1, RUN_BLOCKS_MAX + 1, True, 2.0])
def test_a_run_has_a_sensible_number_of_blocks(blocks: int) -> None:
    with pytest.raises(InvalidArgument, match="blocks of a run: given"):
        RunLayout(V41_FLASH, blocks)


@given(layouts, st.integers(1, 300), st.integers(1, 20), st.integers(1, 12))
def test_room_for_parity_lies_behind_the_sections_and_moves_none(
    layout: BlockLayout, blocks: int, k: int, m: int
) -> None:
    code = RunCode(k, m)
    run, without = RunLayout(layout, blocks, code), RunLayout(layout, blocks)
    assert run.section_offsets == without.section_offsets
    ranges = [run.section_range(-1), run.parity_range(0, blocks)]
    ranges.append((run.losses_offset, run.losses_offset + blocks * code.loss_bytes))
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(ranges))
    assert ranges[-1][1] <= run.run_bytes
    assert run.parity_offset % SECTION_ALIGN_BYTES == 0
    assert run.losses_offset % 8 == code.loss_bytes % 8 == 0
    assert run.parity_range(1, 2)[1] - run.parity_range(1, 2)[0] == m * shard_bytes(
        layout.block_bytes, k
    )


def test_room_for_parity_of_v41_flash_lies_where_the_format_says() -> None:
    run = RunLayout(V41_FLASH, 600, RunCode(10, 2))
    assert run.parity_offset == 68_356_096
    assert run.losses_offset == 68_356_096 + 600 * 22_784 == 82_026_496
    assert RunCode(10, 2).loss_bytes == 112
    assert run.run_bytes == 82_096_128
