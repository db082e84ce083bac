"""A window record in a run: the layout's sections as they lie in the arena, and as one piece.

In a run each section begins at a cache line; in the record they follow each other without a gap.
"""

from __future__ import annotations

from ..arena.region import RunMemory


def gather_record(run: RunMemory) -> memoryview | bytearray:
    """The record's bytes in one piece: the run's own memory if it has no gaps, a copy otherwise."""
    if _has_gaps(run):
        record = bytearray()
        for section in range(len(run.layout.layout.sections)):
            record += run.section(section)
        return record
    return space_for_record(run)


def space_for_record(run: RunMemory) -> memoryview:
    """Where a record may be put in one piece, to be spread from there."""
    start = run.layout.section_offsets[0]
    return run.view[start : start + run.layout.layout.block_bytes]


def spread_record(run: RunMemory) -> None:
    """Moves the sections of a record that lies in one piece to their places."""
    if not _has_gaps(run):
        return
    sections = run.layout.layout.sections
    end = run.layout.section_offsets[0] + run.layout.layout.block_bytes
    # From the last one on: each moves up, into what has been moved away already.
    for index in reversed(range(len(sections))):
        start = end - sections[index].bytes
        run.section(index)[:] = run.view[start:end]
        end = start


def _has_gaps(run: RunMemory) -> bool:
    first, end = run.layout.section_offsets[0], run.layout.section_range(-1)[1]
    return end - first != run.layout.layout.block_bytes
