"""How far a run has come: a small table in its first pages, written by those who fill it.

    head (64 B)   magic u32 | version u32 | pieces u32 | sections u32 | zeros
    row of a piece (64 B + 8 B a section, rounded up to 64 B), up to 16
        first block u32 | end block u32 | state u32 (0 open, 1 ended) | blocks u32 | zeros
        ready[section] u64: so many leading blocks of the piece have this section, verified

Counts only grow, so that a reader who looks late has missed nothing, and no reader can hold up a
writer: that is why this is a table and no queue (docs/decisions/0022). Every row has one writer.
A count is stored after the bytes that it speaks of.
"""

from __future__ import annotations

import struct
from itertools import pairwise

from ..errors import StoreError
from .losses import clear_losses
from .region import RunMemory
from .run_layout import (
    PIECE_HEAD_BYTES,
    READY_BYTES,
    RUN_PIECES_MAX,
    TABLE_HEAD_BYTES,
)

TABLE_MAGIC = 0x4E55_5243  # "CRUN"
TABLE_VERSION = 1
_MAGIC_BYTES = 4
_HEAD = struct.Struct("<IIII")
_ROW = struct.Struct("<IIII")
_OPEN, _ENDED = 0, 1


class ProgressWriter:
    """Fills the row of one piece. For one process and one thread.

    It reads nothing back: an engine, which maps the run too, could have changed it.
    """

    def __init__(self, run: RunMemory, piece: int) -> None:
        assert 0 <= piece < RUN_PIECES_MAX, piece
        sections = len(run.layout.layout.sections)
        self._told = [0] * sections
        start = TABLE_HEAD_BYTES + piece * run.layout.piece_row_bytes
        row = run.view[start : start + PIECE_HEAD_BYTES + sections * READY_BYTES]
        self._head = row[:PIECE_HEAD_BYTES].cast("I")
        self._ready = row[PIECE_HEAD_BYTES:].cast("Q")

    def set_ready(self, section: int, blocks: int) -> None:
        """The first `blocks` blocks of the piece have this section, verified."""
        assert blocks >= self._told[section], (section, blocks, self._told[section])
        self._told[section] = blocks
        self._ready[section] = blocks

    def end(self, blocks: int) -> None:
        """Nothing more comes; the first `blocks` blocks of the piece are there, whole."""
        self._head[3] = blocks
        self._head[2] = _ENDED


def begin_table(run: RunMemory, pieces: list[tuple[int, int]]) -> None:
    """Write a table for a fetch of `pieces`, each [first, end) of the run's blocks, in order and
    without a gap, before any of them has a writer. The magic number comes last, in one store (a
    struct is written byte by byte), so that a reader sees no table rather than half of one."""
    assert 0 < len(pieces) <= RUN_PIECES_MAX, len(pieces)
    assert all(before[1] == after[0] for before, after in pairwise(pieces)), pieces
    assert all(0 <= first < end <= run.layout.blocks for first, end in pieces), pieces
    layout = run.layout
    clear_losses(run)
    run.view[: layout.table_bytes] = bytes(layout.table_bytes)
    for number, (first, end) in enumerate(pieces):
        at = TABLE_HEAD_BYTES + number * layout.piece_row_bytes
        _ROW.pack_into(run.view, at, first, end, _OPEN, 0)
    sections = len(layout.layout.sections)
    _HEAD.pack_into(run.view, 0, 0, TABLE_VERSION, len(pieces), sections)
    run.view[:_MAGIC_BYTES].cast("I")[0] = TABLE_MAGIC


def clear_table(run: RunMemory) -> None:
    """From now on the run has no table. For the engine, before it asks for a fetch: what an earlier
    fetch left there must not be taken for the new one's."""
    run.view[:TABLE_HEAD_BYTES] = bytes(TABLE_HEAD_BYTES)


def has_table(run: RunMemory) -> bool:
    """Has a fetch begun a table in this run?"""
    return run.view[:_MAGIC_BYTES].cast("I")[0] != 0


class ProgressReader:
    """What an engine reads of its run. Raises StoreError if the first pages hold no table."""

    def __init__(self, run: RunMemory) -> None:
        sections = len(run.layout.layout.sections)
        magic, version, pieces, found = _HEAD.unpack_from(run.view, 0)
        if (magic, version, found) != (TABLE_MAGIC, TABLE_VERSION, sections) or not (
            1 <= pieces <= RUN_PIECES_MAX
        ):
            raise StoreError(f"no progress table of {sections} sections at the run's start")
        self._rows: list[tuple[int, int, memoryview, memoryview]] = []
        for number in range(pieces):
            at = TABLE_HEAD_BYTES + number * run.layout.piece_row_bytes
            row = run.view[at : at + PIECE_HEAD_BYTES + sections * READY_BYTES]
            head = row[:PIECE_HEAD_BYTES].cast("I")
            self._rows.append((head[0], head[1], head, row[PIECE_HEAD_BYTES:].cast("Q")))

    def ready_blocks(self, section: int) -> int:
        """So many leading blocks of the fetch have this section, verified."""
        total = 0
        for first, end, _, ready in self._rows:
            blocks = min(ready[section], end - first)
            total += blocks
            if blocks < end - first:
                break
        return total

    @property
    def is_ended(self) -> bool:
        """Nothing more comes."""
        return all(head[2] == _ENDED for _, _, head, _ in self._rows)

    @property
    def whole_blocks(self) -> int:
        """Leading blocks of the fetch that are there in every section."""
        sections = len(self._rows[0][3])
        return min(self.ready_blocks(section) for section in range(sections))
