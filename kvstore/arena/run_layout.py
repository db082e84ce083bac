"""How a run of blocks lies in the arena: layer-major, so that an engine moves one range a layer.

    run | progress table | section 0 of all blocks | section 1 of all blocks | ... | last section |
        | parity of all blocks | losses of all blocks |       only in a run with room for parity

Section s of block b lies at `section_offsets[s] + b * section bytes`. Pure: no memory is touched.
The format is docs/formats/arena.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ..errors import InvalidArgument
from ..layout import BlockLayout, shard_bytes

RUN_ALIGN_BYTES = 4096
"""Runs begin and end at pages."""
SECTION_ALIGN_BYTES = 64
"""Sections begin at a cache line."""
RUN_BLOCKS_MAX = 65_536
RUN_PIECES_MAX = 16
"""Parts of a run that are filled at one time, each by a process of its own."""
TABLE_HEAD_BYTES = 64
PIECE_HEAD_BYTES = 64
READY_BYTES = 8
LOSS_HEAD_BYTES = 16
LOSS_ALIGN_BYTES = 8


class RunCode(NamedTuple):
    """The code k + m of the shards that a run has room for beside the blocks' sections."""

    k: int
    m: int

    def parity_bytes(self, layout: BlockLayout) -> int:
        """Of the parity shards of one block."""
        return self.m * shard_bytes(layout.block_bytes, self.k)

    @property
    def loss_bytes(self) -> int:
        """Of what is noted of one block: a head, and for each data shard a checksum and the number
        of the shard that is there for it."""
        return _round_up(LOSS_HEAD_BYTES + 9 * self.k, LOSS_ALIGN_BYTES)


class Piece(NamedTuple):
    """A part of a byte range of a block that lies in one section."""

    section: int
    offset: int
    """From the section's start within the block."""
    bytes: int


@dataclass(frozen=True, slots=True)
class RunLayout:
    """Where everything lies in a run of `blocks` blocks of `layout`; offsets are from its start.

    Raises InvalidArgument for a number of blocks that is not 1 to 65,536.
    """

    layout: BlockLayout
    blocks: int
    code: RunCode | None = None
    """None: there is no room for parity."""
    table_bytes: int = field(init=False, compare=False)
    section_offsets: tuple[int, ...] = field(init=False, compare=False)
    parity_offset: int = field(init=False, compare=False)
    losses_offset: int = field(init=False, compare=False)
    """Both are the end of the last section where there is no room for parity."""
    run_bytes: int = field(init=False, compare=False)
    """Of the whole run, a multiple of 4,096."""

    def __post_init__(self) -> None:
        if type(self.blocks) is not int or not 1 <= self.blocks <= RUN_BLOCKS_MAX:
            raise InvalidArgument(
                "blocks of a run", given=repr(self.blocks), expected=f"1 to {RUN_BLOCKS_MAX}"
            )
        row_bytes = PIECE_HEAD_BYTES + READY_BYTES * len(self.layout.sections)
        row_bytes = _round_up(row_bytes, SECTION_ALIGN_BYTES)
        table_bytes = _round_up(TABLE_HEAD_BYTES + RUN_PIECES_MAX * row_bytes, RUN_ALIGN_BYTES)
        offsets, at = [], table_bytes
        for section in self.layout.sections:
            offsets.append(at)
            at = _round_up(at + section.bytes * self.blocks, SECTION_ALIGN_BYTES)
        object.__setattr__(self, "table_bytes", table_bytes)
        object.__setattr__(self, "section_offsets", tuple(offsets))
        object.__setattr__(self, "parity_offset", at)
        if self.code is not None:
            at += self.code.parity_bytes(self.layout) * self.blocks
        object.__setattr__(self, "losses_offset", at)
        if self.code is not None:
            at += self.code.loss_bytes * self.blocks
        object.__setattr__(self, "run_bytes", _round_up(at, RUN_ALIGN_BYTES))

    @property
    def piece_row_bytes(self) -> int:
        """Bytes of one piece's row in the progress table."""
        width = PIECE_HEAD_BYTES + READY_BYTES * len(self.layout.sections)
        return _round_up(width, SECTION_ALIGN_BYTES)

    def section_range(self, section: int) -> tuple[int, int]:
        """First byte and end of a section of all blocks: what an engine moves in one go."""
        start = self.section_offsets[section]
        return start, start + self.layout.sections[section].bytes * self.blocks

    def place(self, section: int, block: int) -> int:
        """Where a section of one block begins."""
        return self.section_offsets[section] + block * self.layout.sections[section].bytes

    def parity_range(self, first: int, end: int) -> tuple[int, int]:
        """First byte and end of the parity of the blocks `first` to `end`: of each block its m
        shards, one after the other. Of a run with room for it."""
        assert self.code is not None, self
        size = self.code.parity_bytes(self.layout)
        return self.parity_offset + first * size, self.parity_offset + end * size

    def cut(self, start: int, end: int) -> list[Piece]:
        """Bytes [start, end) of a block, cut at the borders of its sections."""
        return cut_sections(self.layout, start, end)


def cut_sections(layout: BlockLayout, start: int, end: int) -> list[Piece]:
    """Bytes [start, end) of a block of `layout`, cut at the borders of its sections. What lies
    behind the block's end belongs to none of them."""
    pieces, at = [], 0
    for index, section in enumerate(layout.sections):
        first, last = max(start, at), min(end, at + section.bytes)
        if first < last:
            pieces.append(Piece(index, first - at, last - first))
        at += section.bytes
    return pieces


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
