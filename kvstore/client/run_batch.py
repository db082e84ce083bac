"""Where the shards of a batch of blocks lie in a run of the arena: in pieces.

    shard j of a block    |======|=============|===|
                          section 3   section 4   section 5     each block's part of it lies in
                                                                the area of its section

Shards are received, encoded and decoded where they are to stay: a shard is cut where a section ends
(and where the block ends, if it is not a multiple of k x 64 bytes: the zeros behind it live in
scratch memory, and so does the parity, unless the run has room for it). How is the same for all
runs of a layout and a code, and is worked out once: `run_geometry`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..arena.region import RunMemory
from ..arena.run_layout import RunCode, cut_sections
from ..layout import SHARD_ALIGN_BYTES, BlockLayout
from ..layout import shard_bytes as shard_bytes_of
from .geometry import Column, ShardPlaces

GEOMETRIES_KEPT_MAX = 64


class ShardPiece(NamedTuple):
    """A part of a shard that lies in one place."""

    section: int | None
    """The number of sections: in the run's room for parity. None: in scratch memory."""
    offset: int
    """From the start of the block's part of the section, of its parity or its scratch memory."""
    bytes: int


class RunGeometry:
    """How the shards of a block of `layout` are cut; get it from `run_geometry`.

    `pieces[j]` are those of shard j, in order. Between two of `cuts` (0 to shard_bytes) every shard
    lies in one piece. A block needs `scratch_bytes` of scratch memory: the zeros behind its end,
    and its parity if the run has no room for it.
    """

    def __init__(
        self, layout: BlockLayout, k: int, m: int, *, has_parity_room: bool = False
    ) -> None:
        self.layout = layout
        self.k = k
        self.m = m
        self.block_bytes = layout.block_bytes
        self.shard_bytes = size = shard_bytes_of(layout.block_bytes, k)
        self.padding_bytes = k * size - layout.block_bytes
        padding_area = -(-self.padding_bytes // SHARD_ALIGN_BYTES) * SHARD_ALIGN_BYTES
        self.padding_offset = 0 if has_parity_room else m * size
        self.scratch_bytes = self.padding_offset + padding_area
        parity_area = len(layout.sections) if has_parity_room else None
        self.pieces: list[list[ShardPiece]] = [
            *(self._cut_data(shard) for shard in range(k)),
            *([ShardPiece(parity_area, parity * size, size)] for parity in range(m)),
        ]
        ends = {0, size}
        for pieces in self.pieces:
            ends.update(_ends_of(pieces))
        self.cuts = sorted(ends)

    def _cut_data(self, shard: int) -> list[ShardPiece]:
        start, end = shard * self.shard_bytes, (shard + 1) * self.shard_bytes
        pieces = [ShardPiece(*piece) for piece in cut_sections(self.layout, start, end)]
        if end > self.block_bytes:
            first = max(start, self.block_bytes)
            offset = self.padding_offset + first - self.block_bytes
            pieces.append(ShardPiece(None, offset, end - first))
        return pieces

    @cached_property
    def column_places(self) -> tuple[NDArray[np.intp], NDArray[np.uintp]]:
        """For each column and shard, (columns, k + m): the section it lies in (behind the last
        one: the room for parity, then scratch memory), and how far from the start of the block's
        part of it."""
        starts = np.array(self.cuts[:-1], np.uintp)
        shape = (len(starts), self.k + self.m)
        areas, offsets = np.zeros(shape, np.intp), np.zeros(shape, np.uintp)
        for shard, pieces in enumerate(self.pieces):
            ends = _ends_of(pieces)
            which = np.searchsorted(np.array(ends, np.uintp), starts, side="right")
            scratch = len(self.layout.sections) + 1
            sections = [scratch if piece.section is None else piece.section for piece in pieces]
            begins = [end - piece.bytes for piece, end in zip(pieces, ends, strict=True)]
            within = np.array([piece.offset for piece in pieces], np.uintp)
            areas[:, shard] = np.array(sections, np.intp)[which]
            offsets[:, shard] = within[which] + starts - np.array(begins, np.uintp)[which]
        return areas, offsets


@lru_cache(maxsize=GEOMETRIES_KEPT_MAX)
def run_geometry(
    layout: BlockLayout, k: int, m: int, *, has_parity_room: bool = False
) -> RunGeometry:
    """How a layout's shards are cut under the code k + m."""
    return RunGeometry(layout, k, m, has_parity_room=has_parity_room)


def geometry_of(run: RunMemory, k: int, m: int) -> RunGeometry:
    """How the shards of a run's blocks are cut. Room for the parity of another code is left alone:
    what lies there would not be looked for."""
    return run_geometry(run.layout.layout, k, m, has_parity_room=run.layout.code == RunCode(k, m))


class RunBatch(ShardPlaces):
    """The blocks `place` to `place + blocks` of a run, with scratch memory for them.

    `scratch`: at least blocks x geometry.scratch_bytes, at `scratch_address`.
    """

    has_tails = False
    """Nothing is ever gathered: only zeros of a data shard lie outside the run."""

    def __init__(
        self,
        geometry: RunGeometry,
        run: RunMemory,
        *,
        place: int,
        blocks: int,
        scratch: memoryview,
        scratch_address: int,
    ) -> None:
        self.geometry = geometry
        self.shard_bytes = geometry.shard_bytes
        self.block_bytes = geometry.block_bytes
        self._run = run
        self._place = place
        self._blocks = blocks
        self._scratch = scratch
        self._scratch_address = scratch_address
        layout, code = run.layout, run.layout.code
        sections = geometry.layout.sections
        parity_bytes = 0 if code is None else code.parity_bytes(geometry.layout)
        self._area_strides = [*(section.bytes for section in sections), parity_bytes]
        starts = [*layout.section_offsets, layout.parity_offset]
        self._area_offsets = [
            start + place * stride for start, stride in zip(starts, self._area_strides, strict=True)
        ]

    def use_scratch(self, scratch: memoryview, scratch_address: int) -> None:
        """Gives a batch that was made without it its scratch memory: before anything that lies
        there is asked for."""
        self._scratch = scratch
        self._scratch_address = scratch_address

    def __len__(self) -> int:
        return self._blocks

    def pieces_per_shard(self, shard: int) -> int:
        return len(self.geometry.pieces[shard])

    def shard_views(self, shard: int, first: int, end: int) -> list[memoryview]:
        pieces = self.geometry.pieces[shard]
        if len(pieces) == 1:
            return self._piece_views(pieces[0], first, end)
        by_piece = [self._piece_views(piece, first, end) for piece in pieces]
        return list(chain.from_iterable(zip(*by_piece, strict=True)))

    def _piece_views(self, piece: ShardPiece, first: int, end: int) -> list[memoryview]:
        section, offset, size = piece
        if section is None:
            view, stride = self._scratch, self.geometry.scratch_bytes
            start = offset + first * stride
        else:
            view, stride = self._run.view, self._area_strides[section]
            start = self._area_offsets[section] + first * stride + offset
        places = range(start, start + (end - first) * stride, stride)
        return [view[at : at + size] for at in places]

    @cached_property
    def columns(self) -> Sequence[Column]:
        """Made when first asked for: a fetch that decodes nothing needs none."""
        areas, offsets = self.geometry.column_places
        begins = [self._run.address + offset for offset in self._area_offsets]
        begin = np.array([*begins, self._scratch_address], np.uintp)[areas] + offsets
        strides = [*self._area_strides, self.geometry.scratch_bytes]
        stride = np.array(strides, np.uintp)[areas]
        rows = np.arange(self._blocks, dtype=np.uintp)
        addresses = begin[:, None, :] + rows[None, :, None] * stride[:, None, :]
        cuts = self.geometry.cuts
        return [
            Column(cuts[at], cuts[at + 1] - cuts[at], addresses[at]) for at in range(len(addresses))
        ]

    def spread_tails(self) -> None:
        """Zeros behind the end of each block: the rest of its last shards lies in the run."""
        size = self.geometry.padding_bytes
        if not size:
            return
        stride, start = self.geometry.scratch_bytes, self.geometry.padding_offset
        for at in range(start, start + self._blocks * stride, stride):
            self._scratch[at : at + size] = bytes(size)

    def gather_tail(self, block: int) -> None:
        """All of a data shard but zeros lies in the run already."""


class RunBlocks:
    """The blocks from `place` on of a run, `count` of them, as memory to fetch into or save from
    (`BlockMemory`)."""

    def __init__(self, run: RunMemory, *, place: int, count: int, k: int, m: int) -> None:
        self._run = run
        self._place = place
        self._count = count
        self._geometry = geometry_of(run, k, m)

    @property
    def block_bytes(self) -> int:
        return self._geometry.block_bytes

    @property
    def scratch_bytes(self) -> int:
        return self._geometry.scratch_bytes

    def __len__(self) -> int:
        return self._count

    def batch(self, first: int, end: int, scratch: memoryview, address: int) -> RunBatch:
        return RunBatch(
            self._geometry,
            self._run,
            place=self._place + first,
            blocks=end - first,
            scratch=scratch,
            scratch_address=address,
        )


def _ends_of(pieces: Sequence[ShardPiece]) -> list[int]:
    """Where each piece ends within the shard."""
    ends, at = [], 0
    for piece in pieces:
        at += piece.bytes
        ends.append(at)
    return ends
