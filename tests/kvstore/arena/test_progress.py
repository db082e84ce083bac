"""The progress table: golden bytes, counts that only grow, and readers that never run ahead."""

import itertools
import os
import struct
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.arena.progress import (
    ProgressReader,
    ProgressWriter,
    begin_table,
    clear_table,
    has_table,
)
from kvstore.arena.region import ArenaRegion, RunMemory
from kvstore.arena.run_layout import RUN_PIECES_MAX, RunLayout
from kvstore.arena.wakeup import make_wakeup
from kvstore.errors import StoreError
from tests.kvstore.runs import ODD, V41_FLASH, PlainRun, layout_of

# The example of docs/formats/arena.md: 600 blocks of V4.1-Flash, filled by two processes.
GOLDEN_ROWS = {
    0: "4352554e010000000200000004000000",
    64: "00000000400100000100000040010000",
    128: "4001000000000000400100000000000040010000000000004001000000000000",
    192: "40010000580200000000000000000000",
    256: "c0000000000000008000000000000000 40000000000000000000000000000000",
}


def test_bytes_are_those_of_the_format_page() -> None:
    run = PlainRun(V41_FLASH, 600)
    begin_table(run.memory, [(0, 320), (320, 600)])
    first, second = ProgressWriter(run.memory, 0), ProgressWriter(run.memory, 1)
    for section in range(4):
        first.set_ready(section, 320)
    first.end(320)
    for section, blocks in enumerate((192, 128, 64)):
        second.set_ready(section, blocks)
    expected = bytearray(run.layout.table_bytes)
    for at, text in GOLDEN_ROWS.items():
        data = bytes.fromhex(text)
        expected[at : at + len(data)] = data
    assert run.area[: run.layout.table_bytes].tobytes() == bytes(expected)
    assert run.area[run.layout.table_bytes :].min() == 0xA5, "nothing but the table is written"
    reader = ProgressReader(run.memory)
    assert [reader.ready_blocks(section) for section in range(4)] == [512, 448, 384, 320]
    assert (reader.whole_blocks, reader.is_ended) == (320, False)
    second.end(0)
    assert reader.is_ended


@st.composite
def fetches(draw: st.DrawFn) -> tuple[list[tuple[int, int]], list[list[int]]]:
    """Pieces of a run, and for each piece and section how many of its blocks are ready."""
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=RUN_PIECES_MAX))
    ends = list(itertools.accumulate(sizes, initial=0))
    pieces = list(itertools.pairwise(ends))
    ready = [draw(st.lists(st.integers(0, n), min_size=4, max_size=4)) for n in sizes]
    return pieces, ready


@given(fetches())
def test_leading_blocks_are_counted_over_the_pieces(
    fetch: tuple[list[tuple[int, int]], list[list[int]]],
) -> None:
    pieces, ready = fetch
    run = PlainRun(layout_of(256, 256, 256, 256), pieces[-1][1])
    begin_table(run.memory, pieces)
    for number, counts in enumerate(ready):
        writer = ProgressWriter(run.memory, number)
        for section, blocks in enumerate(counts):
            writer.set_ready(section, blocks)
    reader = ProgressReader(run.memory)
    totals = []
    for section in range(4):
        flags = [
            block < counts[section]
            for (first, end), counts in zip(pieces, ready, strict=True)
            for block in range(end - first)
        ]
        totals.append([*flags, False].index(False))
        assert reader.ready_blocks(section) == totals[-1]
    assert reader.whole_blocks == min(totals)


def test_a_count_beyond_the_piece_is_cut_to_it() -> None:
    """Whoever maps the run can write anything there: no reader looks behind the run's blocks."""
    run = PlainRun(V41_FLASH, 10)
    begin_table(run.memory, [(0, 10)])
    run.memory.view[128:136] = struct.pack("<Q", 2**64 - 1)
    assert ProgressReader(run.memory).ready_blocks(0) == 10


def test_a_count_never_falls() -> None:
    run = PlainRun(V41_FLASH, 10)
    begin_table(run.memory, [(0, 10)])
    writer = ProgressWriter(run.memory, 0)
    writer.set_ready(2, 5)
    run.memory.view[128:160] = bytes(32)
    writer.set_ready(2, 5)
    with pytest.raises(AssertionError):
        writer.set_ready(2, 4)


@pytest.mark.parametrize(
    ("at", "value"),
    [(0, 1), (4, 2), (8, 0), (8, RUN_PIECES_MAX + 1), (12, 3)],
    ids=["magic", "version", "no piece", "too many pieces", "other sections"],
)
def test_what_is_no_table_is_not_read(at: int, value: int) -> None:
    run = PlainRun(V41_FLASH, 10)
    begin_table(run.memory, [(0, 10)])
    ProgressReader(run.memory)
    run.memory.view[at : at + 4] = struct.pack("<I", value)
    with pytest.raises(StoreError, match="no progress table of 4 sections"):
        ProgressReader(run.memory)


def test_a_head_that_is_half_written_is_no_table_yet() -> None:
    run = PlainRun(V41_FLASH, 10)
    begin_table(run.memory, [(0, 10)])
    whole = bytes(run.memory.view[:64])
    clear_table(run.memory)
    for end in range(4, 64):
        run.memory.view[4:end] = whole[4:end]
        assert not has_table(run.memory)
    run.memory.view[:4] = whole[:4]
    assert has_table(run.memory)
    ProgressReader(run.memory)


def test_a_table_that_was_cleared_is_none_and_begins_anew() -> None:
    run = PlainRun(V41_FLASH, 10)
    begin_table(run.memory, [(0, 10)])
    ProgressWriter(run.memory, 0).set_ready(0, 10)
    clear_table(run.memory)
    with pytest.raises(StoreError):
        ProgressReader(run.memory)
    begin_table(run.memory, [(0, 4), (4, 10)])
    reader = ProgressReader(run.memory)
    assert [reader.ready_blocks(section) for section in range(4)] == [0, 0, 0, 0]
    assert not reader.is_ended


@pytest.mark.parametrize("pieces", [[], [(0, 0)], [(0, 4), (5, 10)], [(0, 11)], [(0, 1)] * 17])
def test_pieces_lie_one_behind_the_other(pieces: list[tuple[int, int]]) -> None:
    run = PlainRun(V41_FLASH, 10)
    with pytest.raises(AssertionError):
        begin_table(run.memory, pieces)


WRITER = """
import sys
from kvstore.arena.progress import ProgressWriter
from kvstore.arena.region import ArenaRegion
from kvstore.arena.run_layout import RunLayout
from kvstore.arena.wakeup import Waker
from tests.kvstore.runs import ODD

region = ArenaRegion(int(sys.argv[1]))
run = region.run(0, RunLayout(ODD, 50))
progress = ProgressWriter(run, 0)
waker = Waker(int(sys.argv[2]))
print("begun", flush=True)
for block in range(50):
    if block == 25:
        sys.stdin.read(1)  # the reader has seen the first half
    for section in range(61):
        run.part(section, block)[:] = bytes([1 + block]) * ODD.sections[section].bytes
        progress.set_ready(section, block + 1)
        waker.wake()
progress.end(50)
waker.wake()
"""


def test_a_reader_in_another_process_is_never_ahead_of_the_writer() -> None:
    descriptor = ArenaRegion.create(2 << 20)
    waker, wakeup = make_wakeup()
    command = [sys.executable, "-c", WRITER, str(descriptor), str(waker.fileno())]
    with ArenaRegion(descriptor) as region:
        run = region.run(0, RunLayout(ODD, 50))
        begin_table(run, [(0, 50)])
        with subprocess.Popen(
            command,
            pass_fds=[descriptor, waker.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as writing:
            assert writing.stdin is not None
            assert writing.stdout is not None
            assert writing.stdout.readline() == b"begun\n"
            assert check_what_is_ready(run, writing.stdin.close) == [50] * 61
        assert writing.returncode == 0
        # Nobody read: what there was no room for is told by what there is.
        assert 0 < len(os.read(wakeup, 1 << 16)) < 50 * 61 + 1
        del run
    waker.close()
    os.close(wakeup)
    os.close(descriptor)


def check_what_is_ready(run: RunMemory, on_half: Callable[[], None]) -> list[int]:
    """Looks again and again until the fetch has ended; what is ready must be right at every look.
    Calls `on_half` when the first half is there. The counts at the end."""
    reader = ProgressReader(run)
    seen = [0] * 61
    while True:
        is_ended = reader.is_ended
        for section in range(61):
            blocks = reader.ready_blocks(section)
            assert blocks >= seen[section], "a count fell"
            for block in range(seen[section], blocks):
                part = np.frombuffer(run.part(section, block), np.uint8)
                assert (part == 1 + block).all(), (section, block)
            seen[section] = blocks
        if is_ended:
            return seen
        if seen == [25] * 61:
            on_half()
